"""The certificates of servers that are trusted."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .._types import OpenOptions


@dataclass(kw_only=True, unsafe_hash=True)
class CAInfo:
    """The certificates to trust, instead of the certificates of the system.

    Args:
        cacert: A file of certificates in PEM format.
        capath: A folder of such files (``*.pem``, ``*.crt`` or ``*.0``).
        allow_untrusted: Trust every certificate.

    Raises:
        ValueError: Not exactly one of them is given, or the file or folder does not exist.

    """

    cacert: str | os.PathLike[str] | None = None
    capath: str | os.PathLike[str] | None = None
    allow_untrusted: bool = False

    def __post_init__(self) -> None:
        if (self.cacert is not None) + (self.capath is not None) + bool(self.allow_untrusted) != 1:
            raise ValueError("exactly one of cacert, capath and allow_untrusted must be given")
        if self.cacert is not None:
            self.cacert = os.fspath(self.cacert)
            if not Path(self.cacert).is_file():
                raise ValueError(f"cacert is not a file: {self.cacert!r}")
        if self.capath is not None:
            self.capath = os.fspath(self.capath)
            if not Path(self.capath).is_dir():
                raise ValueError(f"capath is not a directory: {self.capath!r}")

    @property
    def curl_flags(self) -> tuple[str, ...]:
        """The equivalent options of ``curl``, for scripts that run it."""
        if self.cacert is not None:
            return "--cacert", os.fspath(self.cacert)
        return ("--insecure",) if self.capath is None else ("--capath", os.fspath(self.capath))


def certificate_options(certificate_handling: CAInfo | None) -> OpenOptions:
    """Return the options of the native code for the argument ``certificate_handling``."""
    if certificate_handling is None:
        return {}
    if not isinstance(certificate_handling, CAInfo):
        raise TypeError(
            f"certificate_handling must be a CAInfo, not {type(certificate_handling).__name__}"
        )
    trusted = certificate_handling.cacert or certificate_handling.capath
    return {
        "certificates": None if trusted is None else os.fspath(trusted),
        "trust_all": bool(certificate_handling.allow_untrusted),
    }
