"""Yields tensors to the members of a process group, each byte being fetched by one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from .._types import Head
from ..group.members import Members
from .collective_load import allocate, fill_collectively, open_collectively
from .load_spec import LoadSpec, ResolvedLoad
from .progress import ProgressReporter
from .read_ahead import ReadAhead
from .selection import Selection
from .shared_batches import FillTask
from .tensor_file import TensorFile, in_batches

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def open_read_ahead(
    group: ProcessGroup,
    opened: Callable[[Sequence[Head] | None], TensorFile],
    spec: LoadSpec,
    reporter: ProgressReporter,
    buffer_bytes: int,
) -> tuple[TensorFile, ResolvedLoad, CollectiveReadAhead | ReadAhead]:
    """Open a file at all members of a group. Return it, the chosen tensors, and their iterator.

    Raises:
        BaseException: The error of this member, or of another.

    """
    members = Members.of(group)
    if members.size == 1:
        file = opened(None)
        try:
            resolved = spec.resolve(file, reporter)
            return (
                file,
                resolved,
                ReadAhead(resolved.wanted, resolved.device, buffer_bytes, ready=False),
            )
        except BaseException:
            file.close()
            raise
    iterators: list[CollectiveReadAhead | ReadAhead] = []
    with members:
        file, each_reads = open_collectively(members, opened)
        try:
            resolved, _ = members.run_on_all(lambda: spec.resolve(file, reporter))
            # Members may have different buffer sizes, and all must form the same batches.
            common_buffer_bytes = min(members.all_gather(buffer_bytes))

            def begin() -> None:
                if each_reads:
                    file.reader.share_cache()
                    iterator = ReadAhead(
                        resolved.wanted, resolved.device, buffer_bytes, ready=False
                    )
                    iterators.append(iterator)
                else:
                    iterators.append(
                        CollectiveReadAhead(members, file, resolved, common_buffer_bytes)
                    )

            members.run_on_all(begin)
        except BaseException:
            for iterator in iterators:
                iterator.close()
            file.close()
            raise
    return file, resolved, iterators[0]


class CollectiveReadAhead(Iterator[list[tuple[int, torch.Tensor]]]):
    """Yields numbers and tensors of the chosen ones of a file, batch by batch at all members.

    Args:
        members: The processes that have the same file. All must take the same number of batches:
            the iteration is one collective call, which ends with the last batch.
        file: The file.
        resolved: The tensors that this member wants.
        buffer_bytes: The most bytes of tensors that are held, the same at all members.

    """

    def __init__(
        self, members: Members, file: TensorFile, resolved: ResolvedLoad, buffer_bytes: int
    ) -> None:
        self._members, self._file, self._resolved = members, file, resolved
        self._ended = False
        file.keeps_shared = False
        self._batches = in_batches(range(len(file)), file.reader.memory_len, buffer_bytes)
        self._wanted = set(resolved.wanted.numbers)

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
        wanted = Selection(self._file, numbers, self._resolved.wanted.parts)

        def prepare() -> FillTask:
            return FillTask(wanted, allocate(wanted, self._resolved.device_of))

        places = fill_collectively(self._members, prepare).tensors
        return [(number, places[number]) for number in wanted.numbers]

    def close(self) -> None:
        """End the iteration, and tell members that continue. Closing again does nothing."""
        if not self._ended:
            self._ended = True
            self._batches = iter(())
            self._members.leave()
