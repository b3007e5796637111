"""The choice of a load: the tensors, the parts of them, and their devices or memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .._types import FilterFuncType, Name
from ..tensors import sharding
from ..tensors.exchange import are_plain
from ..tensors.sharding import Part, Shard
from .arguments import DeviceOf, DeviceType, device_or_function, resolve_device
from .cuts import Cuts
from .parts import Wanted
from .progress import Progress
from .slices import parts_of, with_ones
from .tensor_file import TensorFile

if TYPE_CHECKING:
    from ..group.members import Members


@dataclass(frozen=True)
class Choice:
    """Arguments of :func:`tensorizer.load`, which documents them."""

    names: Sequence[Name] | None
    filter_func: FilterFuncType | None
    slices: Mapping[Any, Any]
    out: Mapping[Any, torch.Tensor] | None
    like: Mapping[Any, Any] | None
    shard: Shard | None
    device: DeviceType | DeviceOf

    def asked(self) -> list[Name] | None:
        """Return the names of the requested tensors; None for all of the file."""
        if self.names is not None:
            return list(self.names)
        if self.out is not None:
            return list(self.out)
        if self.like is not None:
            return [name for name, one in self.like.items() if _is_tensor(one)]
        return None

    def of(self, file: TensorFile, progress: Progress) -> Chosen:
        """Apply the choice to a file.

        Raises:
            KeyError, IndexError, TypeError, ValueError, NotImplementedError: See ``load``.

        """
        return Chosen(self, file, progress)

    def load(self, file: TensorFile, progress: Progress) -> dict[Any, torch.Tensor]:
        """Return the chosen tensors of a file, by name."""
        return self.of(file, progress).load()

    def load_together(
        self, file: TensorFile, members: Members, progress: Progress, *, by_each: bool
    ) -> dict[Any, torch.Tensor]:
        """Load the chosen tensors together with the other members of a group.

        The progress is finished, too. With ``by_each``, each member reads the file by itself.
        """
        # Imported for groups only: torch.distributed is slow to import.
        from .shared_batches import Prepared
        from .together import fill_together, made_for

        def load() -> dict[Any, torch.Tensor]:
            loaded = self.of(file, progress).load()
            progress.finish()
            return loaded

        if by_each:
            file.reader.share_cache()
            return members.together(load)[0]
        file.keeps_shared = False
        chosen: list[Chosen] = []

        def prepare() -> Prepared:
            chosen.append(what := self.of(file, progress))
            places = what.places() or made_for(what.wanted, what.device_of)
            return Prepared(what.wanted, places)

        prepared = fill_together(members, prepare, progress.finish)
        return chosen[0].named(prepared.tensors)


class Chosen:
    """A choice, applied to the tensors of a file.

    Raises:
        KeyError, IndexError, TypeError, ValueError, NotImplementedError: See ``load``.

    """

    def __init__(self, choice: Choice, file: TensorFile, progress: Progress) -> None:
        self._choice, self._file = choice, file
        if sum(given is not None for given in (choice.out, choice.like, choice.shard)) > 1:
            raise ValueError("out=, like= and shard= exclude each other")
        self._device, self._device_of = device_or_function(choice.device)
        default = torch.get_default_device() if self._device is None else self._device
        self._default = resolve_device(default)
        self._known: dict[torch.device | str | None, torch.device] = {}
        self._numbers = self._chosen()
        #: The tensors of ``out=`` or ``like=``, by number.
        self._given: dict[int, Any] = {}
        if choice.out is not None:
            missing = [name for name in self._numbers if name not in choice.out]
            if missing:
                raise KeyError(f"no tensor to load {missing[0]!r} into")
            if len(set(self._numbers.values())) < len(self._numbers):
                raise ValueError("two of the names to load into are those of one tensor")
        like = {name: one for name, one in (choice.like or {}).items() if _is_tensor(one)}
        given = like if choice.out is None else choice.out
        self._given.update((n, given[name]) for name, n in self._numbers.items() if name in given)
        parts, self._rests = parts_of(file, self._numbers, choice.slices)
        self.wanted = Wanted(file, self._numbers.values(), self._with_shards(parts))
        progress.total = self.wanted.total()

    def _chosen(self) -> dict[Name, int]:
        """Return the numbers of the tensors, by the names under which they are returned."""
        names, file = self._choice.asked(), self._file
        if names is None:
            every = range(len(file))
            numbers = dict(zip(file.reader.names(every), every, strict=True))
        else:
            numbers = file.find_all(names)
        wants = self._choice.filter_func
        if wants is not None:
            numbers = {name: n for name, n in numbers.items() if wants(file.reader.name(n))}
        return numbers

    def _with_shards(self, parts: Mapping[int, Part]) -> Mapping[int, Part]:
        """Add the parts of this process, for tensors that are cut among several processes."""
        if self._choice.shard is not None:
            return Cuts.of_shard(self._file, self._numbers, self._choice.shard, parts)
        if self._choice.like is None and not sharding.are_any_sharded(self._given.values()):
            return parts
        cut = dict[int, Part]()
        shapes = self._file.reader.describe_all(list(self._numbers.values()))
        for (name, number), (_, shape) in zip(self._numbers.items(), shapes, strict=True):
            given, part = self._given.get(number), None
            if sharding.is_sharded(given):
                part = sharding.part_of(given)
            sliced = number in parts or number in cut
            if self._choice.like is not None and given is not None and not sliced:
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
        return self._default

    def device_of(self, number: int) -> torch.device:
        """Return the device for a tensor."""
        given = self._given.get(number)
        if self._device_of is not None:
            return self._resolved(self._device_of(self._file.reader.name(number)))
        if self._device is not None or given is None or self._choice.out is not None:
            return self._default
        device = sharding.device_of(given)
        return self._default if device.type == "meta" else resolve_device(device)

    def _resolved(self, device: torch.device | str | None) -> torch.device:
        """Return a device that a function has named, cached: many tensors share few devices."""
        found = self._known.get(device)
        if found is None:
            found = self._default if device is None else resolve_device(device)
            self._known[device] = found
        return found

    def _given_places(self) -> dict[int, torch.Tensor]:
        """Return the memory of ``out=``, by number, in the shapes of the slices to be loaded."""
        places: dict[int, torch.Tensor] = {}
        if not self._rests and are_plain(self._given.values()):
            return {number: self._given[number] for number in self._numbers.values()}
        for name, number in self._numbers.items():
            local = sharding.local_of(self._given[number])
            places[number] = with_ones(local, self._rests.get(number, ()), name)
        return places

    def places(self) -> dict[int, torch.Tensor]:
        """Return the memory of ``out=``, by number, after checking it; empty without ``out=``."""
        if self._choice.out is None:
            return {}
        places = self._given_places()
        self.wanted.check_fits(places)
        return places

    def load(self) -> dict[Any, torch.Tensor]:
        """Load in this process, without a group."""
        if self._choice.out is not None:
            return self.named(self.wanted.fill(self._given_places()))
        if self._choice.like is None and self._device_of is None:
            return self.named(self.wanted.load_to(self._default))
        return self.named(self.wanted.load(self.device_of))

    def named(self, tensors: Mapping[int, torch.Tensor]) -> dict[Any, torch.Tensor]:
        """Return tensors by name, in the requested form."""
        if self._choice.out is not None:
            return {name: self._given[number] for name, number in self._numbers.items()}
        if self.changes_none:
            return {name: tensors[number] for name, number in self._numbers.items()}
        return {name: self.finished(n, tensors[n]) for name, n in self._numbers.items()}

    def names_by_number(self) -> tuple[dict[int, Name], dict[int, list[Name]]]:
        """Return the name under which each tensor is returned, and the further names of some."""
        names = {number: name for name, number in self._numbers.items()}
        further: dict[int, list[Name]] = {}
        if len(names) < len(self._numbers):
            for name, number in self._numbers.items():
                if name != names[number]:
                    further.setdefault(number, []).append(name)
        return names, further

    def finished(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the requested form."""
        given, rest = self._given.get(number), self._rests.get(number)
        if sharding.is_sharded(given):
            tensor = sharding.as_sharded(tensor, given)
        return tensor[rest] if rest else tensor

    @property
    def changes_none(self) -> bool:
        """True if tensors are returned as they are loaded."""
        return not self._rests and not sharding.are_any_sharded(self._given.values())


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _check_shape(name: Name, given: Any, shape: list[int]) -> None:
    if list(given.shape) != shape:
        raise ValueError(
            f"tensor {name!r}: the file holds {shape}, and the tensor to be like is "
            f"{list(given.shape)}"
        )
