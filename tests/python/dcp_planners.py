"""Saves and loads by one process, what they save, and planners of another kind than torch's."""

import contextlib
import dataclasses
import io
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tensorizer.distributed import Reader, Writer
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.planner import WriteItemType

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.complex64, torch.complex128,
]  # fmt: skip


def of_every_dtype():
    numbers = torch.arange(24).reshape(4, 6) % 2
    state = {str(dtype): numbers.to(dtype) for dtype in DTYPES}
    return state | {
        "scalar": torch.tensor(2.5),
        "zero": torch.empty(0, 3),
        "strided": torch.arange(24.0).reshape(4, 6).t(),
        "expanded": torch.ones(3, 1).expand(3, 4),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }


def save(state, folder, **options):
    planner = options.pop("planner", None)
    return dcp.save(state, storage_writer=Writer(folder, **options), planner=planner)


def load(state, folder, **options):
    planner = options.pop("planner", None)
    dcp.load(state, storage_reader=Reader(folder, **options), planner=planner)
    return state


@contextlib.contextmanager
def fails(error, match="."):
    """Expect that a save or load of one process fails by an error, as torch tells it."""
    with pytest.raises(dcp.api.CheckpointException) as caught:
        yield
    ((found, _),) = caught.value.failures.values()
    assert isinstance(found, error), found
    assert re.search(match, str(found)), found


class Halves(default_planner.DefaultSavePlanner):
    """Saves each tensor in two chunks, and a name that says nothing of what it is."""

    data = None

    def create_local_plan(self):
        plan = super().create_local_plan()
        items = []
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                items.append(item)
                continue
            rows = item.tensor_data.size[0]
            for start, stop in ((0, rows // 2), (rows // 2, rows)):
                sizes = torch.Size([stop - start, *item.tensor_data.size[1:]])
                offsets = torch.Size([start] + [0] * (len(sizes) - 1))
                chunk = dataclasses.replace(item.tensor_data.chunk, offsets=offsets, sizes=sizes)
                items.append(
                    dataclasses.replace(
                        item,
                        index=dataclasses.replace(item.index, offset=offsets),
                        type=WriteItemType.SHARD,
                        tensor_data=dataclasses.replace(item.tensor_data, chunk=chunk),
                    )
                )
        self.plan = dataclasses.replace(plan, items=items, planner_data=self.data)
        return self.plan

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data = self.data
        return plans, metadata

    def lookup_object(self, index):
        return self.state_dict[index.fqn]

    def resolve_data(self, write_item):
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO()
        chunk = write_item.tensor_data.chunk
        return self.lookup_object(write_item.index).narrow(0, chunk.offsets[0], chunk.sizes[0])


class AnyBytes(default_planner.DefaultLoadPlanner):
    """Takes bytes as they are."""

    def load_bytes(self, read_item, value):
        self.original_state_dict[read_item.dest_index.fqn] = value.read()
