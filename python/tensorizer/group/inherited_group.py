"""The default process group that a forked process has inherited from its parent."""

from __future__ import annotations

import os
import sys
from typing import Any

_FOUND: list[Any] = [None]


def inherited_default_group() -> Any:
    """Return the default group that the process was forked with; None if there was none.

    Its connections belong to the parent: a process that waits for a response on them waits forever.
    """
    return _FOUND[0]


def _in_child() -> None:
    # Not imported here: that is slow, and without it there is no group.
    group = getattr(sys.modules.get("torch.distributed"), "group", None)
    _FOUND[0] = getattr(group, "WORLD", None)


os.register_at_fork(after_in_child=_in_child)
