"""Slices of tensors in a file."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping
from types import EllipsisType
from typing import Any, TypeAlias

import torch

from .._types import Name
from ..modules import state
from ..tensors.exchange import dtype_of
from .tensor_file import TensorFile

#: What selects a part of each dimension.
Index: TypeAlias = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]
#: First index and end in each dimension.
Ranges: TypeAlias = list[tuple[int, int]]


class TensorSlice:
    """A tensor of a file, of which parts can be loaded: ``file.slice(name)[10:20, :, 3]``.

    Only the bytes of the part are read: ranges of the first dimension as they lie in the file,
    parts of others in runs, together with what lies between them where that is cheaper. Of
    encrypted tensors whole pieces of 2 MiB are read. With ``verify_hash`` the whole tensor is read
    and verified, as its hashes are those of the whole.

    Indices are integers, slices with steps of at least 1, and ``...``, as torch has them; a step
    beyond 1 reads what lies between.

    Attributes:
        shape: The dimensions of the whole tensor.
        dtype: Its dtype in the file.

    """

    def __init__(
        self, file: TensorFile, number: int, device: Callable[[], torch.device], verify: str
    ) -> None:
        self._file, self._number, self._device, self._verify = file, number, device, verify
        dtype, shape, _ = file.reader.describe(number)
        self.shape = torch.Size(shape)
        self.dtype = dtype_of(dtype)

    def __getitem__(self, index: Index) -> torch.Tensor:
        """Load a part of the tensor.

        Raises:
            IndexError, TypeError, ValueError: The index is none of this tensor.
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


def ranges_of(shape: torch.Size, index: Index) -> tuple[Ranges, tuple[Any, ...]]:
    """Return the range of each dimension that an index needs, and the index into what is left.

    Raises:
        IndexError, TypeError, ValueError: It is no index of this shape.

    """
    steps = index if isinstance(index, tuple) else (index,)
    given = sum(step is not ... for step in steps)
    if given > len(shape) or len(steps) - given > 1:
        raise IndexError(f"too many indices for a tensor of {len(shape)} dimensions: {index!r}")
    if given == len(steps):
        steps = (*steps, ...)
    at = steps.index(...)
    missing = (slice(None),) * (len(shape) - given)
    ranges: Ranges = []
    rest: list[Any] = []
    for dim, step in zip(shape, (*steps[:at], *missing, *steps[at + 1 :]), strict=True):
        if isinstance(step, slice):
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


class Wanted:
    """Tensors to load, some of them in part.

    Raises:
        KeyError: A slice is of none of the tensors.
        IndexError, TypeError, ValueError: See :func:`ranges_of`.

    """

    def __init__(
        self, file: TensorFile, numbers: Mapping[Name, int], slices: Mapping[Name, Any]
    ) -> None:
        self._file = file
        self._parts: dict[int, tuple[Ranges, tuple[Any, ...]]] = {}
        among = set(numbers.values())
        for name, given in slices.items():
            number = numbers.get(name)
            if number is None:
                with contextlib.suppress(KeyError):
                    number = file.find(name)
            if number is None or number not in among:
                raise KeyError(f"a slice of {name!r}, which is not among the tensors to load")
            shape = torch.Size(file.reader.describe(number)[1])
            try:
                self._parts[number] = ranges_of(shape, _as_index(shape, given))
            except (IndexError, TypeError, ValueError) as error:
                raise type(error)(f"the slice of {name!r}: {error}") from None
        self._whole = sorted(set(numbers.values()).difference(self._parts))
        self._sliced = sorted(self._parts)

    def _part(self) -> TensorFile:
        return self._file.sliced([(number, self._parts[number][0]) for number in self._sliced])

    def load(self, device: torch.device) -> dict[int, torch.Tensor]:
        """Return the tensors by number."""
        if self._whole and self._sliced and not self._file.reader.seekable:
            # What comes front to back is read once.
            everything = sorted((*self._whole, *self._sliced))
            loaded = {number: tensor for number, tensor, _ in self._file.load(everything, device)}
            for number, (ranges, rest) in self._parts.items():
                part = loaded[number][tuple(slice(*ends) for ends in ranges)].clone()
                loaded[number] = part[rest] if rest else part
            return loaded
        loaded = {number: tensor for number, tensor, _ in self._file.load(self._whole, device)}
        if self._sliced:
            sliced = self._part()
            for at, tensor, _ in sliced.load(range(len(sliced)), device):
                number = self._sliced[at]
                rest = self._parts[number][1]
                loaded[number] = tensor[rest] if rest else tensor
        return loaded

    def fill(self, tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Fill tensors, given by number, and return them.

        Raises:
            ValueError: One of them is not of the dtype and shape of what is to be loaded.

        """
        if self._file.dtype is not None:
            raise ValueError("dtype= makes new tensors: expected it without out=")
        for number in self._sliced:
            rest = self._parts[number][1]
            if any(isinstance(step, slice) and step.step != 1 for step in rest):
                name = self._file.reader.name(number)
                raise ValueError(f"the slice of {name!r} has steps, and cannot be loaded in place")
        part = self._part()
        lent = [_with_ones(tensors[n], self._parts[n][1]) for n in self._sliced]
        for tensor, number in zip(lent, range(len(part)), strict=True):
            _check_fits(tensor, part, number)
        for number in self._whole:
            _check_fits(tensors[number], self._file, number)
        every = list(enumerate(tensors[number] for number in (*self._whole, *self._sliced)))
        if len(state.without_overlaps(every)) < len(every):
            raise ValueError("tensors to load into overlap in memory")
        if self._whole:
            self._file.fill([tensors[number] for number in self._whole], self._whole)
        if lent:
            part.fill(lent, range(len(part)))
        return dict(tensors)


def _with_ones(tensor: torch.Tensor, rest: tuple[Any, ...]) -> torch.Tensor:
    """Return a tensor with the dimensions of one index that its slice has dropped."""
    for dim, step in enumerate(rest if isinstance(tensor, torch.Tensor) else ()):
        if not isinstance(step, slice) and dim <= tensor.dim():
            tensor = tensor.unsqueeze(dim)
    return tensor


def _check_fits(tensor: torch.Tensor, file: TensorFile, number: int) -> None:
    """Refuse what cannot be loaded into."""
    name = file.reader.name(number)
    kind, shape, _ = file.reader.describe(number)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected a tensor to load {name!r} into, found {type(tensor).__name__}")
    found = f"the tensor to load into is {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
    if tensor.dtype != dtype_of(kind) or list(tensor.shape) != shape:
        raise ValueError(f"tensor `{name}`: the file holds torch.{kind} {shape}, {found}")
    if tensor.is_meta or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"tensor `{name}`: expected memory in row-major order, {found}")


def _as_index(shape: torch.Size, given: Any) -> Index:
    """Return an index, which may be given as dimension, start and end."""
    dim_and_range = isinstance(given, tuple) and len(given) == 3
    if dim_and_range and not any(isinstance(step, slice) or step is ... for step in given):
        dim, start, stop = given
        dim = operator.index(dim)
        if not -len(shape) <= dim < len(shape):
            raise IndexError(f"dimension {dim} of a tensor of {len(shape)}")
        return (*(slice(None),) * (dim % len(shape)), slice(start, stop))
    index: Index = given
    return index
