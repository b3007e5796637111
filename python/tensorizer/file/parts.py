"""Loading some tensors of a file, as a whole or the part of each that a process has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from ..modules import state
from ..tensors.exchange import cast_dtype, copied, dtype_of, is_fillable, refuse_short
from ..tensors.sharding import Box, Part
from .tensor_file import TensorFile


class Wanted:
    """Tensors to load, by number, of some of them a part.

    Args:
        file: Where they are.
        numbers: Which.
        parts: What is wanted of those that are not wanted as a whole.

    """

    def __init__(self, file: TensorFile, numbers: Iterable[int], parts: Mapping[int, Part]) -> None:
        self.file, self.parts = file, parts
        self.numbers = sorted(set(numbers))

    def part(self, number: int) -> Part:
        """Return what is wanted of a tensor."""
        found = self.parts.get(number)
        return found or Part.of_ranges((0, dim) for dim in self.file.reader.describe(number)[1])

    def size(self, number: int) -> int:
        """Return how many bytes of a tensor are read."""
        if number not in self.parts:
            return self.file.reader.data_len([number])
        dtype = self.file.reader.describe(number)[0]
        return math.prod(self.parts[number].shape) * dtype_of(dtype).itemsize

    def total(self) -> int:
        """Return how many bytes of all of them are read."""
        if not self.parts:
            return self.file.reader.data_len(self.numbers)
        return sum(map(self.size, self.numbers))

    def load(
        self, device_of: Callable[[int], torch.device], verify: str | None = None
    ) -> dict[int, torch.Tensor]:
        """Return the tensors by number, each on its device."""
        by_device: dict[torch.device, list[int]] = {}
        for number in self.numbers:
            by_device.setdefault(device_of(number), []).append(number)
        loaded: dict[int, torch.Tensor] = {}
        if len(by_device) > 1 and not self.file.reader.seekable:
            # What comes front to back is read once.
            here = self._load(self.numbers, torch.device("cpu"), verify)
            return {number: tensor.to(device_of(number)) for number, tensor in here.items()}
        for device, numbers in by_device.items():
            loaded.update(self._load(numbers, device, verify))
        return loaded

    def _load(
        self, numbers: Sequence[int], device: torch.device, verify: str | None
    ) -> dict[int, torch.Tensor]:
        whole = [number for number in numbers if number not in self.parts]
        cut = [number for number in numbers if number in self.parts]
        if whole and cut and not self.file.reader.seekable:
            loaded = {n: tensor for n, tensor, _ in self.file.load(numbers, device, verify)}
            for number in cut:
                boxes = self.parts[number].boxes
                found = [copied(box.of_whole(loaded[number])) for box in boxes]
                loaded[number] = joined(self.parts[number], found, self._dtype(number), device)
            return loaded
        loaded = {number: tensor for number, tensor, _ in self.file.load(whole, device, verify)}
        if cut:
            sliced = self.file.sliced(
                [(number, box.ranges) for number in cut for box in self.parts[number].boxes]
            )
            tensors = (tensor for _, tensor, _ in sliced.load(range(len(sliced)), device, verify))
            for number in cut:
                part = self.parts[number]
                found = [next(tensors) for _ in part.boxes]
                loaded[number] = joined(part, found, self._dtype(number), device)
        return loaded

    def fill(
        self, tensors: Mapping[int, torch.Tensor], verify: str | None = None
    ) -> dict[int, torch.Tensor]:
        """Fill tensors, given by number, and return them.

        Raises:
            ValueError: One of them is not of the dtype and shape of what is to be loaded.

        """
        self.check_fits(tensors)
        whole = [number for number in self.numbers if number not in self.parts]
        cut = [number for number in self.numbers if number in self.parts]
        if cut and not self.file.reader.seekable:
            # What comes front to back is read once.
            for number, tensor in self._load(self.numbers, torch.device("cpu"), verify).items():
                tensors[number].detach().copy_(tensor)
            return dict(tensors)
        if whole:
            self.file.fill([tensors[number] for number in whole], whole, verify)
        pairs = [(number, box) for number in cut for box in self.parts[number].boxes]
        views = [box.of_part(tensors[number].detach()) for number, box in pairs]
        direct = [at for at, view in enumerate(views) if view.is_contiguous()]
        if direct:
            part = self._sliced(pairs[at] for at in direct)
            part.fill([views[at] for at in direct], range(len(part)), verify)
        # Boxes that are not together in memory come to memory of their own first, one by one.
        for at, view in enumerate(views):
            if not view.is_contiguous():
                part = self._sliced([pairs[at]])
                (loaded,), _ = part.read([0], view.device, verify)
                view.copy_(loaded)
        return dict(tensors)

    def _dtype(self, number: int) -> torch.dtype:
        """Return the dtype that a tensor has once it is loaded."""
        return cast_dtype(dtype_of(self.file.reader.describe(number)[0]), self.file.dtype)

    def _sliced(self, pairs: Iterable[tuple[int, Box]]) -> TensorFile:
        return self.file.sliced([(number, box.ranges) for number, box in pairs])

    def check_fits(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Refuse tensors that cannot be filled with what is wanted.

        Raises:
            TypeError, ValueError: One of them cannot.

        """
        if self.file.dtype is not None:
            raise ValueError("dtype= makes new tensors: expected it without out=")
        for number in self.numbers:
            _check_fits(tensors[number], self.file, number, self.part(number))
        every = [(number, tensors[number]) for number in self.numbers]
        refuse_short((self.file.reader.name(number), tensor) for number, tensor in every)
        if len(state.without_overlaps(every)) < len(every):
            raise ValueError("tensors to load into overlap in memory")


def joined(
    part: Part, tensors: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a part of several boxes as one tensor."""
    if len(tensors) == 1:
        return tensors[0]
    joined = torch.empty(part.shape, dtype=dtype, device=device)
    for box, tensor in zip(part.boxes, tensors, strict=True):
        box.of_part(joined).copy_(tensor)
    return joined


def _check_fits(tensor: torch.Tensor, file: TensorFile, number: int, part: Part) -> None:
    """Refuse what cannot be loaded into."""
    name = file.reader.name(number)
    kind, _, _ = file.reader.describe(number)
    shape = list(part.shape)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected a tensor to load {name!r} into, found {type(tensor).__name__}")
    found = f"the tensor to load into is {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
    if tensor.dtype != dtype_of(kind) or list(tensor.shape) != shape:
        raise ValueError(f"tensor `{name}`: the file holds torch.{kind} {shape}, {found}")
    if not is_fillable(tensor):
        raise ValueError(f"tensor `{name}`: expected memory in row-major order, {found}")
