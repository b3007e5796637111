"""What a process that is forked off finds of its parent's process groups."""

from __future__ import annotations

import os
import sys
from typing import Any

_FOUND: list[Any] = []


def default_group() -> Any:
    """Return the default group that the process was forked off with, None for none.

    Its connections are the parent's: whoever waits for an answer on them waits for ever.
    """
    return _FOUND[0] if _FOUND else None


def _in_child() -> None:
    # Slow to import, and not needed where nobody has.
    distributed = sys.modules.get("torch.distributed")
    _FOUND.clear()
    if distributed is not None and distributed.is_initialized():
        _FOUND.append(distributed.group.WORLD)


os.register_at_fork(after_in_child=_in_child)
