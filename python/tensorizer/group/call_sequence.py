"""The calls that processes make together, and the connections kept between these calls."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


@dataclass
class Connections:
    """Connections between some processes.

    Attributes:
        hosts: The connections between hosts, for CPU tensors.
        devices: The connections between CUDA devices.
        subgroups: The connections between some of the processes, by their ranks.

    """

    hosts: Any = None
    devices: Any = None
    subgroups: dict[tuple[int, ...], Connections] = field(default_factory=dict)

    def take_all(self) -> list[Any]:
        """Remove all process groups, and return them."""
        groups = [one for one in (self.hosts, self.devices) if one is not None]
        self.hosts = self.devices = None
        for subgroup in self.subgroups.values():
            groups += subgroup.take_all()
        self.subgroups.clear()
        return groups


@dataclass
class CallSequence:
    """The calls that some processes make together, one after another.

    They have connections of their own, so that their messages do not mix with others. These are
    kept from call to call, until one of them fails. They are made through a store, to which this
    has a connection of its own: a request that waits for a store blocks all others on its
    connection.
    """

    store: Any
    count: int
    #: The connections of the last call. Other members may still read its last messages from them;
    #: they have done so when all meet for the next call.
    connections: Connections
    #: The number of the call that made the connections, if all calls that used them ended well;
    #: else 0.
    connected_at: int = 0

    @staticmethod
    def of(name: str, size: int) -> CallSequence:
        """Return the calls of the processes that have this name."""
        assert dist.group.WORLD is not None
        known = CALL_SEQUENCES.setdefault(dist.group.WORLD, {})
        if name not in known:
            store: Any = distributed_c10d._get_default_store()
            store = store.clone()
            # The default group may have been made anew, with a store that counts earlier calls.
            known[name] = CallSequence(store, (store.add(name, 1) - 1) // size << 32, Connections())
        return known[name]


#: The calls of each default group, by the name of the processes that make them.
CALL_SEQUENCES: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, CallSequence]] = (
    weakref.WeakKeyDictionary()
)
