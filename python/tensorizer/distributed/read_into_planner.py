"""Reads tensors of a file, or parts of them, into the tensors of a planner."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from ..file.tensor_file import TensorFile
from ..modules.state import without_overlaps
from ..tensors.handles import dtype_of, is_fillable, refuse_short

#: Bytes loaded at a time where tensors are loaded first and then copied to their targets.
_BATCH_BYTES = 256 << 20


def read_tensors(
    file: TensorFile, wanted: list[tuple[ReadItem, int]], planner: LoadPlanner
) -> None:
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


def _fill(file: TensorFile, wanted: list[tuple[ReadItem, int]], planner: LoadPlanner) -> None:
    """Read tensors into those of a planner."""
    targets = [planner.resolve_tensor(item).detach() for item, _ in wanted]
    refuse_short((item.dest_index.fqn, t) for (item, _), t in zip(wanted, targets, strict=True))
    direct: dict[int, torch.Tensor] = {}
    for (item, number), target in zip(wanted, targets, strict=True):
        dtype, shape, _ = file.reader.describe(number)
        if list(target.shape) != shape:
            raise ValueError(
                f"{item.dest_index.fqn!r}: the checkpoint has {shape} for it, and the tensor "
                f"to load into is {list(target.shape)}"
            )
        fits = target.dtype == dtype_of(dtype) and is_fillable(target)
        if fits and file.can_fill_on(target.device) and file.reader.seekable:
            direct[number] = target
    # Memory that several tensors share, such as that of tied parameters, is filled in turn.
    apart = dict(without_overlaps([*direct.items()]))
    shared = [{number: one} for number, one in direct.items() if number not in apart]
    for some in filter(None, (apart, *shared)):
        file.fill([*some.values()], [*some])
    copies: dict[int, list[torch.Tensor]] = {}
    for (_, number), target in zip(wanted, targets, strict=True):
        if number not in direct:
            copies.setdefault(number, []).append(target)
        elif target is not direct[number]:
            target.copy_(direct[number])
    rest = sorted(copies)
    for batch in file.in_batches(rest, file.length_of(rest), _BATCH_BYTES):
        for number, tensor, _ in file.load(batch, torch.device("cpu")):
            for target in copies[number]:
                target.copy_(tensor)
    for (item, _), target in zip(wanted, targets, strict=True):
        planner.commit_tensor(item, target)
