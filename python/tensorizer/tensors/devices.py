"""Statistics of loads and saves, and the staging memory for CUDA."""

from __future__ import annotations

from typing import Any, TypeAlias, overload

import torch

from .. import _native

#: The native module's number for the CPU; CUDA devices have their index.
CPU = -1


def number(device: torch.device) -> int:
    """Return the native module's number for a device; that of the CPU if it does not support it."""
    if device.type != "cuda":
        return CPU
    # torch raises its own errors here, such as that this process was forked.
    torch.cuda.init()
    return torch.cuda.current_device() if device.index is None else device.index


def is_native(device: torch.device) -> bool:
    """Tell whether the native module copies to a device itself, through staging memory."""
    return device.type in ("cpu", "cuda") and _native.staged(number(device))


#: None, typed ``Any`` for callers that know that there was a call.
_OrNone: TypeAlias = Any


@overload
def stats(since: None = None) -> dict[str, Any] | _OrNone: ...


@overload
def stats(since: int) -> list[dict[str, Any]]: ...


def stats(since: int | None = None) -> dict[str, Any] | list[dict[str, Any]] | _OrNone:
    """Return statistics of the last load or save of this process; None before the first.

    Args:
        since: Return a list instead, with every call after the one of this number, in their order;
            0 for all. The last 256 calls are kept: a program that polls with the last number that
            it has seen can tell by the numbers if it missed any. A call is one pass over a file:
            eager loads and saves are one each, lazy access is one per tensor.

    Returns:
        A dict: ``call`` (its number, from 1 on), ``ended`` (seconds since 1970), ``what`` ("load"
        or "save"), ``uri``, ``device``, ``tensors``, ``bytes`` (of tensor data), ``threads``,
        ``most_threads`` (the most threads that might have been used),
        ``seconds`` (from the call to its return, when copies may still be under
        way on the device), ``stages`` (seconds by stage, summed over the threads: ``plan``,
        ``memory`` (waiting for staging memory), ``read``, ``decrypt``, ``hash``, ``copy`` and
        ``write``),
        ``reading`` (how a local file was read: the page cache, direct reads; else nothing),
        ``in_flight`` and ``most_in_flight`` (bytes of direct reads by io_uring: the average that
        was under way, and the most that might have been),
        ``fallbacks`` (slower ways that were used, and the reasons) and ``pinned_bytes`` (staging
        memory that the process keeps).

    """
    return _native.stats() if since is None else _native.stats_since(since)


def set_pinned_limit(limit: int) -> None:
    """Set the most staging memory that loads to and saves from one device use together.

    Args:
        limit: In bytes; at least 16 MiB are used if they are needed. The default is 256 MiB, or the
            value of ``TENSORIZER_PINNED_MB``.

    """
    _native.set_pinned_limit(limit)


def release_pinned() -> int:
    """Give unused staging memory back to the system, and return the number of bytes."""
    released: int = _native.release_pinned()
    return released
