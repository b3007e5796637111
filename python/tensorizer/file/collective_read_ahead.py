"""Yields tensors to the members of a process group, each byte being fetched by one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from .._types import Head
from ..group.members import Members
from .collective_load import allocate, fill_collectively, open_collectively
from .load_plan import LoadPlan
from .progress import ProgressReporter
from .read_ahead import ReadAhead
from .request import Request
from .shared_batches import FillTask
from .tensor_file import TensorFile, in_batches

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def open_read_ahead(
    group: ProcessGroup,
    opened: Callable[[Sequence[Head] | None], TensorFile],
    request: Request,
    reporter: ProgressReporter,
    buffer_bytes: int,
) -> tuple[TensorFile, LoadPlan, CollectiveReadAhead | ReadAhead]:
    """Open a file at all members of a group. Return it, the chosen tensors, and their iterator.

    Raises:
        BaseException: The error of this member, or of another.

    """
    members = Members.of(group)

    def planned(file: TensorFile) -> LoadPlan:
        plan = LoadPlan(request, file)
        reporter.total = plan.total()
        return plan

    if members.size == 1:
        file = opened(None)
        try:
            plan = planned(file)
            return file, plan, ReadAhead(plan, plan.device, buffer_bytes, ready=False)
        except BaseException:
            file.close()
            raise
    iterators: list[CollectiveReadAhead | ReadAhead] = []
    with members:
        file, each_reads = open_collectively(members, opened)
        try:
            plan, _ = members.run_on_all(lambda: planned(file))
            # Members may have different buffer sizes, and all must form the same batches.
            common_buffer_bytes = min(members.all_gather(buffer_bytes))

            def begin() -> None:
                if each_reads:
                    file.reader.share_cache()
                    iterators.append(ReadAhead(plan, plan.device, buffer_bytes, ready=False))
                else:
                    iterators.append(CollectiveReadAhead(members, plan, common_buffer_bytes))

            members.run_on_all(begin)
        except BaseException:
            for iterator in iterators:
                iterator.close()
            file.close()
            raise
    return file, plan, iterators[0]


class CollectiveReadAhead(Iterator[list[tuple[int, torch.Tensor]]]):
    """Yields numbers and tensors of the chosen ones of a file, batch by batch at all members.

    Args:
        members: The processes that have the same file. All must take the same number of batches:
            the iteration is one collective call, which ends with the last batch.
        plan: The tensors that this member wants of the file.
        buffer_bytes: The most bytes of tensors that are held, the same at all members.

    """

    def __init__(self, members: Members, plan: LoadPlan, buffer_bytes: int) -> None:
        self._members, self._plan, file = members, plan, plan.file
        self._ended = False
        file.keeps_shared = False
        self._batches = in_batches(range(len(file)), file.length_of(range(len(file))), buffer_bytes)
        self._wanted = set(plan.numbers)

    def __next__(self) -> list[tuple[int, torch.Tensor]]:
        try:
            batch = next(self._batches)
        except StopIteration:
            if not self._ended:
                self._ended = True
                self._members.complete()
            raise
        return self._load(batch)

    def _load(self, batch: Sequence[int]) -> list[tuple[int, torch.Tensor]]:
        """Return the tensors of a batch that this member wants."""
        numbers = [number for number in batch if number in self._wanted]
        wanted = self._plan.subset(numbers)

        def prepare() -> FillTask:
            return FillTask(wanted, allocate(wanted))

        places = fill_collectively(self._members, prepare).tensors
        return [(number, places[number]) for number in wanted.numbers]

    def close(self) -> None:
        """End the iteration, and tell members that continue. Closing again does nothing."""
        if not self._ended:
            self._ended = True
            self._batches = iter(())
            self._members.leave()
