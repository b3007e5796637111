"""Registers the operators with torch's tracers, before anything is compiled."""

from __future__ import annotations

import torch

from .. import _native  # noqa: F401  # the import of the native module defines the operators
from ..tensors import without_data
from ..tensors.handles import dtype_of
from .dynamo import break_graphs, extend_dynamo
from .import_hook import when_imported
from .inductor import keep_order

_ordered = torch._library.effects.EffectType.ORDERED
for _overload in ("save", "save.list", "load.checked", "_begin", "_end"):
    # Without this, a save is deleted from compiled graphs, because nothing reads its result.
    torch.library._register_effectful_op(f"tensorizer::{_overload}", _ordered)


@torch.library.register_fake("tensorizer::load.checked")  # type: ignore[untyped-decorator]
def _load_checked(
    uri: str,
    names: list[str],
    expected: list[str],
    *,
    device: torch.device | None = None,
    verify: bool = False,
    num_readers: int | None = None,
    key: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Return tensors as in ``expected``, such as ``float32[40,30]``; the file is not looked at.

    torch also calls this with real tensors of the meta device; only a key can be one.
    """
    if key is not None and key.is_meta:
        raise ValueError("the key is on the meta device, and has no bytes: expected one with data")
    tensors = []
    for text in expected:
        dtype, _, shape = text.removesuffix("]").partition("[")
        dims = [int(dim) for dim in shape.split(",") if dim]
        tensors.append(torch.empty(dims, dtype=dtype_of(dtype), device=device or "cpu"))
    return tensors


@torch.library.register_fake("tensorizer::_begin")  # type: ignore[untyped-decorator]
def _begin(uri: str) -> torch.Tensor:
    return torch.empty(0)


@torch.library.impl("tensorizer::_refuse_without_data", "default")
def _refuse_without_data(names: list[str], tensors: list[torch.Tensor]) -> None:
    """Refuse to save uninitialised tensors, and those that ZeRO-3 has emptied."""
    without_data.refuse(names, tensors)


when_imported("torch._dynamo.trace_rules", break_graphs)
when_imported("torch._dynamo.variables.torch", extend_dynamo)
when_imported("torch._inductor.lowering", keep_order)
