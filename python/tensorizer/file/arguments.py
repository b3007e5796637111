"""Checks of the arguments of a load."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch

from .._numbers import check_number
from .._types import NameT, VerifyHash
from ..tensors import fake_mode
from . import hints


def named_device(device: torch.device | str | None) -> torch.device:
    """Return the device that an argument names, if it exists; None is CUDA if there is any."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    named = parsed_device(device)
    if named.type == "cuda" and not torch.cuda.is_available() and not fake_mode.is_active():
        raise RuntimeError(f"device {str(named)!r} was asked for, but CUDA is not available")
    return named


def parsed_device(device: torch.device | str) -> torch.device:
    """Return the device of a name, which this machine may lack."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        wrong = TypeError if isinstance(error, TypeError) else RuntimeError
        raise wrong(f"there is no device {device!r}{hints.of_device(device)}") from error


#: A device as an argument names it; None for torch's default device.
DeviceType: TypeAlias = "torch.device | str | None"
#: A function that maps a tensor's name to its device. The name is a ``str`` for a path of one
#: string, else a tuple.
DeviceOf: TypeAlias = Callable[[Any], "torch.device | str | None"]


def device_or_function(device: DeviceType | DeviceOf) -> tuple[DeviceType, DeviceOf | None]:
    """Return the argument as one device, or as a function of names.

    A ``torch.device`` is a device, although it can be called.
    """
    if device is None or isinstance(device, (str, torch.device)) or not callable(device):
        return device, None
    return None, device


def resolve_device(device: torch.device | str | None) -> torch.device:
    """Return the device that an argument means now: CUDA without a number is the current device.

    A ``torch.device("cuda:1")`` block, or torch's default device, takes precedence over
    ``torch.cuda.set_device``.
    """
    if isinstance(device, torch.device) and device.type == "cpu":
        return device
    named = named_device(device)
    if named.type != "cuda" or named.index is not None:
        return named
    if fake_mode.is_active():
        return torch.device("cuda", 0)
    default = torch.get_default_device()
    if default.type == "cuda" and default.index is not None:
        return default
    return torch.device("cuda", torch.cuda.current_device())


def names_of(names: Iterable[NameT] | None) -> list[NameT] | None:
    """Return the names of an argument as a list; a string is one name."""
    if names is None:
        return None
    return [names] if isinstance(names, str) else list(names)  # type: ignore[list-item]


def checked_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype that tensors are cast to; a string is the name of one in ``torch``."""
    found = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if found is not None and not isinstance(found, torch.dtype):
        raise TypeError(
            f"dtype must be a torch.dtype, or the name of one, not {dtype!r}{hints.of_dtype(dtype)}"
        )
    if found is not None and not (found.is_floating_point or found.is_complex):
        raise ValueError(
            f"dtype={found}: expected a floating-point or complex dtype; a cast to another would "
            "lose the values: quantize the loaded tensors instead"
        )
    return found


def checked_verification(verify_hash: VerifyHash | None) -> str:
    """Return the hashes that are compared: ``"nothing"``, ``"crc32"`` or ``"all"``."""
    if isinstance(verify_hash, str):
        if verify_hash != "crc32":
            raise ValueError(
                f"verify_hash must be a bool or 'crc32', not {verify_hash!r}: True compares all "
                "hashes"
            )
        return verify_hash
    return "all" if verify_hash else "nothing"


def checked_memory_limit(memory_limit: int | None) -> int | None:
    """Return the limit in bytes, after checking that it is None or a positive ``int``."""
    hint = ": a number of bytes, such as 1_000_000_000"
    wanted = "a positive number of bytes"
    check_number("memory_limit", memory_limit, wanted=wanted, hint=hint)
    return memory_limit
