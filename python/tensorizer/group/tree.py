"""A binomial tree of members: each sends its data, and that of members below it, to its parent.

Gloo gathers by a ring, in as many steps as there are members. A tree takes the logarithm of that,
and few connections per member.
"""

from __future__ import annotations

import threading
from typing import Any

import torch


def children_of(rank: int, size: int) -> tuple[list[int], int]:
    """Return the children of a member, and the end of the ranks in its subtree."""
    reach = rank & -rank or size
    steps = (1 << power for power in range(reach.bit_length()) if 1 << power < reach)
    return [rank + step for step in steps if rank + step < size], min(rank + reach, size)


def parent_of(rank: int) -> int:
    """Return the member that another one sends to; the first member sends to none."""
    return rank & (rank - 1)


class TreeGather:
    """Gathers one row of each member at the first one, on a thread.

    Gloo reports nothing about a message before it is waited for, and only a lost connection or the
    time-out ends the wait. So the thread is not waited for if the call fails before.

    Args:
        group: The connections of all members.
        rows: A row for each member, of which this member's own is filled. The first member gets all
            of them.
        rank: The number of this member.

    """

    def __init__(self, group: Any, rows: torch.Tensor, rank: int) -> None:
        self._ended = threading.Event()
        self._failed: BaseException | None = None
        self._stopped = False
        threading.Thread(
            target=self._run, args=(group, rows, rank), name="tensorizer-gather", daemon=True
        ).start()

    def _run(self, group: Any, rows: torch.Tensor, rank: int) -> None:
        try:
            children, end = children_of(rank, len(rows))
            works = []
            for child in children:
                _, last = children_of(child, len(rows))
                works.append(group.recv([rows[child:last]], child, 0))
            while works:
                works.pop(0).wait()
            if rank and not self._stopped:
                group.send([rows[rank:end]], parent_of(rank), 0).wait()
        except BaseException as error:
            self._failed = error.with_traceback(None)
        finally:
            # The thread's reference keeps the connections open.
            del group
            self._ended.set()

    def is_completed(self) -> bool:
        """Tell whether the gathering has ended, well or not."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Raise the error of a gathering that has ended; see :meth:`is_completed`. Does not wait.

        Raises:
            RuntimeError: A connection was lost.

        """
        failed, self._failed = self._failed, None
        try:
            if failed is not None:
                raise failed
        finally:
            del failed

    def stop(self) -> None:
        """Send nothing more, because the call has failed."""
        self._stopped = True
