"""The folder of a model, on this machine or behind an address."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from .._native import local_path, model_files, scheme
from ..streams.addresses import is_address

#: The endings of files that hold weights, and of indices that list such files.
_FILES = tuple(model_files()[1])
#: Addresses of the hub that name a commit.
_COMMIT = re.compile(r"hf://[^@]+@[0-9a-f]{40}/")


class ModelFolder:
    """A folder with a configuration and weights, or one of its files of weights.

    Args:
        address: A local path or a ``file://`` address, or an address that has folders: ``http://``,
            ``https://``, ``s3://``, ``gs://``, ``az://``, ``abfss://`` or ``hf://``.

    Raises:
        TypeError: The address is neither a string nor a path.
        ValueError: The address is of an unknown kind, or has no folders.
        FileNotFoundError: The local folder or file is missing.

    Attributes:
        path: The local folder; None for an address.
        file: The address or path of the file of weights, if the address names one, else None.
        shown: The address without a password and a query, for messages.

    """

    def __init__(self, address: str | os.PathLike[Any]) -> None:
        if not isinstance(address, (str, os.PathLike)):
            raise TypeError(f"expected an address or a path, found {type(address).__name__}")
        self.path: Path | None = None
        self.file: str | None = None
        self._base = self._query = ""
        if not isinstance(address, str) or not is_address(address):
            plain = local_path(address) if isinstance(address, str) else None
            path = Path(plain if plain is not None else os.fsdecode(address))
            self.shown = str(path)
            # Links of the folder are followed once: all files are of the version that they lead to
            # now.
            if path.is_file():
                self.path = path.parent.resolve()
                self.file = str(self.path / path.name)
            elif path.is_dir():
                self.path = path.resolve()
            else:
                raise FileNotFoundError(
                    f"no folder of a model, and no file: {self.shown}{_hub_hint(self.shown)}"
                )
            return
        found = scheme(address)
        kind = found[0] if found is not None else ""
        self.shown = without_secrets(address)
        if kind.startswith("redis"):
            raise ValueError(f"{kind}:// has no folders: {self.shown}")
        base, mark, query = address.partition("?")
        folder, _, last = base.rpartition("/")
        if last.lower().endswith(_FILES) and not (kind == "hf" and _is_repository(base)):
            self.file, base = address, folder
        # A query of HTTP is a signature or a token for all files; one of S3 belongs to one object.
        self._query = mark + query if kind.startswith("http") else ""
        # The name of an object may have an empty component.
        self._base = base if self.file is not None else base.removesuffix("/")

    def join(self, name: str) -> str:
        """Return the path or the address of a file of this folder."""
        if self.path is not None:
            return str(self.path / name)
        return f"{self._base}/{name}{self._query}"

    def pin(self, name: str, opened: str) -> None:
        """Use the commit of the hub at which a file was opened for all further files.

        Args:
            name: The file's name in this folder.
            opened: The address of its stream, which names the commit.

        """
        if _COMMIT.match(opened) and opened.endswith(f"/{name}"):
            base = opened.removesuffix(f"/{name}")
            if self.file is not None:
                self.file = base + self.file[len(self._base) :]
            self._base = base

    @property
    def is_of_hub(self) -> bool:
        """True for a folder of Hugging Face's hub."""
        return self._base.lower().startswith("hf://")

    @property
    def needs_pinning(self) -> bool:
        """True for a folder of the hub whose commit is not known yet."""
        return self.is_of_hub and not _COMMIT.match(f"{self._base}/")

    def show(self, name: str) -> str:
        """Return the path or address of a file for messages, without a password and a query."""
        return without_secrets(self.join(name))


def _hub_hint(path: str) -> str:
    """Return a hint about a name that may be that of a repository of the hub."""
    is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not path.startswith(".")
    return f": the model of this name on Hugging Face's hub would be hf://{path}" if is_name else ""


def _is_repository(base: str) -> bool:
    """Tell whether it is the address of a repository of the hub, without a path in it."""
    parts = [part for part in base.partition("://")[2].split("/") if part]
    return len(parts) <= (3 if parts[:1] == ["models"] else 2)


def without_secrets(address: str) -> str:
    """Return an address as messages show it: without user, password, query and fragment."""
    if not is_address(address):
        return address
    kind, mark, rest = address.partition("://")
    rest = rest.partition("#")[0].partition("?")[0]
    if kind.lower().startswith(("http", "redis")):
        host, slash, path = rest.partition("/")
        rest = host.rpartition("@")[2] + slash + path
    return kind + mark + rest
