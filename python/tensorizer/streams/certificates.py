"""The certificates of servers that are trusted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .._types import OpenOptions


class CAInfo:
    """The certificates to trust, instead of the certificates of the system.

    Args:
        cacert: A file of certificates in PEM format.
        capath: A folder of such files (``*.pem``, ``*.crt`` or ``*.0``).
        allow_untrusted: Trust every certificate.

    Raises:
        ValueError: Not exactly one of them is given, or the file or folder does not exist.

    """

    def __init__(
        self,
        *,
        cacert: str | os.PathLike[str] | None = None,
        capath: str | os.PathLike[str] | None = None,
        allow_untrusted: bool = False,
    ) -> None:
        if (cacert is not None) + (capath is not None) + bool(allow_untrusted) != 1:
            raise ValueError("exactly one of cacert, capath and allow_untrusted must be given")
        if cacert is not None and not Path(cacert).is_file():
            raise ValueError(f"cacert is not a file: {os.fspath(cacert)!r}")
        if capath is not None and not Path(capath).is_dir():
            raise ValueError(f"capath is not a directory: {os.fspath(capath)!r}")
        self.cacert = None if cacert is None else os.fspath(cacert)
        self.capath = None if capath is None else os.fspath(capath)
        self.allow_untrusted = bool(allow_untrusted)

    @property
    def curl_flags(self) -> tuple[str, ...]:
        """The equivalent options of ``curl``, for scripts that run it."""
        if self.allow_untrusted:
            return ("--insecure",)
        given = (("--cacert", self.cacert), ("--capath", self.capath))
        return next((flag, value) for flag, value in given if value is not None)

    def _key(self) -> tuple[str | None, str | None, bool]:
        return self.cacert, self.capath, self.allow_untrusted

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CAInfo) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        given = (("cacert", self.cacert), ("capath", self.capath))
        shown = [f"{name}={value!r}" for name, value in given if value is not None]
        return f"CAInfo({', '.join(shown) or 'allow_untrusted=True'})"


def certificate_options(certificate_handling: CAInfo | None) -> OpenOptions:
    """Return the options of the native code for the argument ``certificate_handling``."""
    if certificate_handling is None:
        return {}
    if not isinstance(certificate_handling, CAInfo):
        raise TypeError(
            f"certificate_handling must be a CAInfo, not {type(certificate_handling).__name__}"
        )
    given = certificate_handling
    return {"certificates": given.cacert or given.capath, "trust_all": given.allow_untrusted}
