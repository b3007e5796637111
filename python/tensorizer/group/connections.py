"""Connections between the members of a process group, which are kept from call to call."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .._native import check_wait

_T = TypeVar("_T")

#: The reason of a wait, in the error of a time limit.
WAITING = "waiting for the other members of the group"
#: Seconds between two checks of the store: at first; at most, with few members; and, with many, for
#: each member, as one store serves all of them.
_PAUSE, _LONGEST_PAUSE, _PAUSE_FOR_EACH = 1e-3, 5e-3, 2e-4
#: Seconds in which members that have lost each other say so in the store.
_SEARCH_SECONDS = 5.0
#: Seconds that a member waits for the store when it leaves: the process that hosts it may be gone.
_STORE_SECONDS = 1.0
#: The key in the store of a call under which members say that they leave, and why.
_LEFT_KEY = "left"
#: The reason of a member that has not failed itself.
_LOST_OTHERS = "lost the others"


@dataclass
class Connections:
    """Connections between the processes of a call.

    Attributes:
        store: The store of the call that made them, or that uses them now.
        hosts: A process group for CPU tensors (gloo).
        number: The number of the call that made them.
        devices: A process group for tensors of CUDA devices (NCCL); None before it is needed.

    """

    store: Any
    hosts: Any
    number: int
    devices: Any = None

    def between_devices(self, timeout: timedelta) -> Any:
        """Return the process group for tensors of devices, which takes long to make."""
        if self.devices is None:
            options = dist.ProcessGroupNCCL.Options()
            # NCCL's own watchdog would end the process if a member is lost: it must come last.
            options._timeout = timeout
            store = distributed_c10d.PrefixStore("devices", self.store)
            rank, size = self.hosts.rank(), self.hosts.size()
            self.devices = dist.ProcessGroupNCCL(store, rank, size, options)
        return self.devices

    def leave(self, rank: int, why: str) -> None:
        """Close the connections, which ends collectives of the others; say why in the store."""
        with contextlib.suppress(RuntimeError, dist.DistError, TimeoutError):
            on_thread(lambda _: self._say(rank, why), _STORE_SECONDS)
        self.close()

    def close(self) -> None:
        """Close the connections, without waiting for messages under way."""
        groups = [group for group in (self.hosts, self.devices) if group is not None]
        self.hosts = self.devices = None
        for group in groups:
            with contextlib.suppress(RuntimeError, AttributeError):
                group.abort()
            del group
        # The last reference waits for messages that are under way.
        _start(groups.clear)

    def is_left(self) -> bool:
        """Return True if a member has said that it leaves.

        Raises:
            TimeoutError: The store does not answer.

        """
        return on_thread(lambda _: bool(self.store.check([_LEFT_KEY])), _STORE_SECONDS)[0]

    def find_lost(self, rank: int, size: int) -> str | None:
        """Close the connections after an error of them; return which member was lost, and why."""
        self.close()
        with contextlib.suppress(RuntimeError, dist.DistError, TimeoutError):
            seconds = _SEARCH_SECONDS + _STORE_SECONDS
            return on_thread(lambda leaving: self._search(rank, size, leaving), seconds)[0]
        return "the process that hosts the store of the group (as a rule rank 0) does not answer"

    def _say(self, rank: int, why: str) -> None:
        self.store.append(_LEFT_KEY, f"{rank} {' '.join(why.split())}\n")

    def _search(self, rank: int, size: int, leaving: threading.Event) -> str | None:
        """Wait until a member says why it has left, or until all but one have said something."""
        self._say(rank, _LOST_OTHERS)
        until = time.monotonic() + _SEARCH_SECONDS
        while True:
            told = [one.partition(" ") for one in self.store.get(_LEFT_KEY).decode().splitlines()]
            reasons = [(other, why) for other, _, why in told if why != _LOST_OTHERS]
            gone = sorted(set(range(size)) - {int(other) for other, *_ in told})
            if reasons or len(gone) <= 1 or time.monotonic() > until or leaving.is_set():
                break
            time.sleep(20 * _PAUSE)
        # Those that have left do not come.
        _wait_for_others(self.store, size - len(reasons) if reasons else len(told))
        if reasons:
            return f"rank {reasons[0][0]} of the group {reasons[0][1]}"
        are = "is" if len(gone) == 1 else "are"
        return f"{_ranks(gone)} of the group {are} gone, or did not answer" if gone else None


def _wait_for_others(store: Any, count: int) -> None:
    """Wait until so many members know why a call has ended, but at most ``_STORE_SECONDS``.

    The process that hosts the store may end then. If it has ended already, nothing is waited for.
    """
    until = time.monotonic() + _STORE_SECONDS
    with contextlib.suppress(RuntimeError, dist.DistError):
        store.add("know", 1)
        while store.add("know", 0) < count and time.monotonic() < until:
            time.sleep(20 * _PAUSE)


def _ranks(numbers: Sequence[int]) -> str:
    """Return some ranks as text: ``"rank 3"``, ``"ranks 1, 3"``."""
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


@dataclass
class CallSequence:
    """The calls that some processes make together, one after another.

    Attributes:
        name: Tells these processes and their group from others.
        size: Their number.
        store: A connection to the store of their own: a request that waits blocks all others on its
            connection.
        count: The number of calls so far.
        kept: Connections of a call that has ended.

    """

    name: str
    size: int
    store: Any
    count: int
    kept: Connections | None = None

    @staticmethod
    def of(group: dist.ProcessGroup, name: str, size: int) -> CallSequence:
        """Return the calls of the processes that have this name, by a group that they are in."""
        known = _SEQUENCES.setdefault(group, {})
        if name not in known:
            store: Any = distributed_c10d._get_default_store()
            store = store.clone()
            # The default group may have been made anew, with a store that counts earlier calls.
            first = (store.add(name, 1) - 1) // size << 32
            known[name] = CallSequence(name, size, store, first)
        return known[name]

    def keep(self, connections: Connections) -> None:
        """Keep the connections of a call that has ended for the next one."""
        if self.kept is None:
            self.kept = connections
        else:
            connections.close()

    def connect(self, rank: int, timeout: timedelta, leaving: threading.Event) -> Connections:
        """Begin a call: wait for the other members, and connect to them.

        If all have kept the connections of the same earlier call, they use these again. Else all
        make new ones, which are opened when they are first used.

        Raises:
            RuntimeError: A member has left, or did not arrive in time.

        """
        self.count += 1
        store = distributed_c10d.PrefixStore(f"{self.name}/{self.count}", self.store)
        kept, self.kept = self.kept, None
        again = self._meet(store, rank, timeout, leaving, 0 if kept is None else kept.number)
        if kept is not None and again:
            kept.store = store
            return kept
        if kept is not None:
            kept.close()
        return Connections(store, _gloo(store, rank, self.size, timeout), self.count)

    def _meet(
        self, store: Any, rank: int, timeout: timedelta, leaving: threading.Event, kept: int
    ) -> bool:
        """Wait until all members arrive; return True if all have kept the same connections.

        A member makes a few requests to the store, however many members there are.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        pause, longest = _PAUSE, max(_LONGEST_PAUSE, self.size * _PAUSE_FOR_EACH)
        store.add(f"kept/{kept}", 1)
        store.set(f"here/{rank}", "")
        if store.add("here", 1) == self.size:
            all_kept = kept > 0 and store.add(f"kept/{kept}", 0) == self.size
            store.compare_set("met", "", "again" if all_kept else "anew")
        while not store.check(["met"]):
            if leaving.is_set() or time.monotonic() > deadline:
                why = f"rank {rank} was interrupted"
                if not leaving.is_set():
                    missing = [one for one in range(self.size) if not store.check([f"here/{one}"])]
                    why = f"{_ranks(missing)} did not come within {timeout}"
                store.compare_set("met", "", why)
                break
            time.sleep(pause)
            pause = min(1.5 * pause, longest)
        outcome, arrived = store.get("met").decode(), store.add("here", 0)
        if outcome not in ("again", "anew"):
            _wait_for_others(store, arrived)
            raise RuntimeError(outcome)
        return bool(outcome == "again")


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a process group for CPU tensors, which connects to a member when it first sends to it.

    ``new_group`` would not do: its name depends on the number of groups that a process is in, which
    may differ among the members.
    """
    gloo: Any = distributed_c10d.ProcessGroupGloo
    options = gloo._Options()
    # As in torch itself, except that connections are made on first use.
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options._devices = [gloo.create_device(interface=n, lazy_init=True) for n in names] or [
        gloo.create_default_device(lazy_init=True)
    ]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def gathering(every: torch.Tensor, rank: int) -> list[Callable[[Any], Any]]:
    """Return the collectives that give all members a row of each; each has filled its own.

    The rows go to the first member, and from there to all. Gloo's all-gather is a ring, which takes
    as many steps as there are members.
    """
    options = dist.GatherOptions()
    options.rootRank = 0
    rows = [list(every)] if rank == 0 else []
    # The first member's row is in its place already.
    mine = every[rank].clone()
    return [
        lambda group: group.gather(rows, [mine], options),
        functools.partial(broadcasting, every, 0),
    ]


def broadcasting(data: torch.Tensor, rank: int, group: Any) -> Any:
    """Begin to send a tensor from one member to all."""
    options = dist.BroadcastOptions()
    options.rootRank = rank
    return group.broadcast([data], options)


def timeout_of(group: dist.ProcessGroup, on_device: bool) -> timedelta:
    """Return the time that members of a group wait for each other."""
    device = torch.device("cuda" if on_device else "cpu")
    try:
        timeout = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        timeout = None
    default: timedelta = dist.default_pg_timeout
    return timeout if isinstance(timeout, timedelta) else default


def on_thread(
    work: Callable[[threading.Event], _T], seconds: float
) -> tuple[_T, BaseException | None]:
    """Run some work on a thread, which signals do not interrupt.

    Args:
        work: Called with an event that is set when the calling thread is interrupted, or waits no
            longer.
        seconds: The time to wait for it.

    Returns:
        The result, and the interruption of this thread meanwhile, or None.

    Raises:
        BaseException: The error of the work, or the interruption of this thread, if there are both;
            a second interruption at once.
        TimeoutError: The work takes longer.

    """
    leaving, ended = threading.Event(), threading.Event()
    results: list[_T] = []
    errors: list[BaseException] = []
    tasks = [work]

    def run() -> None:
        # After an interruption there may be two threads, of which one has nothing to do.
        try:
            task = tasks.pop()
        except IndexError:
            return
        try:
            results.append(task(leaving))
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    interruption: BaseException | None = None
    try:
        until = time.monotonic() + seconds
        while not ended.is_set():
            try:
                if tasks:
                    _start(run)
                # A signal ends the wait at once, ``_thread.interrupt_main`` when it is over.
                while not ended.wait(20 * _PAUSE):
                    # A member that leaves tells the others, even if its time has passed.
                    if seconds > _STORE_SECONDS:
                        check_wait(WAITING)
                    if time.monotonic() > until:
                        raise TimeoutError(f"no answer within {seconds:.0f} s")
            except BaseException as error:
                leaving.set()
                if interruption is not None or isinstance(error, TimeoutError):
                    raise
                # The frames of its traceback hold objects of the work.
                interruption = error.with_traceback(None)
        if errors:
            raise interruption or errors[0]
        return results[0], interruption
    finally:
        # Tracebacks hold this frame.
        errors.clear()
        del interruption


def _start(work: Callable[[], object]) -> None:
    """Run some work on a thread, or here if no thread can be started."""

    def run() -> None:
        try:
            work()
        finally:
            _running.discard(thread)

    thread = threading.Thread(target=run, name="tensorizer-group", daemon=True)
    _running.add(thread)
    try:
        thread.start()
    except RuntimeError:
        run()


_running: set[threading.Thread] = set()
#: The calls of each group, by the name of the processes that make them.
_SEQUENCES: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, CallSequence]] = (
    weakref.WeakKeyDictionary()
)


@atexit.register
def _close_last() -> None:
    _SEQUENCES.clear()
    until = time.monotonic() + _STORE_SECONDS
    for thread in list(_running):
        with contextlib.suppress(RuntimeError):  # it was never started
            thread.join(max(0.0, until - time.monotonic()))
