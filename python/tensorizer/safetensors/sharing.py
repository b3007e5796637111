"""Finds tensors that share memory, by the rules of safetensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch

from ..file.to_safetensors import extent
from ..tensors import fake_mode


def storage_ptr(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has none."""
    if fake_mode.is_fake(tensor):
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        # Subclasses that hold other tensors, and tensors of tracers, have no storage.
        return 0


def storage_size(tensor: torch.Tensor) -> int:
    """Return the size of a tensor's storage in bytes. Other tensors may share the storage."""
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return tensor.nelement() * tensor.element_size()


def _is_complete(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor takes all of its storage."""
    whole = tensor.nelement() * tensor.element_size() == storage_size(tensor)
    return whole and tensor.data_ptr() == storage_ptr(tensor)


def _find_shared_tensors(tensors: Mapping[str, torch.Tensor]) -> list[set[str]]:
    """Return groups of names whose tensors overlap in one storage; most groups have one name.

    Tensors without memory, and nested ones, are in no group.
    """
    storages: dict[tuple[torch.device, int, int], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        single = not tensor.is_meta and not tensor.is_nested
        if single and storage_ptr(tensor) and storage_size(tensor):
            storages[tensor.device, storage_ptr(tensor), storage_size(tensor)].append(name)
    groups: list[set[str]] = []
    for names in storages.values():
        end = 0
        for start, stop, name in sorted((*extent(tensors[name]), name) for name in names):
            if start >= end:
                groups.append(set())
            groups[-1].add(name)
            end = max(end, stop)
    return groups


def _remove_duplicate_names(
    state_dict: Mapping[str, torch.Tensor],
    *,
    preferred_names: Iterable[str] | None = None,
    discard_names: Iterable[str] | None = None,
) -> dict[str, list[str]]:
    """Return the names to leave out, by the name that is kept instead.

    Only tensors that take their whole storage can be kept. Of their names, the first in
    alphabetical order is: of ``preferred_names``, else of those that are not in ``discard_names``,
    else of all.

    Raises:
        RuntimeError: No tensor takes the whole of its storage.

    """
    removed: dict[str, list[str]] = {}
    preferred, discarded = set(preferred_names or ()), set(discard_names or ())
    for group in _find_shared_tensors(state_dict):
        complete = {name for name in group if _is_complete(state_dict[name])}
        if not complete:
            raise RuntimeError(
                f"no tensor of {sorted(group)} covers its whole storage, of which a file "
                "would have a part only: save clones of them. Refusing to save or load the model"
            )
        choices = complete & preferred, complete - discarded, complete
        kept = min(next(filter(None, choices)))
        others = sorted(group - {kept})
        if others:
            removed[kept] = others
    return removed
