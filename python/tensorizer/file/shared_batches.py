"""Batches of tensors that one member of a group fetches for the others."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from ..group import plan
from ..group.exchange import (
    BATCH_BYTES,
    Buffers,
    Exchange,
    ExchangeStopped,
    MemoryBudget,
    batch_bytes,
)
from ..group.members import Members
from ..group.tensor_requests import SharedRows
from ..tensors.handles import dtype_of
from ..tensors.sharding import Ranges
from .load_plan import LoadPlan
from .tensor_file import TensorFile

#: Longer batches for encrypted tensors: whole pieces of 2 MiB are read, even where a batch begins
#: inside one.
_ENCRYPTED_BATCH_BYTES = 8 * BATCH_BYTES


class FillTask(NamedTuple):
    """The tensors that a member wants of a file, and the memory to fill, by number."""

    wanted: LoadPlan
    tensors: Mapping[int, torch.Tensor]


class SharedBatches:
    """Batches of tensors that several members want: one member fetches each for the others.

    Args:
        members: All members.
        mine: The tensors that this member wants, and their memory.
        shared: By the ranks of members that want the same tensors: their shares of these.
        whole: True if tensors are fetched in one piece.

    Attributes:
        read_by_each: Numbers of tensors of which each member reads its own part by itself.

    """

    def __init__(
        self,
        members: Members,
        mine: FillTask,
        shared: Mapping[tuple[int, ...], Mapping[int, SharedRows]],
        *,
        whole: bool,
    ) -> None:
        self._members, (self._wanted, self._tensors) = members, mine
        self._file = file = self._wanted.file
        self.read_by_each: set[int] = set()
        self._tensors_by_ranks: dict[tuple[int, ...], dict[int, plan.SharedTensor]] = {}
        for ranks, shares in shared.items():
            part = {
                number: _shared_tensor(file, number, share, whole)
                for number, share in shares.items()
            }
            self.read_by_each |= {number for number, one in part.items() if one.is_disjoint()}
            part = {number: one for number, one in part.items() if number not in self.read_by_each}
            if part:
                self._tensors_by_ranks[ranks] = part
        self._exchanges: dict[tuple[int, ...], Exchange] = {}
        self._buffers = Buffers()

    def memory_budget(self) -> MemoryBudget:
        """Return the division of this member's memory limit."""
        parts = [(len(ranks), part.values()) for ranks, part in self._tensors_by_ranks.items()]
        most = max((self._batch_bytes(*part) for part in parts), default=BATCH_BYTES)
        longest = max(
            (one.min_batch_bytes(size) for size, part in parts for one in part), default=0
        )
        scattered = any(one.boxes is not None for _, part in parts for one in part)
        min_memory = self._file.min_memory(self._device(), parts=True)
        return MemoryBudget.of(
            self._file.memory_limit, most, longest, min_memory, scattered=scattered
        )

    def _batch_bytes(self, size: int, of_part: Iterable[plan.SharedTensor]) -> int:
        """Return the length of the batches of a part, which all its members compute alike."""
        most = _ENCRYPTED_BATCH_BYTES if self._file.reader.encrypted else BATCH_BYTES
        return batch_bytes(sum(one.nbytes for one in of_part), size, most)

    def prepare(self, budget: MemoryBudget, most: int | None = None) -> None:
        """Plan batches of ``most`` bytes at most, and allocate the memory."""
        self._file.reader.limit_memory(self._file.memory_limit, budget.other_bytes)
        device = self._device()
        any_cuda = any(tensor.is_cuda for tensor in self._tensors.values())
        self._buffers = Buffers(device, pinned=device.type == "cpu" and any_cuda)
        for ranks, part in self._tensors_by_ranks.items():
            size, member = len(ranks), ranks.index(self._members.rank)
            usual = self._batch_bytes(size, part.values())
            exchange = Exchange(
                plan.batches(part.values(), size, usual if most is None else min(usual, most)),
                (member, size),
                fetch=self._fetch,
                pack=functools.partial(self._pack, part),
                deliver=functools.partial(self._deliver, part, member),
                stop=self._file.stop,
                concurrent_reads=budget.concurrent_reads,
            )
            self._buffers.need(exchange)
            self._exchanges[ranks] = exchange
        self._buffers.make()

    def exchange(self, finish: Callable[[], None] | None) -> BaseException | None:
        """Exchange all batches, in the same order at all members; return this member's error."""
        failed: BaseException | None = None
        for ranks, exchange in self._exchanges.items():
            all_want_it = len(ranks) == self._members.size
            members = self._members if all_want_it else self._members.subgroup(ranks)
            failed = exchange.run(members, self._buffers, failed)
        self._exchanges.clear()
        if isinstance(failed, ExchangeStopped):
            # The member that has failed reports the error.
            return None
        if failed is None and finish is not None:
            try:
                finish()
            except BaseException as error:
                return error
        return failed

    def _device(self) -> torch.device:
        """Return the device on which batches are exchanged."""
        device = torch.device("cpu")
        if self._members.on_device:
            found = [tensor.device for tensor in self._tensors.values() if tensor.is_cuda]
            device = found[0] if found else torch.device("cuda", torch.cuda.current_device())
        return device

    def _fetch(self, batch: plan.Batch, buffer: torch.Tensor) -> None:
        """Read a batch into a buffer, on a thread of its own."""
        file = self._file
        views = _views(file, batch, buffer)
        whole: list[tuple[torch.Tensor, plan.Piece]] = []
        cut: list[tuple[torch.Tensor, plan.Piece]] = []
        for view, piece in zip(views, batch.pieces, strict=True):
            shape = file.reader.describe(piece.number)[1]
            (whole if list(view.shape) == shape else cut).append((view, piece))
        # Each thread has a current device of its own.
        with torch.cuda.device(buffer.device) if buffer.is_cuda else contextlib.nullcontext():
            if whole:
                file.fill([view for view, _ in whole], [piece.number for _, piece in whole])
            if cut:
                sliced = file.sliced([(piece.number, piece.ranges) for _, piece in cut])
                sliced.fill([view for view, _ in cut], range(len(cut)))
            if buffer.is_cuda:
                torch.cuda.current_stream().synchronize()

    def _pack(
        self,
        part: Mapping[int, plan.SharedTensor],
        batch: plan.Batch,
        buffer: torch.Tensor,
        slots: Sequence[torch.Tensor],
    ) -> None:
        """Copy each member's part of a batch into the slot that is sent to it."""
        views = _views(self._file, batch, buffer)
        for view, piece in zip(views, batch.pieces, strict=True):
            for member, slot in enumerate(slots):
                common = plan.overlap(piece.ranges, part[piece.number].box(member))
                if common is not None:
                    source = _sliced(view, common[0])
                    to = slot.narrow(0, piece.received_start, source.nbytes)
                    to.view(source.dtype).view(source.shape).copy_(source)

    def _deliver(
        self,
        part: Mapping[int, plan.SharedTensor],
        member: int,
        batch: plan.Batch,
        buffer: torch.Tensor,
    ) -> None:
        """Copy this member's part of a batch into its tensors."""
        for piece in batch.pieces:
            tensor, of_batch = self._tensors.get(piece.number), piece.ranges
            own = part[piece.number].box(member) if batch.scattered else of_batch
            ranges = plan.common(of_batch, own)
            if tensor is None or ranges is None:
                continue
            view = _view(self._file, piece.number, ranges, buffer, piece.received_start)
            for box in self._wanted.part(piece.number).boxes:
                common = plan.overlap(ranges, box.ranges)
                if common is not None:
                    to = _sliced(box.of_part(tensor.detach()), common[1])
                    to.copy_(_sliced(view, common[0]))


def _shared_tensor(
    file: TensorFile, number: int, share: SharedRows, whole: bool
) -> plan.SharedTensor:
    dtype, shape, _ = file.reader.describe(number)
    whole = whole or file.is_strided(number)
    itemsize = dtype_of(dtype).itemsize
    return plan.SharedTensor(number, tuple(shape), itemsize, share.rows, whole, share.boxes)


def _views(file: TensorFile, batch: plan.Batch, buffer: torch.Tensor) -> list[torch.Tensor]:
    """Return the pieces of a batch as tensors."""
    return [_view(file, one.number, one.ranges, buffer, one.start) for one in batch.pieces]


def _view(
    file: TensorFile, number: int, ranges: Ranges, buffer: torch.Tensor, start: int
) -> torch.Tensor:
    """Return a box of a tensor, whose bytes in the buffer begin at ``start``."""
    shape = [stop - start for start, stop in ranges]
    dtype = dtype_of(file.reader.describe(number)[0])
    data = buffer.narrow(0, start, math.prod(shape) * dtype.itemsize)
    return data.view(dtype).view(shape)


def _sliced(tensor: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    return tensor[tuple(slice(*ends) for ends in ranges)]
