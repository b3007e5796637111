"""The order of a tensor's elements in memory, which files do not record."""

from __future__ import annotations

import torch


def elements_spanned(tensor: torch.Tensor) -> int | None:
    """Return the number of elements from the first to the last; None if some share their memory."""
    if tensor.layout is not torch.strided:
        return None
    span = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < span:
                return None
            span += (size - 1) * stride
    return span


def in_order_of(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return loaded data with the strides of the tensor that it replaces, as in channels_last."""
    known = elements_spanned(old)
    if known is None or old.is_contiguous() or old.shape != new.shape:
        return new
    ordered = torch.empty_strided(new.shape, old.stride(), dtype=new.dtype, device=new.device)
    copy_into(ordered, new)
    return ordered


@torch.no_grad()
def copy_into(to: torch.Tensor, data: torch.Tensor) -> None:
    """Copy loaded data, also of dtypes that torch itself cannot copy, such as 4-bit floats."""
    with torch._C.DisableTorchFunctionSubclass():
        if to.dtype is data.dtype and to.dtype.itemsize == 1:
            to, data = to.view(torch.uint8), data.view(torch.uint8)
        to.copy_(data)
