"""What the file says that makes several files a checkpoint: JSON, and no pickle that runs code."""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import json
import math
import os
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from .._errors import FormatError
from .._native import local_path
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
#: Places in lists; torch makes lists up to the largest.
_MOST_PLACES = 1 << 24
#: Chunks of a tensor that are compared each with each.
_MOST_PAIRED = 1 << 10
#: Before the hash of all that it follows, and a brace.
_DIGEST = ',"sha256":"'
#: What reading JSON of any content raises.
_DAMAGED = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
    OverflowError,
    NotImplementedError,
)


@dataclass(frozen=True)
class Place:
    """Where the bytes of an item are: the file, beside this one, and the name of its tensor.

    Attributes:
        dtype, shape: What a checkpoint that was read says of the tensor.

    """

    file: str
    name: str
    dtype: torch.dtype = torch.uint8
    shape: tuple[int, ...] | None = None


def join(folder: str, name: str) -> str:
    """Return the path or address of a file in a folder."""
    return f"{folder.rstrip('/')}/{name}" if folder.strip("/") else f"{folder}{name}"


def folder_of(uri: str | os.PathLike[Any]) -> str:
    """Return a path or an address as text."""
    text = os.fsdecode(uri)
    return (local_path(uri) or text) if isinstance(uri, str) else text


def encoded(metadata: dcp.Metadata, places: dict[dcp.MetadataIndex, Place]) -> bytes:
    """Return the content of the file.

    Raises:
        ValueError: The chunks of a tensor are not, each once, all of it; or it would be too long to
            be read.

    """
    files = sorted({place.file for place in places.values()})
    numbers = {file: number for number, file in enumerate(files)}
    items: dict[str, Any] = {}
    for name, item in metadata.state_dict_metadata.items():
        if isinstance(item, dcp.TensorStorageMetadata):
            _check_cover(name, item)
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
    data = sealed(content)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{FILE} would have {len(data)} bytes, and {_MOST_BYTES} are read")
    return data


