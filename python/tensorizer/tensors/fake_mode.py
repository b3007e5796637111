"""Loads under ``FakeTensorMode`` of torch, in which tensors have a form and no data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes


def is_active() -> bool:
    """Tell whether the mode is active, so that loads make fake tensors and read no data.

    Raises:
        RuntimeError: A tracer records operators beside it. Its graph would make empty tensors.

    """
    if not torch._C._len_torch_dispatch_stack() or torch._guards.active_fake_mode() is None:
        return False
    proxy = torch._C._TorchDispatchModeKey.PROXY
    if (
        torch._C._get_dispatch_mode(proxy) is not None
        or torch._ops._get_dispatch_mode_pre_dispatch(proxy) is not None
    ):
        raise RuntimeError(
            "Python calls of tensorizer cannot be traced into a graph: load before the trace, or "
            "call torch.ops.tensorizer.load"
        )
    return True


def suspended() -> contextlib.AbstractContextManager[object]:
    """Return a context without modes, for calls of the native module, which has real tensors."""
    if torch._C._len_torch_dispatch_stack():
        return _disable_current_modes()
    return contextlib.nullcontext()


def is_fake(tensor: object) -> bool:
    """Tell whether a tensor has a form and no data."""
    return isinstance(tensor, FakeTensor)


def refuse_mixture(tensors: Iterable[torch.Tensor | None]) -> None:
    """Refuse to load real data into fake tensors, or fake tensors into real ones.

    Raises:
        RuntimeError: A tensor is of the other kind.

    """
    active = is_active()
    for tensor in tensors:
        if tensor is not None and tensor.device.type != "meta" and is_fake(tensor) != active:
            here, there = ("active", "outside of") if active else ("not active", "in")
            raise RuntimeError(
                f"FakeTensorMode is {here}, and the module was made {there} it: make the module "
                "and load it either both in the mode or both outside of it"
            )
