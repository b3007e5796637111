"""The calls that processes make together, and the connections that are kept between them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


@dataclass
class Connections:
    """The connections of some processes to each other.

    Attributes:
        hosts: Those that need no device.
        devices: Those between CUDA devices.
        of_parts: Those of some of the processes, by their ranks.

    """

    hosts: Any = None
    devices: Any = None
    of_parts: dict[tuple[int, ...], Connections] = field(default_factory=dict)

    def take_all(self) -> list[Any]:
        """Return all process groups, and forget them."""
        groups = [one for one in (self.hosts, self.devices) if one is not None]
        self.hosts = self.devices = None
        for part in self.of_parts.values():
            groups += part.take_all()
        self.of_parts.clear()
        return groups


@dataclass
class Calls:
    """The calls that some processes make together, one after another.

    They have connections of their own, so that they are mixed up with nothing else. These are kept
    from call to call, until one of them fails. They are made by way of a store, to which this has a
    connection of its own: a call that waits for a store has all others wait that use the same.
    """

    store: Any
    count: int
    #: The connections of the last call. Others may still read from them what was sent at its end;
    #: they have done so when all meet for the next one.
    last: Connections
    #: The number of the call that made them, if it, and those that went on with them, ended well.
    kept: int = 0

    @staticmethod
    def of(name: str, size: int) -> Calls:
        """Return those that processes of a name make."""
        assert dist.group.WORLD is not None
        known = CALLS.setdefault(dist.group.WORLD, {})
        if name not in known:
            store: Any = distributed_c10d._get_default_store()
            store = store.clone()
            # The default group may have been made anew, with a store that knows earlier calls.
            known[name] = Calls(store, (store.add(name, 1) - 1) // size << 32, Connections())
        return known[name]


#: What is known of the calls of this process's default group, by the name of those that make them.
CALLS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Calls]] = weakref.WeakKeyDictionary()
