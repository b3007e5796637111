"""Writes safetensors files, in one piece or in shards with their index."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .._native import check_tensors_name, local_path
from .._numbers import check_number
from ..streams.addresses import is_address, is_there
from ..streams.held_folder import HeldFolder, HeldPath
from ..streams.open import open_stream
from ..tensors import sharding, subclasses, without_data
from ..tensors.batches import in_batches
from .file_writer import FileWriter
from .options import SaveOptions
from .progress import data_bytes

EXTENSION = ".safetensors"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def save_safetensors(
    tensors: Mapping[Any, Any], uri: Any, max_shard_size: int | str | None, **options: Any
) -> Any:
    """Save tensors as a safetensors file, or as several with an index; return what has them all.

    ``options`` are those of :class:`FileWriter`.

    With DTensors among them, all processes of their mesh make this call; the first one gathers the
    whole tensors in its memory, and writes them.

    Raises:
        TypeError: The argument is not tensors by name, or metadata are not strings.
        ValueError: Tensors share memory, or safetensors cannot hold one.
        FileExistsError: Shards would replace others one by one, or be hidden by one file.
        OSError, NotImplementedError: See :class:`tensorizer.TensorSerializer`.

    """
    sharded = isinstance(tensors, Mapping) and any(map(sharding.is_sharded, tensors.values()))
    if not sharded:
        return _save(checked(tensors), uri, max_shard_size, **options)
    from ..group.gathered_save import GatheredSave  # imported already by code with DTensors

    gathering = GatheredSave(list(tensors.values()), uri)
    with gathering.members:
        # All learn of an error: of tied tensors, some processes may have no elements.
        named, _ = gathering.members.run_on_all(lambda: checked(tensors))
        names, whole = list(named), dict[str, torch.Tensor]()

        def collect(selected: slice, tensors: list[torch.Tensor]) -> None:
            whole.update(zip(names[selected], (tensor.cpu() for tensor in tensors), strict=True))

        gathering.write(names, list(named.values()), collect)
        gathering.members.run_on_all(
            lambda: _save(whole, uri, max_shard_size, **options) if gathering.writes else None
        )
    return uri


def _save(
    named: Mapping[str, torch.Tensor], uri: Any, max_shard_size: int | str | None, **options: Any
) -> Any:
    """Save tensors that this process has as a whole; return the file, or the index of several."""
    progress = options.get("progress")
    if progress is not None and not progress.total:
        progress.total = data_bytes(named.values())
    shards = [list(named)]
    if max_shard_size is not None:
        sizes = {name: tensor.nbytes for name, tensor in named.items()}
        shards = list(in_batches(named, sizes.__getitem__, _bytes(max_shard_size)))
    if len(shards) < 2:
        write_one(uri, named, **options)
        return uri
    stem, folder = _stem(uri)
    if is_address(stem):
        return _save_shards(folder.__add__, stem[len(folder) :], named, shards, options)
    with HeldFolder(local_path(folder) or folder) as held:
        return _save_shards(held.entry, stem[len(folder) :], named, shards, options)


def _save_shards(
    path_of: Callable[[str], str | HeldPath],
    stem: str,
    named: Mapping[str, torch.Tensor],
    shards: list[list[str]],
    options: dict[str, Any],
) -> str:
    """Save shards and then their index, all of them in one folder; return the index."""
    index = path_of(f"{stem}{EXTENSION}.index.json")
    server = {name: options.get(name) for name in ("headers", "max_bytes_per_second")}
    files = [
        f"{stem}-{number:05}-of-{len(shards):05}{EXTENSION}" for number in range(1, len(shards) + 1)
    ]
    for path in (index, path_of(f"{stem}{EXTENSION}"), *map(path_of, files)):
        if is_there(path, **server):
            raise FileExistsError(
                f"{path} exists, and would be replaced shard by shard, or be loaded instead of the "
                "new shards: remove it first, or save under another name"
            )
    weight_map = {}
    for shard, names in zip(files, shards, strict=True):
        write_one(path_of(shard), {name: named[name] for name in names}, **options)
        weight_map.update(dict.fromkeys(names, shard))
    total = sum(tensor.nbytes for tensor in named.values())
    metadata = {**(options.get("metadata") or {}), "total_size": total}
    content = {"metadata": metadata, "weight_map": weight_map}
    text = json.dumps(content, indent=2, sort_keys=True)
    with open_stream(index, "wb", **server) as file:
        file.write(f"{text}\n".encode())
    return str(index)


def write_one(uri: Any, tensors: Mapping[str, torch.Tensor], **options: Any) -> None:
    """Write one file, without checking whether the tensors share memory.

    Raises:
        TypeError: Metadata are not strings by name.
        OSError, ValueError, NotImplementedError: See :func:`save_safetensors`.

    """
    with FileWriter(uri, closes_stream=False, **options) as file:
        file.write_safetensors(list(tensors), list(tensors.values()))


def refuse_options(options: SaveOptions, *, allow_meta: bool = False) -> None:
    """Refuse options that only ``.tensors`` files have.

    Raises:
        ValueError: Such an option is given.

    """
    if options.get("encryption") is not None or options.get("hashes", "all") != "all":
        raise ValueError("safetensors files have neither encryption nor hashes")
    if allow_meta:
        raise ValueError("safetensors files cannot record tensors without data: allow_meta=True")
    alignment = options.get("alignment", 64)
    if alignment != 64:
        raise ValueError(
            f"safetensors files have a fixed layout: alignment={alignment} is not supported"
        )


def checked(tensors: Any) -> dict[str, torch.Tensor]:
    """Return the tensors if safetensors can hold them, as far as names and memory show.

    Raises:
        TypeError: They are not tensors by name.
        ValueError: They share memory, have no data, or have names of nested structures.
        NotImplementedError: A tensor is nested, or of a subclass that is more than its bytes.

    """
    if not isinstance(tensors, Mapping):
        raise TypeError(f"expected tensors by name, found {type(tensors).__name__}")
    for name, tensor in tensors.items():
        if isinstance(name, tuple):
            raise ValueError(
                f"safetensors files cannot hold nested structures, found the name {name!r}"
            )
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise TypeError(
                "safetensors files hold tensors by name, and no nested structures: found "
                f"{type(tensor).__name__} at {name!r}"
            )
        if not sharding.is_sharded(tensor):
            subclasses.refuse(name, tensor)
    without_data.refuse(tensors, tensors.values())
    _refuse_shared(tensors)
    return dict(tensors)


def _refuse_shared(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that share memory: a file would hold it twice, and a load not share it."""
    ranges = sorted(
        (str(tensor.device), *extent(tensor), name)
        for name, tensor in ((name, sharding.local_of(one)) for name, one in tensors.items())
        if tensor.layout == torch.strided and not tensor.is_meta and tensor.numel()
    )
    for one, other in itertools.pairwise(ranges):
        if one[0] == other[0] and other[1] < one[2]:
            raise ValueError(
                f"{one[3]!r} and {other[3]!r} share memory, which a safetensors file cannot store: "
                "leave one of them out (load_into_module keeps the ties of a module), save clones, "
                "or save a .tensors file"
            )


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of a tensor, and of the byte after its last."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum(
        (dim - 1) * stride for dim, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return start, start + (last + 1) * tensor.element_size()


