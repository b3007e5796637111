"""Processes that are connected to each other, and the messages that they exchange."""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .._errors import GroupError
from . import leave_notice, tree
from .call_sequence import Connections

#: Seconds that a member waits beyond the group's time-out, which is to end the wait first.
_GRACE_SECONDS = 10.0


class Communicator:
    """Connections between this process and others, used for nothing else.

    Args:
        rank: The number of this process among them.
        size: The number of processes.
        on_device: True if they exchange tensors of CUDA devices without the CPU.
        timeout: The time that they wait for each other at most.

    """

    def __init__(
        self, rank: int, size: int, *, on_device: bool, timeout: datetime.timedelta
    ) -> None:
        self.rank, self.size, self.on_device = rank, size, on_device
        self._timeout = timeout
        self._process = os.getpid()
        self._interrupt: BaseException | None = None
        self._have_left = False
        self._connections = Connections()
        self._store: Any = None
        #: The ranks of a part of the members, for the names of its keys.
        self._subgroup_key = ""

    def connect_hosts(self, connections: Connections, store: Any) -> None:
        """Prepare connections, which are made when they are first used.

        Trees of all members need few of them: connecting each member to each other would take as
        many descriptors as there are members.
        """
        gloo: Any = distributed_c10d.ProcessGroupGloo
        options = gloo._Options()
        # As in torch itself, except that connections are made on first use.
        names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        options._devices = [gloo.create_device(interface=n, lazy_init=True) for n in names] or [
            gloo.create_default_device(lazy_init=True)
        ]
        options._timeout = self._timeout
        connections.hosts = dist.ProcessGroupGloo(store, self.rank, self.size, options)

    def leave(self) -> None:
        """Give the connections up, so that others do not wait for this process."""
        if self._process != os.getpid():
            return  # the connections are the parent's, which goes on
        first, self._have_left = not self._have_left, True
        groups = self._connections.take_all()
        if self._store is not None and (first or groups):
            leave_notice.announce(self._store)
        for group in groups:
            with contextlib.suppress(RuntimeError, AttributeError):
                group.abort()
            del group
        leave_notice.release_in_background(groups)

    def check_process(self) -> None:
        """Raise in a process that was forked from the one that made the connections.

        Raises:
            RuntimeError: This process was forked.

        """
        if self._process != os.getpid():
            raise RuntimeError(
                "these connections were made by the parent process, before fork(): this is a child"
            )

    def all_gather_bytes(self, data: bytes, length: int) -> list[bytes]:
        """Return ``length`` bytes of every member; shorter ones are padded with zeros."""
        every = torch.zeros(self.size, length, dtype=torch.uint8, device="cpu")
        mine = bytearray(data[:length].ljust(length, b"\0"))
        every[self.rank] = torch.frombuffer(mine, dtype=torch.uint8)
        with self._collective():
            gathered = tree.TreeGather(self._connections.hosts, every, self.rank)
        try:
            self.wait(gathered)
        except BaseException:
            gathered.stop()
            raise
        self.wait(self.broadcast(every, 0))
        return [one.tobytes() for one in every.numpy()]

    def broadcast_bytes(self, data: bytes, rank: int, length: int) -> bytes:
        """Return the bytes of one member, which it sends to all."""
        mine = bytearray(data.ljust(length, b"\0") if rank == self.rank else length)
        sent = torch.frombuffer(mine, dtype=torch.uint8)
        self.wait(self.broadcast(sent, rank))
        return sent.numpy().tobytes()

    @contextlib.contextmanager
    def _collective(self) -> Iterator[None]:
        """Check that there are connections, before an exchange begins."""
        self.check_process()
        with self.leave_on_error():
            if self._connections.hosts is None:
                raise RuntimeError("the connections of the group are closed")
            yield

    def broadcast(self, data: torch.Tensor, rank: int) -> Any:
        """Begin to send a tensor from one member to all; return the work to :meth:`wait` for."""
        options = dist.BroadcastOptions()
        options.rootRank = rank
        with self._collective():
            # No frame of a traceback may hold the group: see leave.
            if data.is_cuda and self.on_device:
                return self._device_connections().broadcast([data], options)
            return self._connections.hosts.broadcast([data], options)

    def scatter(self, received: torch.Tensor, slots: Sequence[torch.Tensor], rank: int) -> Any:
        """Begin to send each member a tensor of its own, all of one length, from one member.

        Args:
            received: The tensor that this member receives.
            slots: At the sender, the tensors for all members.
            rank: The sender.

        Returns:
            The work to :meth:`wait` for.

        """
        options = dist.ScatterOptions()
        options.rootRank = rank
        every = [list(slots)] if slots else []
        with self._collective():
            if received.is_cuda and self.on_device:
                return self._device_connections().scatter([received], every, options)
            return self._connections.hosts.scatter([received], every, options)

    def _device_connections(self) -> Any:
        """Return the connections between devices, which take long to make."""
        if self._connections.devices is None:
            options = dist.ProcessGroupNCCL.Options()
            # NCCL's own watchdog would end the process if a member is lost: it must come last.
            options._timeout = self._timeout + datetime.timedelta(seconds=6 * _GRACE_SECONDS)
            store = distributed_c10d.PrefixStore(f"devices{self._subgroup_key}", self._store)
            made = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
            self._connections.devices = made
            del made
        return self._connections.devices

    def wait(self, work: Any) -> None:
        """Wait for an exchange to end, even if this process is interrupted meanwhile.

        Raises:
            GroupError: The exchange did not complete.

        """
        until = time.monotonic() + self._timeout.total_seconds() + _GRACE_SECONDS
        pause = 1e-4
        try:
            with self.leave_on_error(), leave_notice.watch(self._store) as another_left:
                while not work.is_completed():
                    if time.monotonic() > until:
                        raise RuntimeError("timed out")
                    if another_left():
                        raise RuntimeError("another member left")
                    self._pause(pause)
                    pause = min(pause * 1.5, 5e-3)
                work.wait()
        finally:
            # The work keeps the connections open, and a traceback keeps this frame.
            del work

    def _pause(self, seconds: float) -> None:
        """Sleep, and store an interruption; a second one ends the call at once."""
        try:
            time.sleep(seconds)
        except BaseException as interrupt:
            if self._interrupt is not None:
                self.leave()
                raise
            # The frames of its traceback hold the exchange.
            self._interrupt = interrupt.with_traceback(None)

    def interrupted(self) -> BaseException | None:
        """Return the interruption of this process during an exchange, and forget it."""
        interrupt, self._interrupt = self._interrupt, None
        return interrupt

    @contextlib.contextmanager
    def leave_on_error(self) -> Iterator[None]:
        """Leave if anything fails, and raise an error of the connections as ``GroupError``."""
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
