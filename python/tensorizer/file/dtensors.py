"""Loads into modules whose parameters are DTensors: of each the local part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from ..modules.state import Row, TensorSlot
from ..tensors import sharding
from ..tensors.handles import dtype_of, is_fillable
from .arguments import resolve_device
from .load_plan import LoadPlan
from .loaded_tensors import LoadedTensors
from .open_file import OpenFile
from .request import Request


def sharded_slots(rows: Sequence[Row]) -> list[tuple[TensorSlot, int]]:
    """Return the slots of a module that hold DTensors, with the numbers of their tensors.

    Args:
        rows: Slots in the module, the tensors at these slots, and the numbers in the file of the
            tensors for them.

    Raises:
        NotImplementedError: See :func:`tensorizer.tensors.sharding.part_of`.

    """
    if not sharding.are_any_sharded(tensor for _, tensor, _ in rows):
        return []
    pairs = [(slot, number) for slot, tensor, number in rows if sharding.is_sharded(tensor)]
    for slot, _ in pairs:
        sharding.part_of(slot.current())
    return pairs


def load_sharded(
    loaded: LoadedTensors, pairs: Sequence[tuple[TensorSlot, int]], verify: str
) -> list[tuple[TensorSlot, torch.Tensor]]:
    """Fill DTensors of a module in place where possible; return the others' new tensors.

    Args:
        loaded: The tensors of the file that are loaded already, as wholes.
        pairs: Slots that hold DTensors, and the numbers of their tensors.
        verify: The hashes that are compared.

    """
    file = loaded.file
    there: dict[int, Any] = {number: slot.current() for slot, number in pairs}
    # For tied tensors the file may hold two, which may differ.
    users = Counter(map(id, there.values()))
    fits = {
        number: tensor
        for number, tensor in there.items()
        if users[id(tensor)] == 1 and number not in loaded and _can_fill(file, tensor, number)
    }
    if loaded.would_pass_others([*fits]):
        fits = {}
    if fits:
        LoadPlan(Request(numbers=[*fits], out=fits), file).load(verify)
    like = {n: there[n] for n in there if n not in fits and n not in loaded}
    found = LoadPlan(Request(numbers=[*like], like=like), file).load_new(verify)
    made = []
    for slot, number in pairs:
        if number in fits:
            continue
        if number in found:
            local = loaded.cast_for(found[number], there[number])
        else:
            local = _cut(loaded.for_slot(number, there[number]).detach(), there[number])
        made.append((slot, sharding.as_sharded(local, there[number])))
    return made


def _can_fill(file: OpenFile, tensor: Any, number: int) -> bool:
    local = sharding.local_of(tensor)
    return (
        file.dtype is None
        and local.dtype == dtype_of(file.reader.describe(number)[0])
        and is_fillable(local)
        and file.can_fill_on(local.device)
    )


def _cut(whole: torch.Tensor, there: Any) -> torch.Tensor:
    """Return the local part of a tensor that is loaded as a whole."""
    part = sharding.part_of(there)
    device = resolve_device(sharding.device_of(there))
    if part is None:
        return whole.to(device)
    local = torch.empty(part.shape, dtype=whole.dtype, device=device)
    for box in part.boxes:
        box.of_part(local).copy_(box.of_whole(whole))
    return local
