"""Finds the differences between two files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensorizer import CryptographyError, FormatError, HashMismatchError

from .file import BatchedFile
from .file_description import plain, text
from .output import brief, plural
from .progress import ProgressBar

#: Errors that mean that a file or a tensor is not as it was written.
DAMAGES = (HashMismatchError, CryptographyError, FormatError)
#: Bytes that are compared at once.
_PIECE = 1 << 20
#: A difference, as an object for programs and as a line of text.
Difference = tuple[dict[str, Any], str]


def differences(
    file: BatchedFile, other: BatchedFile, progress: ProgressBar, *, copied: bool = False
) -> Iterator[Difference]:
    """Yield differences in the order of the file; then tensors of the other alone; then metadata.

    Args:
        file: The file to compare with.
        other: The file that may differ.
        progress: Counts the bytes of the first.
        copied: True if data of the other that cannot be read, or does not match its hashes, is a
            difference too.

    Raises:
        OSError, ValueError, CryptographyError: One of the files cannot be read.

    """
    for batch in file.batches(file.share_memory_with(other)):
        found: dict[int, Difference] = {}
        pairs: list[tuple[int, int]] = []
        for number in batch:
            same = other.reader.find(file.reader.name(number))
            difference = _described(file, number, other, same)
            if difference is not None:
                found[number] = difference
            elif same is not None and file.data_lens[number]:
                pairs.append((number, same))
        found.update(_of_data(file, other, pairs, copied))
        for number in sorted(found):
            yield found[number]
        progress.add(file.size(batch))
    for number in range(len(other)):
        name = other.reader.name(number)
        if file.reader.find(name) is None:
            line = f"only in {other.shown}: {text(name)}"
            yield {"name": plain(name), "difference": "only_in_other"}, line
    yield from _of_metadata(file, other)


def _described(
    file: BatchedFile, number: int, other: BatchedFile, same: int | None
) -> Difference | None:
    """Compare the entries of the indices."""
    name = file.reader.name(number)
    if same is None:
        line = f"only in {file.shown}: {text(name)}"
        return {"name": plain(name), "difference": "only_in_file"}, line
    mine, theirs = file.reader.describe(number)[:2], other.reader.describe(same)[:2]
    if mine != theirs:
        sides = {
            side: {"dtype": dtype, "shape": shape}
            for side, (dtype, shape) in (("file", mine), ("other", theirs))
        }
        line = f"{text(name)}: {mine[0]} {mine[1]} and {theirs[0]} {theirs[1]}"
        return {"name": plain(name), "difference": "type", **sides}, line
    if file.is_meta(number) != other.is_meta(same):
        which = "other" if file.is_meta(number) else "file"
        line = f"{text(name)}: only {(other if which == 'other' else file).shown} has data"
        return {"name": plain(name), "difference": "only_one_has_data", "has_data": which}, line
    return None


def _of_data(
    file: BatchedFile, other: BatchedFile, pairs: list[tuple[int, int]], copied: bool
) -> Iterator[tuple[int, Difference]]:
    """Load and compare the data of tensors with equal entries."""
    mine, _ = file.load([number for number, _ in pairs], "nothing")
    verify = "all" if copied and other.reader.format == "tensors" else "nothing"
    try:
        theirs, _ = other.load([same for _, same in pairs], verify)
    except DAMAGES as error:
        if not copied:
            raise
        if len(pairs) > 1:
            for pair in pairs:
                yield from _of_data(file, other, [pair], copied)
        else:
            name = file.reader.name(pairs[0][0])
            found = {"name": plain(name), "difference": "damage", "message": str(error)}
            yield pairs[0][0], (found, f"{text(name)}: {error}")
        return
    for (number, _), *both in zip(pairs, mine, theirs, strict=True):
        plain_ones = (tensor.resolve_conj().resolve_neg().contiguous() for tensor in both)
        one, two = (tensor.reshape(-1).view(torch.uint8) for tensor in plain_ones)
        pieces = zip(one.split(_PIECE), two.split(_PIECE), strict=True)
        count, total = sum(int((a != b).sum()) for a, b in pieces), one.numel()
        if count:
            name = file.reader.name(number)
            differ = "differs" if count == 1 else "differ"
            line = f"{text(name)}: {count:,} of {plural(total, 'byte')} {differ}"
            what = {"name": plain(name), "difference": "data", "bytes": count, "of": total}
            yield number, (what, line)


def _of_metadata(file: BatchedFile, other: BatchedFile) -> Iterator[Difference]:
    mine, theirs = file.metadata, other.metadata
    for name in {**mine, **theirs}:
        one, two = mine.get(name), theirs.get(name)
        if one == two:
            continue
        if one is None or two is None:
            line = f"only in {(other if one is None else file).shown}: metadata {name!r}"
        else:
            line = f"metadata {name!r}: {brief(one)!r} and {brief(two)!r}"
        yield {"name": name, "difference": "metadata", "file": one, "other": two}, line
