"""The members of a process group, which exchange values and fail together."""

from __future__ import annotations

import atexit
import copy
import datetime
import functools
import pickle
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .._errors import GroupError
from . import inherited, leaving, meeting
from .calls import CALLS, Calls, Connections
from .linked import Linked

_T = TypeVar("_T")

#: Bytes of each member's answer that are sent first, and of the length in front of it.
_TOLD_AT_ONCE, _LENGTH = 512, 8
#: The most connections of parts that are kept between calls: each takes descriptors and threads.
_MOST_PARTS_KEPT = 32


class Members(Linked):
    """The processes that make one call together.

    Args:
        ranks: Their ranks in the default group, the same at all of them.
        like: A group whose backend and time-out are used.

    Raises:
        ValueError: This process is not one of them.
        RuntimeError: This process was forked from one of them.

    Attributes:
        rank: The number of this process among them.
        size: The number of members.
        on_device: True if they exchange tensors of CUDA devices without the CPU.

    """

    def __init__(self, ranks: Sequence[int], like: dist.ProcessGroup) -> None:
        if dist.get_rank() not in ranks:
            raise ValueError("this process is no member of the group that makes this call")
        if dist.group.WORLD is inherited.default_group():
            raise RuntimeError(
                "torch.distributed was initialised by the process that this one was forked off: "
                "initialise it here"
            )
        on_device = "nccl" in dist.get_backend(like)
        super().__init__(
            ranks.index(dist.get_rank()),
            len(ranks),
            on_device=on_device,
            timeout=_timeout(like, on_device),
        )
        self._have_failed = False
        self._name = f"tensorizer/{like.group_name}/{','.join(map(str, ranks))}"
        self._made = 0

    @staticmethod
    def of(group: dist.ProcessGroup) -> Members:
        """Return the members of a group."""
        if dist.get_rank(group) < 0:
            raise ValueError("this process is no member of the group that makes this call")
        return Members(sorted(dist.get_process_group_ranks(group)), group)

    def __enter__(self) -> Members:
        self.join()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the call; leave it if it fails here and the other members do not know that."""
        if error is not None and not self._have_failed:
            self.leave()

    def join(self) -> None:
        """Meet the other members, and connect to them.

        Raises:
            GroupError: A member was lost, or did not come.

        """
        self.check_process()
        interruption = None
        self._have_left = False
        with self.or_lost():
            calls = Calls.of(self._name, self.size)
            calls.count += 1
            self._store = distributed_c10d.PrefixStore(f"{self._name}/{calls.count}", calls.store)
            connect = functools.partial(self._connect, calls)
            interruption, failure = meeting.uninterrupted(connect)
            try:
                if failure is not None and interruption is None:
                    raise failure
            finally:
                # Its traceback holds this call, and all objects of it.
                del failure
        try:
            if interruption is not None:
                self.leave()
                raise interruption
        finally:
            del interruption

    def _connect(self, calls: Calls, leaves: threading.Event) -> None:
        """Meet the other members, unless this one leaves before all arrive, and connect to them.

        If all have the connections of the same earlier call, they use these again.
        """
        kept = calls.kept if calls.last.hosts is not None else 0
        same = meeting.meet(self._store, self.size, self._timeout, leaves, str(kept))
        calls.kept = 0
        if kept and same:
            self._made = kept
        else:
            calls.last, self._made = Connections(), calls.count
            self.connect_hosts(calls.last, self._store)
        self._connections = calls.last
        if self._have_left:
            # This member has left without waiting for this thread.
            self.leave()

    def part(self, ranks: Sequence[int]) -> Members:
        """Return some of the members, this one among them; all of them make this call.

        They have connections of their own, which are kept with those of all members.

        Raises:
            GroupError: A member was lost.

        """
        part = copy.copy(self)
        part.rank, part.size = ranks.index(self.rank), len(ranks)
        part._part = "/" + "-".join(map(str, ranks))
        known = self._connections.of_parts.setdefault(tuple(ranks), Connections())
        part._connections = known
        if known.hosts is None:
            store = distributed_c10d.PrefixStore(f"part{part._part}", self._store)
            with self.or_lost():
                interruption, failure = meeting.uninterrupted(
                    lambda _: part.connect_hosts(known, store)
                )
                try:
                    if failure is not None:
                        raise failure
                    # As during an exchange, the other members are told at its end.
                    part._interrupt = interruption
                finally:
                    del failure, interruption
            if part.on_device:
                # Connections between devices are made without a watch for members that leave: wait
                # until all have arrived.
                part.gather(b"", 1)
        return part

    def done(self) -> None:
        """End a call that succeeded at all members: the next one uses its connections again."""
        calls = Calls.of(self._name, self.size)
        few_parts = len(self._connections.of_parts) <= _MOST_PARTS_KEPT
        if calls.last is self._connections and calls.last.hosts is not None and few_parts:
            calls.kept = self._made

    def together(
        self, work: Callable[[], _T], tell: Callable[[_T], Any] | None = None
    ) -> tuple[_T, list[Any]]:
        """Run ``work`` at every member; return its result, and what each member tells of its own.

        Raises:
            BaseException: See :meth:`agree`.

        """
        try:
            result = work()
            told = None if tell is None else tell(result)
        except BaseException as error:
            self.agree(error)
            raise
        return result, self.agree(None, told)

    def agree(self, error: BaseException | None, told: Any = None) -> list[Any]:
        """Return the values of all members, or raise if one of them has failed.

        Raises:
            BaseException: The error of this member. Else the error of the first other member that
                has failed: of the same class if it can be sent, and else a ``GroupError``.

        """
        try:
            if isinstance(error, GroupError):
                raise error
            answers = self.tell((told, None if error is None else _sendable(error)))
            self._have_failed = any(failure is not None for _, failure in answers)
            if error is not None:
                raise error
            for rank, (_, failure) in enumerate(answers):
                if failure is not None:
                    raise _received(failure, rank)
            return [told for told, _ in answers]
        finally:
            # Its traceback holds this call, and all objects of it.
            del error

    def tell(self, value: Any) -> list[Any]:
        """Return the values of all members.

        They go up a tree to the first member, and from there to all, in a time that grows with the
        logarithm of the number of members. The length of each value and its first bytes, as a rule
        all of it, are sent first. If one value is longer, its member sends the rest; if several
        are, the tree is used once more, with all padded to the longest.
        """
        data = pickle.dumps(value)
        begun = self.gather(_with_length(data), _TOLD_AT_ONCE)
        lengths = [int.from_bytes(one[:_LENGTH], "little") for one in begun]
        begun = [one[_LENGTH:] for one in begun]
        room = _TOLD_AT_ONCE - _LENGTH
        longer = [rank for rank, length in enumerate(lengths) if length > room]
        rest = [b""] * self.size
        if len(longer) > 1:
            rest = self.gather(data[room:], max(lengths) - room)
        for rank in longer if len(longer) == 1 else ():
            rest[rank] = self.from_one(data[room:], rank, lengths[rank] - room)
        answers = [
            value if rank == self.rank else pickle.loads((first + more)[:length])
            for rank, (first, more, length) in enumerate(zip(begun, rest, lengths, strict=True))
        ]
        self._raise_interrupt()
        return answers

    def first(self, work: Callable[[], _T]) -> _T:
        """Run ``work`` at the first member, and return its result at all of them.

        Raises:
            BaseException: The error of the first member: see :meth:`agree`.

        """
        told: tuple[Any, Any] = None, None
        error: BaseException | None = None
        try:
            if self.rank == 0:
                try:
                    told = work(), None
                except BaseException as raised:
                    told, error = (None, _sendable(raised)), raised
            data = pickle.dumps(told)
            begun = self.from_one(_with_length(data)[:_TOLD_AT_ONCE], 0, _TOLD_AT_ONCE)
            rest = int.from_bytes(begun[:_LENGTH], "little") - len(begun) + _LENGTH
            if rest > 0:
                begun += self.from_one(data[len(begun) - _LENGTH :], 0, rest)
            result: Any
            result, failure = told if self.rank == 0 else pickle.loads(begun[_LENGTH:])
            self._have_failed = failure is not None
            if error is not None:
                raise error
            if failure is not None:
                raise _received(failure, 0)
            self._raise_interrupt()
            found: _T = result
            return found
        finally:
            # Its traceback holds this call, and all objects of it.
            del error

    def _raise_interrupt(self) -> None:
        """Leave, and raise the interruption, if this process was interrupted in an exchange."""
        interrupt = self.interrupted()
        if interrupt is not None:
            # The other members go on, and would wait for this one.
            self.leave()
            try:
                raise interrupt
            finally:
                # Its traceback holds this frame.
                del interrupt


def _timeout(group: dist.ProcessGroup, on_device: bool) -> datetime.timedelta:
    """Return the time that members of a group wait for each other."""
    device = torch.device("cuda" if on_device else "cpu")
    try:
        timeout = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        timeout = None
    default: datetime.timedelta = dist.default_pg_timeout
    return timeout if isinstance(timeout, datetime.timedelta) else default


def _with_length(data: bytes) -> bytes:
    return len(data).to_bytes(_LENGTH, "little") + data


def _sendable(error: BaseException) -> tuple[bytes | None, str]:
    """Return an error as bytes, if it survives pickling, and as text."""
    text = f"{type(error).__name__}: {error}"
    if not isinstance(error, Exception):
        return None, text
    try:
        data = pickle.dumps(error)
        same = type(pickle.loads(data)) is type(error)
    except Exception:  # of any library
        return None, text
    return (data if same else None), text


def _received(failure: tuple[bytes | None, str], rank: int) -> BaseException:
    """Return the exception for the error of another member."""
    data, text = failure
    where = f"rank {rank} of the group failed"
    if data is None:
        return GroupError(f"{where}: {text}")
    error: BaseException = pickle.loads(data)
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(where)
    return error


@atexit.register
def _close_last() -> None:
    CALLS.clear()
    leaving.end()
