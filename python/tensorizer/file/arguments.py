"""The parts of reading that need no deserializer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .._native import Reader
from . import opening

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def open_reader(file_obj: Any) -> Reader:
    """Open what a caller gave as a file."""
    target = opening.classify(file_obj)
    if isinstance(target, opening.LocalPath):
        return Reader.from_path(target.path)
    if isinstance(target, opening.Remote):
        return Reader.from_source(target.source, target.base)
    if not isinstance(file_obj, int):
        readable = getattr(file_obj, "readable", None)
        if not hasattr(file_obj, "read") or (readable is not None and not readable()):
            raise ValueError(f"expected a readable file: {target.uri}")
    if isinstance(target, opening.Descriptor):
        return Reader.from_fd(target.number, target.uri, target.base)
    return Reader.from_object(target.file, target.uri, target.base, target.size)


def resolve_device(device: torch.device | str | None) -> torch.device:
    """Return the device that an argument stands for; None is CUDA if there is any."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    resolved = torch.device(device)
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"device {str(resolved)!r} was asked for, but CUDA is not available")
    if resolved.type == "cuda" and resolved.index is None:
        resolved = torch.device("cuda", torch.cuda.current_device())
    return resolved


def checked_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype, which must be one."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, not {dtype!r}")
    return dtype


def checked_verification(verify_hash: bool | str | None) -> str:
    """Return which hashes are compared: ``"nothing"``, ``"crc32"`` or ``"all"``."""
    if isinstance(verify_hash, str):
        if verify_hash != "crc32":
            raise ValueError(f"verify_hash must be a bool or 'crc32', not {verify_hash!r}")
        return verify_hash
    return "all" if verify_hash else "nothing"


def check_num_readers(num_readers: int | None) -> None:
    """Refuse numbers of readers that are none."""
    if num_readers is None:
        return
    if not isinstance(num_readers, int) or isinstance(num_readers, bool):
        raise TypeError(f"num_readers must be an int or None, not {num_readers!r}")
    if num_readers < 1:
        raise ValueError(f"num_readers must be at least 1, not {num_readers}")


def parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    """Return a tensor as a parameter; those that can have a gradient require one."""
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    return torch.nn.Parameter(tensor, requires_grad=differentiable)


def as_numpy(tensor: torch.Tensor, opaque: bool) -> npt.NDArray[Any]:
    """Return the array of a CPU tensor; integers of the same width if its dtype is opaque."""
    if not opaque:
        array: npt.NDArray[Any] = tensor.numpy()
        return array
    same_width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    raw: npt.NDArray[np.int64] = tensor.view(same_width[tensor.element_size()]).numpy()
    return raw