def _bytes(size: int | str) -> int:
    """Return a number of bytes; it may be given as text such as ``"5GB"``."""
    if isinstance(size, str):
        found = re.fullmatch(r"([0-9]+)\s*([A-Za-z]*)", size.strip())
        unit = _UNITS.get(found[2].upper()) if found else None
        if found is None or unit is None:
            raise ValueError(f"expected bytes as in 5000000000, '5GB' or '4GiB', found {size!r}")
        size = int(found[1]) * unit
    check_number("max_shard_size", size, wanted="positive", needed=True)
    return size


def _stem(uri: Any) -> tuple[str, str]:
    """Return the beginning of the shards' names, and the part of it that is their folder."""
    if not isinstance(uri, (str, bytes, os.PathLike)):
        raise TypeError(f"shards need a path or an address, found {type(uri).__name__}")
    path = os.fsdecode(uri)
    if not path.lower().endswith(EXTENSION):
        raise ValueError(
            f"shards are named after a file that ends with {EXTENSION}, found {path!r}"
        )
    stem = path[: -len(EXTENSION)]
    return stem, stem[: stem.rfind("/") + 1]


def is_safetensors_target(uri: Any, format: str | None) -> bool:
    """Tell whether a file is to be a safetensors file, by the format or else by its name.

    Raises:
        ValueError: The format cannot be written, or the name promises another format.

    """
    if format not in (None, "tensors", "safetensors"):
        raise ValueError(f"format must be 'tensors' or 'safetensors', not {format!r}")
    if format is None and isinstance(uri, (str, bytes, os.PathLike)):
        name = os.fsdecode(uri)
        if name.partition("?")[0].lower().endswith(EXTENSION):
            return True
        check_tensors_name(name, allows_torch=False)
        return False
    return format == "safetensors"
