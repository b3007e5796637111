"""The file ``checkpoint.json``, which makes the files in a folder a checkpoint.

It is JSON, so that reading it runs no code, as unpickling could.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import pickle
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from .._errors import FormatError
from .._native import local_path
from ..file.open_file import OpenFile
from ..streams import addresses
from ..streams.open import open_stream
from ..tensors.handles import dtype_of
from .items import ItemLocation, ItemLocations, Items, decoding, encoded as encoded_items

#: The file that is written last. Without it there is no checkpoint.
FILE = "checkpoint.json"
_FORMAT = "tensorizer.distributed"
#: Version 2 has grids; it is written only if a tensor is cut in one.
_VERSIONS = (1, 2)
#: Names of the files of ranks: no folders, and nothing above the checkpoint's folder.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.tensors")
#: The most bytes of the file; many million chunks in grids take less.
MOST_BYTES = 1 << 30
#: The exclusive upper bound of list indices in paths: torch makes a list up to the largest index.
_MAX_LIST_INDEX = 1 << 24
#: The text between the content and its SHA-256, which ends the file.
_DIGEST = ',"sha256":"'


def _empty_bytes() -> bytes:
    return b""


#: Functions that pickles of ``b""`` and ``BytesIO`` call, which torch's unpickler does not know.
_OF_BYTES: list[Any] = [(_empty_bytes, "builtins.bytes"), (io.BytesIO, "_io.BytesIO")]


class NoFolderError(ValueError, AttributeError):
    """The folder is not known yet. torch looks for ``checkpoint_id`` before it names the folder."""


class InFolder:
    """A reader or writer of checkpoints for torch, which has a folder or is given one later."""

    _folder: str | None

    @property
    def checkpoint_id(self) -> str:
        """The folder of the checkpoint."""
        if self._folder is None:
            raise NoFolderError(f"expected {type(self).__name__}(uri) or checkpoint_id=")
        return self._folder

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[Any]) -> bool:
        """Return True if the argument is of a type that can name a folder."""
        return isinstance(checkpoint_id, (str, os.PathLike))


def join(folder: str, name: str) -> str:
    """Return the path or address of a file in a folder."""
    # The name of an object may have an empty component.
    slash = "" if not folder or folder.endswith("/") else "/"
    return f"{folder}{slash}{name}"


def folder_of(uri: str | os.PathLike[Any]) -> str:
    """Return a path or an address as text; an address of a local file as its path."""
    text = os.fsdecode(uri)
    if addresses.is_address(uri) and not text.partition("://")[2].strip("/"):
        raise ValueError(f"expected the address of a folder, found {text!r}")
    return (local_path(uri) or text) if isinstance(uri, str) else text


def encoded(metadata: dcp.Metadata, locations: dict[dcp.MetadataIndex, ItemLocation]) -> bytes:
    """Return the content of ``checkpoint.json``.

    Args:
        metadata: The metadata of all items that are saved.
        locations: The locations of their bytes.

    Raises:
        ValueError: The chunks of a tensor do not cover each element exactly once; or it would be
            too long to be read.

    """
    items = encoded_items(metadata.state_dict_metadata, locations)
    content = {
        "format": _FORMAT,
        "version": _VERSIONS[1] if "orders" in items else _VERSIONS[0],
        "dcp_version": metadata.version,
        **items,
        "planner": _encoded_planner(metadata.planner_data),
    }
    data = sealed(content)
    if len(data) > MOST_BYTES:
        raise ValueError(
            f"{FILE} would have {len(data)} bytes for {len(locations)} parts of tensors and "
            f"objects: expected at most {MOST_BYTES} bytes, which is what can be read"
        )
    return data


def sealed(content: dict[str, Any]) -> bytes:
    """Return JSON that ends with its own hash."""
    text = json.dumps(content, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{text[:-1]}{_DIGEST}{digest}"}}'.encode()


def _unsealed(data: bytes) -> Any:
    before, _, after = data.rpartition(_DIGEST.encode())
    if after != f'{hashlib.sha256(before + b"}").hexdigest()}"}}'.encode():
        raise ValueError("its SHA-256 does not match: the file is damaged or was edited")
    return json.loads(data)


def are_paths(data: Any) -> bool:
    """Tell whether a planner's data has the form of torch's own planner: a path for each name.

    A path has keys, and list indices that torch may use.
    """
    return isinstance(data, dict) and all(
        isinstance(name, str) and isinstance(path, tuple) and all(map(_is_step, path))
        for name, path in data.items()
    )


def _is_step(step: Any) -> bool:
    return type(step) is str or (type(step) is int and 0 <= step < _MAX_LIST_INDEX)


def _encoded_planner(data: Any) -> Any:
    """Return a planner's data as JSON: the paths of torch's own planner, or a pickle."""
    if data is None:
        return None
    if are_paths(data):
        return {"paths": {name: list(path) for name, path in data.items()}}
    file = io.BytesIO()
    torch.save(data, file)
    return {"pickle": base64.b64encode(file.getvalue()).decode()}


def read(folder: str) -> tuple[dcp.Metadata, list[str]]:
    """Return the metadata of a checkpoint, and the names of its files.

    Items are decoded on access, so that a rank decodes only those it loads; a damaged item
    raises then. The data of a planner other than torch's own is returned as the bytes of a pickle.
    ``save_id`` is the hash of ``checkpoint.json``, which identifies the checkpoint.

    Raises:
        OSError: There is no checkpoint, or it cannot be read.
        FormatError: It is damaged.

    """
    uri = join(folder, FILE)
    try:
        if not addresses.is_address(uri):
            size_of(Path(uri))
        with open_stream(uri) as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"there is no checkpoint at {folder}: expected {FILE}, which is written last"
        ) from error
    if len(data) > MOST_BYTES:
        raise FormatError(f"{uri} is longer than {MOST_BYTES} bytes")
    with decoding(uri):
        content = _unsealed(data)
        files = _files(content)
        items = Items(uri, content, files)
        version, planner = content["dcp_version"], content["planner"]
        if not isinstance(version, (str, type(None))):
            raise TypeError(f"expected a version, found {version!r}")
        metadata = dcp.Metadata(
            items,  # type: ignore[arg-type]  # it is used as a dict is
            planner_data=None if planner is None else _decoded_planner(planner),
            storage_data=ItemLocations(items),
            storage_meta=dcp.StorageMeta(save_id=content["sha256"]),
            version=version,
        )
    return metadata, files


def size_of(path: Path) -> int | None:
    """Return the bytes of a file; None if it is missing, which matters only when it is read.

    Raises:
        FormatError: It is not a regular file; reading a FIFO would block.

    """
    try:
        about = path.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(about.st_mode):
        raise FormatError(f"{path}: expected a regular file, found one of mode {about.st_mode:o}")
    return about.st_size


@contextmanager
def unpickling(what: str, problem: str) -> Iterator[None]:
    """Name an object that is unpickled in the error if it cannot be.

    Raises:
        pickle.UnpicklingError: A restricted unpickler refuses it.
        MemoryError: It is too large for the memory.
        FormatError: It has the problem.

    """
    try:
        yield
    except pickle.UnpicklingError as error:
        raise pickle.UnpicklingError(f"{what}: {error}") from error
    except Exception as error:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise MemoryError(f"{what}: {error}") from error
        raise FormatError(f"{what} {problem}: {error!r}") from error


def unpickled(data: bytes, what: str, weights_only: bool) -> Any:
    """Return an object of ``torch.save``; ``weights_only`` asks for the restricted unpickler.

    Raises:
        pickle.UnpicklingError, FormatError: See :func:`unpickling`.

    """
    # They stay allowed: other threads may be loading objects, too.
    torch.serialization.add_safe_globals(_OF_BYTES)
    with unpickling(what, "cannot be read as an object of torch.save"):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)


def is_there(folder: str) -> bool:
    """Tell whether there is a checkpoint in a folder."""
    return addresses.is_there(join(folder, FILE), NotADirectoryError)


def find(file: OpenFile, location: ItemLocation) -> int:
    """Return the number that a tensor of a checkpoint has in its file.

    Raises:
        FormatError: It is missing, or has another dtype or shape than the checkpoint states.

    """
    uri = file.reader.uri
    try:
        number = file.find(location.name)
    except KeyError:
        raise FormatError(
            f"expected tensor {location.name!r} in {uri}, which the checkpoint says it holds"
        ) from None
    dtype, shape, _ = file.reader.describe(number)
    expected = shape if location.shape is None and len(shape) == 1 else list(location.shape or ())
    if dtype_of(dtype) != location.dtype or shape != expected:
        raise FormatError(
            f"tensor {location.name!r} of {uri} is {dtype} of shape {shape}, and the checkpoint "
            f"says {location.dtype} of shape {expected}"
        )
    return number


def _files(content: dict[str, Any]) -> list[str]:
    version = content["version"]
    if content["format"] != _FORMAT or type(version) is not int or version not in _VERSIONS:
        raise ValueError(
            f"expected format {_FORMAT!r}, version {' or '.join(map(str, _VERSIONS))}, found "
            f"{content['format']!r}, {version!r}"
        )
    found: list[str] = content["files"]
    if not isinstance(found, list):
        raise TypeError("expected a list of files")
    for file in found:
        if not _NAME.fullmatch(file):
            raise ValueError(
                f"expected the name of a file in the folder of the checkpoint, found {file!r}"
            )
    return found


def _decoded_planner(data: dict[str, Any]) -> Any:
    """Return the paths of torch's own planner, or the bytes of a pickle."""
    if "pickle" in data:
        return base64.b64decode(data["pickle"], validate=True)
    paths = {name: tuple(path) for name, path in data["paths"].items()}
    if not are_paths(paths):
        raise ValueError(f"expected str keys and list indices below {_MAX_LIST_INDEX} in paths")
    return paths
