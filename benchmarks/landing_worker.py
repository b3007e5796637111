"""One process of landing.py: loads files with one library, and counts what each load costs.

    python benchmarks/landing_worker.py DEVICE

Requests and results are lines of JSON on the standard input and output.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/cuda"))

import emulated

Pairs = Iterable[tuple[str, torch.Tensor]]
Tensors = dict[str, torch.Tensor]

#: Engines that hand out tensors before all have landed.
STREAMING = ("iterate", "own_prefetch", "prefetch")


def iterate(path: str, device: torch.device, **options: int) -> Pairs:
    import tensorizer

    return tensorizer.iterate(path, device, **options)


def load(path: str, device: torch.device) -> Pairs:
    import tensorizer

    return tensorizer.load(path, device).items()


def clone(path: str, device: torch.device) -> Pairs:
    import tensorizer

    return tensorizer.load(path, device, clone=True).items()


def out(path: str, device: torch.device, given: Tensors) -> Pairs:
    import tensorizer

    return tensorizer.load(path, out=given).items()


def tensors_for(engine: str, path: str, device: torch.device) -> dict[str, Tensors]:
    """Return the argument of `out`: tensors of zeros for a whole file; none for other engines."""
    if engine != "out":
        return {}
    import tensorizer

    tensors = tensorizer.load(path, "cpu")
    empty = {name: torch.empty_like(tensor, device=device) for name, tensor in tensors.items()}
    return {"given": {name: tensor.zero_() for name, tensor in empty.items()}}


def prefetch(path: str, device: torch.device, buffer_bytes: int = 0) -> Iterator:
    """Iterate; this library has no limit for the tensors that wait on the device."""
    from safetensors import safe_open

    with safe_open(path, "pt", device=str(device)) as file, file.prefetch() as loader:
        yield from loader


def own_prefetch(path: str, device: torch.device, buffer_bytes: int | None = None) -> Iterator:
    from tensorizer.safetensors import safe_open

    file = safe_open(path, "pt", device)
    with file, file.prefetch(buffer_bytes=buffer_bytes) as loader:
        yield from loader


def prefetch_all(path: str, device: torch.device) -> Pairs:
    return dict(prefetch(path, device)).items()


def get_tensor(path: str, device: torch.device) -> Iterator:
    from safetensors import safe_open

    with safe_open(path, "pt", device=str(device)) as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


ENGINES: dict[str, Callable[..., Pairs]] = {
    engine.__name__: engine
    for engine in (iterate, load, clone, out, own_prefetch, prefetch, prefetch_all, get_tensor)
}


class Counters:
    """The emulator's counters and those of torch's allocator, from the construction on."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        emulated.reset()
        self._device, self._tensors = emulated.stat("device used"), torch.cuda.memory_allocated()

    def read(self) -> dict[str, float]:
        # "copy" is no function: it counts copies as they run.
        calls = {name: n for name, n in emulated.calls_by_name().items() if name != "copy"}
        return {
            "driver_calls": sum(n for name, n in calls.items() if not name.startswith("cuda")),
            "calls": sum(calls.values()),
            "device_peak": emulated.stat("device peak") - self._device,
            "tensors_peak": torch.cuda.max_memory_allocated() - self._tensors,
            "bus_busy": emulated.stat("bus busy us") / 1e6,
        }


def measure(
    engine: str, path: str, device: torch.device, pause: float = 0, **options: int
) -> dict[str, float | None]:
    """Load a file once and drop each tensor, after a pause of so many seconds per byte."""
    on_device = device.type == "cuda"
    given = tensors_for(engine, path, device)
    gc.collect()
    counters = Counters() if on_device else None
    first = first_bytes = None
    count = 0
    cpu, begun = time.process_time(), time.perf_counter()
    for _, tensor in ENGINES[engine](path, device, **options, **given):
        if on_device and (pause or count == 0):
            torch.cuda.current_stream().synchronize()
        if count == 0 and engine in STREAMING:
            first, first_bytes = time.perf_counter() - begun, tensor.nbytes
        if pause:
            time.sleep(pause * tensor.nbytes)
        count += 1
        del tensor
    if on_device:
        torch.cuda.synchronize()
    found = {
        "seconds": time.perf_counter() - begun,
        "cpu": time.process_time() - cpu,
        "count": count,
        "first": first,
        "first_bytes": first_bytes,
    }
    return found | (counters.read() if counters else {})


def header(path: str) -> tuple[dict[str, dict], int]:
    """Return what a safetensors file says of its tensors, and the offset of their bytes."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    return entries, 8 + length


def verify(
    engine: str, path: str, device: torch.device, reference: str, **options: int
) -> dict[str, float]:
    """Compare all bytes with those of a safetensors file, which is read without any library."""
    entries, start = header(reference)
    expected = Path(reference).read_bytes()
    given = tensors_for(engine, path, device)
    count = 0
    for name, tensor in ENGINES[engine](path, device, **options, **given):
        begin, end = entries.pop(name)["data_offsets"]
        found = tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        if found != expected[start + begin : start + end]:
            raise RuntimeError(f"{engine} of {path}: {name} has other bytes than the file")
        count += 1
    if entries:
        raise RuntimeError(f"{engine} of {path}: {len(entries)} tensors are missing")
    return {"count": count}


def main() -> None:
    device = torch.device(sys.argv[1])
    if device.type == "cuda":
        torch.empty(1, device=device)
    for line in sys.stdin:
        request = json.loads(line)
        task = {"measure": measure, "verify": verify}[request.pop("task")]
        print(json.dumps(task(device=device, **request)), flush=True)


if __name__ == "__main__":
    main()
