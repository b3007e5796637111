"""Finds tensors without data, which a file must not hold as if they had some."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from .._types import Name
from . import sharding

META = "on the meta device, and without data"
_UNINITIALISED = "uninitialised, and without shape and data"
_PLACEHOLDER = "emptied by DeepSpeed's ZeRO-3, whose ranks each hold a part of the data"
#: Instructions for each reason.
INSTEAD = {
    META: "materialize them with their weights (accelerate has those of offloaded layers: "
    "accelerate.utils.get_state_dict_offloaded_model), or leave them out",
    _UNINITIALISED: "run the lazy module once, so that its parameters get their shapes, or leave "
    "them out",
    _PLACEHOLDER: "make this call inside deepspeed.zero.GatheredParameters(list("
    "module.parameters())), on all ranks",
}
#: The most names in a message.
_MAX_SHOWN = 20


def without_data(names: Iterable[Name], tensors: Iterable[torch.Tensor]) -> dict[str, list[Name]]:
    """Return the names of the tensors that have no data, by the reason."""
    found: dict[str, list[Name]] = {}
    empty: list[tuple[Name, torch.Tensor]] = []
    with torch._C.DisableTorchFunctionSubclass():
        for name, tensor in zip(names, tensors, strict=True):
            if is_lazy(tensor):
                found.setdefault(_UNINITIALISED, []).append(name)
            elif sharding.local_of(tensor).is_meta:
                found.setdefault(META, []).append(name)
            elif not tensor.is_nested and tensor.numel() == 0:
                empty.append((name, tensor))
        if placeholders := [name for name, _ in _placeholders(empty)]:
            found[_PLACEHOLDER] = placeholders
    return found


def refuse(
    names: Iterable[Name], tensors: Iterable[torch.Tensor], *, allow_meta: bool = False
) -> None:
    """Refuse to save tensors that have no data.

    Args:
        names: Their names.
        tensors: The tensors.
        allow_meta: True if tensors of the meta device may be recorded without data.

    Raises:
        ValueError: There are such tensors; the message has their names, and what to do.

    """
    found = without_data(names, tensors)
    if allow_meta:
        found.pop(META, None)
    for reason, some in found.items():
        raise ValueError(f"{listed(some)} {reason}: {INSTEAD[reason]}")


def hint(tensor: torch.Tensor) -> str:
    """Return the reason why a tensor of a module has another shape than in a file, if known."""
    zero3 = " (of DeepSpeed's ZeRO-3: load inside deepspeed.zero.GatheredParameters)"
    return zero3 if _is_placeholder(tensor) else ""


def listed(names: Sequence[Name]) -> str:
    """Return names as the subject of a sentence, such as ``'a' and 'b' are``."""
    shown = [repr(name) for name in names[:_MAX_SHOWN]]
    if more := len(names) - len(shown):
        shown.append(f"{more:,} more")
    *first, last = shown
    return f"{', '.join(first)} and {last} are" if first else f"{last} is"


def _placeholders(empty: Sequence[tuple[Name, Any]]) -> Iterator[tuple[Name, torch.Tensor]]:
    """Yield the tensors without elements that stand for parameters of ZeRO-3.

    A ``state_dict()`` has other tensors over the storages of these parameters, without their
    attributes, so that the parameters themselves are looked for.
    """
    storages: set[int] = set()
    if "deepspeed" in sys.modules and any(tensor.shape == (0,) for _, tensor in empty):
        everything = gc.get_objects()
        parameters = [one for one in everything if type(one) is torch.nn.Parameter]
        storages = {one.untyped_storage()._cdata for one in parameters if _is_placeholder(one)}
    for name, tensor in empty:
        if _is_placeholder(tensor) or (
            tensor.shape == (0,) and storages and tensor.untyped_storage()._cdata in storages
        ):
            yield name, tensor


def _is_placeholder(tensor: Any) -> bool:
    whole = getattr(tensor, "ds_shape", None)
    return whole is not None and tensor.numel() == 0 < math.prod(whole)
