"""Loads into modules whose parameters are DTensors: of each the local part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from ..modules.state import TensorSlot
from ..tensors import sharding
from ..tensors.handles import dtype_of, is_fillable
from ..tensors.sharding import Part
from .arguments import resolve_device
from .loaded_tensors import LoadedTensors
from .selection import Selection


class DTensorLoader:
    """The slots of a module that hold DTensors, and their tensors in a file.

    Args:
        loaded: The tensors of the file that are loaded already, as wholes.
        slots: Slots in the module.
        tensors: The tensors at these slots.
        numbers: The number in the file of the tensor for each slot.

    Raises:
        NotImplementedError: See :func:`tensorizer.tensors.sharding.part_of`.

    """

    def __init__(
        self,
        loaded: LoadedTensors,
        slots: Sequence[TensorSlot],
        tensors: Sequence[torch.Tensor | None],
        numbers: Sequence[int],
    ) -> None:
        self._file, self._loaded = loaded.file, loaded
        self.pairs: list[tuple[TensorSlot, int]] = []
        if sharding.are_any_sharded(tensors):
            rows = zip(slots, tensors, numbers, strict=True)
            self.pairs = [(slot, n) for slot, one, n in rows if sharding.is_sharded(one)]
        parts = {number: sharding.part_of(slot.current()) for slot, number in self.pairs}
        self._parts: dict[int, Part] = {n: part for n, part in parts.items() if part is not None}

    def load(self, verify: str) -> list[tuple[TensorSlot, torch.Tensor]]:
        """Fill tensors in place where possible; return the other slots with their new tensors."""
        direct: dict[int, torch.Tensor] = {}
        rest = []
        # For tied tensors the file may hold two, which may differ.
        users = Counter(id(slot.current()) for slot, _ in self.pairs)
        for slot, number in self.pairs:
            tensor = slot.current()
            local = sharding.local_of(tensor)
            if users[id(tensor)] == 1 and self._can_fill(local, number):
                direct[number] = local
            else:
                rest.append((slot, number))
        if direct:
            Selection(self._file, direct, self._of(direct)).fill(direct, verify)
        devices = {number: _device(slot.current()) for slot, number in rest}
        missing = [number for number in devices if number not in self._loaded]
        wanted = Selection(self._file, missing, self._of(missing))
        found = wanted.load(devices.__getitem__, verify)
        made = []
        for slot, number in rest:
            there = slot.current()
            if number in found:
                local = self._loaded.cast_for(found[number], there)
            else:
                local = self._cut(number, there)
            made.append((slot, sharding.as_sharded(local, there)))
        return made

    def _of(self, numbers: Iterable[int]) -> dict[int, Part]:
        return {number: self._parts[number] for number in numbers if number in self._parts}

    def _can_fill(self, local: torch.Tensor, number: int) -> bool:
        dtype = dtype_of(self._file.reader.describe(number)[0])
        return (
            number not in self._loaded
            and self._file.dtype is None
            and local.dtype == dtype
            and is_fillable(local)
            and self._file.can_fill_on(local.device)
        )

    def _cut(self, number: int, there: torch.Tensor | None) -> torch.Tensor:
        """Return the local part of a tensor that is loaded as a whole."""
        whole, device = self._loaded.for_slot(number, there).detach(), _device(there)
        part = self._parts.get(number)
        if part is None:
            return whole.to(device)
        local = torch.empty(part.shape, dtype=whole.dtype, device=device)
        for box in part.boxes:
            box.of_part(local).copy_(box.of_whole(whole))
        return local


def _device(tensor: torch.Tensor | None) -> torch.device:
    return resolve_device(sharding.device_of(tensor))
