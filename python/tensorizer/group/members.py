"""The members of a process group: what they tell each other, and that they fail together."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .._errors import GroupError
from . import inherited, leaving, meeting

_T = TypeVar("_T")


@dataclass
class _Calls:
    """The calls that some processes make together, one after another.

    They have connections of their own, so that they are mixed up with nothing else. These are kept
    from call to call, until one of them fails. They are made by way of a store, to which this has a
    connection of its own: a call that waits for a store has all others wait that use the same.
    """

    store: Any
    count: int
    #: The connections of the last call. Others may still read from them what was sent at its end;
    #: they have done so when all meet for the next one.
    last: list[Any]
    #: The number of the call that made them, if it, and those that went on with them, ended well.
    kept: int = 0

    @staticmethod
    def of(name: str, size: int) -> _Calls:
        """Return those that processes of a name make."""
        assert dist.group.WORLD is not None
        known = _CALLS.setdefault(dist.group.WORLD, {})
        if name not in known:
            store: Any = distributed_c10d._get_default_store()
            store = store.clone()
            # The default group may have been made anew, with a store that knows earlier calls.
            known[name] = _Calls(store, (store.add(name, 1) - 1) // size << 32, [])
        return known[name]


#: What is known of the calls of this process's default group, by a name for who makes them.
_CALLS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, _Calls]] = (
    weakref.WeakKeyDictionary()
)
#: Bytes of what every member tells at once, and of the length in front of it.
_TOLD_AT_ONCE, _LENGTH = 512, 8
#: Seconds that a member waits for others beyond the group's timeout, which they see first.
_GRACE = 10.0


class Members:
    """Some processes, for one call that all of them make.

    Args:
        ranks: Their ranks in the default group, the same at all of them.
        like: A group whose backend and time-out are used.

    Raises:
        ValueError: This process is none of them.
        RuntimeError: It was forked off one of them.

    Attributes:
        rank: The number of this process among them.
        size: How many there are.
        on_device: Whether they exchange tensors of CUDA devices without the CPU.

    """

    def __init__(self, ranks: Sequence[int], like: dist.ProcessGroup) -> None:
        if dist.get_rank() not in ranks:
            raise ValueError("this process is no member of the group that makes this call")
        self.rank, self.size = ranks.index(dist.get_rank()), len(ranks)
        self.on_device = "nccl" in dist.get_backend(like)
        if dist.group.WORLD is inherited.default_group():
            raise RuntimeError(
                "torch.distributed was initialised by the process that this one was forked off: "
                "initialise it here"
            )
        self._process = os.getpid()
        self._timeout = _timeout(like, self.on_device)
        self._interrupt: BaseException | None = None
        self._have_failed = False
        self._have_left = False
        self._among_hosts: Any = None
        self._among_devices: Any = None
        self._store: Any = None
        self._name = f"tensorizer/{like.group_name}/{','.join(map(str, ranks))}"
        self._last: list[Any] = []
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
        """End the call. Where it fails and the others do not know it, they need not wait."""
        if error is not None and not self._have_failed:
            self.leave()

    def join(self) -> None:
        """Meet the others, and connect to them.

        Raises:
            GroupError: One of them was lost, or did not come.

        """
        self._check_process()
        interruption = None
        self._have_left = False
        with self._or_lost():
            calls = _Calls.of(self._name, self.size)
            calls.count += 1
            self._store = distributed_c10d.PrefixStore(f"{self._name}/{calls.count}", calls.store)
            connect = functools.partial(self._connect, calls)
            interruption, failure = meeting.uninterrupted(connect)
            try:
                if failure is not None and interruption is None:
                    raise failure
            finally:
                # It knows this call, and all that it holds.
                del failure
        try:
            if interruption is not None:
                self.leave()
                raise interruption
        finally:
            del interruption

    def _connect(self, calls: _Calls, leaves: threading.Event) -> None:
        """Meet the others, unless this one leaves before all are here, and connect to them.

        Where all have the connections of the same earlier call, they go on with these.
        """
        kept = calls.kept if calls.last else 0
        member = self.rank, self.size
        every = meeting.meet(self._store, member, self._timeout, leaves, str(kept))
        calls.kept = 0
        if kept and every == {str(kept)}:
            self._last, self._made = calls.last, kept
            self._among_hosts, *devices = calls.last
            self._among_devices = devices[0] if devices else None
            del devices
        else:
            made = dist.ProcessGroupGloo(self._store, self.rank, self.size, self._options())
            self._among_hosts, self._among_devices = made, None
            calls.last, self._made = [made], calls.count
            self._last = calls.last
            del made
        if self._have_left:
            # It was not waited for.
            self.leave()

    def _options(self) -> Any:
        """Return options of gloo for connections that are made when they are first used.

        A ring and a tree of all members take few of them: a connection of each member to each other
        would take as many descriptors as there are members.
        """
        gloo: Any = distributed_c10d.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_default_device(lazy_init=True)]
        options._timeout = self._timeout
        return options

    def done(self) -> None:
        """End a call that ended well at all members: the next one goes on with its connections."""
        calls = _Calls.of(self._name, self.size)
        if calls.last is self._last and self._among_hosts is not None:
            calls.kept = self._made

    def leave(self) -> None:
        """Give the connections up, for others not to wait for this process."""
        if self._process != os.getpid():
            return  # they are the parent's, which goes on
        first, self._have_left = not self._have_left, True
        groups = [one for one in (self._among_hosts, self._among_devices) if one is not None]
        if self._store is not None and (first or groups):
            leaving.tell(self._store)
        for group in groups:
            with contextlib.suppress(RuntimeError, AttributeError):
                group.abort()
            del group
        self._among_hosts = self._among_devices = None
        self._last.clear()
        leaving.let_go(groups)

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError(
                "these connections belong to the process that made them: this one was forked off it"
            )

    # What happens at all of them

    def together(
        self, work: Callable[[], _T], tell: Callable[[_T], Any] | None = None
    ) -> tuple[_T, list[Any]]:
        """Do some work at every member; return its result, and what each tells of its own.

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
        """Return what every member tells, unless one of them has failed.

        Raises:
            BaseException: What has failed here. Else what has failed at the first of the others:
                an error of the same class, where it can be sent.

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
            # It knows this call, and all that it holds.
            del error

    def tell(self, value: Any) -> list[Any]:
        """Return what every member tells: in two collectives at most, for any number of members.

        The first one has the length of each answer and its first bytes, as a rule all of it. What
        is longer comes from its member, or, of several members, padded to the longest.
        """
        data = pickle.dumps(value)
        begun = self._gather(len(data).to_bytes(_LENGTH, "little") + data, _TOLD_AT_ONCE)
        lengths = [int.from_bytes(one[:_LENGTH], "little") for one in begun]
        begun = [one[_LENGTH:] for one in begun]
        room = _TOLD_AT_ONCE - _LENGTH
        longer = [rank for rank, length in enumerate(lengths) if length > room]
        rest = [b""] * self.size
        if len(longer) > 1:
            rest = self._gather(data[room:], max(lengths) - room)
        for rank in longer if len(longer) == 1 else ():
            rest[rank] = self._from_one(data[room:], rank, lengths[rank] - room)
        answers = [
            value if rank == self.rank else pickle.loads((first + more)[:length])
            for rank, (first, more, length) in enumerate(zip(begun, rest, lengths, strict=True))
        ]
        interrupt = self.interrupted()
        if interrupt is not None:
            # The others go on, and would wait for this one.
            self.leave()
            try:
                raise interrupt
            finally:
                # Its traceback has this frame.
                del interrupt
        return answers

    def _gather(self, data: bytes, length: int) -> list[bytes]:
        """Return so many bytes of every member; those of shorter ones have zeros behind them."""
        mine = torch.frombuffer(bytearray(data[:length].ljust(length, b"\0")), dtype=torch.uint8)
        every = torch.empty(self.size, length, dtype=torch.uint8, device="cpu")
        self.wait(self._allgather(list(every), mine))
        return [one.numpy().tobytes() for one in every]

    def _from_one(self, data: bytes, rank: int, length: int) -> bytes:
        """Return the bytes of one member, which it gives to all."""
        mine = bytearray(data if rank == self.rank else length)
        sent = torch.frombuffer(mine, dtype=torch.uint8)
        self.wait(self.broadcast(sent, rank))
        return sent.numpy().tobytes()

    # One exchange

    @contextlib.contextmanager
    def _collective(self) -> Iterator[None]:
        """Check that there are connections, to begin an exchange."""
        self._check_process()
        with self._or_lost():
            if self._among_hosts is None:
                raise RuntimeError("the connections were given up")
            yield

    def _allgather(self, every: list[torch.Tensor], mine: torch.Tensor) -> Any:
        """Begin to send a tensor of each member to all."""
        with self._collective():
            return self._among_hosts.allgather([every], [mine])

    def broadcast(self, data: torch.Tensor, rank: int) -> Any:
        """Begin to send a tensor from one member to all; return what :meth:`wait` waits for."""
        options = dist.BroadcastOptions()
        options.rootRank = rank
        with self._collective():
            # No frame of a traceback may have the group: see leave.
            if data.is_cuda and self.on_device:
                return self._of_devices().broadcast([data], options)
            return self._among_hosts.broadcast([data], options)

    def _of_devices(self) -> Any:
        """Return the connections between devices, which take long to be made."""
        if self._among_devices is None:
            options = dist.ProcessGroupNCCL.Options()
            # Its own watchdog would end the process, where a member is lost.
            options._timeout = self._timeout + datetime.timedelta(seconds=6 * _GRACE)
            store = distributed_c10d.PrefixStore("devices", self._store)
            self._among_devices = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
            self._last.append(self._among_devices)
        return self._among_devices

    def wait(self, work: Any) -> None:
        """Wait for an exchange, to its end even where this process is interrupted.

        Raises:
            GroupError: It did not come to its end.

        """
        until = time.monotonic() + self._timeout.total_seconds() + _GRACE
        pause = 1e-4
        try:
            with self._or_lost(), leaving.watch(self._store) as another_left:
                while not work.is_completed():
                    if time.monotonic() > until:
                        raise RuntimeError("timed out")
                    if another_left():
                        raise RuntimeError("one of them left")
                    self._pause(pause)
                    pause = min(pause * 1.5, 5e-3)
                work.wait()
        finally:
            # It keeps the connections open, and a traceback keeps this frame.
            del work

    def _pause(self, seconds: float) -> None:
        """Sleep, and remember an interruption; a second one ends the call at once."""
        try:
            time.sleep(seconds)
        except BaseException as interrupt:
            if self._interrupt is not None:
                self.leave()
                raise
            # Frames of its traceback have the exchange.
            self._interrupt = interrupt.with_traceback(None)

    def interrupted(self) -> BaseException | None:
        """Return what has interrupted this process during an exchange, once."""
        interrupt, self._interrupt = self._interrupt, None
        return interrupt

    @contextlib.contextmanager
    def _or_lost(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.leave()
            if not isinstance(error, (RuntimeError, dist.DistError)):
                raise
            raise GroupError(
                f"rank {self.rank} of {self.size} lost the other members of its group, or they "
                f"did not answer within {self._timeout}: {error}"
            ) from error


def _timeout(group: dist.ProcessGroup, on_device: bool) -> datetime.timedelta:
    """Return how long members of a group wait for each other."""
    device = torch.device("cuda" if on_device else "cpu")
    try:
        timeout = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        timeout = None
    default: datetime.timedelta = dist.default_pg_timeout
    return timeout if isinstance(timeout, datetime.timedelta) else default


def _sendable(error: BaseException) -> tuple[bytes | None, str]:
    """Return an error as bytes, where it survives that, and as text."""
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
    """Return the error of another member."""
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
    _CALLS.clear()
    leaving.end()
