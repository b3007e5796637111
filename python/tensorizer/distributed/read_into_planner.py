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

    Args:
        file: The file.
        wanted: The requests of a planner, each with the number of its tensor in the file.
        planner: The planner.

    Raises:
        ValueError: A tensor of the planner has another shape than its request.

    """
    wanted = sorted(wanted, key=lambda one: one[1])
    slices: list[tuple[int, list[tuple[int, int]] | None]] = []
    for item, number in wanted:
        ends = [
            (at, at + size) for at, size in zip(item.storage_offsets, item.lengths, strict=True)
        ]
        is_whole = list(item.lengths) == file.reader.describe(number)[1]
        slices.append((number, None if is_whole else ends))
    parts = file.sliced(slices)
    targets = [planner.resolve_tensor(item).detach() for item, _ in wanted]
    refuse_short((item.dest_index.fqn, t) for (item, _), t in zip(wanted, targets, strict=True))
    direct: list[tuple[int, torch.Tensor]] = []
    for number, target in enumerate(targets):
        dtype, shape, _ = parts.reader.describe(number)
        if list(target.shape) != shape:
            raise ValueError(
                f"{wanted[number][0].dest_index.fqn!r}: the checkpoint has {shape} for it, and the "
                f"tensor to load into is {list(target.shape)}"
            )
        fits = target.dtype == dtype_of(dtype) and is_fillable(target)
        if fits and parts.can_fill_on(target.device) and parts.reader.seekable:
            direct.append((number, target))
    # Memory that several tensors share, such as that of tied parameters, is filled in turn.
    apart = dict(without_overlaps(direct))
    shared = [{number: target} for number, target in direct if number not in apart]
    for some in filter(None, (apart, *shared)):
        parts.fill([*some.values()], [*some])
    rest = sorted({*range(len(targets))} - dict(direct).keys())
    for batch in parts.in_batches(rest, parts.length_of(rest), _BATCH_BYTES):
        for number, tensor, _ in parts.load(batch, torch.device("cpu")):
            targets[number].copy_(tensor)
    for (item, _), target in zip(wanted, targets, strict=True):
        planner.commit_tensor(item, target)
