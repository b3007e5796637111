"""Slices of tensors in a file."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import EllipsisType
from typing import Any, TypeAlias

import torch

from .._types import Name
from ..tensors.handles import dtype_of
from .open_file import OpenFile

#: An index as in brackets, which selects a part of each dimension.
Index: TypeAlias = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]


class TensorSlice:
    """A tensor of a file, of which parts can be loaded: ``file.slice(name)[10:20, :, 3]``.

    Only the bytes of the part are read. Ranges of the first dimension are contiguous in the file.
    Parts of other dimensions are read as several contiguous ranges, including the gaps between them
    if that is cheaper. Encrypted tensors are read in whole pieces of 2 MiB, the unit of encryption.
    With ``verify_hash`` the whole tensor is read and verified, because its hashes cover all of it.

    Indices are integers, slices with steps of at least 1, and ``...``, as in torch. With a step
    above 1, the elements between are read too.

    Attributes:
        shape: The dimensions of the whole tensor.
        dtype: Its dtype in the file.

    """

    def __init__(
        self, file: OpenFile, number: int, device: Callable[[], torch.device], verify: str
    ) -> None:
        self._file, self._number, self._device, self._verify = file, number, device, verify
        dtype, shape, _ = file.reader.describe(number)
        self.shape = torch.Size(shape)
        self.dtype = dtype_of(dtype)

    def __getitem__(self, index: Index) -> torch.Tensor:
        """Load a part of the tensor.

        Raises:
            IndexError, TypeError, ValueError: The index does not fit this tensor.
            OSError, ValueError, HashMismatchError, CryptographyError: See
                :class:`tensorizer.TensorDeserializer`.

        """
        ranges, rest = ranges_of(self.shape, index)
        part = self._file.sliced([(self._number, ranges)])
        ((_, tensor, _),) = part.load([0], self._device(), self._verify)
        return tensor[rest] if rest else tensor

    def __repr__(self) -> str:
        name = self._file.reader.name(self._number)
        return f"<{type(self).__name__} of {name!r}: {self.dtype} {list(self.shape)}>"


def ranges_of(
    shape: torch.Size, index: Index, *, clips: bool = True
) -> tuple[list[tuple[int, int]], tuple[Any, ...]]:
    """Return the range of each dimension that an index needs, and the index to apply to that part.

    Ends outside of a dimension are clipped, as in torch, or refused.

    Raises:
        IndexError, TypeError, ValueError: It is not an index of this shape.

    """
    steps = index if isinstance(index, tuple) else (index,)
    given = sum(step is not ... for step in steps)
    if len(steps) - given > 1:
        raise IndexError(f"expected at most one ..., found {len(steps) - given}: {index!r}")
    if given > len(shape):
        raise IndexError(f"too many indices for a tensor of {len(shape)} dimensions: {index!r}")
    if given == len(steps):
        steps = (*steps, ...)
    at = steps.index(...)
    missing = (slice(None),) * (len(shape) - given)
    ranges: list[tuple[int, int]] = []
    rest: list[Any] = []
    for dim, step in zip(shape, (*steps[:at], *missing, *steps[at + 1 :]), strict=True):
        if isinstance(step, slice):
            for end in () if clips else (step.start, step.stop):
                if end is not None and not -dim <= operator.index(end) <= dim:
                    raise IndexError(
                        f"{end} is outside of a dimension of {dim}: expected ends from {-dim} to "
                        f"{dim}, or None"
                    )
            start, stop, stride = step.indices(dim)
            if stride < 1:
                raise ValueError(f"slice steps must be at least 1, not {stride}")
            ranges.append((start, max(start, stop)))
            rest.append(slice(None, None, stride))
            continue
        if isinstance(step, (bool, torch.Tensor, EllipsisType)) or not hasattr(step, "__index__"):
            raise TypeError(f"expected integers, slices and ..., found {step!r}")
        number = operator.index(step)
        if not -dim <= number < dim:
            raise IndexError(f"index {number} is out of bounds for a dimension of {dim}")
        ranges.append((number % dim, number % dim + 1))
        rest.append(0)
    plain = all(isinstance(step, slice) and step.step == 1 for step in rest)
    return ranges, () if plain else tuple(rest)


def with_ones(tensor: torch.Tensor, rest: tuple[Any, ...], name: Name) -> torch.Tensor:
    """Return a tensor with a dimension of size 1 for each that its slice has dropped.

    Raises:
        ValueError: The slice has steps, so that it cannot be loaded in place.

    """
    if any(isinstance(step, slice) and step.step != 1 for step in rest):
        raise ValueError(f"the slice of {name!r} has steps, and cannot be loaded in place")
    for dim, step in enumerate(rest if isinstance(tensor, torch.Tensor) else ()):
        if not isinstance(step, slice) and dim <= tensor.dim():
            tensor = tensor.unsqueeze(dim)
    return tensor


def index_of(shape: torch.Size, given: Any) -> Index:
    """Return an index; ``(dimension, start, end)`` becomes a slice of that dimension."""
    dim_and_range = isinstance(given, tuple) and len(given) == 3
    if dim_and_range and not any(isinstance(step, slice) or step is ... for step in given):
        dim, start, stop = given
        dim = operator.index(dim)
        if not -len(shape) <= dim < len(shape):
            raise IndexError(f"dimension {dim} of a tensor of {len(shape)}")
        return (*(slice(None),) * (dim % len(shape)), slice(start, stop))
    index: Index = given
    return index