def sealed(content: dict[str, Any]) -> bytes:
    """Return JSON that ends with its own hash."""
    text = json.dumps(content, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{text[:-1]}{_DIGEST}{digest}"}}'.encode()


def _unsealed(data: bytes) -> Any:
    before, _, after = data.rpartition(_DIGEST.encode())
    if after != f'{hashlib.sha256(before + b"}").hexdigest()}"}}'.encode():
        raise ValueError("its bytes are not those that were hashed when it was written")
    return json.loads(data)


def _encoded_planner(data: Any) -> Any:
    """Return what a planner wants to have back: paths of torch's own planner, or a pickle."""
    if data is None:
        return None
    if isinstance(data, dict) and all(
        isinstance(name, str) and isinstance(path, tuple) and all(map(_is_step, path))
        for name, path in data.items()
    ):
        return {"paths": {name: list(path) for name, path in data.items()}}
    file = io.BytesIO()
    torch.save(data, file)
    return {"pickle": base64.b64encode(file.getvalue()).decode()}


def read(folder: str) -> tuple[dcp.Metadata, list[str]]:
    """Return the metadata of a checkpoint, and the names of its files.

    What another planner than torch's own has stored is a pickle still, as bytes. ``save_id`` is the
    hash of the file, which tells checkpoints apart.

    Raises:
        OSError: There is none, or it cannot be read.
        FormatError: It is damaged.

    """
    content, uri = _content(folder)
    try:
        return _decoded(content), content["files"]
    except _DAMAGED as error:
        raise _damaged(uri, error) from error


def files(folder: str) -> list[str]:
    """Return the names of the files of a checkpoint.

    Raises:
        OSError, FormatError: See :func:`read`.

    """
    content, uri = _content(folder)
    try:
        return _files(content)
    except _DAMAGED as error:
        raise _damaged(uri, error) from error


def _damaged(uri: str, error: Exception) -> FormatError:
    return FormatError(f"{uri} is no checkpoint, or damaged: {error!r}")


def _content(folder: str) -> tuple[dict[str, Any], str]:
    """Return what the file holds, and where it is."""
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
        return _unsealed(data), uri
    except _DAMAGED as error:
        raise _damaged(uri, error) from error


def unpickled(data: bytes, what: str, weights_only: bool) -> Any:
    """Return an object of ``torch.save``.

    Raises:
        pickle.UnpicklingError: The restricted unpickler, which ``weights_only`` asks for, refuses
            it.
        FormatError: It is none.

    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise pickle.UnpicklingError(f"{what}: {error}") from error
    except Exception as error:
        raise FormatError(f"{what} is no object of torch.save: {error!r}") from error


def is_there(folder: str) -> bool:
    """Tell whether there is a checkpoint in a folder."""
    try:
        with open_stream(join(folder, FILE)):
            return True
    except (FileNotFoundError, NotADirectoryError):
        return False


def find(file: TensorFile, place: Place) -> int:
    """Return the number of a tensor that a checkpoint says is in a file.

    Raises:
        FormatError: It is not there, or not what the checkpoint says.

    """
    uri = file.reader.uri
    try:
        number = file.find(place.name)
    except KeyError:
        raise FormatError(
            f"expected tensor {place.name!r} in {uri}, which the checkpoint says it holds"
        ) from None
    dtype, shape, _ = file.reader.describe(number)
    expected = shape if place.shape is None and len(shape) == 1 else list(place.shape or ())
    if dtype_of(dtype) != place.dtype or shape != expected:
        raise FormatError(
            f"tensor {place.name!r} of {uri} is {dtype} of shape {shape}, and the checkpoint says "
            f"{place.dtype} of shape {expected}"
        )
    return number


def _files(content: dict[str, Any]) -> list[str]:
    if content["format"] != _FORMAT or content["version"] != _VERSION:
        raise ValueError(
            f"expected format {_FORMAT!r}, version {_VERSION}, found {content['format']!r}, "
            f"{content['version']!r}"
        )
    found: list[str] = content["files"]
    if not isinstance(found, list):
        raise TypeError("expected a list of files")
    for file in found:
        if not _NAME.fullmatch(file):
            raise ValueError(f"{file!r} is no name of a file beside it")
    return found


def _decoded(content: dict[str, Any]) -> dcp.Metadata:
    files = _files(content)
    items: dict[str, Any] = {}
    places: dict[dcp.MetadataIndex, Place] = {}
    for name, item in content["items"].items():
        if "object" in item:
            items[name] = dcp.BytesStorageMetadata()
            places[dcp.MetadataIndex(name)] = _place(files, *item["object"])
            continue
        properties = dcp.TensorProperties(dtype=dtype_of(item["dtype"]))
        tensor = dcp.TensorStorageMetadata(properties, _size(item["size"]), [])
        for offsets, sizes, *where in item["chunks"]:
            chunk = dcp.ChunkStorageMetadata(_size(offsets), _size(sizes))
            tensor.chunks.append(chunk)
            number, stored = where
            place = _place(files, number, stored, properties.dtype, tuple(chunk.sizes))
            places[dcp.MetadataIndex(name, chunk.offsets)] = place
        _check_cover(name, tensor)
        items[name] = tensor
    version = content["dcp_version"]
    if not isinstance(version, (str, type(None))):
        raise TypeError(f"expected a version, found {version!r}")
    return dcp.Metadata(
        items,
        planner_data=_decoded_planner(content["planner"]),
        storage_data=places,
        storage_meta=dcp.StorageMeta(save_id=content["sha256"]),
        version=version,
    )


def _check_cover(name: str, tensor: dcp.TensorStorageMetadata) -> None:
    """Refuse chunks that are not, each once, all of a tensor."""
    for chunk in tensor.chunks:
        ends = zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
        if any(offset + length > whole for offset, length, whole in ends):
            raise ValueError(f"a chunk of {name!r} lies outside of it: {chunk}")
    if len({chunk.offsets for chunk in tensor.chunks}) != len(tensor.chunks):
        raise ValueError(f"two chunks of {name!r} begin at the same place")
    found, expected = sum(math.prod(one.sizes) for one in tensor.chunks), math.prod(tensor.size)
    if found != expected:
        raise ValueError(
            f"the chunks of {name!r} have {found} elements together, and the tensor has {expected}"
        )
    if not _are_apart([one for one in tensor.chunks if 0 not in one.sizes]):
        raise ValueError(f"chunks of {name!r} overlap, or too many lie across one another")


def _are_apart(chunks: list[dcp.ChunkStorageMetadata]) -> bool:
    """Tell whether no two chunks have elements in common.

    They are cut in one dimension after another wherever no chunk lies on both sides. What cannot be
    cut, which no grid comes to, is compared one by one.
    """
    if len(chunks) < 2:
        return True
    for dim in range(len(chunks[0].offsets)):
        groups: list[list[dcp.ChunkStorageMetadata]] = []
        end = 0
        for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[dim]):
            if not groups or chunk.offsets[dim] >= end:
                groups.append([])
            groups[-1].append(chunk)
            end = max(end, chunk.offsets[dim] + chunk.sizes[dim])
        if len(groups) > 1:
            return all(map(_are_apart, groups))
    if len(chunks) > _MOST_PAIRED:
        return False
    return not any(itertools.starmap(_overlap, itertools.combinations(chunks, 2)))


def _overlap(one: dcp.ChunkStorageMetadata, other: dcp.ChunkStorageMetadata) -> bool:
    ends = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + many and b < a + much for a, much, b, many in ends)


def _decoded_planner(data: Any) -> Any:
    """Return the paths of torch's own planner, or the bytes of a pickle."""
    if data is None:
        return None
    if "pickle" in data:
        return base64.b64decode(data["pickle"], validate=True)
    return {name: _path(path) for name, path in data["paths"].items()}


def _is_step(step: Any) -> bool:
    """Tell whether it is a key, or a place in a list that torch may make."""
    return type(step) is str or (type(step) is int and 0 <= step < _MOST_PLACES)


def _path(steps: Sequence[Any]) -> tuple[str | int, ...]:
    for step in steps:
        if not _is_step(step):
            raise ValueError(f"expected keys and places in lists, found {step!r}")
    return tuple(steps)


def _size(numbers: Sequence[int]) -> torch.Size:
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
        raise ValueError(f"expected lengths, found {numbers!r}")
    return torch.Size(numbers)


def _place(
    files: list[str],
    number: int,
    name: str,
    dtype: torch.dtype = torch.uint8,
    shape: tuple[int, ...] | None = None,
) -> Place:
    if type(number) is not int or not 0 <= number < len(files) or not isinstance(name, str):
        raise ValueError(
            f"expected one of {len(files)} files and a name, found {number!r}, {name!r}"
        )
    name.encode()  # raises where it is no text
    return Place(files[number], name, dtype, shape)
