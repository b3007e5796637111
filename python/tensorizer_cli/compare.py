"""``tensorizer diff``: the differences between two files, which verified copies look for too."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from tensorizer import CryptographyError
from tensorizer._types import Name
from tensorizer.tensors.handles import bytes_of

from . import keys
from .file import BatchedFile, open_file
from .file_description import text
from .output import Report, brief, plural
from .progress import Progress

_DIFFERENT = 1
#: Bytes that are compared at once.
_PIECE = 1 << 20
#: A difference, as an object for programs and as a line of text.
Difference = tuple[dict[str, Any], str]


def diff(options: argparse.Namespace) -> int:
    """Compare two files, tensor by tensor."""
    report = Report(options)
    found: list[dict[str, Any]] = []
    with (
        Progress(options) as progress,
        open_file(options.file, options, progress=progress) as file,
        open_file(options.other, options) as other,
    ):
        for one in (file, other):
            one.refuse_unreached(options.skip_objects)
        _decrypt(file, other, options)
        for difference, line in differences(file, other):
            report.line(line)
            found.append(difference)
    count = plural(len(found), "difference")
    report.summary(count if found else "the tensors are the same")
    report.result(file=file.shown, other=other.shown, same=not found, differences=found)
    return _DIFFERENT if found else 0


def _decrypt(file: BatchedFile, other: BatchedFile, options: argparse.Namespace) -> None:
    """Give each file its key."""
    params, others = keys.decryption(options), keys.decryption(options, "other-")
    if others is not None:
        other.decrypt(others)
        if params is not None:
            file.decrypt(params)
    elif params is not None:
        # One of them may be the plain copy; it is refused only if files must have a seal.
        encrypted = [one for one in (file, other) if one.reader.encrypted]
        if not encrypted:
            raise CryptographyError(f"neither {file.shown} nor {other.shown} is encrypted")
        for one in (file, other) if options.require_manifest else encrypted:
            one.decrypt(params)
    file.check_key()
    other.check_key("give its key, for example with --other-key-file")


def differences(
    file: BatchedFile, other: BatchedFile, *, copied: bool = False
) -> Iterator[Difference]:
    """Yield differences in the order of the file; then tensors of the other alone; then metadata.

    Args:
        file: The file to compare with.
        other: The file that may differ.
        copied: True if data of the other that cannot be read, or does not match its hashes, is a
            difference too.

    Raises:
        OSError, ValueError, CryptographyError: One of the files cannot be read.

    """
    most = file.share_memory_with(other)
    for batch in file.batches(most):
        same = {number: other.find(file.names[number]) for number in batch}
        found = {number: _described(file, number, other, same[number]) for number in batch}
        pairs = [
            (number, its)
            for number, its in same.items()
            if its is not None and found[number] is None and file.data_lens[number]
        ]
        found.update(_of_data(file, other, pairs, copied, most))
        yield from filter(None, found.values())
    for name in other.names:
        if file.find(name) is None:
            yield _difference(name, "only_in_other", f"only in {other.shown}: {text(name)}")
    for name in {**file.metadata, **other.metadata}:
        mine, theirs = file.metadata.get(name), other.metadata.get(name)
        if mine != theirs:
            line = f"metadata {name!r}: {brief(mine or '')!r} and {brief(theirs or '')!r}"
            if mine is None or theirs is None:
                line = f"only in {(other if mine is None else file).shown}: metadata {name!r}"
            yield _difference(name, "metadata", line, file=mine, other=theirs)


def _difference(name: Name, what: str, line: str, **more: Any) -> Difference:
    return {"name": name, "difference": what, **more}, line


def _described(
    file: BatchedFile, number: int, other: BatchedFile, same: int | None
) -> Difference | None:
    """Compare the entries of the indices."""
    name = file.names[number]
    if same is None:
        return _difference(name, "only_in_file", f"only in {file.shown}: {text(name)}")
    types = file.types[number], other.types[same]
    if types[0] != types[1]:
        line = " and ".join(f"{dtype} {list(shape)}" for dtype, shape in types)
        mine, theirs = ({"dtype": dtype, "shape": shape} for dtype, shape in types)
        return _difference(name, "type", f"{text(name)}: {line}", file=mine, other=theirs)
    if file.is_meta(number) != other.is_meta(same):
        which, one = ("other", other) if file.is_meta(number) else ("file", file)
        line = f"{text(name)}: only {one.shown} has data"
        return _difference(name, "only_one_has_data", line, has_data=which)
    return None


def _of_data(
    file: BatchedFile, other: BatchedFile, pairs: list[tuple[int, int]], copied: bool, most: int
) -> Iterator[tuple[int, Difference]]:
    """Load and compare the data of tensors with equal entries."""
    numbers = [number for number, _ in pairs]
    others = [same for _, same in pairs]
    # A tensor larger than a batch is alone, and comes in pieces, unless its hashes need all of it.
    in_pieces = len(pairs) == 1 and file.data_lens[numbers[0]] > most
    has_hashes = copied and other.reader.format == "tensors"
    theirs: Iterable[torch.Tensor | Exception | None] = [None]
    if has_hashes:
        theirs = other.load_undamaged(others, "all")
    elif not in_pieces:
        theirs = other.load(others, "nothing")[0]
    mine: Iterable[torch.Tensor | None] = [None]
    if not in_pieces:
        mine = file.load(numbers, "nothing")[0]
    for (number, same), one, two in zip(pairs, mine, theirs, strict=True):
        name = file.names[number]
        if isinstance(two, Exception):
            line = f"{text(name)}: {two}"
            yield number, _difference(name, "damage", line, message=str(two))
            continue
        pieces = zip(file.pieces(number, most, one), other.pieces(same, most, two), strict=True)
        count, total = sum(map(_differing, pieces)), file.memory_lens[number]
        if count:
            differ = "differs" if count == 1 else "differ"
            line = f"{text(name)}: {count:,} of {plural(total, 'byte')} {differ}"
            yield number, _difference(name, "data", line, bytes=count, of=total)


def _differing(pair: tuple[torch.Tensor, torch.Tensor]) -> int:
    """Return the number of bytes that differ."""
    one, two = map(bytes_of, pair)
    pieces = zip(one.split(_PIECE), two.split(_PIECE), strict=True)
    return sum(int((a != b).sum()) for a, b in pieces)
