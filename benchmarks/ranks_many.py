"""Measure what a load of few bytes by many ranks takes: time, descriptors, and plans of 512 ranks.

    python benchmarks/ranks_many.py [--ranks 32] [--rounds 3] [--record]

Ranks are processes of gloo on this machine, forked off one that has imported torch. nginx serves
400 kB; the time is that of the last rank, from a barrier on. Every byte is compared. The plan of
512 ranks and 100,000 tensors is made by one process, from what these would tell each other.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import tensorizer
import torch
import torch.distributed as dist
from machine import commit, version
from run import HERE
from serve import server
from tensorizer.group.wishes import Wish, merged

#: Tensors of the file, of 4 kB each.
COUNT = 100
#: Ranks and tensors of the plan.
PLANNED = 512, 100_000


def rank(number: int, world: int, port: int, out: Path, *, uri: str, together: bool) -> None:
    """Load a few times; write what it took."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=number, world_size=world)
    dist.barrier()
    opened = len(os.listdir("/proc/self/fd"))
    took, right = [], True
    for _ in range(2):
        dist.barrier()
        begun = time.perf_counter()
        found = tensorizer.load(uri, "cpu", group=dist.group.WORLD if together else None)
        took.append(time.perf_counter() - begun)
        right = right and all(bool((one == int(name)).all()) for name, one in found.items())
    opened = len(os.listdir("/proc/self/fd")) - opened
    out.joinpath(str(number)).write_text(json.dumps([*took, opened, right and len(found) == COUNT]))
    dist.barrier()
    os._exit(0)


def measure(world: int, uri: str, together: bool = True) -> tuple[float, float, int]:
    """Return the seconds of a first and of a second load, and descriptors that are left open."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        out, children = Path(name), []
        for number in range(world):
            child = os.fork()
            if child == 0:
                try:
                    rank(number, world, port, out, uri=uri, together=together)
                finally:
                    os._exit(1)
            children.append(child)
        for child in children:
            if os.waitpid(child, 0)[1] != 0:
                raise RuntimeError("a rank failed")
        found = [json.loads(path.read_text()) for path in out.iterdir()]
    if len(found) != world or not all(one[3] for one in found):
        raise RuntimeError("other bytes were loaded than were written")
    first, second, opened = (max(one[at] for one in found) for at in range(3))
    return first, second, opened


def planned(kind: str) -> tuple[float, float]:
    """Return the CPU seconds of the plan on one rank, and the megabytes that it receives for it."""
    world, count = PLANNED
    shapes = [8192, 1024, 1024, 8192, 28672, 28672, 8192, 8192, 8192, 8192]

    def wish(number: int) -> Wish:
        parts = 1 if kind == "all" else world
        place = 0 if kind == "all" else number
        each = [(place * -(-n // parts), (place + 1) * -(-n // parts)) for n in shapes]
        wide = kind == "columns of its own"
        boxes = [((0, 4096), ends) if wide else (ends,) for ends in each]
        of = [(4096, n) if wide else (n,) for n in shapes]
        return Wish.of((n, [boxes[n % 10]], of[n % 10], 2) for n in range(count))

    begun = time.process_time()
    mine = wish(0)
    mine.digest()
    own = time.process_time() - begun
    # All ranks have the same tensors; each sends a digest, and its table if the digests differ.
    wishes = [wish(number) for number in range(0, world, 64)]
    tables = [one.table for one in wishes]
    told = 128 if kind == "all" else 128 + max(len(one.encoded_table()) for one in wishes)
    begun = time.process_time()
    of_all = [(n, tables[n % len(tables)]) for n in range(world)]
    merged([(mine.columns, of_all)], count, world, [], encrypted=False)
    return own + time.process_time() - begun, world * told / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record", action="store_true", help="keep the figures")
    chosen = parser.parse_args()
    rows: list[Any] = []
    with tempfile.TemporaryDirectory() as name, server("nginx", Path(name)) as host:
        path = Path(name) / "few.tensors"
        made = {str(n): torch.full((1000,), float(n)) for n in range(COUNT)}
        tensorizer.save(made, path, hashes="crc32")
        calls = [
            ("local file, `group=`", str(path), True),
            ("local file, each alone", str(path), False),
        ]
        if host is not None:
            calls += [("HTTP, `group=`", f"http://{host}/few.tensors", True)]
        for what, uri, together in calls:
            found = [measure(chosen.ranks, uri, together) for _ in range(chosen.rounds)]
            first, second, opened = (statistics.median(one[at] for one in found) for at in range(3))
            rows.append(f"| {what} | {first:.3f} | {second:.3f} | {opened:.0f} |")
    kinds = ("all", "rows of its own", "columns of its own")
    plans = [f"| {kind} | {cpu:.2f} | {size:.2f} |" for kind in kinds
             for cpu, size in [planned(kind)]]  # fmt: skip
    page = f"""# {chosen.ranks} ranks load 400 kB, and what 512 ranks tell each other

{os.cpu_count()} cores, torch {version("torch")}, commit {commit()}. {chosen.ranks} ranks of gloo
on the same machine, {chosen.rounds} rounds, medians; the last rank counts. All bytes were compared.

    python benchmarks/ranks_many.py --ranks {chosen.ranks} --rounds {chosen.rounds}

| load | first, s | second, s | descriptors left open |
|---|---|---|---|
{chr(10).join(rows)}

The plan of a rank of 512, for 100,000 tensors, by simulation:

| each rank wants | CPU s | MB received |
|---|---|---|
{chr(10).join(plans)}
"""
    print(page)
    if chosen.record:
        folder = HERE / "records" / f"{os.cpu_count()}-core-{os.uname().machine}"
        day = datetime.datetime.now(datetime.timezone.utc).date()
        (folder / f"ranks-many-{day}.md").write_text(page)


if __name__ == "__main__":
    main()
