"""What the file says that makes several files a checkpoint: JSON, and no pickle that runs code."""

from __future__ import annotations

import base64
import io
import json
import os
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from .._errors import FormatError
from ..file.tensor_file import TensorFile
from ..streams.open import open_stream
from ..tensors.exchange import dtype_of

#: The file that is written last. Without it there is no checkpoint.
FILE = "checkpoint.json"
_FORMAT, _VERSION = "tensorizer.distributed", 1
#: Names of the files of ranks: no folders, and nothing above.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.tensors")
#: Bytes; a checkpoint of a million chunks has less.
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Place:
    """Where the bytes of an item are: the file, beside this one, and the name of its tensor."""

    file: str
    name: str


def join(folder: str, name: str) -> str:
    """Return the path or address of a file in a folder."""
    return f"{folder.rstrip('/')}/{name}" if folder.strip("/") else f"{folder}{name}"


def folder_of(uri: str | os.PathLike[Any]) -> str:
    """Return a path or an address as text."""
    return os.fsdecode(uri)


def encoded(metadata: dcp.Metadata, places: dict[dcp.MetadataIndex, Place]) -> bytes:
    """Return the content of the file."""
    files = sorted({place.file for place in places.values()})
    numbers = {file: number for number, file in enumerate(files)}
    items: dict[str, Any] = {}
    for name, item in metadata.state_dict_metadata.items():
        if isinstance(item, dcp.TensorStorageMetadata):
            chunks = []
            for chunk in item.chunks:
                place = places[dcp.MetadataIndex(name, chunk.offsets)]
                where = [numbers[place.file], place.name]
                chunks.append([list(chunk.offsets), list(chunk.sizes), *where])
            dtype = str(item.properties.dtype).removeprefix("torch.")
            items[name] = {"dtype": dtype, "size": list(item.size), "chunks": chunks}
        else:
            place = places[dcp.MetadataIndex(name)]
            items[name] = {"object": [numbers[place.file], place.name]}
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "dcp_version": metadata.version,
        "files": files,
        "items": items,
        "planner": _encoded_planner(metadata.planner_data),
    }
    return json.dumps(content, separators=(",", ":")).encode()


def _encoded_planner(data: Any) -> Any:
    """Return what a planner wants to have back: paths of torch's own planner, or a pickle."""
    if data is None:
        return None
    if isinstance(data, dict) and all(
        isinstance(name, str)
        and isinstance(path, tuple)
        and all(type(step) in (str, int) for step in path)
        for name, path in data.items()
    ):
        return {"paths": {name: list(path) for name, path in data.items()}}
    file = io.BytesIO()
    torch.save(data, file)
    return {"pickle": base64.b64encode(file.getvalue()).decode()}


def read(folder: str) -> tuple[dcp.Metadata, list[str]]:
    """Return the metadata of a checkpoint, and the names of its files.

    Raises:
        OSError: There is none, or it cannot be read.
        FormatError: It is damaged.
        pickle.UnpicklingError: torch's restricted unpickler refuses what a planner has stored.

    """
    uri = join(folder, FILE)
    try:
        with open_stream(uri) as file:
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"there is no checkpoint at {folder}: expected {FILE}, which is written last"
        ) from error
    if len(data) > _MOST_BYTES:
        raise FormatError(f"{uri} is longer than {_MOST_BYTES} bytes")
    try:
        return _decoded(json.loads(data))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise FormatError(f"{uri} is no checkpoint, or damaged: {error!r}") from error


def is_there(folder: str) -> bool:
    """Tell whether there is a checkpoint in a folder."""
    try:
        with open_stream(join(folder, FILE)):
            return True
    except (FileNotFoundError, NotADirectoryError):
        return False


def find(file: TensorFile, name: str) -> int:
    """Return the number of a tensor that a checkpoint says is in a file.

    Raises:
        FormatError: It is not there.

    """
    try:
        return file.find(name)
    except KeyError:
        raise FormatError(
            f"expected tensor {name!r} in {file.reader.uri}, which the checkpoint says it holds"
        ) from None


def _decoded(content: dict[str, Any]) -> tuple[dcp.Metadata, list[str]]:
    if content["format"] != _FORMAT or content["version"] != _VERSION:
        raise ValueError(
            f"expected format {_FORMAT!r}, version {_VERSION}, found {content['format']!r}, "
            f"{content['version']!r}"
        )
    files = content["files"]
    for file in files:
        if not _NAME.fullmatch(file):
            raise ValueError(f"{file!r} is no name of a file beside it")
    items: dict[str, Any] = {}
    places: dict[dcp.MetadataIndex, Place] = {}
    for name, item in content["items"].items():
        if "object" in item:
            items[name] = dcp.BytesStorageMetadata()
            places[dcp.MetadataIndex(name)] = _place(files, *item["object"])
            continue
        size = _size(item["size"])
        chunks = []
        for offsets, sizes, *place in item["chunks"]:
            chunk = dcp.ChunkStorageMetadata(_size(offsets), _size(sizes))
            ends = zip(chunk.offsets, chunk.sizes, size, strict=True)
            if any(offset + length > whole for offset, length, whole in ends):
                raise ValueError(f"a chunk of {name!r} lies outside of it: {chunk}")
            chunks.append(chunk)
            places[dcp.MetadataIndex(name, chunk.offsets)] = _place(files, *place)
        properties = dcp.TensorProperties(dtype=dtype_of(item["dtype"]))
        items[name] = dcp.TensorStorageMetadata(properties, size, chunks)
    metadata = dcp.Metadata(
        items,
        planner_data=_decoded_planner(content["planner"]),
        storage_data=places,
        storage_meta=dcp.StorageMeta(),
        version=content["dcp_version"],
    )
    return metadata, files


def _decoded_planner(data: Any) -> Any:
    if data is None:
        return None
    if "paths" in data:
        return {name: tuple(path) for name, path in data["paths"].items()}
    file = io.BytesIO(base64.b64decode(data["pickle"], validate=True))
    return torch.load(file, weights_only=True)


def _size(numbers: list[int]) -> torch.Size:
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
        raise ValueError(f"expected lengths, found {numbers!r}")
    return torch.Size(numbers)


def _place(files: list[str], number: int, name: str) -> Place:
    if type(number) is not int or not 0 <= number < len(files) or not isinstance(name, str):
        raise ValueError(
            f"expected one of {len(files)} files and a name, found {number!r}, {name!r}"
        )
    return Place(files[number], name)
