"""One engine loads or saves one model on a device, in a process of its own: prints a line of JSON.

    python engine.py ENGINE FOLDER MODEL [LOADS]

The clock runs from the call until the device has everything. What is loaded is summed there and
compared with the sums of what was written. All loads after the first are in ``again``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
from checks import Tensors, blank, sums
from comparisons import BASELINES
from models import KEY, OUT

DEVICE = "cuda"
Pairs = Iterable[tuple[str, torch.Tensor]]


class AbsentError(Exception):
    """The engine cannot do this here."""


def ours(path: Path, suffix: str = "tensors", **options) -> Tensors:
    import tensorizer

    if suffix == "encrypted":
        options["encryption"] = tensorizer.DecryptionParams.from_key(KEY)
    return tensorizer.load(f"{path}.{suffix}", DEVICE, **options)


def ours_module(path: Path) -> Tensors:
    """Fill parameters that are on the device already; making them is not measured."""
    import tensorizer

    names = list(read_sums(path))
    shapes = torch.ops.tensorizer._describe(f"{path}.tensors", names)
    out = []
    for text in shapes:
        dtype, _, shape = text.removesuffix("]").partition("[")
        dims = [int(dim) for dim in shape.split(",")]
        out.append(torch.empty(dims, dtype=getattr(torch, dtype), device=DEVICE))
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.ops.tensorizer.load(f"{path}.tensors", names, out=out)
    torch.cuda.synchronize()
    ours_module.seconds = time.perf_counter() - start
    del tensorizer
    return dict(zip(names, out, strict=True))


def old(path: Path) -> Tensors:
    import tensorizer

    loaded = tensorizer.TensorDeserializer(f"{path}.tensors", device=DEVICE, num_readers=8)
    return dict(loaded.items())


def safetensors(path: Path) -> Tensors:
    from safetensors.torch import load_file

    return load_file(f"{path}.safetensors", device=DEVICE)


def ours_iterate(path: Path) -> Pairs:
    import tensorizer

    return tensorizer.iterate(f"{path}.tensors", DEVICE)


def safetensors_prefetch(path: Path) -> Pairs:
    from safetensors import safe_open

    with safe_open(f"{path}.safetensors", "pt", device="cuda:0") as file:
        if not hasattr(file, "prefetch"):
            raise AbsentError("this safetensors has no prefetch")
        with file.prefetch(threads=os.cpu_count() or 8) as loader:
            yield from loader


def instanttensor(path: Path) -> Pairs:
    from instanttensor import safe_open

    with safe_open(f"{path}.safetensors", framework="pt", device=0) as file:
        yield from file.tensors()


def fastsafetensors(path: Path) -> Tensors:
    from fastsafetensors import fastsafe_open

    with fastsafe_open(filenames=[f"{path}.safetensors"], nogds=True, device="cuda:0") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def runai(path: Path) -> Pairs:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(f"{path}.safetensors", device=DEVICE)
        for name, tensor in streamer.get_tensors():
            yield name, tensor.to(DEVICE)


def torch_load(path: Path) -> Tensors:
    return torch.load(f"{path}.pt", map_location=DEVICE, weights_only=True)


def torch_load_mmap(path: Path) -> Tensors:
    return torch.load(f"{path}.pt", map_location=DEVICE, weights_only=True, mmap=True)


#: An engine returns all tensors at once, or hands them out as they land.
LOADERS: dict[str, Callable[[Path], Tensors | Pairs]] = {
    "ours": ours,
    "ours iterate": ours_iterate,
    "ours safetensors": lambda path: ours(path, "safetensors"),
    "ours clone": lambda path: ours(path, clone=True),
    "ours in place": ours_module,
    "ours float32": lambda path: ours(path, dtype=torch.float32),
    "ours verify": lambda path: ours(path, verify_hash=True),
    "ours verify-crc32": lambda path: ours(path, verify_hash="crc32"),
    "ours decrypt": lambda path: ours(path, "encrypted"),
    "tensorizer 2.12.1": old,
    "safetensors": safetensors,
    "safetensors prefetch": safetensors_prefetch,
    "InstantTensor": instanttensor,
    "fastsafetensors": fastsafetensors,
    "run:ai": runai,
    "torch.load": torch_load,
    "torch.load mmap": torch_load_mmap,
}


#: Ours with another value of an environment variable: "ours NAME=VALUE".
VARIED = ("ours NUMA=0", "ours DIRECT_IO=0", "ours GDS=1")
LOADERS |= dict.fromkeys(VARIED, ours)

#: Imported before the clock starts.
MODULES = {
    "ours": "tensorizer",
    "2.12.1": "tensorizer",
    "safetensors": "safetensors.torch",
    "InstantTensor": "instanttensor",
    "fastsafetensors": "fastsafetensors",
    "run:ai": "runai_model_streamer",
}


def read_sums(path: Path) -> dict[str, str]:
    return json.loads(Path(f"{path}.json").read_text())["sums"]


def pinned_copy(size: int, back: bool) -> float:
    """Return the seconds of copies from one pinned buffer to the device, or back."""
    step = min(256 << 20, size)
    buffer = torch.ones(step, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(step, dtype=torch.uint8, device=DEVICE)
    source, target = (there, buffer) if back else (buffer, there)
    for round_ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(size // step):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        if round_:
            return (time.perf_counter() - start) * size / (size // step * step)
    raise AssertionError


def baseline(engine: str, path: Path) -> dict[str, object]:
    if engine == "direct reads":
        from baselines import direct

        found = direct(Path(f"{path}.tensors"))
        if not found["bytes"]:
            raise AbsentError("the file is too small")
        return {**found, "verified": True}
    size = os.path.getsize(f"{path}.tensors")
    seconds = pinned_copy(size, back=engine == "pinned copy back")
    return {"seconds": seconds, "bytes": size, "verified": True}


def saved(engine: str, out: str) -> Tensors:
    """Load on the CPU what was saved."""
    if engine.startswith("ours"):
        import tensorizer

        return tensorizer.load(out, "cpu", verify_hash=True)
    if engine == "torch.save":
        return torch.load(out, weights_only=True)
    from safetensors.torch import load_file

    return load_file(out)


def save(engine: str, path: Path) -> dict[str, object]:
    """Save what is on the device, with fsync."""
    tensors = ours(path)
    torch.cuda.synchronize()
    total = sum(tensor.nbytes for tensor in tensors.values())
    out = f"{path}.{OUT}"
    if engine == "torch.save":
        # Small tensors share storages, of which torch.save would write all for each.
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        torch.cuda.synchronize()
    result: dict[str, object] = {}
    start = time.perf_counter()
    if engine == "ours save":
        import tensorizer

        tensorizer.save(tensors, out)
    elif engine == "ours save_async":
        import tensorizer

        future = tensorizer.save_async(tensors, out)
        result["call_seconds"] = time.perf_counter() - start
        future.result()
    else:
        from safetensors.torch import save_file

        torch.save(tensors, out) if engine == "torch.save" else save_file(tensors, out)
        descriptor = os.open(out, os.O_RDWR)
        os.fsync(descriptor)
        os.close(descriptor)
    result |= {"seconds": time.perf_counter() - start, "bytes": total}
    del tensors
    result["verified"] = sums(saved(engine, out)) == read_sums(path)
    os.remove(out)
    return result


def verify(engine: str, tensors: Tensors, expected: dict[str, str]) -> bool:
    if engine == "ours float32":
        if any(tensor.dtype != torch.float32 for tensor in tensors.values()):
            return False
        tensors = {name: tensor.half() for name, tensor in tensors.items()}
    return sums(tensors) == expected


def collect(found: Tensors | Pairs, start: float) -> tuple[Tensors, float | None]:
    """Return all tensors, and the seconds until the device had the first that was handed out."""
    if isinstance(found, dict):
        return found, None
    tensors, first = {}, None
    for name, tensor in found:
        if first is None:
            torch.cuda.current_stream().synchronize()
            first = time.perf_counter() - start
        tensors[name] = tensor
    return tensors, first


def load(engine: str, path: Path, loads: int) -> dict[str, object]:
    result: dict[str, object] = {"verified": True}
    times = []
    for attempt in range(loads):
        start = time.perf_counter()
        tensors, first = collect(LOADERS[engine](path), start)
        torch.cuda.synchronize()
        times.append(getattr(ours_module, "seconds", None) or time.perf_counter() - start)
        if attempt == 0 and first is not None:
            result["first"] = first
        if attempt == 0 and engine.startswith("ours"):
            import tensorizer

            result["stats"] = tensorizer.stats()
            if engine == "ours GDS=1" and result["stats"]["reading"] != "GPUDirect Storage":
                raise AbsentError("GPUDirect Storage is not available here")
        # The bytes that were read: a cast to float32 doubles them on the device.
        size = sum(tensor.nbytes for tensor in tensors.values())
        result["bytes"] = size // 2 if engine == "ours float32" else size
        result["verified"] &= verify(engine, tensors, read_sums(path))
        del tensors
        torch.cuda.empty_cache()
        if attempt + 1 < loads:
            blank(size, DEVICE)
    return result | {"seconds": times[0], "again": times[1:]}


def import_modules(engine: str) -> None:
    """Import what an engine needs, before the clock starts."""
    for name, module in MODULES.items():
        if name in engine:
            try:
                importlib.import_module(module)
            except ModuleNotFoundError as error:
                if error.name == module.partition(".")[0]:
                    raise AbsentError(f"{error.name} is not installed") from None
                raise


def main(engine: str, folder: str, model: str, loads: str = "2") -> dict[str, object]:
    path = Path(folder) / model
    if engine in VARIED:
        name, value = engine.removeprefix("ours ").split("=")
        os.environ[f"TENSORIZER_{name}"] = value
    import_modules(engine)
    torch.ones(1, device=DEVICE)
    torch.cuda.synchronize()
    if engine in BASELINES:
        return baseline(engine, path)
    if "save" in engine.rsplit(maxsplit=1)[-1]:
        return save(engine, path)
    return load(engine, path, int(loads))


if __name__ == "__main__":
    try:
        print(json.dumps(main(*sys.argv[1:])))
    except AbsentError as absent:
        print(json.dumps({"absent": str(absent)}))
    sys.stdout.flush()
    os._exit(0)
