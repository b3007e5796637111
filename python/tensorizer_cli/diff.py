"""``tensorizer diff``."""

from __future__ import annotations

import argparse

import torch

from . import keys
from .file import File, text
from .output import Progress, say

_DIFFERENT = 1
#: Dtype, shape, and whether numpy lacks the dtype.
_Description = tuple[str, list[int], bool]


def run(options: argparse.Namespace) -> int:
    """Compare two files, tensor by tensor."""
    params = keys.decryption(options)
    different = 0
    with (
        File(options.file, params, None) as left,
        File(options.target, params, None) as right,
        Progress(left.total) as progress,
    ):
        for name in map(right.reader.name, range(len(right))):
            if left.reader.find(name) is None:
                say(f"only in {right.uri}: {text(name)}")
                different += 1
        for batch in left.batches():
            pairs: list[tuple[int, int]] = []
            for number in batch:
                name = left.reader.name(number)
                same = right.reader.find(name)
                if same is None:
                    say(f"only in {left.uri}: {text(name)}")
                    different += 1
                else:
                    pairs.append((number, same))
            ours, _ = left.load([a for a, _ in pairs], "nothing")
            theirs, _ = right.load([b for _, b in pairs], "nothing")
            for (a, b), one, other in zip(pairs, ours, theirs, strict=True):
                what = _difference(left.reader.describe(a), one, right.reader.describe(b), other)
                if what:
                    say(f"{text(left.reader.name(a))}: {what}")
                    different += 1
            progress.add(sum(left.data_lens[n] for n in batch))
    print(f"{different} differences" if different else "the tensors are the same")
    return _DIFFERENT if different else 0


def _difference(
    mine: _Description, one: torch.Tensor, theirs: _Description, other: torch.Tensor
) -> str | None:
    if mine[:2] != theirs[:2]:
        return f"{mine[0]} {mine[1]} and {theirs[0]} {theirs[1]}"
    if one.is_meta != other.is_meta:
        return "only one has data"
    if one.is_meta or one.numel() == 0:
        return None
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)]
    count = int((flat[0] != flat[1]).sum())
    return f"{count:,} of {flat[0].numel():,} bytes differ" if count else None
