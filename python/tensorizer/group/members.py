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
from . import inherited_group, leave_notice, rendezvous
from .call_sequence import CALL_SEQUENCES, CallSequence, Connections
from .communicator import Communicator

_T = TypeVar("_T")

#: Bytes of each member's value that are sent first, and of the length in front of it.
_FIRST_BYTES, _LENGTH = 512, 8
#: The most connections of parts that are kept between calls: each takes descriptors and threads.
_MAX_KEPT_SUBGROUPS = 32


class Members(Communicator):
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
            raise ValueError("this process is not a member of the process group of this call")
        if dist.group.WORLD is inherited_group.inherited_default_group():
            raise RuntimeError(
                "torch.distributed was initialised by the parent process, before fork(): "
                "initialise it in this process"
            )
        on_device = "nccl" in dist.get_backend(like)
        super().__init__(
            ranks.index(dist.get_rank()),
            len(ranks),
            on_device=on_device,
            timeout=_timeout(like, on_device),
        )
        self._failure_agreed = False
        self._name = f"tensorizer/{like.group_name}/{','.join(map(str, ranks))}"
        self._connected_at = 0

    @staticmethod
    def of(group: dist.ProcessGroup) -> Members:
        """Return the members of a group."""
        if dist.get_rank(group) < 0:
            raise ValueError("this process is not a member of the process group of this call")
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
        if error is not None and not self._failure_agreed:
            self.leave()

    def join(self) -> None:
        """Meet the other members, and connect to them.

        Raises:
            GroupError: A member was lost, or did not come.

        """
        self.check_process()
        interruption = None
        self._have_left = False
        with self.leave_on_error():
            calls = CallSequence.of(self._name, self.size)
            calls.count += 1
            self._store = distributed_c10d.PrefixStore(f"{self._name}/{calls.count}", calls.store)
            connect = functools.partial(self._connect, calls)
            interruption, failure = rendezvous.run_uninterrupted(connect)
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

    def _connect(self, calls: CallSequence, leaves: threading.Event) -> None:
        """Meet the other members, unless this one leaves before all arrive, and connect to them.

        If all have the connections of the same earlier call, they use these again.
        """
        connected_at = calls.connected_at if calls.connections.hosts is not None else 0
        same = rendezvous.rendezvous(
            self._store, self.size, self._timeout, leaves, str(connected_at)
        )
        calls.connected_at = 0
        if connected_at and same:
            self._connected_at = connected_at
        else:
            calls.connections, self._connected_at = Connections(), calls.count
            self.connect_hosts(calls.connections, self._store)
        self._connections = calls.connections
        if self._have_left:
            # This member has left without waiting for this thread.
            self.leave()

    def subgroup(self, ranks: Sequence[int]) -> Members:
        """Return some of the members, this one among them; all of them make this call.

        They have connections of their own, which are kept with those of all members.

        Raises:
            GroupError: A member was lost.

        """
        subgroup = copy.copy(self)
        subgroup.rank, subgroup.size = ranks.index(self.rank), len(ranks)
        subgroup._subgroup_key = "/" + "-".join(map(str, ranks))
        known = self._connections.subgroups.setdefault(tuple(ranks), Connections())
        subgroup._connections = known
        if known.hosts is None:
            store = distributed_c10d.PrefixStore(f"part{subgroup._subgroup_key}", self._store)
            with self.leave_on_error():
                interruption, failure = rendezvous.run_uninterrupted(
                    lambda _: subgroup.connect_hosts(known, store)
                )
                try:
                    if failure is not None:
                        raise failure
                    # As during an exchange, the other members are told at its end.
                    subgroup._interrupt = interruption
                finally:
                    del failure, interruption
            if subgroup.on_device:
                # Connections between devices are made without a watch for members that leave: wait
                # until all have arrived.
                subgroup.all_gather_bytes(b"", 1)
        return subgroup

    def complete(self) -> None:
        """End a call that succeeded at all members: the next one uses its connections again."""
        calls = CallSequence.of(self._name, self.size)
        few_subgroups = len(self._connections.subgroups) <= _MAX_KEPT_SUBGROUPS
        if (
            calls.connections is self._connections
            and calls.connections.hosts is not None
            and few_subgroups
        ):
            calls.connected_at = self._connected_at

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

    def agree(self, error: BaseException | None, value: Any = None) -> list[Any]:
        """Return the values of all members, or raise if one of them has failed.

        Raises:
            BaseException: The error of this member. Else the error of the first other member that
                has failed: of the same class if it can be sent, and else a ``GroupError``.

        """
        try:
            if isinstance(error, GroupError):
                raise error
            values = self.all_gather((value, None if error is None else _sendable(error)))
            self._failure_agreed = any(failure is not None for _, failure in values)
            if error is not None:
                raise error
            for rank, (_, failure) in enumerate(values):
                if failure is not None:
                    raise _received(failure, rank)
            return [value for value, _ in values]
        finally:
            # Its traceback holds this call, and all objects of it.
            del error

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all members.

        They go up a tree to the first member, and from there to all, in a time that grows with the
        logarithm of the number of members. The length of each value and its first bytes, as a rule
        all of it, are sent first. If one value is longer, its member sends the rest; if several
        are, the tree is used once more, with all padded to the longest.
        """
        data = pickle.dumps(value)
        first_parts = self.all_gather_bytes(_with_length(data), _FIRST_BYTES)
        lengths = [int.from_bytes(one[:_LENGTH], "little") for one in first_parts]
        first_parts = [one[_LENGTH:] for one in first_parts]
        room = _FIRST_BYTES - _LENGTH
        longer = [rank for rank, length in enumerate(lengths) if length > room]
        rest = [b""] * self.size
        if len(longer) > 1:
            rest = self.all_gather_bytes(data[room:], max(lengths) - room)
        for rank in longer if len(longer) == 1 else ():
            rest[rank] = self.broadcast_bytes(data[room:], rank, lengths[rank] - room)
        values = [
            value if rank == self.rank else pickle.loads((first + more)[:length])
            for rank, (first, more, length) in enumerate(
                zip(first_parts, rest, lengths, strict=True)
            )
        ]
        self._raise_interrupt()
        return values

    def run_on_first(self, work: Callable[[], _T]) -> _T:
        """Run ``work`` at the first member, and return its result at all of them.

        Raises:
            BaseException: The error of the first member: see :meth:`agree`.

        """
        outcome: tuple[Any, Any] = None, None
        error: BaseException | None = None
        try:
            if self.rank == 0:
                try:
                    outcome = work(), None
                except BaseException as raised:
                    outcome, error = (None, _sendable(raised)), raised
            data = pickle.dumps(outcome)
            received = self.broadcast_bytes(_with_length(data)[:_FIRST_BYTES], 0, _FIRST_BYTES)
            rest = int.from_bytes(received[:_LENGTH], "little") - len(received) + _LENGTH
            if rest > 0:
                received += self.broadcast_bytes(data[len(received) - _LENGTH :], 0, rest)
            result: Any
            result, failure = outcome if self.rank == 0 else pickle.loads(received[_LENGTH:])
            self._failure_agreed = failure is not None
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
    CALL_SEQUENCES.clear()
    leave_notice.join_threads()
