"""The members of a process group, which exchange values and tensors, and fail together."""

from __future__ import annotations

import contextlib
import datetime
import functools
import math
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist

from .._errors import GroupError
from .._native import check_wait
from . import inherited_group
from .connections import (
    WAITING,
    CallSequence,
    Connections,
    broadcasting,
    gathering,
    on_thread,
    timeout_of,
)

_T = TypeVar("_T")

#: Bytes of each member's value that are sent first, and of the length in front of it.
_FIRST_BYTES, _LENGTH = 128, 8
#: Longer values of fewer members than this share are sent one by one; more are padded to the
#: longest.
_FEW = 1 / 4
#: Seconds that a member waits beyond the group's time-out, which is to end the wait first.
_GRACE_SECONDS = 10.0
#: Seconds of a wait for others after which a member looks whether one of them has left.
_LOOK_SECONDS = 0.5


class FreeGroup(NamedTuple):
    """A process group that nothing else uses during a call.

    Tensors of devices are then sent on it, whatever its backend, and no connections between
    devices are made.

    Attributes:
        group: The group.
        shares_local_files: True if its members read local files together, too, though they share
            the page cache of a machine.
        prefers_cache: True if each member reads files of servers by itself, from a cache. That of
            the first member decides.

    """

    group: dist.ProcessGroup
    shares_local_files: bool = False
    prefers_cache: bool = False


