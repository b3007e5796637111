"""Measure ``checkpoint.json`` of many ranks: bytes, and CPU of the coordinator and of each rank.

The plans of all ranks are made in this process, without tensors and without files of ranks. Each
rank has a part of every tensor.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/python"))

import torch
from dcp_plans import plans_of, saved
from tensorizer.distributed import Reader, items, layout, save_plan
from torch.distributed.checkpoint import metadata, planner_helpers

ROWS, COLUMNS = 8, 1024


def cpu(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU seconds of a call, and what it returns."""
    start = time.process_time()
    found = call()
    return time.process_time() - start, found


def planned_by(found: metadata.Metadata, rank: int) -> list[Any]:
    """Return what torch's planner asks to be read by a rank: its part of every tensor."""
    part = metadata.ChunkStorageMetadata(torch.Size([rank * ROWS, 0]), torch.Size([ROWS, COLUMNS]))
    wanted: list[Any] = []
    for name, item in found.state_dict_metadata.items():
        assert isinstance(item, metadata.TensorStorageMetadata)
        wanted += planner_helpers.create_read_items_for_chunk_list(name, item, [part])
    return wanted


def decoded(folder: str, rank: int) -> dict[str, float]:
    """Return the CPU seconds of a rank that finds its part of every tensor."""
    first, found = cpu(Reader(folder).read_metadata)
    chunks, _ = cpu(lambda: [found.state_dict_metadata[one] for one in found.state_dict_metadata])
    plan, wanted = cpu(lambda: planned_by(found, rank))
    places, _ = cpu(lambda: [found.storage_data[one.storage_index] for one in wanted])
    return {"read": first, "items": chunks, "places": places, "load plan": plan}


def scattered(places: dict[metadata.MetadataIndex, items.ItemLocation], ranks: int) -> None:
    """Have other ranks save each tensor's parts, as where torch picks among replicas."""
    for number, index in enumerate(list(places)):
        at = (number * 7919) % ranks
        places[index] = items.ItemLocation(save_plan.file_of(at, "0" * 16), places[index].name)


def written(ranks: int, tensors: int, spread: bool) -> tuple[bytes, list[float]]:
    """Return the content of the file, and the CPU seconds of the coordinator."""
    plans = plans_of(ranks, tensors, ROWS, COLUMNS)
    check, _ = cpu(lambda: save_plan.check(plans, "folder"))
    torch_plan, (found, places) = cpu(lambda: saved(plans))
    if spread:
        scattered(places, ranks)
    encode, data = cpu(lambda: layout.encoded(found, places))
    return data, [check, encode, torch_plan]


def row(ranks: int, tensors: int, spread: bool, rounds: int) -> str:
    """Return a row of the table."""
    data, (check, encode, torch_plan) = written(ranks, tensors, spread)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, layout.FILE).write_bytes(data)
        times = [decoded(folder, ranks - 1) for _ in range(rounds)]
    ours = statistics.median(one["read"] + one["items"] + one["places"] for one in times)
    plan = statistics.median(one["load plan"] for one in times)
    what = f"{ranks} x {tensors}{', in other files each' if spread else ''}"
    return (
        f"| {what} | {len(data) / 1e6:.2f} | {len(data) / ranks / tensors:.2f} | {check:.2f} "
        f"| {encode:.2f} | {torch_plan:.2f} | {ours:.3f} | {plan:.2f} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--tensors", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(
        "| ranks x tensors | MB | bytes a shard | limit checked | encoded | torch's save plan, and "
        "places | decoded by a rank | torch's load plan |",
        "|---" * 8 + "|",
        sep="\n",
    )
    for ranks in args.ranks:
        print(row(ranks, args.tensors, False, args.rounds), flush=True)
    print(row(args.ranks[-1], args.tensors, True, args.rounds))


if __name__ == "__main__":
    main()
