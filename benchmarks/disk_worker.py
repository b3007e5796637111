"""One load of disk.py in a process of its own: prints what it took as a line of JSON.

python benchmarks/disk_worker.py ENGINE MODEL [--cold] [--verify]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import peers
import tensorizer
import torch
from landing_files import Model, model_of
from machine import have_memory
from run import forget

Tensors = Mapping[str, torch.Tensor]
#: A slice loads one part in so many of each tensor.
SHARE = 8
RUN_AI = "run:ai"


def ours(model: Model, device: str) -> Tensors:
    return tensorizer.load(model.path("tensors"), device)


def eighth(model: Model, device: str, dim: int) -> Tensors:
    """Load the first eighth of each tensor along a dimension."""
    slices = {name: (dim, 0, shape[dim] // SHARE) for name, shape in model.shapes()}
    return tensorizer.load(model.path("tensors"), device, slices=slices)


def safetensors_clone(model: Model, device: str) -> Tensors:
    del device
    return peers.safetensors_cloned([str(model.path("safetensors"))])


ENGINES: dict[str, Callable[[Model, str], Tensors]] = {
    "ours": ours,
    "rows": lambda model, device: eighth(model, device, 0),
    "columns": lambda model, device: eighth(model, device, 1),
    RUN_AI: lambda model, _: peers.run_ai([str(model.path("safetensors"))]),
    "clone": safetensors_clone,
}


def wanted(engine: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return what an engine loads of a tensor."""
    if engine in ("rows", "columns"):
        dim = 0 if engine == "rows" else 1
        return tensor.narrow(dim, 0, tensor.shape[dim] // SHARE)
    return tensor


def is_right(engine: str, model: Model, loaded: Tensors) -> bool:
    """Compare all bytes with those of the other file of the model."""
    from safetensors import safe_open

    with safe_open(model.path("safetensors"), "pt") as file:
        return set(loaded) == set(file.keys()) and all(
            torch.equal(
                wanted(engine, file.get_tensor(name)).contiguous().view(torch.uint8),
                tensor.cpu().contiguous().view(torch.uint8),
            )
            for name, tensor in loaded.items()
        )


def bytes_from_disk() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--wait", action="store_true", help="read a line before the load begins")
    parser.add_argument("--verify", action="store_true")
    options = parser.parse_args()
    model = model_of(options.model)
    peers.import_for(options.engine)
    torch.zeros(1, device=options.device)
    files = [model.path(ending) for ending in ("tensors", "safetensors")]
    have_memory(model.total_bytes)
    if options.cold:
        forget(files)
    if options.wait:
        print("ready", flush=True)
        sys.stdin.readline()
    read, cpu, start = bytes_from_disk(), cpu_seconds(), time.perf_counter()
    loaded = ENGINES[options.engine](model, options.device)
    if options.device != "cpu":
        torch.cuda.synchronize()
    found = {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": cpu_seconds() - cpu,
        "read_bytes": bytes_from_disk() - read,
        "bytes": sum(tensor.nbytes for tensor in loaded.values()),
    }
    if options.engine != RUN_AI and (report := tensorizer.stats()):
        found |= {name: report[name] for name in ("in_flight", "most_in_flight", "reading")}
    if options.verify and not is_right(options.engine, model, loaded):
        raise SystemExit(f"{options.engine}: loaded other bytes than were written")
    print(json.dumps(found), flush=True)
    # Freeing memory is not part of what is measured.
    os._exit(0)


if __name__ == "__main__":
    main()
