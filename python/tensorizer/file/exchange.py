"""Loads tensors by the members of a process group, each byte being read by one of them."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .._native import check_wait
from ..group.blocks import Block, BlockPlan, Layout, Piece, aligned, common, sized
from ..group.members import Members
from ..group.wishes import MergedWishes, with_all_dims
from ..tensors.handles import cast_dtype, dtype_of
from ..tensors.sharding import Ranges
from .block_reader import BlockReader
from .load_plan import LoadPlan
from .progress import ProgressReporter

#: Blocks that a member holds at once: two that are being read, one that is being exchanged, and
#: one whose tensors are being taken.
_BLOCKS_HELD, _READS = 4, 2
#: Seconds between two looks at a read.
_PAUSE = 2e-2


@dataclass
class _BlockInFlight:
    """A block that is being read, exchanged, or handed out.

    Attributes:
        block: The block.
        memory: The bytes that all members want.
        pieces: The pieces that each of some members reads for the others, by the ranks of these.
        staged: The memory of the pieces that this member reads.
        tensors: The memory of tensors that are not handed out as views of ``memory``.
        read: The reading of this member's share.

    """

    block: Block
    memory: torch.Tensor
    pieces: dict[tuple[int, ...], list[list[Piece]]]
    staged: list[torch.Tensor]
    tensors: dict[int, torch.Tensor]
    read: Future[None] = field(default_factory=Future)

    def mine(self, rank: int) -> list[Piece]:
        """Return the pieces that a member reads for others."""
        every = (of_ranks[ranks.index(rank)] for ranks, of_ranks in self.pieces.items())
        return list(itertools.chain.from_iterable(every))

    def synchronize(self) -> None:
        """Wait for what is under way on the current streams of the devices of its memory."""
        every = [self.memory, *self.staged, *self.tensors.values()]
        for device in {one.device for one in every if one.is_cuda}:
            torch.cuda.current_stream(device).synchronize()


class _Messages(NamedTuple):
    """Messages from and to all members, with the bytes of each by rank, and the received boxes."""

    received: torch.Tensor
    sent: torch.Tensor
    received_lens: list[int]
    sent_lens: list[int]
    boxes: list[tuple[int, Ranges]]


class Exchange(Iterator[list[tuple[int, torch.Tensor]]]):
    """Yields the numbers and tensors that a member wants, a block at a time at all members.

    Tensors that all members want are views of the memory of a block, which lives as long as one of
    them. All members must take the same number of blocks: the iteration is one collective call,
    which ends with the last block.

    Args:
        members: The members, which have the same file.
        plan: The tensors that this member wants, and the memory to load them into, if it has any.
        wishes: The wishes of all members.
        limit: The most bytes that are held beside the tensors, the same at all members.
        verify: The hashes that any member compares. If these are some, tensors are read as wholes.
        reporter: Reports the bytes that are loaded, on the thread that waits for tensors. An error
            of it is that of all.
        finishes: True if it reports at the end that everything is done.

    """

    def __init__(
        self,
        members: Members,
        plan: LoadPlan,
        wishes: MergedWishes,
        limit: int,
        verify: str,
        *,
        reporter: ProgressReporter,
        finishes: bool,
    ) -> None:
        self._members, self._plan, self._file = members, plan, plan.file
        self._rank, self._size = members.rank, members.size
        self._reporter, self._finishes = reporter, finishes
        reporter.waits_for_flush = True
        self._reader = BlockReader(self._file, verify)
        self._file.refuse_without_data(plan.numbers)
        described = self._file.reader.describe_all(range(len(self._file)))
        self._dtypes = [dtype_of(dtype) for dtype, _ in described]
        self._shapes = [tuple(shape) for _, shape in described]
        self._blocks_plan = BlockPlan(wishes, self._layout, self._size)
        most = self._blocks_plan.block_bytes(limit // _BLOCKS_HELD)
        self._blocks = self._blocks_plan.blocks(most)
        self._targets = plan.checked_targets()
        self._limit = limit
        self._is_wanted = set(plan.numbers)
        #: Tensors that no block has, as no member wants any byte of them.
        self._empty = deque((n, self._memory_of(n)) for n in plan.numbers if wishes.case_of[n] < 0)
        self._next: Block | None = next(self._blocks, None)
        self._in_flight: deque[_BlockInFlight] = deque()
        self._pool = ThreadPoolExecutor(_READS, "tensorizer-read")
        self._device = self._device_of_blocks()
        self._pinned = self._device.type == "cpu" and any(
            plan.device_of(number).type == "cuda" for number in plan.numbers[:1]
        )
        self._ended = False

    def __next__(self) -> list[tuple[int, torch.Tensor]]:
        if self._ended:
            raise StopIteration
        failed: BaseException | None = None
        one = messages = None
        try:
            self._start_reads()
            if self._in_flight:
                one = self._in_flight.popleft()
                self._wait_for(one.read)
                messages = self._packed(one)
            elif self._finishes:
                self._reporter.finish()
        except BaseException as error:
            failed = error
        try:
            then = None if one is None else self._collectives(one, messages)
            self._members.agree(failed, then=then)
            ready = None if one is None else self._delivered(one, messages)
        except BaseException as error:
            self._stop()
            self._members.leave_after(error)
            if isinstance(error, StopIteration):
                raise RuntimeError("a function of the caller raised StopIteration") from error
            raise
        finally:
            # Its traceback holds this call, and all objects of it.
            del failed
        return self._last() if ready is None else ready

    def _layout(self, number: int) -> Layout:
        return Layout(self._shapes[number] or (1,), self._dtypes[number].itemsize)

    def _device_of_blocks(self) -> torch.device:
        """Return the device on which blocks are exchanged."""
        if not self._members.on_device:
            return torch.device("cpu")
        found = [self._plan.device_of(number) for number in self._plan.numbers[:1]]
        if found and found[0].type != "cpu":
            return found[0]
        return torch.device("cuda", torch.cuda.current_device())

    # Reading

    def _start_reads(self) -> None:
        """Begin to read the next blocks, as far as there is memory for them."""
        while self._next is not None and len(self._in_flight) < _BLOCKS_HELD - 1:
            held = sum(self._blocks_plan.cost(one.block) for one in self._in_flight)
            if self._in_flight and held + self._blocks_plan.cost(self._next) > self._limit:
                break
            one = self._prepared(self._next)
            one.read = self._pool.submit(self._read, one)
            self._in_flight.append(one)
            self._next = next(self._blocks, None)

    def _wait_for(self, read: Future[None]) -> None:
        # Waits with a time-out are ended by every kind of interruption.
        while not wait([read], _PAUSE).done:
            check_wait(f"loading `{self._file.uri}`")
            self._reporter.flush()
        read.result()
        self._reporter.flush()

    def _prepared(self, block: Block) -> _BlockInFlight:
        """Allocate the memory of a block, on the calling thread."""
        pieces = {
            ranks: self._blocks_plan.pieces(block, ranks)
            for ranks in block.shared
            if self._rank in ranks
        }
        gathered = {placed.number for placed in block.gathered}
        tensors = {
            number: self._memory_of(number)
            for number in block.numbers
            if number in self._is_wanted and number not in gathered
        }
        memory = torch.empty(
            block.nbytes, dtype=torch.uint8, device=self._device, pin_memory=self._pinned
        )
        one = _BlockInFlight(block, memory, pieces, [], tensors)
        for piece in one.mine(self._rank):
            shape = [stop - start for start, stop in piece.ranges]
            dtype = self._dtypes[piece.number]
            one.staged.append(torch.empty(shape, dtype=dtype, device=self._device))
        # The memory may still be in use on this stream, and is filled on others.
        one.synchronize()
        return one

    def _memory_of(self, number: int) -> torch.Tensor:
        """Return the memory to load a tensor of this member into."""
        target = self._targets.get(number)
        if target is not None:
            return target.detach()
        dtype = cast_dtype(self._dtypes[number], self._file.dtype)
        shape, device = self._plan.part(number).shape, self._plan.device_of(number)
        try:
            return torch.empty(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            if device.type != "cpu":
                raise
            raise MemoryError(f"tensor {self._file.reader.name(number)!r}: {error}") from error

    def _read(self, one: _BlockInFlight) -> None:
        """Read this member's share of a block, and what it alone wants of it."""
        device = self._device
        # Each thread has a current device of its own.
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            share = one.block.share(self._rank)
            memory = [one.memory.narrow(0, of.position, sized(of.ranges)) for of in share]
            self._reader.read(share, memory, as_bytes=True)
            self._reader.read(one.mine(self._rank), one.staged, as_bytes=False)
            case = self._blocks_plan.case
            alone = [number for number in one.tensors if not case(number).shared]
            if alone and self._file.dtype is None:
                self._plan.subset(alone).fill(one.tensors)
            elif alone:
                for number, tensor in self._plan.subset(alone).load_new().items():
                    one.tensors[number].copy_(tensor)
            one.synchronize()

    # Exchanging

    def _packed(self, one: _BlockInFlight) -> _Messages | None:
        """Return what this member sends and receives of the rows that only some members want.

        What it wants of those that it has read is copied to its place.
        """
        plan, rank = self._blocks_plan, self._rank
        if not one.block.shared:
            return None
        sent: list[list[torch.Tensor]] = [[] for _ in range(self._size)]
        received: list[list[tuple[int, Ranges]]] = [[] for _ in range(self._size)]
        staged = iter(one.staged)
        for ranks, of_ranks in one.pieces.items():
            for owner, pieces in zip(ranks, of_ranks, strict=True):
                for piece in pieces if owner != rank else ():
                    received[owner] += [(piece.number, box) for box in plan.overlaps(piece, rank)]
            for piece in of_ranks[ranks.index(rank)]:
                data = next(staged)
                for other in ranks:
                    for box in plan.overlaps(piece, other):
                        part = _sliced(data, _within(box, piece.ranges))
                        if other == rank:
                            self._place(one, piece.number, box, part)
                        else:
                            sent[other].append(part)
        sent_lens = [sum(aligned(p.nbytes) for p in to) for to in sent]
        received_lens = [
            sum(aligned(sized(box) * self._dtypes[number].itemsize) for number, box in of)
            for of in received
        ]
        outgoing, incoming = (
            torch.empty(sum(lens), dtype=torch.uint8, device=self._device)
            for lens in (sent_lens, received_lens)
        )
        position = 0
        for part in itertools.chain.from_iterable(sent):
            _view(outgoing, position, part.dtype, part.shape).copy_(part)
            position += aligned(part.nbytes)
        boxes = list(itertools.chain.from_iterable(received))
        return _Messages(incoming, outgoing, received_lens, sent_lens, boxes)

    def _collectives(self, one: _BlockInFlight, messages: _Messages | None) -> Callable[[], None]:
        """Return a function that exchanges a block, from another thread."""
        stream = None
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)

        def exchange() -> None:
            with torch.cuda.stream(stream):
                if one.block.nbytes:
                    self._members.exchange(one.memory, one.block.ends)
                if messages is not None:
                    self._members.all_to_all(*messages[:4])

        return exchange

    def _unpack(self, one: _BlockInFlight, messages: _Messages) -> None:
        """Copy what this member has received to its place."""
        position = 0
        for number, box in messages.boxes:
            shape = [stop - start for start, stop in box]
            dtype = self._dtypes[number]
            data = _view(messages.received, position, dtype, shape)
            self._place(one, number, box, data)
            position += aligned(data.nbytes)

    def _place(self, one: _BlockInFlight, number: int, box: Ranges, data: torch.Tensor) -> None:
        """Copy a box of a tensor to its place in this member's part of it."""
        tensor, shape = one.tensors[number], self._layout(number).shape
        if not self._shapes[number]:
            tensor.copy_(data.view(()))
            return
        for own in self._plan.part(number).boxes:
            both = common(box, with_all_dims(own.ranges, shape))
            if both is not None:
                place = own.of_part(tensor)
                _sliced(place, _within(both, own.ranges)).copy_(_sliced(data, _within(both, box)))

    # Handing out

    def _delivered(
        self, one: _BlockInFlight, messages: _Messages | None
    ) -> list[tuple[int, torch.Tensor]]:
        """Return the tensors of a block that this member wants; an error is that of all."""
        try:
            if messages is not None:
                self._unpack(one, messages)
            for memory in (one.memory, *one.tensors.values()):
                if memory.is_cuda:
                    # It may have been allocated on another stream.
                    memory.record_stream(torch.cuda.current_stream(memory.device))
            return list(self._handed_out(one))
        except BaseException as error:
            self._members.agree(error)
            raise

    def _handed_out(self, one: _BlockInFlight) -> Iterator[tuple[int, torch.Tensor]]:
        gathered = {placed.number: placed for placed in one.block.gathered}
        for number in one.block.numbers:
            if number not in self._is_wanted:
                continue
            while self._empty and self._empty[0][0] < number:
                yield self._empty.popleft()
            placed = gathered.get(number)
            if placed is None:
                yield number, one.tensors[number]
                continue
            first, stop = placed.rows
            shape = (stop - first, *self._shapes[number][1:]) if self._shapes[number] else ()
            view = _view(one.memory, placed.start, self._dtypes[number], shape)
            yield number, self._in_wanted_memory(number, view)

    def _in_wanted_memory(self, number: int, view: torch.Tensor) -> torch.Tensor:
        """Return a tensor of a block in the memory that it is wanted in."""
        target = self._targets.get(number)
        if target is not None:
            target.detach().copy_(view)
            return target
        wanted = self._file.dtype
        device, dtype = self._plan.device_of(number), cast_dtype(view.dtype, wanted)
        # If others are cast, one that is not must not keep the memory of all.
        return view.to(device, dtype, copy=wanted is not None)

    def _last(self) -> list[tuple[int, torch.Tensor]]:
        """Return the tensors without data that come last, and end the call."""
        self._ended = True
        self._pool.shutdown(wait=False)
        self._members.complete()
        if not self._empty:
            raise StopIteration
        return list(self._empty)

    def _stop(self) -> None:
        """End the reads that are under way."""
        if not self._ended:
            self._ended = True
            self._file.reader.close()
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._in_flight.clear()

    def end(self) -> None:
        """Make another thread leave the call, if one waits for the next block."""
        self._members.end("has closed its iterator before its end")
        self._file.reader.close()

    def close(self) -> None:
        """End the iteration, and tell members that continue. Closing again does nothing."""
        if not self._ended:
            self._stop()
            self._members.leave()
            self._members.raise_interruption()


def _within(box: Ranges, around: Ranges) -> Ranges:
    """Return the ranges of a box relative to one that contains it."""
    ends = zip(box, around, strict=True)
    return tuple((low - first, high - first) for (low, high), (first, _) in ends)


def _sliced(tensor: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    return tensor[tuple(slice(*ends) for ends in ranges)]


def _view(
    memory: torch.Tensor, start: int, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """Return a tensor whose bytes begin at a position of the memory."""
    return memory.narrow(0, start, math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
