"""One engine loads one model on the emulated CUDA, in a process of its own: prints a line of JSON.

    python counted.py ENGINE FOLDER MODEL [verify]

Without ``verify`` copies take the time of the bus and move nothing: counted are seconds, processor
time, calls of CUDA, memory, and the seconds until the first tensor is there. With it, all bytes are
compared.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests/cuda"))

import emulated
import torch
from checks import Tensors, sums

from engine import LOADERS, AbsentError, Pairs, collect, import_modules, read_sums


def two_devices(path: Path) -> Tensors:
    """Load the first half of the layers to one device, and the others to another one."""
    import tensorizer

    count = len(read_sums(path))

    def device(name: str) -> str:
        return f"cuda:{int(name.split('.')[1]) * 2 // count}"

    return tensorizer.load(f"{path}.tensors", device)


def start(engine: str, path: Path) -> Tensors | Pairs:
    """Begin a load: all tensors, or an iterator of them."""
    return two_devices(path) if engine == "ours two devices" else LOADERS[engine](path)


def load(engine: str, path: Path) -> dict[str, float]:
    """Load once, and count."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    emulated.reset()
    used = emulated.stat("device used")
    cpu, begun = time.process_time(), time.perf_counter()
    tensors, first = collect(start(engine, path), begun)
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    size = sum(tensor.nbytes for tensor in tensors.values())
    calls = {name: n for name, n in emulated.calls_by_name().items() if name != "copy"}
    return {
        "seconds": seconds,
        "first": seconds if first is None else first,
        "cpu": cpu,
        "bytes": size,
        "calls": sum(calls.values()),
        "pinned": emulated.stat("pinned peak"),
        "device": emulated.stat("device peak") - used,
        "busy": emulated.stat("bus busy us") / 1e6,
    }


def main(engine: str, folder: str, model: str, task: str = "count") -> dict[str, object]:
    path = Path(folder) / model
    import_modules(engine)
    torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    if task == "verify":
        tensors, _ = collect(start(engine, path), 0)
        return {"verified": sums(tensors) == read_sums(path)}
    first = load(engine, path)
    gc.collect()
    return first | {"again": load(engine, path)}


if __name__ == "__main__":
    try:
        print(json.dumps(main(*sys.argv[1:])))
    except AbsentError as absent:
        print(json.dumps({"absent": str(absent)}))
    sys.stdout.flush()
    os._exit(0)
