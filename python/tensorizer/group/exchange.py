"""Batches that each member of a group fetches for all, and gives to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from .._errors import GroupError
from .._native import shares_of_group
from .linked import Linked
from .plan import Batch

#: Bytes of a batch, at most, about: some milliseconds of a fast network.
BATCH_BYTES = 32 << 20
#: Batches that a member reads at once, so that a server has always something to do.
_READ_AT_ONCE = 3
#: Batches that are on their way between members at once: one is put in place during the next.
_SENT_AT_ONCE = 2
#: What comes to all members at once, while nothing is exchanged yet, is this share of everything.
_ON_THE_WAY = 1 / 10
#: Bytes in front of a batch that say whether its owner, or anything at it, has failed.
_HEADER = 64

_CPU = torch.device("cpu")

#: Fills a buffer with a batch.
Fetch: TypeAlias = Callable[[Batch, torch.Tensor], None]
#: Takes what is wanted from a buffer with a batch.
Deliver: TypeAlias = Callable[[Batch, torch.Tensor], None]


def batch_bytes(total: int, members: int, most: int = BATCH_BYTES) -> int:
    """Return the length of the batches of so many bytes.

    A server gives all batches that are read at once in about the same time. With long ones, members
    would have nothing to send at first, and much at the end.
    """
    fitting = int(total * _ON_THE_WAY) // (members * _READ_AT_ONCE)
    return min(most, max(most // 8, fitting))


@dataclass(frozen=True)
class Shares:
    """How a member shares its memory limit.

    ``batch`` has the bytes of a batch, of which ``at_once`` are read at a time; ``beside`` is what
    each of these reads leaves to all else.
    """

    batch: int
    at_once: int
    beside: int

    @classmethod
    def of(cls, limit: int | None, most: int, longest: int, reader: int) -> Shares:
        """Share a limit, for batches of ``most`` bytes; those of ``longest`` are not cut.

        What reads one takes ``reader`` at least.

        Raises:
            ValueError: The limit is too small.

        """
        # What is sent, of this member and of others, beside what is read.
        others = 2 * _SENT_AT_ONCE
        batch, at_once, beside = shares_of_group(
            limit, most + _HEADER, _READ_AT_ONCE, others, longest + _HEADER, reader
        )
        return cls(batch - _HEADER, at_once, beside)


class Buffers:
    """The memory of batches, for exchanges that follow each other.

    Args:
        device: Where it is.
        pinned: Whether it is host memory from which a device copies at full speed.

    """

    def __init__(self, device: torch.device = _CPU, *, pinned: bool = False) -> None:
        self._device, self._pinned = device, pinned
        self._len = 0
        self._memory = torch.empty(0, dtype=torch.uint8, device=_CPU)

    def need(self, exchange: Exchange) -> None:
        """Be enough for an exchange, too."""
        self._len = max(self._len, exchange.buffer_count * exchange.buffer_len)

    def make(self) -> None:
        """Take the memory."""
        device = self._device
        kind: dict[str, Any] = {"dtype": torch.uint8, "device": device, "pin_memory": self._pinned}
        self._memory = torch.empty(self._len, **kind)
        if device.type == "cuda":
            # It may still be in use on this stream, and is filled on others.
            torch.cuda.current_stream(device).synchronize()

    def of(self, exchange: Exchange) -> list[torch.Tensor]:
        """Return the buffers of an exchange, which no other one uses at the same time."""
        size = exchange.buffer_len
        return [self._memory.narrow(0, n * size, size) for n in range(exchange.buffer_count)]


class GivenUp(Exception):
    """An exchange that was broken off because another member has failed."""


class Exchange:
    """One pass over all batches. They come in order, at all members at once.

    Args:
        batches: What each member fetches, the same at all of them.
        rank: The number of this one among them.
        fetch: Called on other threads.
        deliver: Called for every batch, those of this member too.
        stop: Ends what is being fetched.
        at_once: Batches that are fetched at once.

    """

    def __init__(
        self,
        batches: Sequence[Batch],
        rank: int,
        *,
        fetch: Fetch,
        deliver: Deliver,
        stop: Callable[[], None],
        at_once: int = _READ_AT_ONCE,
    ) -> None:
        self._batches, self._rank = batches, rank
        self._fetch, self._deliver, self._stop = fetch, deliver, stop
        self._mine = deque(batch for batch in batches if batch.owner == rank)
        size = _HEADER + max((batch.nbytes for batch in batches), default=0)
        # While a batch is sent, others are read or wait for their turn. Those that are much longer
        # than usual come one by one.
        usual = size <= _HEADER + 2 * BATCH_BYTES
        self._sent_at_once = _SENT_AT_ONCE if usual else 1
        self._at_once = at_once
        self.buffer_len = -(-size // _HEADER) * _HEADER
        self._own = min(len(self._mine), at_once + _SENT_AT_ONCE if usual else 2)
        self._free: deque[torch.Tensor] = deque()
        self._for_others: deque[torch.Tensor] = deque()
        self._coming: deque[tuple[torch.Tensor, Future[None]]] = deque()
        self._sent: deque[tuple[Batch, torch.Tensor, Any]] = deque()
        self._failed: BaseException | None = None
        self._broken_off = False

    @property
    def buffer_count(self) -> int:
        """The number of buffers that it needs at once."""
        return self._own + self._sent_at_once

    def run(
        self, members: Linked, buffers: Buffers, failed: BaseException | None = None
    ) -> BaseException | None:
        """Fetch, send and deliver everything; return what has failed here.

        :class:`GivenUp` says that it has failed at another member, which knows why.

        Args:
            members: The connections to the others.
            buffers: Enough of them; they are free when it ends.
            failed: What has failed here before: the others are told by what this member sends.

        Raises:
            GroupError: A member was lost.

        """
        every = buffers.of(self)
        self._free, self._for_others = deque(every[: self._own]), deque(every[self._own :])
        self._failed = failed
        pool = ThreadPoolExecutor(self._at_once, "tensorizer-fetch")
        try:
            self._pass(pool, members)
        except GroupError:
            raise
        except BaseException:
            # The others would wait.
            members.leave()
            raise
        finally:
            if self._coming or self._failed is not None:
                self._stop()
            pool.shutdown(wait=True, cancel_futures=True)
            self._coming.clear()
            # They keep the connections open, and tracebacks have this object.
            self._sent.clear()
        # An interruption comes first: the connections of a part, which know it, are asked once.
        failed, self._failed = members.interrupted() or self._failed, None
        if failed is None and self._broken_off:
            failed = GivenUp()
        try:
            return failed
        finally:
            del failed

    def _pass(self, pool: ThreadPoolExecutor, members: Linked) -> None:
        """Go through all batches, or to the first whose owner has failed."""
        self._fetch_more(pool)
        for batch in self._batches:
            own = batch.owner == self._rank
            buffer = self._fetched(members) if own else self._for_others.popleft()
            data = buffer[: _HEADER + batch.nbytes]
            self._sent.append((batch, buffer, members.broadcast(data, batch.owner)))
            if len(self._sent) == self._sent_at_once and not self._finish(members):
                self._broken_off = True
                break
            self._fetch_more(pool)
        # What others have begun to send, they finish.
        while self._sent:
            self._broken_off |= not self._finish(members)

    def _fetch_more(self, pool: ThreadPoolExecutor) -> None:
        """Have batches read into all buffers that are free."""
        while self._mine and self._free:
            batch, buffer = self._mine.popleft(), self._free.popleft()
            inside = buffer[_HEADER : _HEADER + batch.nbytes]
            self._coming.append((buffer, pool.submit(self._fetch, batch, inside)))

    def _fetched(self, members: Linked) -> torch.Tensor:
        """Wait for the next batch of this member; its header says whether all is well here."""
        buffer, future = self._coming.popleft()
        self._failed = self._failed or members.interrupted()
        if self._failed is None:
            try:
                future.result()
            except BaseException as error:
                self._failed = error
        buffer[0] = self._failed is not None
        return buffer

    def _finish(self, members: Linked) -> bool:
        """Wait for the oldest batch that is being sent; tell whether its owner is well."""
        batch, buffer, work = self._sent.popleft()
        try:
            members.wait(work)
        finally:
            del work
        well = not bool(buffer[0])
        if well and self._failed is None:
            try:
                self._deliver(batch, buffer[_HEADER : _HEADER + batch.nbytes])
            except BaseException as error:
                self._failed = error
        if buffer.is_cuda:
            # A buffer is free when the copies out of it are done.
            torch.cuda.current_stream(buffer.device).synchronize()
        (self._free if batch.owner == self._rank else self._for_others).append(buffer)
        return well
