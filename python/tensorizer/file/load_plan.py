"""The tensors that a call wants of a file, and their load."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..modules import state
from ..tensors import sharding
from ..tensors.batches import in_batches
from ..tensors.handles import are_plain, cast_dtype, dtype_of, is_fillable, refuse_short
from ..tensors.sharding import Part
from .arguments import device_or_function, resolve_device
from .open_file import OpenFile
from .parts import planned_parts
from .placement import Places
from .progress import ProgressReporter
from .request import Request
from .slices import with_ones

#: Bytes of boxes that are read into other memory at a time, because theirs is not contiguous.
_COPIED_BYTES = 256 << 20


class LoadPlan:
    """A request, looked up in a file: its tensors by number, and the native plan of their parts.

    Args:
        request: The request.
        file: The file.
        reporter: Gets the number of bytes that are read, if it is given.

    Raises:
        KeyError, IndexError, TypeError, ValueError, NotImplementedError: See
            :func:`tensorizer.load`.

    Attributes:
        file: The file.
        numbers: The numbers of the tensors, in order.
        read: The file, or a view of it whose tensors are the wanted parts.

    """

    def __init__(
        self, request: Request, file: OpenFile, reporter: ProgressReporter | None = None
    ) -> None:
        self._request, self.file = request, file
        self._device, self._device_of = device_or_function(request.device)
        default = torch.get_default_device() if self._device is None else self._device
        #: The device of tensors for which no other device is given.
        self.device = resolve_device(default)
        #: Cached: many tensors share few devices.
        self._resolve = functools.cache(resolve_device)
        self._keys = request.find(file)
        #: The tensors of ``out`` or ``like``, by number.
        self._given = self._given_tensors()
        self.numbers = sorted(set(self._keys.values()))
        self._parts = planned_parts(file, request, self._keys, self._given)
        self.read = self._parts.file
        if reporter is not None:
            reporter.total = self._total()

    def _given_tensors(self) -> dict[int, Any]:
        """Return the tensors of ``out`` or ``like``, by number.

        Raises:
            KeyError, ValueError: A tensor is missing in ``out``, or two are for the same one.

        """
        out, like = self._request.out, self._request.like
        if out is not None:
            missing = [key for key in self._keys if key not in out]
            if missing:
                raise KeyError(f"no tensor to load {missing[0]!r} into")
            if len(set(self._keys.values())) < len(self._keys):
                raise ValueError(
                    "two of the names to load into belong to the same tensor of the file"
                )
            return {number: out[key] for key, number in self._keys.items()}
        if not like:
            return {}
        tensors = {key: one for key, one in like.items() if isinstance(one, torch.Tensor)}
        return {number: tensors[key] for key, number in self._keys.items() if key in tensors}

    def subset(self, numbers: Iterable[int]) -> LoadPlan:
        """Return the plan for some of the tensors."""
        some = copy.copy(self)
        some.numbers = sorted(numbers)
        return some

    def is_cut(self, number: int) -> bool:
        """Tell whether only a part of a tensor is wanted."""
        return number in self._parts.cuts

    def part(self, number: int) -> Part:
        """Return the wanted part of a tensor, which may be all of it."""
        cut, first = self._parts.cuts.get(number), self._parts.first
        if isinstance(cut, Part):
            return cut
        ranges = None if first is None else self.read.reader.ranges(first[number])
        if ranges is None:
            ranges = [(0, dim) for dim in self.file.reader.describe(number)[1]]
        return Part.of_ranges(ranges)

    def _total(self) -> int:
        """Return the number of bytes that are read for all of them."""
        if self._parts.first is None:
            return self.file.reader.data_len(self.numbers)
        whole = [number for number in self.numbers if not self.is_cut(number)]
        boxes = self.subset(filter(self.is_cut, self.numbers)).entries()
        return self.file.reader.data_len(whole) + sum(self.read.reader.memory_lens(boxes))

    def entries(self) -> list[int]:
        """Return the numbers in ``read`` of the boxes of all tensors."""
        first, counts = self._parts.first, self._parts.box_counts
        if first is None:
            return self.numbers
        return [first[n] + at for n in self.numbers for at in range(counts.get(n, 1))]

    def numbers_of_entries(self) -> list[int]:
        """Return the tensor of each of the :meth:`entries`."""
        if not self._parts.box_counts:
            return self.numbers
        return [n for n in self.numbers for _ in range(self._box_count(n))]

    def _box_count(self, number: int) -> int:
        return self._parts.box_counts.get(number, 1)

    # Devices

    def device_of(self, number: int) -> torch.device:
        """Return the device for a tensor."""
        given = self._given.get(number)
        if self._device_of is not None:
            named = self._device_of(self.file.reader.name(number))
            return self.device if named is None else self._resolve(named)
        if self._device is not None or given is None or self._request.out is not None:
            return self.device
        device = sharding.device_of(given)
        return self.device if device.type == "meta" else resolve_device(device)

    def _places(self) -> Places:
        """Return the device of all boxes, or of each."""
        if self._request.like is None and self._device_of is None:
            return self.device
        of = {number: self.device_of(number) for number in self.numbers}
        found = set(of.values())
        return found.pop() if len(found) == 1 else [of[n] for n in self.numbers_of_entries()]

    # Loading

    def load(self, verify: str | None = None) -> dict[Any, torch.Tensor]:
        """Load in this process; return the tensors by key, in the requested form."""
        if self._request.out is not None:
            self.fill(self._targets(), verify)
            return self.by_key({})
        return self.by_key(self.load_new(verify))

    def load_new(self, verify: str | None = None) -> dict[int, torch.Tensor]:
        """Return new tensors, by number."""
        tensors = (one for _, one, _ in self.read.load(self.entries(), self._places(), verify))
        if not self._parts.box_counts:
            return dict(zip(self.numbers, tensors, strict=True))
        # Joined at once, so that no more than a batch is held twice.
        return {
            number: self._joined(number, list(itertools.islice(tensors, self._box_count(number))))
            for number in self.numbers
        }

    def _joined(self, number: int, boxes: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the boxes of a tensor's part as one tensor."""
        if len(boxes) == 1:
            return boxes[0]
        part = self.part(number)
        dtype = cast_dtype(dtype_of(self.file.reader.describe(number)[0]), self.file.dtype)
        device = boxes[0].device if boxes else self.device_of(number)
        whole = torch.empty(part.shape, dtype=dtype, device=device)
        for box, tensor in zip(part.boxes, boxes, strict=True):
            box.of_part(whole).copy_(tensor)
        return whole

    def _targets(self) -> dict[int, torch.Tensor]:
        """Return the memory of ``out``, by number, in the shapes of the parts to be loaded."""
        if not self._parts.rests and are_plain(self._given.values()):
            return {number: self._given[number] for number in self.numbers}
        targets: dict[int, torch.Tensor] = {}
        for key, number in self._keys.items():
            local = sharding.local_of(self._given[number])
            targets[number] = with_ones(local, self._parts.rests.get(number, ()), key)
        return targets

    def checked_targets(self) -> dict[int, torch.Tensor]:
        """Return the memory of ``out``, by number, after checking it; empty without ``out``."""
        if self._request.out is None:
            return {}
        targets = self._targets()
        self.check_fits(targets)
        return targets

    def fill(self, tensors: Mapping[int, torch.Tensor], verify: str | None = None) -> None:
        """Fill tensors, given by number.

        Raises:
            TypeError, ValueError: A tensor does not have the dtype and shape of what is to be
                loaded.

        """
        entries, targets = self.entries(), [tensors[number] for number in self.numbers]
        several = self.numbers if self._parts.box_counts else ()
        copied = {n: tensors[n].nbytes for n in several if self._box_count(n) > 1}
        plain = self.file.dtype is None and len(entries) == len(targets) and not copied
        plain = plain and are_plain(targets)
        if plain and not self.read.strided(entries):
            try:
                self.read.fill(targets, entries, verify)
            except (ValueError, NotImplementedError, RuntimeError):
                # Nothing was filled if a tensor does not fit; this check raises a more precise
                # error.
                self.check_fits(tensors)
                raise
            return
        self.check_fits(tensors)
        # The boxes of a tensor are read together, as a pipe is read only once.
        for numbers in in_batches(self.numbers, lambda n: copied.get(n, 0), _COPIED_BYTES):
            some = self.subset(numbers)
            views = list(some._views(tensors))
            memory = [one if one.is_contiguous() else _contiguous(one) for one in views]
            self.read.fill(memory, some.entries(), verify)
            for view, filled in zip(views, memory, strict=True):
                if filled is not view:
                    view.copy_(filled)

    def _views(self, tensors: Mapping[int, torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the memory of each of the :meth:`entries`."""
        for number in self.numbers:
            tensor = tensors[number].detach()
            if self._box_count(number) == 1:
                yield tensor
            else:
                yield from (box.of_part(tensor) for box in self.part(number).boxes)

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

    # Results

    @property
    def returns_as_loaded(self) -> bool:
        """True if tensors are returned as they are loaded."""
        return not self._parts.rests and not sharding.are_any_sharded(self._given.values())

    def by_key(self, tensors: Mapping[int, torch.Tensor]) -> dict[Any, torch.Tensor]:
        """Return tensors by key, in the requested form."""
        if self._request.out is not None:
            return {key: self._given[number] for key, number in self._keys.items()}
        if self.returns_as_loaded:
            return {key: tensors[number] for key, number in self._keys.items()}
        return {key: self.in_requested_form(n, tensors[n]) for key, n in self._keys.items()}

    def keys_by_number(self) -> dict[int, list[Any]]:
        """Return the keys under which each tensor is returned."""
        keys: dict[int, list[Any]] = {}
        for key, number in self._keys.items():
            keys.setdefault(number, []).append(key)
        return keys

    def in_requested_form(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the requested form."""
        given, rest = self._given.get(number), self._parts.rests.get(number)
        if sharding.is_sharded(given):
            tensor = sharding.as_sharded(tensor, given)
        return tensor[rest] if rest else tensor


def _contiguous(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _check_fits(tensor: torch.Tensor, file: OpenFile, number: int, part: Part) -> None:
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
