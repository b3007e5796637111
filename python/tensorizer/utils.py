"""Helpers for scripts: sizes, memory figures, and models without initial weights."""

from .modules.uninitialised import no_init_or_tensor
from .tensors.usage import (
    CPUMemoryUsage,
    GlobalGPUMemoryUsage,
    MemoryUsage,
    TorchGPUMemoryUsage,
    convert_bytes,
    get_device,
    get_gpu_name,
    get_mem_usage,
)

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
