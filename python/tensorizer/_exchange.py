"""How tensors pass between torch and the native module."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_lend = torch.ops.tensorizer._lend.default
_take = torch.ops.tensorizer._take.default


def lend(tensors: Sequence[torch.Tensor]) -> int:
    """Lend tensors to the next native call, which finds them under the number returned."""
    with torch._C.DisableTorchFunctionSubclass():
        return int(_lend(tensors))


def take(ticket: int) -> list[torch.Tensor]:
    """Return the tensors that a native call has loaded."""
    tensors: list[torch.Tensor] = _take(ticket)
    return tensors


def cast_dtype(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return what ``dtype=`` makes of a tensor's dtype.

    Floating-point tensors are cast, and complex ones if a complex dtype is asked for. Casting
    others would change what their numbers mean.
    """
    if wanted is None:
        return dtype
    castable = dtype.is_floating_point or (dtype.is_complex and wanted.is_complex)
    return wanted if castable else dtype
