"""Passes tensors between torch and the native module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from .._native import Handle
from . import fake_mode, sharding, subclasses

_lend = torch.ops.tensorizer._lend.default
_refuse_short = torch.ops.tensorizer._refuse_short.default
_take: Callable[[int], list[torch.Tensor]] = torch.ops.tensorizer._take.default
_PLAIN = {torch.Tensor, torch.nn.Parameter}


def lend(tensors: Sequence[torch.Tensor]) -> Handle:
    """Lend tensors to a native call, while it runs or the handle lives."""
    handle = Handle()
    with torch._C.DisableTorchFunctionSubclass(), fake_mode.suspended():
        _lend(handle.number, tensors)
    return handle


def take(handle: Handle) -> list[torch.Tensor]:
    """Return the tensors that a native call has loaded."""
    with fake_mode.suspended():
        return _take(handle.number)


def refuse_short(tensors: Iterable[tuple[object, torch.Tensor | None]]) -> None:
    """Refuse named tensors whose storage is smaller than they need: torch would read beyond it.

    Raises:
        ValueError: Memory was freed by ``untyped_storage().resize_(0)``, as FSDP frees that of
            parameters which are not gathered.

    """
    there = [(str(name), tensor) for name, tensor in tensors if tensor is not None]
    plain = [row for row in there if subclasses.is_plain(row[1])]
    if len(plain) < len(there):
        local = [(name, sharding.local_of(tensor)) for name, tensor in there]
        plain = [(name, tensor) for name, tensor in local if subclasses.reason(tensor) is None]
    with torch._C.DisableTorchFunctionSubclass(), fake_mode.suspended():
        _refuse_short([name for name, _ in plain], [tensor for _, tensor in plain])


def are_plain(tensors: Iterable[object]) -> bool:
    """Tell whether all are tensors or parameters of torch itself, and of no subclass."""
    return set(map(type, tensors)) <= _PLAIN


def is_fillable(tensor: torch.Tensor) -> bool:
    """Tell whether the bytes of a file can be read straight into the memory of a tensor.

    False for strided views, and for lazily conjugated or negated ones: their memory holds other
    values.
    """
    plain = tensor.layout == torch.strided and not tensor.is_meta and tensor.is_contiguous()
    return plain and not tensor.is_conj() and not tensor.is_neg()


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name without ``torch.``.

    Raises:
        NotImplementedError: This torch has no such dtype.

    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise NotImplementedError(f"torch {torch.__version__} has no dtype {name}")
    return dtype


def cast_dtype(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a tensor after a cast to ``wanted``.

    Floating-point tensors are cast, and complex ones if a complex dtype is wanted. Casting others
    would change the meaning of their numbers. So it would for floating-point numbers of 8 bits or
    fewer, whose value is known only together with a scale.
    """
    if wanted is None:
        return dtype
    castable = dtype.is_floating_point and dtype.itemsize > 1
    castable = castable or (dtype.is_complex and wanted.is_complex)
    return wanted if castable else dtype


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, in the order of its elements."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that shares no memory, byte for byte.

    torch itself cannot copy dtypes such as ``int4``, and changes bytes of a boolean other than 0 to
    1.
    """
    plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    if not plain or tensor.dtype.itemsize != 1 or tensor.is_quantized or tensor.is_nested:
        return tensor.clone()
    return tensor.view(torch.uint8).clone().view(tensor.dtype)
