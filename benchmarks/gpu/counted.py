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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests/cuda"))

import emulated
import torch
from checks import sums

from engine import DEVICE, LOADERS, AbsentError, import_modules, read_sums

Pairs = Iterable[tuple[str, torch.Tensor]]


def iterate(path: Path) -> Pairs:
    import tensorizer

    return tensorizer.iterate(f"{path}.tensors", DEVICE)


def of_safetensors(path: Path) -> Pairs:
    """Load the file that the peers load."""
    import tensorizer

    return tensorizer.load(f"{path}.safetensors", DEVICE).items()


def two_devices(path: Path) -> Pairs:
    """Load the first half of the layers to one device, and the others to another one."""
    import tensorizer

    count = len(read_sums(path))

    def device(name: str) -> str:
        return f"cuda:{int(name.split('.')[1]) * 2 // count}"

    return tensorizer.load(f"{path}.tensors", device).items()


def prefetch(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    with safe_open(f"{path}.safetensors", "pt", device="cuda:0") as file:
        if not hasattr(file, "prefetch"):
            raise AbsentError("this safetensors has no prefetch")
        with file.prefetch(threads=os.cpu_count() or 8) as loader:
            yield from loader


def runai(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(f"{path}.safetensors", device=DEVICE)
        for name, tensor in streamer.get_tensors():
            yield name, tensor.to(DEVICE)


def instanttensor(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from instanttensor import safe_open

    with safe_open(f"{path}.safetensors", framework="pt", device=0) as file:
        yield from file.tensors()


OURS: dict[str, Callable[[Path], Pairs]] = {
    "ours safetensors": of_safetensors,
    "ours two devices": two_devices,
}
#: Engines that hand out tensors before all have landed.
STREAMING: dict[str, Callable[[Path], Pairs]] = {
    "ours iterate": iterate,
    "safetensors prefetch": prefetch,
    "run:ai": runai,
    "InstantTensor": instanttensor,
}


def pairs(engine: str, path: Path) -> Pairs:
    if engine in OURS:
        return OURS[engine](path)
    if engine in STREAMING:
        return STREAMING[engine](path)
    return LOADERS[engine](path).items()


def load(engine: str, path: Path) -> dict[str, float]:
    """Load once, and count."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    emulated.reset()
    used = emulated.stat("device used")
    first = None
    tensors = []
    cpu, begun = time.process_time(), time.perf_counter()
    for _, tensor in pairs(engine, path):
        if first is None and engine in STREAMING:
            torch.cuda.current_stream().synchronize()
            first = time.perf_counter() - begun
        tensors.append(tensor)
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    size = sum(tensor.nbytes for tensor in tensors)
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
    torch.ones(1, device=DEVICE)
    torch.cuda.synchronize()
    if task == "verify":
        return {"verified": sums(dict(pairs(engine, path))) == read_sums(path)}
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