class Members:
    """The processes that make one call together.

    Messages go over connections of their own (gloo, and NCCL between CUDA devices), which are kept
    for the next call. So other collectives of the group may run at the same time.

    Args:
        ranks: Their ranks in the default group, the same at all of them.
        like: A group whose backend and time-out are used.
        free: Set if nothing else uses ``like`` during the call.

    Raises:
        ValueError: This process is not one of them.
        RuntimeError: This process was forked from one of them.

    Attributes:
        rank: The number of this process among them.
        size: The number of members.
        on_device: True if they exchange tensors of devices without the CPU.
        shares_local_files, prefers_cache: See :class:`FreeGroup`.

    """

    def __init__(
        self, ranks: Sequence[int], like: dist.ProcessGroup, *, free: FreeGroup | None = None
    ) -> None:
        if dist.get_rank() not in ranks:
            raise ValueError("this process is not a member of the process group of this call")
        if dist.group.WORLD is inherited_group.inherited_default_group():
            raise RuntimeError(
                "torch.distributed was initialised by the parent process, before fork(): "
                "initialise it in this process"
            )
        self.rank, self.size = ranks.index(dist.get_rank()), len(ranks)
        backend = dist.get_backend(like)
        # Connections made here are NCCL's. A free group may have another backend of devices.
        self.on_device = "nccl" in backend or (
            free is not None and backend not in ("gloo", "mpi") and torch.cuda.is_available()
        )
        self.shares_local_files = free is not None and free.shares_local_files
        self.prefers_cache = free is not None and free.prefers_cache
        self._like, self._free = like, None if free is None else free.group
        self._timeout = timeout_of(like, self.on_device)
        self._process = os.getpid()
        self._name = f"tensorizer/{like.group_name}/{','.join(map(str, ranks))}"
        self._calls: CallSequence | None = None
        self._connections: Connections | None = None
        self._interrupt: BaseException | None = None
        self._failure_agreed = False
        #: The reason for which another thread has ended the call, or None.
        self._end_reason: str | None = None

    @staticmethod
    def of(given: dist.ProcessGroup | FreeGroup) -> Members:
        """Return the members of a group."""
        free = given if isinstance(given, FreeGroup) else None
        group = given.group if isinstance(given, FreeGroup) else given
        if dist.get_rank(group) < 0:
            raise ValueError("this process is not a member of the process group of this call")
        return Members(sorted(dist.get_process_group_ranks(group)), group, free=free)

    def __enter__(self) -> Members:
        self.join()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.leave_after(error)

    def leave_after(self, error: BaseException) -> None:
        """Leave the call after an error, unless the other members know it."""
        if not self._failure_agreed:
            self.leave(f"has failed: {type(error).__name__}: {error}")

    def join(self) -> None:
        """Meet the other members, and connect to them.

        Raises:
            GroupError: A member was lost, or did not come.

        """
        self._check_process()
        seconds = self._timeout.total_seconds() + _GRACE_SECONDS
        calls = self._calls = CallSequence.of(self._like, self._name, self.size)

        def connect(leaving: threading.Event) -> None:
            # Known at once: an interruption at any later place must be told to the others.
            try:
                self._connections = calls.connect(self.rank, self._timeout, leaving)
            except TimeoutError as error:
                raise RuntimeError(str(error)) from error

        try:
            try:
                _, interruption = on_thread(connect, seconds)
            except (RuntimeError, dist.DistError) as error:
                raise GroupError(
                    f"rank {self.rank} of {self.size} did not meet the other members of its group: "
                    f"{error}"
                ) from error
            made = self._connections
            if interruption is not None or (made is not None and made.number == calls.count):
                # One that left before all are connected would not be missed before the time-out.
                self.agree(interruption)
        except BaseException as error:
            self.leave_after(error)
            raise
        finally:
            # No frame of a traceback may hold it.
            made = None

    def complete(self) -> None:
        """End a call that succeeded at all members: the next one uses its connections again."""
        self._keep()
        self.raise_interruption()

    def raise_interruption(self) -> None:
        """Raise the interruption of this process that came during an exchange, if one did."""
        interruption = self._interruption()
        if interruption is not None:
            raise interruption

    def _keep(self) -> None:
        connections, self._connections = self._connections, None
        if connections is not None and self._calls is not None:
            self._calls.keep(connections)

    def leave(self, why: str = "has left the call") -> None:
        """Give the connections up, so that others do not wait for this process."""
        connections, self._connections = self._connections, None
        if connections is not None and self._process == os.getpid():
            connections.leave(self.rank, self._end_reason or why)

    def end(self, why: str) -> None:
        """Make a thread that exchanges something with the others raise a ``GroupError``.

        When that thread leaves the call, the others get this reason. No other thread may close the
        connections meanwhile: a message that begins on closed ones can wait for ever.
        """
        self._end_reason = why

    # Values

    def run_on_all(
        self, work: Callable[[], _T], describe: Callable[[_T], Any] | None = None
    ) -> tuple[_T, list[Any]]:
        """Run ``work`` at every member; return its result, and the descriptions of all results.

        Raises:
            BaseException: See :meth:`agree`.

        """
        try:
            result = work()
            value = None if describe is None else describe(result)
        except BaseException as error:
            self.agree(error)
            raise
        return result, self.agree(None, value)

    def agree(
        self, error: BaseException | None, value: Any = None, then: Callable[[], None] | None = None
    ) -> list[Any]:
        """Return the values of all members, or raise if one of them has failed.

        Args:
            error: The error of this member, or None.
            value: Its value.
            then: Collectives that follow at once if none has failed. An interruption of this
                process waits for their end, and is the error of the next call.

        Raises:
            BaseException: The error of this member. Else the error of the first other member that
                has failed: of the same class if it can be sent, and else a ``GroupError``.

        """
        try:
            if isinstance(error, GroupError):
                raise error
            error = error or self._interruption()
            failure = None if error is None else _sendable(error)
            nothing = value is None and failure is None
            data = b"" if nothing else pickle.dumps((value, failure))
            answers = self._uninterrupted(lambda: self._answers(data, then))
            self._failure_agreed = any(failure is not None for _, failure in answers)
            if self._failure_agreed:
                # Nothing is under way: the next call can use the connections.
                self._keep()
            if error is not None:
                raise error
            for rank, (_, failure) in enumerate(answers):
                if failure is not None:
                    raise _received(failure, rank)
            return [value for value, _ in answers]
        finally:
            # Its traceback holds this call, and all objects of it.
            del error

    def _answers(self, data: bytes, then: Callable[[], None] | None) -> list[Any]:
        answers = [pickle.loads(one) if one else (None, None) for one in self.all_gather(data)]
        if then is not None and all(failure is None for _, failure in answers):
            then()
        return answers

    def _uninterrupted(self, work: Callable[[], _T]) -> _T:
        """Run collectives on a thread, so that this process takes part in them to their end."""
        try:
            result, self._interrupt = on_thread(lambda _: work(), threading.TIMEOUT_MAX)
            return result
        except GroupError:
            raise
        except BaseException:
            self.leave("was interrupted")
            raise

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of all members.

        The length of each and its first bytes, as a rule all of it, are sent first.
        """
        start = (len(data).to_bytes(_LENGTH, "little") + data)[:_FIRST_BYTES]
        found, lens = [], []
        for one in self._gather_bytes(start, _FIRST_BYTES):
            lens.append(int.from_bytes(one[:_LENGTH], "little"))
            found.append(one[_LENGTH : _LENGTH + lens[-1]])
        room = _FIRST_BYTES - _LENGTH
        longer = [rank for rank, length in enumerate(lens) if length > room]
        if len(longer) > _FEW * self.size:
            rest = self._gather_bytes(data[room:], max(lens) - room)
            return [(found[rank] + rest[rank])[: lens[rank]] for rank in range(self.size)]
        for rank in longer:
            more = bytearray(data[room:] if rank == self.rank else lens[rank] - room)
            view = torch.frombuffer(more, dtype=torch.uint8)
            self._run(view, [functools.partial(broadcasting, view, rank)])
            found[rank] += more
        return found

    def _gather_bytes(self, data: bytes, length: int) -> list[bytes]:
        """Return ``length`` bytes of every member; shorter ones are padded with zeros."""
        every = torch.zeros(self.size, length, dtype=torch.uint8, device="cpu")
        every[self.rank] = torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)
        self._run(every, gathering(every, self.rank))
        return [one.tobytes() for one in every.numpy()]

    # Tensors

    def exchange(self, block: torch.Tensor, ends: Sequence[int]) -> None:
        """Give all members the shares of a block that each of them has, in place.

        Args:
            block: The block, of which this member has its share.
            ends: The position at which the share of each member ends.

        Raises:
            GroupError: A member was lost.

        """
        starts = (0, *ends[:-1])
        is_even = len({end - start for start, end in zip(starts, ends, strict=True)}) == 1
        if is_even and self.on_device and not block.is_cpu:
            mine = block[starts[self.rank] : ends[self.rank]]
            self._run(block, [lambda group: group._allgather_base(block, mine)])
            return
        # Gloo's all-gather is not in place: it takes a second block and twice the CPU time.
        begins = (
            functools.partial(broadcasting, block[start:end], rank)
            for rank, (start, end) in enumerate(zip(starts, ends, strict=True))
            if start < end
        )
        self._run(block, begins)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, *lens: list[int]) -> None:
        """Send each member bytes of its own; the lengths are by rank, of those received first.

        Raises:
            GroupError: A member was lost.

        """
        self._run(received, [lambda group: group.alltoall_base(received, sent, *lens)])

    def _run(self, data: torch.Tensor, begins: Iterable[Callable[[Any], Any]]) -> None:
        """Run collectives one after another, to their end."""
        self._check_process()
        if self._connections is None:
            raise GroupError("the connections of the group are closed")
        group = work = None
        try:
            if data.is_cpu or not self.on_device:
                group = self._connections.hosts
            else:
                group = self._free or self._connections.between_devices(
                    self._timeout + datetime.timedelta(seconds=6 * _GRACE_SECONDS)
                )
            # One after another: connections on which another one waits could not be closed.
            for begin in begins:
                work = begin(group)
                self._wait(work)
        except GroupError:
            raise
        except (RuntimeError, dist.DistError) as error:
            # No frame of a traceback may hold the group.
            group = work = None
            self._raise_lost(error)
        finally:
            group = work = None

    def _wait(self, work: Any) -> None:
        now = time.monotonic()
        until, look = now + self._timeout.total_seconds() + _GRACE_SECONDS, now + _LOOK_SECONDS
        pause = 1e-4
        try:
            while not work.is_completed():
                check_wait(WAITING)
                if self._end_reason is not None:
                    raise GroupError(f"this member {self._end_reason}")
                if time.monotonic() > until:
                    raise RuntimeError("timed out")
                if time.monotonic() > look:
                    look = self._next_look()
                time.sleep(pause)
                pause = min(pause * 1.5, 5e-3)
            work.wait()
        finally:
            # It keeps the connections open, and a traceback keeps this frame.
            del work

    def _next_look(self) -> float:
        """Raise if a member has left: one that is not connected yet would not be missed.

        Return the time of the next look. There is none if the store does not answer.
        """
        connections = self._connections
        try:
            if connections is None or connections.is_left():
                raise RuntimeError("a member has left")
        except TimeoutError:
            return math.inf
        return time.monotonic() + _LOOK_SECONDS

    def _raise_lost(self, error: BaseException) -> NoReturn:
        """Leave after a collective that failed; say which member has left, or is gone."""
        connections, self._connections = self._connections, None
        if connections is None:
            # Another thread has left the call.
            raise GroupError("the connections of the group are closed") from error
        found = connections.find_lost(self.rank, self.size)
        raise GroupError(
            f"{found or 'another member was lost'} (at rank {self.rank} of {self.size}: {error})"
        ) from error

    def _interruption(self) -> BaseException | None:
        """Return the interruption of this process during an exchange, and forget it."""
        interrupt, self._interrupt = self._interrupt, None
        return interrupt

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError(
                "these connections were made by the parent process, before fork(): this is a child"
            )


def _sendable(error: BaseException) -> tuple[bytes | None, str]:
    """Return an error as bytes, if it survives pickling, and as text."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, Exception):
        with contextlib.suppress(Exception):  # of any library
            data = pickle.dumps(error)
            if type(pickle.loads(data)) is type(error):
                return data, text
    return None, text


def _received(failure: tuple[bytes | None, str], rank: int) -> BaseException:
    """Return the exception for the error of another member."""
    data, text = failure
    where = f"rank {rank} of the group failed"
    error: BaseException = GroupError(f"{where}: {text}")
    if data is not None:
        with contextlib.suppress(Exception):  # a class that is not here
            error = pickle.loads(data)
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(where)
    return error
