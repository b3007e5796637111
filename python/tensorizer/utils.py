"""Helpers for scripts: sizes, memory figures, and models without initial weights."""

from __future__ import annotations

import contextlib
import contextvars
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar, overload

import torch

__all__ = [
    "CPUMemoryUsage",
    "GlobalGPUMemoryUsage",
    "MemoryUsage",
    "TorchGPUMemoryUsage",
    "convert_bytes",
    "get_device",
    "get_gpu_name",
    "get_mem_usage",
    "no_init_or_tensor",
]

T = TypeVar("T")
_Device = torch.device | str | int | None


def convert_bytes(num: float, decimal: bool = True) -> str:
    """Return a number of bytes for people: ``"123.5 MB"``, or ``"117.8 MiB"`` if not decimal."""
    step, infix = (1000, "") if decimal else (1024, "i")
    value = float(num)
    for prefix in ("", "K", "M", "G", "T"):
        if abs(value) < step:
            unit = f"{prefix}{infix}B" if prefix else "bytes"
            return f"{value:.1f} {unit}"
        value /= step
    return f"{value:.1f} P{infix}B"


def get_device() -> torch.device:
    """Return ``cuda`` if there is one, else ``cpu``."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def get_gpu_name() -> str:
    """Return the name of the current GPU, or ``"N/A"``."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "N/A"


class CPUMemoryUsage(NamedTuple):
    """Host memory in bytes."""

    #: Largest resident size of this process so far, and of its largest finished child.
    maxrss: int
    #: Memory that processes could take now.
    free: int

    @classmethod
    def now(cls) -> CPUMemoryUsage:
        """Measure."""
        unit = 1 if sys.platform == "darwin" else 1024
        own, children = (
            resource.getrusage(who).ru_maxrss * unit
            for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        return cls(own + children, _available_memory())

    def __str__(self) -> str:
        return f"CPU: (maxrss: {_mib(self.maxrss)} F: {_mib(self.free)})"


class GlobalGPUMemoryUsage(NamedTuple):
    """Memory of a GPU in bytes, used by whatever process."""

    total: int
    free: int
    used: int

    @classmethod
    def now(cls, device: _Device = None) -> GlobalGPUMemoryUsage | None:
        """Measure; None without CUDA."""
        if not torch.cuda.is_available():
            return None
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free, total - free)

    def __str__(self) -> str:
        return f"GPU: (U: {_mib(self.used)} F: {_mib(self.free)} T: {_mib(self.total)})"


class TorchGPUMemoryUsage(NamedTuple):
    """Memory of a GPU in bytes that torch's allocator has reserved and uses."""

    reserved: int
    reserved_max: int
    used: int
    used_max: int

    @classmethod
    def now(cls, device: _Device = None) -> TorchGPUMemoryUsage | None:
        """Measure; None without CUDA."""
        if not torch.cuda.is_available():
            return None
        cuda = torch.cuda
        return cls(
            cuda.memory_reserved(device),
            cuda.max_memory_reserved(device),
            cuda.memory_allocated(device),
            cuda.max_memory_allocated(device),
        )

    def __str__(self) -> str:
        reserved = f"R: {_mib(self.reserved)}/{_mib(self.reserved_max)}"
        return f"TORCH: ({reserved}, A: {_mib(self.used)}/{_mib(self.used_max)})"


class MemoryUsage(NamedTuple):
    """All of the above at one time."""

    cpu: CPUMemoryUsage
    gpu: GlobalGPUMemoryUsage | None
    torch: TorchGPUMemoryUsage | None

    @classmethod
    def now(cls, device: _Device = None) -> MemoryUsage:
        """Measure."""
        return cls(
            CPUMemoryUsage.now(),
            GlobalGPUMemoryUsage.now(device),
            TorchGPUMemoryUsage.now(device),
        )

    def __str__(self) -> str:
        return " ".join(str(part) for part in self if part is not None)


def get_mem_usage() -> str:
    """Return the memory in use as one line."""
    return str(MemoryUsage.now())


def _mib(num: int) -> str:
    return f"{num >> 20:,}MiB"


def _available_memory() -> int:
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:  # noqa: PTH123
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


# Models without initial weights

_active: contextvars.ContextVar[bool] = contextvars.ContextVar("no_init_or_tensor", default=False)
_lock = threading.Lock()
_depth = 0
_undo: list[tuple[Any, str, Any]] = []


def _patch() -> None:
    """Put wrappers in place that do nothing unless this task has asked for them."""
    empty = torch.empty

    def empty_on_meta(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _active.get():
            kwargs["device"] = "meta"
        result: torch.Tensor = empty(*args, **kwargs)
        return result

    def skipped(original: Callable[[Any], None]) -> Callable[[Any], None]:
        def reset_parameters(self: Any) -> None:
            if not _active.get():
                original(self)

        return reset_parameters

    _replace(torch, "empty", empty_on_meta)
    for layer in (torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm):
        _replace(layer, "reset_parameters", skipped(layer.reset_parameters))


def _replace(owner: Any, name: str, value: Any) -> None:
    _undo.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


@contextlib.contextmanager
def _no_init() -> Iterator[None]:
    global _depth  # noqa: PLW0603
    with _lock:
        if _depth == 0:
            _patch()
        _depth += 1
    token = _active.set(True)
    try:
        yield
    finally:
        _active.reset(token)
        with _lock:
            _depth -= 1
            if _depth == 0:
                while _undo:
                    owner, name, value = _undo.pop()
                    setattr(owner, name, value)


@overload
def no_init_or_tensor(
    loading_code: None = None,
) -> contextlib.AbstractContextManager[None]: ...
@overload
def no_init_or_tensor(loading_code: Callable[[], T]) -> T: ...
def no_init_or_tensor(loading_code: Callable[[], T] | None = None) -> Any:
    """Build modules whose weights take no memory, to load into.

    Inside, ``torch.empty`` makes tensors on the ``meta`` device, whatever device it is given,
    and ``Linear``, ``Embedding`` and ``LayerNorm`` do not initialise their parameters. Only the
    task or thread that asked for it is affected.

    Args:
        loading_code: Run this inside and return its result. None returns a context manager.

    Raises:
        TypeError: ``loading_code`` is neither None nor callable.

    """
    if loading_code is None:
        return _no_init()
    if not callable(loading_code):
        raise TypeError(f"loading_code must be callable or None, not {loading_code!r}")
    with _no_init():
        return loading_code()
