"""Loads by several ranks of one machine: one download for all, beside other loaders.

The clock runs from one barrier to the next, so the slowest rank counts. The server lets 200 MB/s
pass over all connections together, however many there are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness.case import Case, Engine, Given, Measured, Tensors
from harness.files import checksum, sums_of
from harness.process import bytes_read, cpu_seconds, ranks

Loader = Callable[[Given, bool], Tensors]


def ours(given: Given, together: bool, device: str = "cpu") -> Tensors:
    """Load everything in each rank; ``together``, each part is fetched by one of them."""
    import tensorizer
    import torch.distributed as dist

    return tensorizer.load(given.where, device, group=dist.group.WORLD if together else None)


def to_device(given: Given, together: bool) -> Tensors:
    """Load to a CUDA device; ranks share local files too."""
    import tensorizer
    import torch
    import torch.distributed as dist
    from tensorizer.group.members import FreeGroup

    group: Any = FreeGroup(dist.group.WORLD, shares_local_files=True) if together else None
    loaded = tensorizer.load(given.where, "cuda", group=group)
    torch.cuda.synchronize()
    return loaded


def run_ai(given: Given, together: bool) -> Tensors:
    """Load with run:ai, distributed."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(given.files, device="cpu", is_distributed=together, owned=True)
        return dict(streamer.get_tensors())


def fastsafetensors(given: Given, _: bool) -> Tensors:
    """Load with fastsafetensors, each rank a part of the files."""
    import torch.distributed as dist
    from fastsafetensors import ParallelLoader

    loader = ParallelLoader(dist.group.WORLD, given.files, device="cpu", nogds=True)
    try:
        return dict(loader.iterate_weights())
    finally:
        loader.close()


def rank(loader: Loader, given: Given, together: bool, loads: int) -> dict[str, Any]:
    """Load as a rank, several times; return what the first and the last took."""
    import torch.distributed as dist

    opened = len(os.listdir("/proc/self/fd"))
    times = []
    cpu, read, disk = cpu_seconds(), bytes_read(), bytes_read("read_bytes")
    for _ in range(loads):
        dist.barrier()
        begun = time.perf_counter()
        found = loader(given, together)
        dist.barrier()
        times.append(time.perf_counter() - begun)
    return {
        "seconds": times[0], "again": times[-1], "cpu": (cpu_seconds() - cpu) / loads,
        "read": bytes_read() - read, "disk": bytes_read("read_bytes") - disk,
        "descriptors": len(os.listdir("/proc/self/fd")) - opened,
        "bytes": sum(tensor.nbytes for tensor in found.values()),
        "verified": checksum({n: tensor.cpu() for n, tensor in found.items()})
        == sums_of(given.folder, given.model, "all"),
    }  # fmt: skip


def loading(
    world: int, loader: Loader, together: bool = True, loads: int = 1
) -> Callable[[Given], Measured]:
    """Return a load by ranks, with figures of what they read and left open."""

    def run(given: Given) -> Measured:
        found = ranks(min(world, 4) if given.quick else world, rank, loader, given, together, loads)
        size = found[0]["bytes"]
        figures = {"disk reads / file": sum(one["disk"] for one in found) / size}
        if "://" not in given.base:
            figures["most read by a rank / file"] = max(one["read"] for one in found) / size
        if loads > 1:
            figures["second load s"] = max(one["again"] for one in found)
            figures["descriptors"] = max(one["descriptors"] for one in found)
        return Measured(
            max(one["seconds"] for one in found), size, sum(one["cpu"] for one in found), figures,
            all(one["verified"] for one in found),
        )  # fmt: skip

    return run


def engine(name: str, world: int, loader: Loader, *imports: str, **options: Any) -> Engine:
    """Return an engine of several ranks."""
    return Engine(
        name, loading(world, loader, **options), "shards", imports or ("tensorizer",), touch=False,
        # run:ai shares a read over gloo only if it is told to.
        env={"RUNAI_STREAMER_DIST": "1", "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip


def cases(world: int) -> list[Case]:
    """Return the cases of a number of ranks."""
    group = engine("tensorizer group=", world, ours)
    alone = engine("tensorizer, each alone", world, ours, together=False)
    peer = engine("run:ai, distributed", world, run_ai, "runai_model_streamer")
    fast = engine("fastsafetensors", world, fastsafetensors, "fastsafetensors")
    toy = () if world == 2 else None
    limited = {"server": "200 MB/s", "quick": toy}
    return [
        Case(f"ranks/http-{world}", f"{world} ranks load from a server of 200 MB/s",
             (group, alone), "ranks", scheme="http", **limited),
        Case(f"ranks/s3-{world}", f"{world} ranks load from S3 of 200 MB/s", (group, peer),
             "ranks", scheme="s3", **limited),
        Case(f"ranks/local-{world}", f"{world} ranks load from the page cache", (group, fast),
             "ranks", quick=toy),
    ]  # fmt: skip


def single(name: str, world: int, together: bool) -> Engine:
    """Return an engine that loads one small file twice, by many ranks."""
    return replace(engine(name, world, ours, together=together, loads=2), form="tensors")


def without_group(together: bool) -> Engine:
    """Return an engine of three processes that load one cold file."""
    name = "tensorizer, LOCAL_WORLD_SIZE=3" if together else "tensorizer, each alone"
    env = {"LOCAL_WORLD_SIZE": "3" if together else "1"}
    return replace(engine(name, 3, ours, together=False), form="tensors", env=env)


MANY = (single("tensorizer group=", 32, True), single("tensorizer, each alone", 32, False))
CASES = [
    *cases(2), *cases(4),
    Case("ranks/many-local", "32 ranks load 400 kB from the page cache, twice", MANY, "few"),
    Case("ranks/many-http", "32 ranks load 400 kB from nginx on this machine, twice", MANY[:1],
         "few", server="nginx", scheme="http"),
    Case("ranks/cold", "three processes load one file, nothing in the page cache",
         (without_group(True), without_group(False)), cold=True),
    Case("device/ranks", "two ranks load from the page cache to one CUDA device",
         (engine("tensorizer group=", 2, to_device),), "ranks", device=True),
]  # fmt: skip
