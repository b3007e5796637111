"""The facts that ``ls`` and ``info`` show of a file, its tensors, and the files that hold them.

Tensors and files are dicts with the fields that ``--json`` prints.
"""

from __future__ import annotations

import math
import os
import stat
from collections import Counter
from collections.abc import Sequence
from typing import Any

from . import native
from .file_description import FileDescription, status
from .output import plural, without_password


def tensors_of(file: FileDescription) -> list[dict[str, Any]]:
    """Return the tensors of a file, in its order."""
    kinds, offsets = native.module().KINDS, file.reader.offsets()
    every = zip(file.names, file.types, file.data_lens, offsets, file.kinds, strict=True)
    return [
        {
            "name": name,
            "dtype": dtype,
            "shape": list(shape),
            "bytes": nbytes,
            "offset": start,
            "type": kinds[kind],
        }
        for name, (dtype, shape), nbytes, (_, start), kind in every
    ]


def totals(tensors: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Return sums over some tensors. Elements of buffers do not count as parameters."""
    return {
        "tensors": len(tensors),
        "parameters": sum(math.prod(one["shape"]) for one in tensors if one["type"] != "buffer"),
        "bytes": sum(one["bytes"] for one in tensors),
    }


def by_dtype(tensors: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the totals of the tensors of each dtype, most bytes first."""
    names = dict.fromkeys(one["dtype"] for one in tensors)
    found = {name: totals([one for one in tensors if one["dtype"] == name]) for name in names}
    return dict(sorted(found.items(), key=lambda item: -item[1]["bytes"]))


def hashes(file: FileDescription) -> tuple[dict[str, int] | None, str]:
    """Return the number of tensors with each hash, and a text about them.

    Of a file on a server or in a checkpoint, only the largest tensor is looked at, to spare a
    request for each. The number is None if the format has no hashes, or everything would be read.
    """
    reader = file.first
    if reader is None or reader.version is None:
        return None, "none: the format has no place for them"
    if not reader.seekable:
        return None, "unknown: the file can only be read once, and is not read to the end for this"
    lens = reader.data_lens()
    numbers = [number for number, length in enumerate(lens) if length]
    sampled = (not reader.local or reader is not file.reader) and len(numbers) > 1
    if sampled:
        numbers = [max(numbers, key=lens.__getitem__)]
    counts = Counter(name for found in reader.hashes(numbers) for name, _ in found)
    if all(count == len(numbers) for count in counts.values()):
        names = " and ".join(counts) or "none"
    else:
        names = ", ".join(f"{name} of {count:,}" for name, count in counts.items())
    of = f"of {plural(len(numbers), 'tensor')} with data"
    of = "as the largest tensor says" if sampled else of
    return {**counts, "looked_at": len(numbers)}, f"{names}, {of}"


def alignment(file: FileDescription) -> int | None:
    """Return the largest power of two that divides the positions of all data; None without data."""
    reader = file.first
    if reader is None:
        return None
    places = zip(reader.offsets(), reader.data_lens(), strict=True)
    divisor = math.gcd(*(start for (_, start), length in places if length))
    return divisor & -divisor or None


def locations(file: FileDescription) -> list[dict[str, Any]]:
    """Return the files of a model in its order.

    ``cached`` is the number of bytes in the folder that ``TENSORIZER_CACHE`` names; None if that
    names none, or the file is not on a server whose files are cached.
    """
    heads = {uri: (length, etag, changed) for uri, length, etag, changed, *_ in file.heads}
    cached: dict[str, int | None] = {}
    if os.environ.get("TENSORIZER_CACHE"):
        cached = dict.fromkeys(heads, 0)
        cached |= {uri: here for uri, _, here, _ in native.module().cache_entries()}
    tensors = Counter(file.reader.file_numbers())
    found: list[dict[str, Any]] = []
    for number, uri in enumerate(file.reader.files()):
        is_local = native.module().local_path(uri) is not None
        # Of local files, regular ones have a size, and pipes, say, have none.
        about = status(uri) if is_local else None
        size = about.st_size if about is not None and stat.S_ISREG(about.st_mode) else None
        length, etag, changed = heads.get(uri, (size, None, None))
        found.append(
            {
                "file": without_password(uri),
                "local": is_local,
                "tensors": tensors[number],
                "bytes": length,
                "etag": etag,
                "modified": changed,
                "cached": cached.get(uri),
            }
        )
    return found
