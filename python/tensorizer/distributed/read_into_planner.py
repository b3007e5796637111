"""Reads tensors of a file, or parts of them, into the tensors of a planner."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from .._native import with_earlier
from ..file.open_file import OpenFile
from ..tensors import fake_mode
from ..tensors.handles import dtype_of, is_fillable, refuse_short

#: Bytes loaded at a time where tensors are loaded first and then copied to their targets.
_BATCH_BYTES = 256 << 20


def read_tensors(file: OpenFile, wanted: list[tuple[ReadItem, int]], planner: LoadPlanner) -> None:
    """Read tensors and parts of tensors into the tensors of a planner.

    The hashes of tensors that are read as a whole are compared without a copy.
    """
    whole: list[tuple[ReadItem, int]] = []
    parts: list[tuple[ReadItem, int]] = []
    slices: list[tuple[int, list[tuple[int, int]]]] = []
    for item, number in wanted:
        ends = [
            (at, at + size) for at, size in zip(item.storage_offsets, item.lengths, strict=True)
        ]
        if list(item.lengths) == file.reader.describe(number)[1]:
            whole.append((item, number))
        else:
            parts.append((item, len(slices)))
            slices.append((number, ends))
    if whole:
        _fill(file, whole, planner)
    if parts:
        _fill(file.sliced(slices), parts, planner)


def _fill(file: OpenFile, wanted: list[tuple[ReadItem, int]], planner: LoadPlanner) -> None:
    """Read tensors into those of a planner."""
    targets = [planner.resolve_tensor(item).detach() for item, _ in wanted]
    refuse_short((item.dest_index.fqn, t) for (item, _), t in zip(wanted, targets, strict=True))
    direct: dict[int, torch.Tensor] = {}
    others: dict[int, list[torch.Tensor]] = {}
    for (item, number), target in zip(wanted, targets, strict=True):
        dtype, shape, _ = file.reader.describe(number)
        if list(target.shape) != shape:
            raise ValueError(
                f"{item.dest_index.fqn!r}: the checkpoint has {shape} for it, and the tensor "
                f"to load into is {list(target.shape)}"
            )
        fits = target.dtype == dtype_of(dtype) and is_fillable(target)
        fits = fits and file.can_fill_on(target.device)
        if fits and number not in direct:
            direct[number] = target
        else:
            others.setdefault(number, []).append(target)
    for number in _overlapping(direct):
        others.setdefault(number, []).append(direct.pop(number))
    if len(with_earlier(file.reader, [*direct], None)) > len(direct):
        # Filling these would pass others.
        for number, target in direct.items():
            others.setdefault(number, []).append(target)
        direct.clear()
    if direct:
        file.fill([*direct.values()], [*direct])
    for number in direct.keys() & others.keys():
        for target in others.pop(number):
            target.copy_(direct[number])
    rest = sorted(others)
    for batch in file.in_batches(rest, file.length_of(rest), _BATCH_BYTES):
        for number, tensor, _ in file.load(batch, torch.device("cpu")):
            for target in others[number]:
                target.copy_(tensor)
    for (item, _), target in zip(wanted, targets, strict=True):
        planner.commit_tensor(item, target)


def _overlapping(tensors: dict[int, torch.Tensor]) -> list[int]:
    """Return the numbers of tensors whose memory overlaps others, such as tied parameters.

    No two of the remaining tensors overlap. All are contiguous.
    """
    found = []
    end = 0
    real = {number: one for number, one in tensors.items() if not fake_mode.is_fake(one)}
    for number, tensor in sorted(real.items(), key=lambda one: one[1].data_ptr()):
        if tensor.data_ptr() < end:
            found.append(number)
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    return found
