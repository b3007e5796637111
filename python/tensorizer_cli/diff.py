"""``tensorizer diff``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from tensorizer import CryptographyError

from . import keys
from .file import File, plain, text
from .output import Report, plural
from .progress import Progress

_DIFFERENT = 1
#: A difference, for programs, and for people.
_Difference = tuple[dict[str, Any], str]


def run(options: argparse.Namespace) -> int:
    """Compare two files, tensor by tensor."""
    report = Report(options)
    differences: list[dict[str, Any]] = []
    with (
        File(options.file, None, options.readers) as file,
        File(options.other, None, options.readers) as other,
    ):
        _decrypt(file, other, options)
        with Progress(file.total, options) as progress:
            for found, line in _differences(file, other, progress):
                report.finding(line)
                differences.append(found)
    count = plural(len(differences), "difference")
    report.summary(count if differences else "the tensors are the same")
    report.result(file=file.shown, other=other.shown, same=not differences, differences=differences)
    return _DIFFERENT if differences else 0


def _decrypt(file: File, other: File, options: argparse.Namespace) -> None:
    """Give each file its key."""
    params, others = keys.decryption(options), keys.decryption(options, "other-")
    if others is not None:
        other.decrypt(others)
        if params is not None:
            file.decrypt(params)
    elif params is not None:
        # One of them may be the plain copy, unless files without a seal are refused.
        encrypted = [one for one in (file, other) if one.reader.encrypted]
        if not encrypted:
            raise CryptographyError(f"neither {file.shown} nor {other.shown} is encrypted")
        for one in (file, other) if options.require_manifest else encrypted:
            one.decrypt(params)
    file.check_key()
    other.check_key("--other-key-file, for example, says where its key is")


def _differences(file: File, other: File, progress: Progress) -> Iterator[_Difference]:
    """Yield differences in the order of the file; at last what only the other has."""
    for batch in file.batches():
        found: dict[int, _Difference] = {}
        pairs: list[tuple[int, int]] = []
        for number in batch:
            same = other.reader.find(file.reader.name(number))
            difference = _described(file, number, other, same)
            if difference is not None:
                found[number] = difference
            elif same is not None and file.data_lens[number]:
                pairs.append((number, same))
        found.update(_of_data(file, other, pairs))
        for number in sorted(found):
            yield found[number]
        progress.add(file.size(batch))
    for number in range(len(other)):
        name = other.reader.name(number)
        if file.reader.find(name) is None:
            line = f"only in {other.shown}: {text(name)}"
            yield {"name": plain(name), "difference": "only_in_other"}, line


def _described(file: File, number: int, other: File, same: int | None) -> _Difference | None:
    """Compare what the indices say."""
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
    file: File, other: File, pairs: list[tuple[int, int]]
) -> Iterator[tuple[int, _Difference]]:
    """Load and compare data of tensors that are described alike."""
    mine, _ = file.load([number for number, _ in pairs], "nothing")
    theirs, _ = other.load([same for _, same in pairs], "nothing")
    for (number, _), *both in zip(pairs, mine, theirs, strict=True):
        plain_ones = (tensor.resolve_conj().resolve_neg() for tensor in both)
        one, two = (tensor.reshape(-1).view(torch.uint8) for tensor in plain_ones)
        count, total = int((one != two).sum()), one.numel()
        if count:
            name = file.reader.name(number)
            differ = "differs" if count == 1 else "differ"
            line = f"{text(name)}: {count:,} of {plural(total, 'byte')} {differ}"
            found = {"name": plain(name), "difference": "data", "bytes": count, "of": total}
            yield number, (found, line)
