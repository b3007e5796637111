"""Loads some tensors of a file, as wholes or in part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from .._native import Reader
from ..modules import state
from ..tensors.handles import (
    are_plain,
    cast_dtype,
    copied,
    dtype_of,
    is_fillable,
    refuse_short,
)
from ..tensors.sharding import Box, Part
from .planned_parts import PlannedParts
from .tensor_file import TensorFile


class Selection:
    """Tensors to load, by number; of some of them only a part.

    Args:
        file: The file that holds them.
        numbers: Their numbers.
        parts: The parts of those that are not wanted as a whole, by number.

    """

    def __init__(self, file: TensorFile, numbers: Iterable[int], parts: Mapping[int, Part]) -> None:
        self.file, self.parts = file, parts
        self.numbers = sorted(set(numbers))

    def part(self, number: int) -> Part:
        """Return the wanted part of a tensor, which may be all of it."""
        found = self.parts.get(number)
        return found or Part.of_ranges((0, dim) for dim in self.file.reader.describe(number)[1])

    def total(self) -> int:
        """Return the number of bytes that are read for all of them."""
        if not self.parts:
            return self.file.reader.data_len(self.numbers)
        whole, cut = self._split(self.numbers)
        planned = self._planned(cut)
        if planned is not None:
            read = sum(map(planned[0].memory_lens().__getitem__, planned[1]))
        else:
            sizes = (math.prod(self.parts[number].shape) for number in cut)
            dtypes = (dtype_of(dtype) for dtype, _ in self.file.reader.describe_all(cut))
            read = sum(size * dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=True))
        return self.file.reader.data_len(whole) + read

    def _planned(self, cut: Sequence[int]) -> tuple[Reader, Sequence[int]] | None:
        """Return a reader of parts of tensors, and their numbers in it; None if there is none."""
        numbers = (
            self.parts.numbers_in_reader(cut) if isinstance(self.parts, PlannedParts) else None
        )
        if numbers is None or not isinstance(self.parts, PlannedParts):
            return None
        return self.parts.reader, numbers

    def _split(self, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the numbers of tensors wanted as a whole, and of those wanted in part."""
        if not self.parts:
            return list(numbers), []
        cut = [number for number in numbers if number in self.parts]
        if len(cut) == len(numbers):
            return [], cut
        return [number for number in numbers if number not in self.parts], cut

    def load(
        self, device_of: Callable[[int], torch.device], verify: str | None = None
    ) -> dict[int, torch.Tensor]:
        """Return the tensors by number, each on its device."""
        devices = {number: device_of(number) for number in self.numbers}
        by_device: dict[torch.device, list[int]] = {}
        for number, device in devices.items():
            by_device.setdefault(device, []).append(number)
        if len(by_device) > 1 and not self.file.reader.seekable:
            # A stream that cannot seek is read only once.
            here = self._load(self.numbers, torch.device("cpu"), verify)
            return {number: tensor.to(devices[number]) for number, tensor in here.items()}
        if len(by_device) > 1 and self.file.can_load_to_each(by_device):
            return self._load_to_each(devices, verify)
        loaded: dict[int, torch.Tensor] = {}
        for device, numbers in by_device.items():
            loaded.update(self._load(numbers, device, verify))
        return loaded

    def load_to(self, device: torch.device, verify: str | None = None) -> dict[int, torch.Tensor]:
        """Return the tensors by number, all on one device."""
        return self._load(self.numbers, device, verify)

    def _load(
        self, numbers: Sequence[int], device: torch.device, verify: str | None
    ) -> dict[int, torch.Tensor]:
        whole, cut = self._split(numbers)
        if whole and cut and not self.file.reader.seekable:
            loaded = {n: tensor for n, tensor, _ in self.file.load(numbers, device, verify)}
            for number in cut:
                boxes = self.parts[number].boxes
                found = [copied(box.of_whole(loaded[number])) for box in boxes]
                loaded[number] = joined(self.parts[number], found, self._dtype(number), device)
            return loaded
        loaded = {number: tensor for number, tensor, _ in self.file.load(whole, device, verify)}
        if cut:
            sliced, numbers_in_file, is_one_box = self._sliced(cut)
            tensors = (tensor for _, tensor, _ in sliced.load(numbers_in_file, device, verify))
            if is_one_box:
                loaded.update(zip(cut, tensors, strict=True))
                return loaded
            for number in cut:
                part = self.parts[number]
                found = [next(tensors) for _ in part.boxes]
                loaded[number] = joined(part, found, self._dtype(number), device)
        return loaded

    def _load_to_each(
        self, devices: Mapping[int, torch.device], verify: str | None
    ) -> dict[int, torch.Tensor]:
        """Return the tensors by number, each on its device, loading to all devices at once."""
        whole, cut = self._split(self.numbers)
        tensors = self.file.load_to_each(whole, [devices[number] for number in whole], verify)
        loaded = dict(zip(whole, tensors, strict=True))
        if cut:
            sliced, of_boxes, _ = self._sliced(cut)
            box_devices = [devices[number] for number in cut for _ in self.parts[number].boxes]
            boxes = iter(sliced.load_to_each(of_boxes, box_devices, verify))
            for number in cut:
                part, device = self.parts[number], devices[number]
                found = [next(boxes) for _ in part.boxes]
                loaded[number] = joined(part, found, self._dtype(number), device)
        return loaded

    def _sliced(self, cut: Sequence[int]) -> tuple[TensorFile, Sequence[int], bool]:
        """Return a file of the parts' boxes, their numbers there, and if each part has just one."""
        planned = self._planned(cut)
        file = None if planned is None else self.file.with_reader(planned[0])
        if planned is not None and file is not None:
            return file, planned[1], True
        pairs = [(number, box.ranges) for number in cut for box in self.parts[number].boxes]
        return self.file.sliced(pairs), range(len(pairs)), False

    def fill(
        self, tensors: Mapping[int, torch.Tensor], verify: str | None = None
    ) -> dict[int, torch.Tensor]:
        """Fill tensors, given by number, and return them.

        Raises:
            TypeError, ValueError: A tensor does not have the dtype and shape of what is to be
                loaded.

        """
        whole, cut = self._split(self.numbers)
        if not self.file.reader.seekable and self._are_on_several_devices(tensors):
            # A stream is read only once, for all devices.
            self.check_fits(tensors)
            for number, tensor in self._load(self.numbers, torch.device("cpu"), verify).items():
                tensors[number].detach().copy_(tensor)
            return dict(tensors)
        if self._fill_at_once(tensors, whole, cut, verify):
            return dict(tensors)
        self.check_fits(tensors)
        if cut and not self.file.reader.seekable:
            # A stream that cannot seek is read only once.
            for number, tensor in self._load(self.numbers, torch.device("cpu"), verify).items():
                tensors[number].detach().copy_(tensor)
            return dict(tensors)
        if whole:
            self.file.fill([tensors[number] for number in whole], whole, verify)
        pairs = [(number, box) for number in cut for box in self.parts[number].boxes]
        views = [box.of_part(tensors[number].detach()) for number, box in pairs]
        direct = [at for at, view in enumerate(views) if view.is_contiguous()]
        if direct:
            part = self._sliced_boxes(pairs[at] for at in direct)
            part.fill([views[at] for at in direct], range(len(part)), verify)
        # Boxes that are not contiguous in memory are loaded into other memory first, one by one.
        for at, view in enumerate(views):
            if not view.is_contiguous():
                part = self._sliced_boxes([pairs[at]])
                (loaded,), _ = part.read([0], view.device, verify)
                view.copy_(loaded)
        return dict(tensors)

    def _are_on_several_devices(self, tensors: Mapping[int, torch.Tensor]) -> bool:
        """Tell whether tensors are on several devices; other objects are refused later."""
        devices = {getattr(tensors[number], "device", None) for number in self.numbers}
        return len(devices) > 1

    def _fill_at_once(
        self,
        tensors: Mapping[int, torch.Tensor],
        whole: Sequence[int],
        cut: Sequence[int],
        verify: str | None,
    ) -> bool:
        """Fill tensors by one native call that checks them too, if possible; tell whether it was.

        Raises:
            TypeError, ValueError: See :meth:`fill`.

        """
        one_kind = not (whole and cut) and self.file.dtype is None
        targets = [tensors[number] for number in self.numbers]
        if not one_kind or not are_plain(targets) or self.file.strided(self.numbers):
            return False
        file, numbers = self.file, whole
        if cut:
            planned = self._planned(cut)
            sliced = None if planned is None else file.with_reader(planned[0])
            if planned is None or sliced is None or not file.reader.seekable:
                return False
            file, numbers = sliced, list(planned[1])
        try:
            file.fill(targets, numbers, verify)
        except (ValueError, NotImplementedError, RuntimeError):
            # Nothing was filled if a tensor does not fit; this check raises a more precise error.
            self.check_fits(tensors)
            raise
        return True

    def _dtype(self, number: int) -> torch.dtype:
        """Return the dtype that a tensor has once it is loaded."""
        return cast_dtype(dtype_of(self.file.reader.describe(number)[0]), self.file.dtype)

    def _sliced_boxes(self, pairs: Iterable[tuple[int, Box]]) -> TensorFile:
        return self.file.sliced([(number, box.ranges) for number, box in pairs])

    def check_fits(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Refuse tensors that cannot be filled with the wanted ones.

        Raises:
            TypeError, ValueError: A tensor cannot be filled.

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
    """Return the boxes of a part as one tensor."""
    if len(tensors) == 1:
        return tensors[0]
    joined = torch.empty(part.shape, dtype=dtype, device=device)
    for box, tensor in zip(part.boxes, tensors, strict=True):
        box.of_part(joined).copy_(tensor)
    return joined


def _check_fits(tensor: torch.Tensor, file: TensorFile, number: int, part: Part) -> None:
    """Raise unless a tensor can be filled with a part."""
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
