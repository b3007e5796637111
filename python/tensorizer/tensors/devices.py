"""Statistics of loads and saves, and the staging memory for CUDA."""

from __future__ import annotations

from typing import Any, TypeAlias, overload

import torch

from .. import _native
from .._numbers import check_number
from . import fake_mode

#: The native module's number for the CPU; CUDA devices have their index.
CPU = -1


def number(device: torch.device) -> int:
    """Return the native module's number for a device; that of the CPU if it does not support it."""
    if device.type != "cuda" or fake_mode.is_active():
        return CPU
    # torch raises its own errors here, such as that this process was forked.
    torch.cuda.init()
    return torch.cuda.current_device() if device.index is None else device.index


def is_native(device: torch.device) -> bool:
    """Tell whether the native module copies to a device itself, through staging memory."""
    return device.type == "cuda" and _native.uses_staging_memory(number(device))


#: None, typed ``Any`` for callers that know that there was a call.
_OrNone: TypeAlias = Any


@overload
def stats(since: None = None) -> dict[str, Any] | _OrNone: ...


@overload
def stats(since: int) -> list[dict[str, Any]]: ...


@overload
def stats(*, running: bool) -> list[dict[str, Any]]: ...


def stats(
    since: int | None = None, *, running: bool = False
) -> dict[str, Any] | list[dict[str, Any]] | _OrNone:
    """Return statistics of the last load or save of this process; None before the first.

    Args:
        since: Return a list of the statistics of every call after this number, in order; 0 for all.
            The last 256 calls are kept; lazy reads of single tensors are removed before others. To
            poll, pass the last number that you have seen; a gap in the numbers means that calls
            were missed. A call is one pass over a file: an eager load or a save is one call, and
            lazy access is one call per tensor. Calls that have failed are among them.
        running: Return a list of the calls that are under way, on any thread.

    Returns:
        A dict: ``call`` (its number, from 1 on), ``ended`` (seconds since 1970), ``what`` ("load"
        or "save"), ``uri``, ``device``, ``tensors``, ``bytes`` (of tensor data), ``threads``,
        ``most_threads`` (the most threads that the call could have used), ``seconds`` (from the
        call to its return, when copies may still be under way on the device), ``stages`` (seconds
        by stage, summed over the threads: ``plan``, ``memory`` (waiting for staging memory),
        ``read``, ``decrypt``, ``hash``, ``copy`` and ``write``), ``reading`` (the way in which a
        local file was read: the page cache, direct reads; empty for others), ``in_flight`` and
        ``most_in_flight`` (bytes of direct reads by io_uring under way: the average, and the most
        possible), ``fallbacks`` (slower paths that were used, and the reasons), ``pinned_bytes``
        (staging memory that the process keeps), ``requests`` (to servers, with those that opened
        the file), ``retries`` (requests that repeat a failed one), ``network_bytes``,
        ``cache_bytes`` and ``disk_bytes`` (bytes that came from servers or went there, from copies
        of servers' files, and from other local files) and ``error`` (the message of a call that has
        failed, or None).

        A call that is under way: ``function``, ``begun`` and ``since`` (seconds since 1970),
        ``uri``, ``waits_for`` (what it has waited for since then, and its last failed request),
        ``requests``, ``retries`` and ``network_bytes``.

    """
    check_number("since", since, least=0)
    if running:
        return _native.running()
    return _native.stats() if since is None else _native.stats_since(since)


def set_pinned_limit(limit: int) -> None:
    """Set the most staging memory that all loads to and saves from one device share.

    Args:
        limit: The limit in bytes; 16 MiB can be used in any case. The default is 256 MiB, or the
            value of ``TENSORIZER_PINNED_MB``.

    """
    check_number("limit", limit, least=0, wanted="a number of bytes", needed=True)
    _native.set_pinned_limit(limit)


def release_pinned() -> int:
    """Return unused staging memory to the system; the result is its size in bytes."""
    return _native.release_pinned()
