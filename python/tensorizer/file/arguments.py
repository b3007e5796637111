"""What callers say about a load, checked."""

from __future__ import annotations

import torch


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
