"""The plan of a prefetch: the tensors of a file to load, and the part of each."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ..file.slices import ranges_of
from .errors import SafetensorError
from .safetensors_file import SafetensorsFile, check_dtype


class PlannedTensor(NamedTuple):
    """A tensor that is to be loaded.

    Attributes:
        name: Its name.
        number: Its number in the file.
        ranges: The first index and the end in each dimension; None for the whole tensor.
        rest: The index to apply to these ranges to get the requested part; empty for all of them.

    """

    name: str
    number: int
    ranges: list[tuple[int, int]] | None = None
    rest: tuple[Any, ...] = ()


def plan_tensors(opened: SafetensorsFile, plan: Mapping[str, Any] | None) -> list[PlannedTensor]:
    """Return the tensors of a plan, in the order of the file.

    Args:
        opened: The file.
        plan: By name None for the whole tensor, or a slice of its first dimension, or a tuple of
            indices as for :meth:`PySafeSlice.__getitem__`. None for the whole file.

    Raises:
        SafetensorError: The plan names no tensors, or one that the file lacks; a slice does not fit
            its tensor; or torch has no dtype for a tensor.

    """
    if plan is None:
        plan = dict.fromkeys(opened.numbers)
    elif not isinstance(plan, Mapping):
        raise TypeError(f"argument 'plan': expected a dict, found {type(plan).__name__}")
    elif not plan:
        raise SafetensorError("prefetch plan selects no tensors")
    chosen = [_plan_tensor(opened, name, part) for name, part in plan.items()]
    chosen.sort(key=lambda tensor: tensor.number)
    for tensor in chosen:
        check_dtype(opened.file, tensor.number)
    return chosen


def _plan_tensor(opened: SafetensorsFile, name: Any, part: Any) -> PlannedTensor:
    if not isinstance(name, str):
        raise SafetensorError("prefetch plan keys must be tensor names")
    number = opened.find(name)
    if part is None:
        return PlannedTensor(name, number)
    _, shape, _ = opened.file.reader.describe(number)
    if isinstance(part, slice):
        _check_rows(name, part, shape)
    elif not isinstance(part, tuple):
        raise SafetensorError(
            f"prefetch plan values must be None or a slice, got {type(part)} for {name}"
        )
    try:
        ranges, rest = ranges_of(torch.Size(shape), part)
    except (IndexError, TypeError, ValueError) as error:
        raise SafetensorError(f"invalid prefetch plan slice for {name}: {error}") from error
    return PlannedTensor(name, number, ranges, rest)


def _check_rows(name: str, rows: slice, shape: list[int]) -> None:
    """Refuse slices of the first dimension that the safetensors library refuses."""
    if not shape:
        raise SafetensorError(f"cannot slice rows of the 0-d tensor {name}")
    for which, bound in (("start", rows.start), ("stop", rows.stop)):
        if bound is None:
            continue
        if not hasattr(bound, "__index__"):
            raise SafetensorError(f"prefetch plan slice bounds for {name} must be integers or None")
        # Indexing would clip the bound silently. In a plan it is a mistake.
        if abs(operator.index(bound)) > shape[0]:
            raise SafetensorError(
                f"prefetch plan slice {which} {bound} for {name} is out of range for "
                f"{shape[0]} rows"
            )
    # A step of 0 is no index at all.
    if rows.step not in (None, 0, 1):
        raise SafetensorError(f"prefetch plan slices must have step 1, got {rows.step} for {name}")
