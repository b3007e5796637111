"""What a load is asked for: the tensors, the parts of them, and their devices or memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .._types import FilterFuncType, Name
from ..tensors import sharding
from ..tensors.handles import are_plain
from ..tensors.sharding import Part, Shard
from .arguments import DeviceOf, DeviceType, device_or_function, resolve_device
from .planned_parts import PlannedParts
from .progress import ProgressReporter
from .selection import Selection
from .slices import parts_of, with_ones
from .tensor_file import TensorFile

if TYPE_CHECKING:
    from ..group.members import Members


@dataclass(frozen=True)
class LoadSpec:
    """Arguments of :func:`tensorizer.load`, which documents them."""

    names: Sequence[Name] | None
    filter_func: FilterFuncType | None
    slices: Mapping[Any, Any]
    out: Mapping[Any, torch.Tensor] | None
    like: Mapping[Any, Any] | None
    shard: Shard | None
    device: DeviceType | DeviceOf

    def requested_names(self) -> list[Name] | None:
        """Return the names of the requested tensors; None for all of the file."""
        if self.names is not None:
            return list(self.names)
        if self.out is not None:
            return list(self.out)
        if self.like is not None:
            return [name for name, one in self.like.items() if _is_tensor(one)]
        return None

    def resolve(self, file: TensorFile, progress: ProgressReporter) -> ResolvedLoad:
        """Resolve the spec for the tensors of a file.

        Raises:
            KeyError, IndexError, TypeError, ValueError, NotImplementedError: See ``load``.

        """
        return ResolvedLoad(self, file, progress)

    def load(self, file: TensorFile, progress: ProgressReporter) -> dict[Any, torch.Tensor]:
        """Return the requested tensors of a file, by name."""
        return self.resolve(file, progress).load()

    def load_collectively(
        self, file: TensorFile, members: Members, progress: ProgressReporter, *, each_reads: bool
    ) -> dict[Any, torch.Tensor]:
        """Load the requested tensors together with the other members of a group.

        The progress is finished, too. With ``each_reads``, each member reads the file by itself.
        """
        # Imported for groups only: torch.distributed is slow to import.
        from .collective_load import allocate, fill_collectively
        from .shared_batches import FillTask

        def load() -> dict[Any, torch.Tensor]:
            loaded = self.resolve(file, progress).load()
            progress.finish()
            return loaded

        if each_reads:
            file.reader.share_cache()
            return members.run_on_all(load)[0]
        file.keeps_shared = False
        resolved_loads: list[ResolvedLoad] = []

        def prepare() -> FillTask:
            resolved_loads.append(resolved := self.resolve(file, progress))
            targets = resolved.checked_targets() or allocate(resolved.wanted, resolved.device_of)
            return FillTask(resolved.wanted, targets)

        prepared = fill_collectively(members, prepare, progress.finish)
        return resolved_loads[0].by_name(prepared.tensors)


class ResolvedLoad:
    """A spec, resolved for the tensors of a file.

    Raises:
        KeyError, IndexError, TypeError, ValueError, NotImplementedError: See ``load``.

    """

    def __init__(self, spec: LoadSpec, file: TensorFile, progress: ProgressReporter) -> None:
        self._spec, self._file = spec, file
        if sum(given is not None for given in (spec.out, spec.like, spec.shard)) > 1:
            raise ValueError("out=, like= and shard= exclude each other")
        self._device, self._device_of = device_or_function(spec.device)
        default = torch.get_default_device() if self._device is None else self._device
        self._default_device = resolve_device(default)
        self._resolved_devices: dict[torch.device | str | None, torch.device] = {}
        self._numbers = self._numbers_by_name()
        #: The tensors of ``out=`` or ``like=``, by number.
        self._given_tensors: dict[int, Any] = {}
        if spec.out is not None:
            missing = [name for name in self._numbers if name not in spec.out]
            if missing:
                raise KeyError(f"no tensor to load {missing[0]!r} into")
            if len(set(self._numbers.values())) < len(self._numbers):
                raise ValueError(
                    "two of the names to load into belong to the same tensor of the file"
                )
        like = {name: one for name, one in (spec.like or {}).items() if _is_tensor(one)}
        given = like if spec.out is None else spec.out
        self._given_tensors.update(
            (n, given[name]) for name, n in self._numbers.items() if name in given
        )
        parts, self._further_indices = parts_of(file, self._numbers, spec.slices)
        self.wanted = Selection(file, self._numbers.values(), self._with_shards(parts))
        progress.total = self.wanted.total()

    def _numbers_by_name(self) -> dict[Name, int]:
        """Return the numbers of the tensors, by the names under which they are returned."""
        names, file = self._spec.requested_names(), self._file
        if names is None:
            every = range(len(file))
            numbers = dict(zip(file.reader.names(every), every, strict=True))
        else:
            numbers = file.find_all(names)
        wants = self._spec.filter_func
        if wants is not None:
            numbers = {name: n for name, n in numbers.items() if wants(file.reader.name(n))}
        return numbers

    def _with_shards(self, parts: Mapping[int, Part]) -> Mapping[int, Part]:
        """Add the parts of this process, for tensors that are cut among several processes."""
        if self._spec.shard is not None:
            return PlannedParts.of_shard(self._file, self._numbers, self._spec.shard, parts)
        if self._spec.like is None and not sharding.are_any_sharded(self._given_tensors.values()):
            return parts
        cut = dict[int, Part]()
        shapes = self._file.reader.describe_all(list(self._numbers.values()))
        for (name, number), (_, shape) in zip(self._numbers.items(), shapes, strict=True):
            given, part = self._given_tensors.get(number), None
            if sharding.is_sharded(given):
                part = sharding.part_of(given)
            sliced = number in parts or number in cut
            if self._spec.like is not None and given is not None and not sliced:
                _check_shape(name, given, list(shape))
            if part is not None and sliced:
                raise ValueError(f"both a slice and a shard of {name!r} are asked for")
            if part is not None:
                _check_shape(name, given, list(shape))
                cut[number] = part
        return {**parts, **cut} if cut else parts

    @property
    def device(self) -> torch.device:
        """The device of tensors for which no other device is given."""
        return self._default_device

    def device_of(self, number: int) -> torch.device:
        """Return the device for a tensor."""
        given = self._given_tensors.get(number)
        if self._device_of is not None:
            return self._resolved(self._device_of(self._file.reader.name(number)))
        if self._device is not None or given is None or self._spec.out is not None:
            return self._default_device
        device = sharding.device_of(given)
        return self._default_device if device.type == "meta" else resolve_device(device)

    def _resolved(self, device: torch.device | str | None) -> torch.device:
        """Return a device that a function has named, cached: many tensors share few devices."""
        found = self._resolved_devices.get(device)
        if found is None:
            found = self._default_device if device is None else resolve_device(device)
            self._resolved_devices[device] = found
        return found

    def _targets_by_number(self) -> dict[int, torch.Tensor]:
        """Return the memory of ``out=``, by number, in the shapes of the slices to be loaded."""
        targets: dict[int, torch.Tensor] = {}
        if not self._further_indices and are_plain(self._given_tensors.values()):
            return {number: self._given_tensors[number] for number in self._numbers.values()}
        for name, number in self._numbers.items():
            local = sharding.local_of(self._given_tensors[number])
            targets[number] = with_ones(local, self._further_indices.get(number, ()), name)
        return targets

    def checked_targets(self) -> dict[int, torch.Tensor]:
        """Return the memory of ``out=``, by number, after checking it; empty without ``out=``."""
        if self._spec.out is None:
            return {}
        targets = self._targets_by_number()
        self.wanted.check_fits(targets)
        return targets

    def load(self) -> dict[Any, torch.Tensor]:
        """Load in this process, without a group."""
        if self._spec.out is not None:
            return self.by_name(self.wanted.fill(self._targets_by_number()))
        if self._spec.like is None and self._device_of is None:
            return self.by_name(self.wanted.load_to(self._default_device))
        return self.by_name(self.wanted.load(self.device_of))

    def by_name(self, tensors: Mapping[int, torch.Tensor]) -> dict[Any, torch.Tensor]:
        """Return tensors by name, in the requested form."""
        if self._spec.out is not None:
            return {name: self._given_tensors[number] for name, number in self._numbers.items()}
        if self.returns_as_loaded:
            return {name: tensors[number] for name, number in self._numbers.items()}
        return {name: self.in_requested_form(n, tensors[n]) for name, n in self._numbers.items()}

    def names_by_number(self) -> tuple[dict[int, Name], dict[int, list[Name]]]:
        """Return the name under which each tensor is returned, and the further names of some."""
        names = {number: name for name, number in self._numbers.items()}
        further: dict[int, list[Name]] = {}
        if len(names) < len(self._numbers):
            for name, number in self._numbers.items():
                if name != names[number]:
                    further.setdefault(number, []).append(name)
        return names, further

    def in_requested_form(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the requested form."""
        given, rest = self._given_tensors.get(number), self._further_indices.get(number)
        if sharding.is_sharded(given):
            tensor = sharding.as_sharded(tensor, given)
        return tensor[rest] if rest else tensor

    @property
    def returns_as_loaded(self) -> bool:
        """True if tensors are returned as they are loaded."""
        return not self._further_indices and not sharding.are_any_sharded(
            self._given_tensors.values()
        )


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _check_shape(name: Name, given: Any, shape: list[int]) -> None:
    if list(given.shape) != shape:
        raise ValueError(
            f"tensor {name!r}: the file holds {shape}, and the tensor in out= or like= has "
            f"{list(given.shape)}"
        )
