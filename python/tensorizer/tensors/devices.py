"""Loads to and saves from CUDA: what they did, and the memory that they keep."""

from __future__ import annotations

from typing import Any, TypeAlias, overload

import torch

from .. import _native

#: How the native module knows the CPU; CUDA devices have their index.
CPU = -1


def number(device: torch.device) -> int:
    """Return how the native module knows a device; what it does not know comes to the CPU."""
    if device.type != "cuda":
        return CPU
    # Whatever torch has to say about this process, such as that it was forked, it says here.
    torch.cuda.init()
    return torch.cuda.current_device() if device.index is None else device.index


def is_native(device: torch.device) -> bool:
    """Tell whether the native module puts tensors there itself, through staging memory."""
    return device.type in ("cpu", "cuda") and _native.staged(number(device))


#: None, for callers that know that it cannot be: type checkers pass it.
_OrNone: TypeAlias = Any


@overload
def stats(since: None = None) -> dict[str, Any] | _OrNone: ...


@overload
def stats(since: int) -> list[dict[str, Any]]: ...


def stats(since: int | None = None) -> dict[str, Any] | list[dict[str, Any]] | _OrNone:
    """Return what the last load or save of this process did; None before the first.

    Args:
        since: Return a list instead, of what every call did after the one of this number, in
            their order; 0 for all. The last 256 calls are kept: who asks now and then with the
            last number that it has seen misses none, and sees by the numbers if it has. A call is
            one pass over a file: eager loads and saves are one each, lazy access one a tensor.

    Returns:
        A dict: ``call`` (its number, from 1 on), ``ended`` (seconds since 1970), ``what`` ("load"
        or "save"), ``uri``, ``device``, ``tensors``, ``bytes`` (of tensor data), ``threads``,
        ``most_threads`` (that there might have been, had more helped),
        ``seconds`` (from the call to its return, in which copies may still be under
        way on the device), ``stages`` (seconds by stage, summed over the threads: ``plan``,
        ``memory`` waiting for staging memory, ``read``, ``decrypt``, ``hash``, ``copy`` and
        ``write``),
        ``reading`` (how a local file was read: the page cache, direct reads; else nothing),
        ``in_flight`` and ``most_in_flight`` (bytes of direct reads by io_uring that were under
        way, on average, and that might have been),
        ``fallbacks`` (slower ways that were taken, and why) and ``pinned_bytes`` (staging memory
        that the process keeps).

    """
    return _native.stats() if since is None else _native.stats_since(since)


def set_pinned_limit(limit: int) -> None:
    """Set the most staging memory that the loads to and saves from one device take together.

    Args:
        limit: In bytes; at least 16 MiB are taken if they are needed. The default is 256 MiB, or
            what ``TENSORIZER_PINNED_MB`` says.

    """
    _native.set_pinned_limit(limit)


def release_pinned() -> int:
    """Give the staging memory that is not in use back to the system; return how many bytes."""
    released: int = _native.release_pinned()
    return released
