"""One engine loads or saves one model on a device, in a process of its own: prints a line of JSON.

    python engine.py ENGINE FOLDER MODEL

``BENCHMARK_DEVICE`` says where (``cuda``). The clock runs from the call until the device has
everything. What is loaded is summed there and compared with the sums of what was written.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

DEVICE = os.environ.get("BENCHMARK_DEVICE", "cuda")
KEY = bytes(range(32))
Tensors = dict[str, torch.Tensor]


class AbsentError(Exception):
    """The engine is not installed, or cannot run here."""


def synchronize() -> None:
    if DEVICE != "cpu":
        torch.cuda.synchronize()


def sums(tensors: Tensors) -> dict[str, int]:
    """Read every byte where it is: one sum a tensor, modulo 2^64."""
    return {
        name: int(tensor.detach().flatten().view(torch.int64).sum())
        for name, tensor in tensors.items()
    }


def only_cuda() -> None:
    if DEVICE == "cpu":
        raise AbsentError("it loads to CUDA only")


def ours(path: Path, suffix: str = "tensors", **options) -> Tensors:
    import tensorizer

    if suffix == "encrypted":
        options["encryption"] = tensorizer.DecryptionParams.from_key(KEY)
    return tensorizer.load(f"{path}.{suffix}", DEVICE, **options)


def ours_module(path: Path) -> Tensors:
    """Fill parameters that are on the device already; making them is not measured."""
    import tensorizer

    names = list(json.loads(Path(f"{path}.json").read_text()))
    shapes = torch.ops.tensorizer._describe(f"{path}.tensors", names)
    out = []
    for text in shapes:
        dtype, _, shape = text.removesuffix("]").partition("[")
        dims = [int(dim) for dim in shape.split(",")]
        out.append(torch.empty(dims, dtype=getattr(torch, dtype), device=DEVICE))
    synchronize()
    start = time.perf_counter()
    torch.ops.tensorizer.load(f"{path}.tensors", names, out=out)
    synchronize()
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


def safetensors_prefetch(path: Path) -> Tensors:
    only_cuda()
    from safetensors import safe_open

    with safe_open(f"{path}.safetensors", framework="pt", device="cuda") as file:
        if not hasattr(file, "prefetch"):
            raise AbsentError("this safetensors has no prefetch")
        return dict(file.prefetch(threads=os.cpu_count() or 8))


def instanttensor(path: Path) -> Tensors:
    only_cuda()
    from instanttensor import safe_open

    with safe_open(f"{path}.safetensors", framework="pt", device=0) as file:
        return dict(file.tensors())


def fastsafetensors(path: Path) -> Tensors:
    only_cuda()
    from fastsafetensors import fastsafe_open

    with fastsafe_open(filenames=[f"{path}.safetensors"], nogds=True, device="cuda:0") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


def runai(path: Path) -> Tensors:
    from runai_model_streamer import SafetensorsStreamer

    out = {}
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(f"{path}.safetensors")
        for name, tensor in streamer.get_tensors():
            out[name] = tensor.to(DEVICE, non_blocking=True)
    return out


def torch_load(path: Path) -> Tensors:
    return torch.load(f"{path}.pt", map_location=DEVICE, weights_only=True, mmap=True)


LOADERS: dict[str, Callable[[Path], Tensors]] = {
    "ours": ours,
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
    "torch.load mmap": torch_load,
}


#: Imported before the clock starts.
MODULES = {
    "ours": "tensorizer",
    "2.12.1": "tensorizer",
    "safetensors": "safetensors.torch",
    "InstantTensor": "instanttensor",
    "fastsafetensors": "fastsafetensors",
    "run:ai": "runai_model_streamer",
}


def pinned_copy(size: int) -> float:
    """The limit: one pinned buffer copied to the device again and again; returns seconds."""
    step = min(256 << 20, size)
    pin = DEVICE != "cpu"
    buffer = torch.ones(step, dtype=torch.uint8, pin_memory=pin)
    there = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    for round_ in range(2):
        synchronize()
        start = time.perf_counter()
        for offset in range(0, size - step + 1, step):
            there[offset : offset + step].copy_(buffer, non_blocking=True)
        synchronize()
        if round_:
            return (time.perf_counter() - start) * size / (size // step * step)
    raise AssertionError


def save(engine: str, path: Path) -> dict[str, object]:
    """Save what is on the device, with fsync."""
    tensors = ours(path)
    synchronize()
    total = sum(tensor.nbytes for tensor in tensors.values())
    out = f"{path}.out"
    start = time.perf_counter()
    if engine == "ours save":
        import tensorizer

        tensorizer.save(tensors, out)
    elif engine == "ours save_async":
        import tensorizer

        future = tensorizer.save_async(tensors, out)
        snapshot = time.perf_counter() - start
        future.result()
    else:
        from safetensors.torch import save_file

        save_file(tensors, out)
        descriptor = os.open(out, os.O_RDWR)
        os.fsync(descriptor)
        os.close(descriptor)
    seconds = time.perf_counter() - start
    assert os.path.getsize(out) >= total
    verified = True
    if engine.startswith("ours"):
        import tensorizer

        verified = sums(tensorizer.load(out, "cpu", verify_hash=True)) == sums(tensors)
    os.remove(out)
    result = {"seconds": seconds, "bytes": total, "verified": verified}
    return result | ({"again_seconds": snapshot} if engine == "ours save_async" else {})


def main(engine: str, folder: str, model: str) -> dict[str, object]:
    path = Path(folder) / model
    expected = json.loads(Path(f"{path}.json").read_text())
    for name, module in MODULES.items():
        if name in engine:
            importlib.import_module(module)
    if DEVICE != "cpu":
        torch.ones(1, device=DEVICE).add_(1)
        synchronize()
    if engine == "pinned copy":
        size = os.path.getsize(f"{path}.tensors")
        return {"seconds": pinned_copy(size), "bytes": size, "verified": True}
    if "save" in engine:
        return save(engine, path)
    result: dict[str, object] = {}
    for attempt in ("seconds", "again_seconds"):
        start = time.perf_counter()
        tensors = LOADERS[engine](path)
        synchronize()
        result[attempt] = getattr(ours_module, "seconds", None) or time.perf_counter() - start
        if attempt == "seconds":
            cast = engine == "ours float32"
            # What was read: a cast doubles it on the device.
            result["bytes"] = sum(t.nbytes for t in tensors.values()) // (2 if cast else 1)
            result["verified"] = (
                all(t.dtype == torch.float32 for t in tensors.values())
                if cast
                else sums(tensors) == expected
            )
            if engine.startswith("ours"):
                import tensorizer

                result["stats"] = tensorizer.stats()
        del tensors
        if DEVICE != "cpu":
            torch.cuda.empty_cache()
    return result


if __name__ == "__main__":
    try:
        print(json.dumps(main(*sys.argv[1:4])))
    except (AbsentError, ImportError) as absent:
        print(json.dumps({"absent": str(absent)}))
    sys.stdout.flush()
    os._exit(0)
