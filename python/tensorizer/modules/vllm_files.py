"""Files that vLLM wrote from a model of its own, whose weights it had changed for its kernels.

The empty model that vLLM then has filled is one from before these changes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .._errors import FormatError
from .._types import TensorType
from . import state
from .strides import copy_into, elements_spanned

#: The metadata that has the strides of tensors whose memory is not row-major: JSON, by name.
_STRIDES = "vllm.strides"
#: The most elements between which those of a tensor may lie, for each of them: kernels pad some.
_MOST_PADDING = 4


def strides_to_store(
    names: Sequence[str], tensors: Sequence[torch.Tensor]
) -> tuple[str, str] | None:
    """Return the metadata with the strides of a model of vLLM; None for any other model."""
    if not any(name.rpartition(".")[2] in state.MARKERS for name in names):
        return None
    strided = {
        name: tensor.stride()
        for name, tensor in zip(names, tensors, strict=True)
        if elements_spanned(tensor) is not None and not tensor.is_contiguous()
    }
    return (_STRIDES, json.dumps(strided)) if strided else None


def stored_strides(metadata: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return the strides in a file's metadata, by name.

    Raises:
        FormatError: They are not what :func:`strides_to_store` makes.

    """
    text = dict(metadata).get(_STRIDES, "{}")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise FormatError(f"metadata {_STRIDES}: expected strides by name, found {text[:80]!r}")
    return found


def with_strides(tensor: torch.Tensor, strides: Any) -> torch.Tensor:
    """Return a loaded tensor with the strides that its file states.

    Raises:
        FormatError: They do not fit its shape.

    """
    most = _MOST_PADDING * max(tensor.numel(), 1)
    fits = isinstance(strides, list) and len(strides) == tensor.dim()
    fits = fits and all(type(one) is int and 0 <= one <= most for one in strides)
    if fits:
        spanned = elements_spanned(torch.empty_strided(tensor.shape, strides, device="meta"))
        fits = spanned is not None and spanned <= most
    if not fits:
        raise FormatError(
            f"metadata {_STRIDES}: expected strides of a tensor of {list(tensor.shape)}, "
            f"found {str(strides)[:80]}"
        )
    ordered = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    copy_into(ordered, tensor.detach())
    return ordered


def accepted_shapes(
    shapes: Sequence[Sequence[int]],
    tensors: Sequence[torch.Tensor | None],
    dtypes: Iterable[torch.dtype],
) -> list[Sequence[int]]:
    """Return the shapes of a file, or those of a model's tensors where the difference is vLLM's.

    That is any difference if tensors are quantized, and else one of shapes of equal sizes.
    """
    quantized = any(dtype.itemsize == 1 or dtype is torch.int32 for dtype in dtypes)
    return [
        tensor.shape
        if tensor is not None and (quantized or math.prod(shape) == tensor.numel())
        else shape
        for shape, tensor in zip(shapes, tensors, strict=True)
    ]


def removed_parameters(root: torch.nn.Module, found: state.Found) -> list[state.TensorSlot]:
    """Return the slots of parameters that vLLM had removed: their modules' other tensors are there.

    ``found`` has the slots of all tensors of the file, and the tensors in these slots.
    """
    modules = {id(slot.module) for slot, _ in found}
    there = {id(tensor) for _, tensor in found}
    return [
        slot
        for _, _, kind, slot, tensor in state.walk(root)
        if kind is TensorType.PARAM and id(slot.module) in modules and id(tensor) not in there
    ]
