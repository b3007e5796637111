"""The size of ``checkpoint.json``, computed from the plans of all ranks before any rank writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from . import layout
from .items import ItemLocation, check_count, stored_name

#: The most bytes of a number in JSON, with its comma.
_NUMBER_BYTES = 20
#: Bytes of JSON around all items, around the names and numbers of one item, and around a chunk's.
_AROUND_BYTES, _ITEM_BYTES, _CHUNK_BYTES = 512, 96, 32
#: A placeholder of the length that all save ids have.
_PLACEHOLDER_ID = "0" * 16


def file_of(rank: int, save_id: str) -> str:
    """Return the name of the file of a rank."""
    return f"rank-{rank:05}-{save_id}.tensors"


def name_of(item: WriteItem, used_names: set[str]) -> str:
    """Return a name for an item's tensor in its rank's file, and add it to the used names.

    Another item may already have the name that a part of a tensor would get.
    """
    name = stored_name(item.index.fqn, item.index.offset or ())
    while name in used_names:
        name += "@"
    used_names.add(name)
    return name


def check(plans: Sequence[SavePlan], folder: str) -> None:
    """Refuse plans whose checkpoint would be too large to be read.

    The data of a planner other than torch's own is not counted here, but when the file is written.

    Raises:
        ValueError: There are too many chunks, or ``checkpoint.json`` would be too long.

    """
    try:
        check_count(sum(len(plan.items) for plan in plans))
        # A planner that has kept its last plans passes on only those that have changed.
        whole = all(plan.usable for plan in plans)
        if whole and _upper_bound_bytes(plans) > layout.MOST_BYTES:
            # The bound is far too high for tensors cut in grids: compute the exact size.
            _, metadata = create_default_global_save_plan([*plans], rewrite_index_hints=False)
            metadata.planner_data = _paths(plans)
            layout.encoded(metadata, _locations(plans))
    except ValueError as error:
        raise ValueError(
            f"the checkpoint of {len(plans)} ranks at {folder} cannot be saved: {error}; nothing "
            "was written"
        ) from error


def _upper_bound_bytes(plans: Sequence[SavePlan]) -> int:
    """Return an upper bound of the bytes of ``checkpoint.json``, as if no tensor were a grid."""
    lengths: dict[str, int] = {}
    total = _AROUND_BYTES + len(plans) * (len(file_of(0, _PLACEHOLDER_ID)) + _NUMBER_BYTES)
    for plan in plans:
        for item in plan.items:
            name, data = item.index.fqn, item.tensor_data
            numbers = len(data.chunk.sizes) * _NUMBER_BYTES if data else 0
            if name not in lengths:
                lengths[name] = len(json.dumps(name))
                total += lengths[name] + numbers + _ITEM_BYTES
            total += lengths[name] + 3 * numbers + _CHUNK_BYTES
    return total + sum(len(json.dumps([name, path])) + 8 for name, path in _paths(plans).items())


def _paths(plans: Sequence[SavePlan]) -> dict[str, Any]:
    """Return the paths of torch's own planner, merged from all ranks."""
    found: dict[str, Any] = {}
    for plan in plans:
        if layout.are_paths(plan.planner_data):
            found |= plan.planner_data
    return found


def _locations(plans: Sequence[SavePlan]) -> dict[dcp.MetadataIndex, ItemLocation]:
    """Return the locations that ranks will choose."""
    found = {}
    for rank, plan in enumerate(plans):
        file, used_names = file_of(rank, _PLACEHOLDER_ID), set[str]()
        for item in plan.items:
            found[item.index] = ItemLocation(file, name_of(item, used_names))
    return found
