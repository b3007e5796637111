"""Comparison of the targets that the ranks of one collective save name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any


def spellings(target: Any) -> tuple[str, ...]:
    """Return a path or address as it is and as a resolved path; nothing for other files."""
    if not isinstance(target, (str, bytes, os.PathLike)):
        return ()
    text = os.fsdecode(target)
    return (text,) if "://" in text else (text, os.path.realpath(text))


def refuse_different(targets: Sequence[tuple[str, ...]]) -> None:
    """Refuse a collective save whose ranks name different targets.

    Args:
        targets: The :func:`spellings` of each rank's target. Other files are not compared.

    Raises:
        ValueError: A rank shares no spelling with rank 0.

    """
    for rank, target in enumerate(targets):
        if target and targets[0] and not set(target) & set(targets[0]):
            raise ValueError(
                f"rank {rank} of this collective save names the target {target[0]!r}, and rank 0 "
                f"names {targets[0][0]!r}: expected the same target on all ranks"
            )
