"""One engine of ``format_cases.py``, one run: how ours is called, and the measuring.

``formats.py`` calls :func:`once` in a process of its own.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import baselines
import peers
import torch
from engines import checksum, reset_peak, status
from format_cases import Case
from format_files import Given, given, one_file, sums
from machine import have_memory
from peers import Pairs, Tensors


def ours(where: Given, **options) -> Tensors:
    import tensorizer

    return tensorizer.load(where.whole, "cpu", **options)


def ours_half(where: Given, **options) -> Tensors:
    slices = {name: (0, 0, rows) for name, rows in where.rows.items()}
    return ours(where, slices=slices, **options)


def ours_iterate(where: Given, **options) -> Pairs:
    import tensorizer

    yield from tensorizer.iterate(where.whole, device="cpu", buffer_bytes=where.buffer, **options)


def safetensors_half(where: Given) -> Tensors:
    return peers.safetensors_rows(where.files, next(iter(where.rows.values())))


def torch_half(where: Given) -> Tensors:
    tensors = peers.torch_load(where.files, mmap=True)
    return {name: tensors[name][:rows].clone() for name, rows in where.rows.items()}


def fetched(where: Given, load: Callable[[list[str]], Tensors]) -> Tensors:
    """Download files, one connection each, and map them."""
    with tempfile.TemporaryDirectory(dir=os.environ["BENCHMARK_FOLDER"]) as folder:
        outputs = [f"{folder}/{number}" for number in range(len(where.files))]
        pairs = zip(outputs, where.files, strict=True)
        arguments = [part for path, url in pairs for part in ("--output", path, url)]
        command = ["curl", "--fail", "--parallel", "--parallel-immediate"]
        subprocess.run([*command, *arguments], check=True, capture_output=True)
        return load(outputs)


#: Tuned engines differ in their environment only, so "tuned" is left out of these names.
LOADERS: dict[str, Callable[[Given], Tensors]] = {
    "ours": ours,
    "ours mmap": lambda where: ours(where, mmap=True),
    "ours half": ours_half,
    "ours mmap half": lambda where: ours_half(where, mmap=True),
    "safetensors mapped": lambda where: peers.safetensors(where.files),
    "safetensors cloned": lambda where: peers.safetensors_cloned(where.files),
    "safetensors half": safetensors_half,
    "torch.load": lambda where: peers.torch_load(where.files),
    "torch.load mmap": lambda where: peers.torch_load(where.files, mmap=True),
    "torch.load mmap half": torch_half,
    "run:ai": lambda where: peers.run_ai(where.files),
    "fastsafetensors": lambda where: peers.fastsafetensors(where.files),
    "curl, then safetensors": lambda where: fetched(where, peers.safetensors),
    "curl, then torch.load": lambda where: fetched(
        where, lambda files: peers.torch_load(files, mmap=True)
    ),
}
#: Engines that load from bytes, read before the clock starts; and the module of their ``load``.
OF_BYTES = {"ours bytes": "tensorizer.safetensors", "safetensors bytes": "safetensors.torch"}
ITERATORS: dict[str, Callable[[Given], Pairs]] = {
    "ours iterate": ours_iterate,
    "ours mmap iterate": lambda where: ours_iterate(where, mmap=True),
    "safetensors iterate": lambda where: peers.safetensors_iterate(where.files),
    "run:ai iterate": lambda where: peers.run_ai_iterate(where.files),
    # Its tensors are overwritten by later ones, which costs it nothing here.
    "run:ai tuned iterate": lambda where: peers.run_ai_iterate(where.files, owned=False),
    "fastsafetensors iterate": lambda where: peers.fastsafetensors_iterate(
        where.files, where.buffer
    ),
}


def warm_up(engine: str, case: Case, where: Given, server: str) -> None:
    """Set what the engine reads from the environment, import it, start torch's threads."""
    name = engine.removesuffix(" iterate")
    settings = peers.S3_SETTINGS if case.scheme == "s3" else peers.SETTINGS
    os.environ.update(settings.get(name, {}))
    if case.scheme == "s3":
        os.environ.update(peers.s3_environment(server))
    if engine.endswith(" iterate"):
        os.environ["RUNAI_STREAMER_MEMORY_LIMIT"] = str(where.buffer)
    if engine.startswith("ours"):
        importlib.import_module("tensorizer")
    else:
        peers.import_for(engine)
    checksum({"": torch.ones(1 << 20, dtype=torch.int64)})


def iterated(pairs: Pairs) -> tuple[dict[str, int], int]:
    """Add up each tensor and let it go; return the sums, and how many bytes there were."""
    found: dict[str, int] = {}
    total = 0
    for name, tensor in pairs:
        assert name not in found, f"{name} came twice"
        found |= checksum({name: tensor})
        total += tensor.nbytes
        del tensor
    return found, total


def once(engine: str, case: Case, folder: Path, server: str, quick: bool) -> Mapping[str, object]:
    """Measure one engine, or a baseline, once."""
    os.environ["BENCHMARK_SERVER"] = server
    os.environ["BENCHMARK_FOLDER"] = str(folder)
    if engine in case.baselines:
        return baselines.measure(engine, one_file(folder, case))
    where = given(folder, case, server, quick)
    warm_up(engine, case, where, server)
    expected = sums(folder, case, half=engine.endswith(" half"))
    plain = engine.replace(" tuned", "")
    iterate = ITERATORS.get(engine) or ITERATORS.get(plain)
    load = LOADERS.get(plain)
    if engine in OF_BYTES:
        data = Path(where.files[0]).read_bytes()
        of_bytes = importlib.import_module(OF_BYTES[engine]).load

        def load(_: Given) -> Tensors:
            return of_bytes(data)

    have_memory(one_file(folder, case).stat().st_size)
    reset_peak()
    before = status("VmHWM")
    cpu = sum(os.times()[:4])
    start = time.perf_counter()
    if iterate is not None:
        found, total = iterated(iterate(where))
        kept = 0
        loaded = time.perf_counter() - start
    else:
        tensors = load(where)
        loaded = time.perf_counter() - start
        found = checksum(tensors)
        kept = total = sum(tensor.nbytes for tensor in tensors.values())
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "load_seconds": loaded,
        "cpu_seconds": sum(os.times()[:4]) - cpu,
        "bytes": total,
        "extra_bytes": status("VmHWM") - before - kept,
        "verified": found == expected,
    }
