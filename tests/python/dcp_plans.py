"""Plans of many ranks, their metadata and places, made in one process without tensors."""

import torch
from tensorizer.distributed import items, save_plan
from torch.distributed.checkpoint import default_planner, metadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType


def write_item(name, size, offsets, sizes):
    """Return the request of a planner to write a part of a tensor."""
    size, offsets, sizes = map(torch.Size, (size, offsets, sizes))
    chunk = metadata.ChunkStorageMetadata(offsets, sizes)
    data = TensorWriteData(chunk, metadata.TensorProperties(dtype=torch.float32), size)
    return WriteItem(metadata.MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


def names_of(tensors):
    """Return names as models have them."""
    return [f"model.layers.{number // 12}.block{number % 12}.weight" for number in range(tensors)]


def plans_of(ranks, tensors, rows=8, columns=1024):
    """Return plans in which each rank has rows of each tensor."""
    names = names_of(tensors)
    paths = {name: tuple(name.split(".", 1)) for name in names}
    size = (ranks * rows, columns)
    return [
        SavePlan(
            [write_item(name, size, (rank * rows, 0), (rows, columns)) for name in names],
            planner_data=paths,
        )
        for rank in range(ranks)
    ]


def saved(plans):
    """Return the metadata that torch's planner makes of plans, and where ranks put the parts."""
    plans, found = default_planner.create_default_global_save_plan(plans)
    found.planner_data = save_plan._paths(plans)
    return found, save_plan._locations(plans)


def content_of(encoded):
    """Return a decoder of encoded items."""
    whole = {"version": 2, "orders": []} | encoded
    return items.Items("checkpoint.json", whole, whole["files"])
