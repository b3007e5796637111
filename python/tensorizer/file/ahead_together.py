"""Yields tensors to the members of a process group, each byte being fetched by one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from .._types import Head
from ..group.members import Members
from .ahead import ReadAhead
from .choice import Choice, Chosen
from .parts import Wanted
from .progress import Progress
from .shared_batches import Prepared
from .tensor_file import TensorFile, in_batches
from .together import fill_together, made_for, open_together

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def open_for_group(
    group: ProcessGroup,
    opened: Callable[[Sequence[Head] | None], TensorFile],
    choice: Choice,
    told: Progress,
    buffer_bytes: int,
) -> tuple[TensorFile, Chosen, AheadTogether | ReadAhead]:
    """Open a file at all members of a group. Return it, the chosen tensors, and their iterator.

    Raises:
        BaseException: The error of this member, or of another.

    """
    members = Members.of(group)
    if members.size == 1:
        file = opened(None)
        try:
            chosen = choice.of(file, told)
            return file, chosen, ReadAhead(chosen.wanted, chosen.device, buffer_bytes, ready=False)
        except BaseException:
            file.close()
            raise
    made: list[AheadTogether | ReadAhead] = []
    with members:
        file, by_each = open_together(members, opened)
        try:
            chosen, _ = members.together(lambda: choice.of(file, told))
            # Members may have different buffer sizes, and all must form the same batches.
            least = min(members.tell(buffer_bytes))

            def begin() -> None:
                if by_each:
                    file.reader.share_cache()
                    ahead = ReadAhead(chosen.wanted, chosen.device, buffer_bytes, ready=False)
                    made.append(ahead)
                else:
                    made.append(AheadTogether(members, file, chosen, least))

            members.together(begin)
        except BaseException:
            for ahead in made:
                ahead.close()
            file.close()
            raise
    return file, chosen, made[0]


class AheadTogether(Iterator[list[tuple[int, torch.Tensor]]]):
    """Yields numbers and tensors of the chosen ones of a file, batch by batch at all members.

    Args:
        members: The processes that have the same file. All must take the same number of batches:
            the iteration is one collective call, which ends with the last batch.
        file: The file.
        chosen: The tensors that this member wants.
        buffer_bytes: The most bytes of tensors that are held, the same at all members.

    """

    def __init__(
        self, members: Members, file: TensorFile, chosen: Chosen, buffer_bytes: int
    ) -> None:
        self._members, self._file, self._chosen = members, file, chosen
        self._ended = False
        file.keeps_shared = False
        self._batches = in_batches(range(len(file)), file.reader.memory_len, buffer_bytes)
        self._wanted = set(chosen.wanted.numbers)

    def __next__(self) -> list[tuple[int, torch.Tensor]]:
        try:
            batch = next(self._batches)
        except StopIteration:
            if not self._ended:
                self._ended = True
                self._members.done()
            raise
        return self._load(batch)

    def _load(self, batch: Sequence[int]) -> list[tuple[int, torch.Tensor]]:
        """Return the tensors of a batch that this member wants."""
        numbers = [number for number in batch if number in self._wanted]
        wanted = Wanted(self._file, numbers, self._chosen.wanted.parts)

        def prepare() -> Prepared:
            return Prepared(wanted, made_for(wanted, self._chosen.device_of))

        places = fill_together(self._members, prepare).tensors
        return [(number, places[number]) for number in wanted.numbers]

    def close(self) -> None:
        """End the iteration, and tell members that continue. Closing again does nothing."""
        if not self._ended:
            self._ended = True
            self._batches = iter(())
            self._members.leave()
