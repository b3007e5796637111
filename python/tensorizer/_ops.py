"""What torch's tracers must know of the operators before anything is compiled."""

from __future__ import annotations

import torch

from ._native import Reader  # the import of the native module defines the operators

_ordered = torch._library.effects.EffectType.ORDERED
for _overload in ("save", "save.list", "load.list"):
    # Unmarked, a save is deleted from compiled graphs, because nothing reads what it returns.
    torch.library._register_effectful_op(f"tensorizer::{_overload}", _ordered)


@torch.library.register_fake("tensorizer::load.list")  # type: ignore[untyped-decorator]
def _load_list(
    uri: str, names: list[str], *, device: torch.device | None = None
) -> list[torch.Tensor]:
    """Shapes and dtypes from the index of the file, which must exist when a graph is traced."""
    reader = Reader.from_path(uri)
    number = {name: at for at, name in enumerate(reader.stored_names())}
    missing = [name for name in names if name not in number]
    if missing:
        raise RuntimeError(f"Tensor not found: `{missing[0]}` in `{uri}`")
    described = [reader.describe(number[name]) for name in names]
    return [
        torch.empty(shape, dtype=getattr(torch, dtype), device=device or "cpu")
        for dtype, shape, _ in described
    ]
