"""Exchanges batches that each member of a group fetches, and sends to all others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from .._errors import GroupError
from .._native import split_group_memory
from .communicator import Communicator
from .plan import HEADER, Batch

#: The most bytes of a batch, about: some milliseconds of a fast network.
BATCH_BYTES = 32 << 20
#: Batches that a member reads at once, to keep a server busy.
_CONCURRENT_READS = 3
#: Batches that are sent between members at once: one is delivered while the next one is sent.
_CONCURRENT_SENDS = 2
#: The share of all bytes in the first batches of all members: nothing is exchanged until they come.
_FIRST_BATCHES_SHARE = 1 / 10

_CPU = torch.device("cpu")

#: A function that fills a buffer with a batch.
Fetch: TypeAlias = Callable[[Batch, torch.Tensor], None]
#: A function that copies each member's part of a batch into the slot that is sent to it.
Pack: TypeAlias = Callable[[Batch, torch.Tensor, Sequence[torch.Tensor]], None]
#: A function that takes the wanted tensors out of the received bytes of a batch.
Deliver: TypeAlias = Callable[[Batch, torch.Tensor], None]


def batch_bytes(total: int, members: int, most: int = BATCH_BYTES) -> int:
    """Return the length of batches for this total of bytes.

    A server responds to all reads that are made at once in about the same time. With long batches,
    members would have nothing to send at first, and much at the end.
    """
    by_share = int(total * _FIRST_BATCHES_SHARE) // (members * _CONCURRENT_READS)
    return min(most, max(most // 8, by_share))


@dataclass(frozen=True)
class MemoryBudget:
    """The division of a member's memory limit.

    Attributes:
        batch_bytes: The length of a batch.
        concurrent_reads: The number of batches that are read at a time.
        other_bytes: The bytes of the limit that are not for one of these reads.

    """

    batch_bytes: int
    concurrent_reads: int
    other_bytes: int

    @classmethod
    def of(
        cls, limit: int | None, most: int, longest: int, reader: int, *, scattered: bool
    ) -> MemoryBudget:
        """Divide a limit, for batches of ``most`` bytes, and of at least ``longest``.

        Reading a batch takes at least ``reader`` bytes. ``scattered`` means that members may
        receive only their parts of a batch.

        Raises:
            ValueError: The limit is too small.

        """
        # Batches that are being sent, of this member and of others, beside those being read.
        others = 2 * _CONCURRENT_SENDS + scattered
        batch, concurrent_reads, other_bytes = split_group_memory(
            limit, most + HEADER, _CONCURRENT_READS, others, longest + HEADER, reader
        )
        return cls(batch - HEADER, concurrent_reads, other_bytes)


class Buffers:
    """The memory of batches, for exchanges that run one after another.

    Args:
        device: The device of the memory.
        pinned: True for pinned host memory, from which a device copies at full speed.

    """

    def __init__(self, device: torch.device = _CPU, *, pinned: bool = False) -> None:
        self._device, self._pinned = device, pinned
        self._len = 0
        self._memory = torch.empty(0, dtype=torch.uint8, device=_CPU)

    def need(self, exchange: Exchange) -> None:
        """Plan enough memory for an exchange, too."""
        self._len = max(self._len, exchange.buffer_count * exchange.buffer_len)

    def make(self) -> None:
        """Allocate the memory."""
        device = self._device
        kind: dict[str, Any] = {"dtype": torch.uint8, "device": device, "pin_memory": self._pinned}
        self._memory = torch.empty(self._len, **kind)
        if device.type == "cuda":
            # The memory may still be in use on this stream, and is filled on others.
            torch.cuda.current_stream(device).synchronize()

    def of(self, exchange: Exchange) -> list[torch.Tensor]:
        """Return the buffers of an exchange; no other exchange may use them at the same time."""
        size = exchange.buffer_len
        return [self._memory.narrow(0, n * size, size) for n in range(exchange.buffer_count)]


class _Sent(NamedTuple):
    """A batch that is being sent.

    ``received`` is the buffer for the bytes that this member receives. ``sent`` is the buffer that
    the owner of the batch sends it from. ``work`` is the exchange to wait for.
    """

    batch: Batch
    received: torch.Tensor
    sent: torch.Tensor | None
    work: Any


class ExchangeStopped(Exception):
    """An exchange was stopped because another member has failed."""


class Exchange:
    """One pass over all batches, in the same order and at the same time at all members.

    Args:
        batches: The batches of all members, the same list at all of them.
        member: The rank of this member, and the number of members.
        fetch: Called on other threads.
        pack: Called for each scattered batch of this member, with a slot for each member.
        deliver: Called for every batch, those of this member too.
        stop: Ends the reads that are under way.
        concurrent_reads: Batches that are fetched at once.

    """

    def __init__(
        self,
        batches: Sequence[Batch],
        member: tuple[int, int],
        *,
        fetch: Fetch,
        pack: Pack,
        deliver: Deliver,
        stop: Callable[[], None],
        concurrent_reads: int = _CONCURRENT_READS,
    ) -> None:
        self._batches, (self._rank, self._size) = batches, member
        self._fetch, self._pack, self._deliver, self._stop = fetch, pack, deliver, stop
        self._to_fetch = deque(batch for batch in batches if batch.owner == self._rank)
        size = max(map(self._buffer_len, batches), default=HEADER)
        # While a batch is sent, others are read or wait for their turn. Batches that are much
        # longer than usual are sent one by one.
        usual = size <= HEADER + 2 * BATCH_BYTES
        self._concurrent_sends = _CONCURRENT_SENDS if usual else 1
        self._concurrent_reads = concurrent_reads
        self.buffer_len = -(-size // HEADER) * HEADER
        most_own = concurrent_reads + _CONCURRENT_SENDS if usual else 2
        self._own_count = min(len(self._to_fetch), most_own)
        # A scattered batch is packed into a spare buffer, from which it is sent.
        self._spare_count = int(any(batch.scattered for batch in self._to_fetch))
        self._spare: deque[torch.Tensor] = deque()
        self._free: deque[torch.Tensor] = deque()
        self._receive_buffers: deque[torch.Tensor] = deque()
        self._fetching: deque[tuple[torch.Tensor, Future[None]]] = deque()
        self._sent: deque[_Sent] = deque()
        self._failed: BaseException | None = None
        self._stopped_early = False

    @property
    def buffer_count(self) -> int:
        """The number of buffers that the exchange needs at once."""
        return self._own_count + self._spare_count + self._concurrent_sends

    def _buffer_len(self, batch: Batch) -> int:
        packed = self._size * _slot_bytes(batch) if batch.scattered else 0
        return max(HEADER + batch.nbytes, packed)

    def run(
        self, members: Communicator, buffers: Buffers, failed: BaseException | None = None
    ) -> BaseException | None:
        """Fetch, send and deliver all batches; return the error of this member.

        :class:`ExchangeStopped` is returned if another member has failed, which knows the error.

        Args:
            members: The connections to the other members.
            buffers: The memory; it is free again when this returns.
            failed: An earlier error of this member. The headers of its batches tell the others.

        Raises:
            GroupError: A member was lost.

        """
        every = buffers.of(self)
        own, spare = self._own_count, self._own_count + self._spare_count
        self._free, self._spare = deque(every[:own]), deque(every[own:spare])
        self._receive_buffers = deque(every[spare:])
        self._failed = failed
        pool = ThreadPoolExecutor(self._concurrent_reads, "tensorizer-fetch")
        try:
            self._exchange_all(pool, members)
        except GroupError:
            raise
        except BaseException:
            # The other members would wait for this one.
            members.leave()
            raise
        finally:
            if self._fetching or self._failed is not None:
                self._stop()
            pool.shutdown(wait=True, cancel_futures=True)
            self._fetching.clear()
            # They keep the connections open, and tracebacks keep this object alive.
            self._sent.clear()
        # An interruption takes precedence. Connections of a part hold theirs, and are not asked
        # later.
        failed, self._failed = members.interrupted() or self._failed, None
        if failed is None and self._stopped_early:
            failed = ExchangeStopped()
        try:
            return failed
        finally:
            del failed

    def _exchange_all(self, pool: ThreadPoolExecutor, members: Communicator) -> None:
        """Process all batches, or those up to the first whose owner has failed."""
        self._fetch_more(pool)
        for batch in self._batches:
            fetched = self._next_fetched(members) if batch.owner == self._rank else None
            self._sent.append(self._begin(members, batch, fetched))
            if len(self._sent) == self._concurrent_sends and not self._finish(members):
                self._stopped_early = True
                break
            self._fetch_more(pool)
        # Finish the batches that other members have begun to send.
        while self._sent:
            self._stopped_early |= not self._finish(members)

    def _begin(self, members: Communicator, batch: Batch, fetched: torch.Tensor | None) -> _Sent:
        """Begin to send a batch that this member has fetched, or to receive another member's."""
        if not batch.scattered:
            buffer = self._receive_buffers.popleft() if fetched is None else fetched
            data = buffer[: HEADER + batch.nbytes]
            return _Sent(batch, buffer, fetched, members.broadcast(data, batch.owner))
        slots: list[torch.Tensor] = []
        packed = None
        if fetched is not None:
            packed = self._spare.popleft()
            slots = list(packed[: self._size * _slot_bytes(batch)].view(self._size, -1))
            self._pack_all(batch, fetched, slots)
            self._spare.append(fetched)
        buffer = self._receive_buffers.popleft()
        work = members.scatter(buffer[: _slot_bytes(batch)], slots, batch.owner)
        return _Sent(batch, buffer, packed, work)

    def _pack_all(self, batch: Batch, fetched: torch.Tensor, slots: list[torch.Tensor]) -> None:
        """Copy each member's part of a batch into the slot that is sent to it."""
        inside = fetched[HEADER : HEADER + batch.nbytes]
        try:
            if self._failed is None:
                self._pack(batch, inside, [slot[HEADER:] for slot in slots])
        except BaseException as error:
            self._failed = error
        for slot in slots:
            slot[0] = self._failed is not None
        if fetched.is_cuda:
            # The buffer is filled again once the copies out of it are done.
            torch.cuda.current_stream(fetched.device).synchronize()

    def _fetch_more(self, pool: ThreadPoolExecutor) -> None:
        """Start to read batches into all buffers that are free."""
        while self._to_fetch and self._free:
            batch, buffer = self._to_fetch.popleft(), self._free.popleft()
            inside = buffer[HEADER : HEADER + batch.nbytes]
            self._fetching.append((buffer, pool.submit(self._fetch, batch, inside)))

    def _next_fetched(self, members: Communicator) -> torch.Tensor:
        """Wait for the next batch of this member; its header is not 0 if this member has failed."""
        buffer, future = self._fetching.popleft()
        self._failed = self._failed or members.interrupted()
        if self._failed is None:
            try:
                future.result()
            except BaseException as error:
                self._failed = error
        buffer[0] = self._failed is not None
        return buffer

    def _finish(self, members: Communicator) -> bool:
        """Wait for the oldest batch that is being sent; return False if its owner has failed."""
        batch, buffer, sent, work = self._sent.popleft()
        try:
            members.wait(work)
        finally:
            del work
        owner_succeeded = not bool(buffer[0])
        if owner_succeeded and self._failed is None:
            try:
                self._deliver(batch, buffer[HEADER : HEADER + batch.received])
            except BaseException as error:
                self._failed = error
        if buffer.is_cuda:
            # The buffer is free once the copies out of it are done.
            torch.cuda.current_stream(buffer.device).synchronize()
        if sent is not None:
            self._free.append(sent)
        if sent is not buffer:
            self._receive_buffers.append(buffer)
        return owner_succeeded


def _slot_bytes(batch: Batch) -> int:
    """Return the bytes that each member receives of a batch, with its header."""
    return HEADER + batch.received
