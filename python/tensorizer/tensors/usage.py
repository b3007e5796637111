"""Sizes as text, and the memory that is in use."""

from __future__ import annotations

import contextlib
import resource
from typing import NamedTuple

import torch

from .. import _native

_Device = torch.device | str | int | None


def convert_bytes(num: float, decimal: bool = True) -> str:
    """Return a number of bytes as text: ``"123.5 MB"``, or ``"117.8 MiB"`` if not ``decimal``."""
    return _native.convert_bytes(num, decimal)


def get_device() -> torch.device:
    """Return the device ``cuda`` if CUDA is available, else ``cpu``."""
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
        """Measure the host memory."""
        own, children = (
            resource.getrusage(who).ru_maxrss * 1024
            for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        return cls(own + children, _available_memory())

    def __str__(self) -> str:
        return f"CPU: (maxrss: {_mib(self.maxrss)} F: {_mib(self.free)})"


class GlobalGPUMemoryUsage(NamedTuple):
    """Memory of a GPU in bytes, used by any process."""

    total: int
    free: int
    used: int

    @classmethod
    def now(cls, device: _Device = None) -> GlobalGPUMemoryUsage | None:
        """Measure the GPU memory; None without CUDA."""
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
        """Measure the memory of torch's allocator; None without CUDA."""
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
    """The memory of the host, of the GPU and of torch's allocator at one time."""

    cpu: CPUMemoryUsage
    gpu: GlobalGPUMemoryUsage | None
    torch: TorchGPUMemoryUsage | None

    @classmethod
    def now(cls, device: _Device = None) -> MemoryUsage:
        """Measure all of them."""
        return cls(
            CPUMemoryUsage.now(), GlobalGPUMemoryUsage.now(device), TorchGPUMemoryUsage.now(device)
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
