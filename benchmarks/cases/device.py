"""Loads to a CUDA device, saves from it, and the tests for devices.

The clock stops when the device has everything; sums are computed there. Each process loads twice:
"again" is the second load, when memory has been pinned. On the emulated CUDA, its counts are
figures too.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness import baselines
from harness.case import AbsentError, Case, Engine, Given, Measured, Pairs, Tensors
from harness.files import KEY, own, sums, sums_of, sync
from harness.process import ROOT, have_memory
from ours import OLD

DEVICE = "cuda"
Loader = Callable[[Given], Tensors | Pairs]
#: The emulator's counts that become figures, and what they are divided by.
COUNTS = {"pinned peak": ("pinned MiB", 1 << 20), "device peak": ("device MiB", 1 << 20),
          "bus busy us": ("bus busy s", 1e6), "total calls": ("calls", 1)}  # fmt: skip
#: Settings that a sweep tries, one at a time.
SWEPT = {
    "TENSORIZER_STAGING_KB": (4096, 8192, 16384),
    "TENSORIZER_IN_FLIGHT_MB": (16, 32),
    "TENSORIZER_STREAMS": (1, 3, 4, 8),
    "TENSORIZER_READERS": (2, 4, 8, 16),
}
#: Paths of compute-sanitizer if it is not on the PATH.
SANITIZERS = ("usr/local/cuda*/bin/compute-sanitizer", "opt/nvidia/*/bin/compute-sanitizer")
#: A small load and save, for compute-sanitizer.
SANITIZED = """
import sys, tensorizer, torch
tensors = {f"t.{n}": torch.randn(37 * n + 1) for n in range(50)} | {"t": torch.randn(5_000_000)}
for device in ("cuda", "cpu"):
    tensorizer.save(tensors, sys.argv[1])
    loaded = tensorizer.load(sys.argv[1], device, verify_hash=True)
    assert all(torch.equal(loaded[name].cpu(), one.cpu()) for name, one in tensors.items())
    tensors = loaded
"""


def emulator_counts() -> dict[str, float]:
    """Return what the emulated CUDA has counted; nothing on a real device."""
    stat = getattr(ctypes.CDLL(None), "fake_cuda_stat", None)
    if stat is None:
        return {}
    stat.restype, stat.argtypes = ctypes.c_uint64, [ctypes.c_char_p]
    return {name: stat(key.encode()) / unit for key, (name, unit) in COUNTS.items()}


def started() -> None:
    """Start the device.

    Raises:
        AbsentError: There is none.

    """
    if not torch.cuda.is_available():
        raise AbsentError("torch sees no CUDA device")
    torch.ones(1, device=DEVICE)
    torch.cuda.synchronize()


def collected(found: Tensors | Pairs, start: float) -> tuple[dict[str, torch.Tensor], float | None]:
    """Return all tensors, and the seconds until the device had the first of an iterator."""
    if isinstance(found, dict):
        return found, None
    tensors, first = {}, None
    for name, tensor in found:
        if first is None:
            torch.cuda.current_stream().synchronize()
            first = time.perf_counter() - start
        tensors[name] = tensor
    return tensors, first


def twice(load: Loader) -> Callable[[Given], Measured]:
    """Return two loads, of which the first is the figure."""

    def run(given: Given) -> Measured:
        started()
        if emulator_counts():
            have_memory(given.model.total)  # the emulated device's memory is that of the host
        times, figures, right, size = [], {}, True, 0
        for attempt in range(2):
            start, cpu = time.perf_counter(), time.process_time()
            tensors, first = collected(load(given), start)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            if attempt == 0:
                used = time.process_time() - cpu
                figures = emulator_counts() | ({} if first is None else {"first tensor s": first})
            size = sum(tensor.nbytes for tensor in tensors.values())
            found = sums(tensors, "weighed")
            right &= found == sums_of(given.folder, given.model, "weighed")
            del tensors
            # The memory that the next load gets holds other bytes than those of this one.
            torch.cuda.empty_cache()
            torch.full((size // 8,), -1, dtype=torch.int64, device=DEVICE)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        return Measured(times[0], size, used, {"again s": times[1]} | figures, right)

    return run


def loading(**options: Any) -> Loader:
    """Return a load by this package."""

    def load(given: Given) -> Tensors:
        import tensorizer

        if given.form == "encrypted":
            options["encryption"] = tensorizer.DecryptionParams.from_key(KEY)
        return tensorizer.load(given.where, DEVICE, **options)

    return load


def iterating(given: Given) -> Pairs:
    """Iterate with this package."""
    import tensorizer

    return iter(tensorizer.iterate(given.where, DEVICE))


def predecessor(given: Given) -> Tensors:
    """Load with the predecessor."""
    import tensorizer

    file = tensorizer.TensorDeserializer(given.where, device=DEVICE, num_readers=8)
    return dict(file.items())


def safetensors(given: Given) -> Tensors:
    """Load with safetensors."""
    from safetensors.torch import load_file

    return load_file(given.where, device=DEVICE)


def prefetch(given: Given) -> Pairs:
    """Iterate with the read-ahead of safetensors 0.9."""
    from safetensors import safe_open

    with safe_open(given.where, "pt", device="cuda:0") as file:
        if not hasattr(file, "prefetch"):
            raise AbsentError("this safetensors has no prefetch")
        with file.prefetch(threads=os.cpu_count() or 8) as loader:
            yield from loader


def instanttensor(given: Given) -> Pairs:
    """Iterate with InstantTensor."""
    from instanttensor import safe_open

    with safe_open(given.where, framework="pt", device=0) as file:
        yield from file.tensors()


def fastsafetensors(given: Given) -> Tensors:
    """Load with fastsafetensors."""
    from fastsafetensors import fastsafe_open

    with fastsafe_open(filenames=[given.where], nogds=True, device="cuda:0") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def run_ai(given: Given) -> Pairs:
    """Iterate with run:ai."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(given.where, device=DEVICE)
        for name, tensor in streamer.get_tensors():
            yield name, tensor.to(DEVICE)


def torch_load(mmap: bool) -> Loader:
    """Return a call of ``torch.load``."""
    return lambda given: torch.load(given.where, map_location=DEVICE, weights_only=True, mmap=mmap)


def pinned_copy(back: bool) -> Callable[[Given], Measured]:
    """Return copies of one pinned buffer to the device, or back."""

    def run(given: Given) -> Measured:
        started()
        step = min(256 << 20, given.model.total)
        size = given.model.total // step * step
        buffer = torch.ones(step, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(step, dtype=torch.uint8, device=DEVICE)
        source, target = (there, buffer) if back else (buffer, there)
        seconds = 0.0
        for _ in range(2):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(size // step):
                target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
        return Measured(seconds, size)

    return run


def saving(save: Callable[[Tensors, Path], Any], read: Callable[[Path], Tensors]
           ) -> Callable[[Given], Measured]:  # fmt: skip
    """Return a save of what is on the device, synced, and then loaded on the CPU."""

    def run(given: Given) -> Measured:
        started()
        have_memory(given.model.total)
        # Small tensors share storages, of which torch.save would write all for each.
        tensors = own({n: one.to(DEVICE) for n, one in given.model.tensors().items()})
        torch.cuda.synchronize()
        path, start = given.out / "saved", time.perf_counter()
        save(tensors, path)
        sync(given.out)
        seconds = time.perf_counter() - start
        right = sums(read(path), "weighed") == sums_of(given.folder, given.model, "weighed")
        return Measured(seconds, given.model.total, verified=right)

    return run


def save_ours(tensors: Tensors, path: Path) -> None:
    """Save with this package."""
    import tensorizer

    tensorizer.save(tensors, path)


def save_async(tensors: Tensors, path: Path) -> None:
    """Save in the background, and wait."""
    import tensorizer

    tensorizer.save_async(tensors, path).result()


def read_ours(path: Path) -> Tensors:
    """Load what was saved by this package."""
    import tensorizer

    return tensorizer.load(path, "cpu", verify_hash=True)


def save_file(tensors: Tensors, path: Path) -> None:
    """Save with safetensors."""
    from safetensors.torch import save_file as save

    save(tensors, path)


def read_file(path: Path) -> Tensors:
    """Load what was saved by safetensors."""
    from safetensors.torch import load_file

    return load_file(path)


def tests(folder: str) -> Callable[[Given], Measured]:
    """Return a run of tests; one that crashes ends a worker of pytest-xdist, and the others run."""

    def run(given: Given) -> Measured:
        started()
        command = [
            sys.executable,
            "-m",
            "pytest",
            folder,
            "-q",
            "-n",
            "1",
            "-p",
            "no:cacheprovider",
        ]
        command += ["-k", "test_load or test_save"] if given.quick else []
        env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
        start = time.perf_counter()
        done = subprocess.run(
            command, cwd=ROOT, env=env | {"REQUIRE_CUDA": "1"}, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        counts = dict.fromkeys(("passed", "skipped", "failed"), 0.0)
        for count, state in re.findall(r"(\d+) (passed|skipped|failed|error)", done.stdout[-300:]):
            counts["failed" if state == "error" else state] += int(count)
        if not counts["passed"] and not counts["failed"]:
            raise RuntimeError(f"pytest did not run: {done.stdout[-500:]}{done.stderr[-500:]}")
        named = re.findall(r"^(?:FAILED|ERROR) .*\n", done.stdout, re.MULTILINE)
        print("".join(named), end="", flush=True)
        return Measured(seconds, figures=counts)

    return run


def memcheck(given: Given) -> Measured:
    """Have compute-sanitizer look at a small load and a small save."""
    started()
    found = (str(path) for pattern in SANITIZERS for path in Path("/").glob(pattern))
    program = shutil.which("compute-sanitizer") or next(found, None)
    if program is None:
        raise AbsentError("compute-sanitizer is not installed")
    command = [program, "--tool", "memcheck", "--error-exitcode", "99", sys.executable, "-c"]
    start = time.perf_counter()
    done = subprocess.run([*command, SANITIZED, str(given.out / "f.tensors")], check=False)
    failed = float(done.returncode != 0)
    return Measured(time.perf_counter() - start, figures={"passed": 1 - failed, "failed": failed})


def engine(name: str, load: Loader, form: str = "tensors", *imports: str, **more: Any) -> Engine:
    """Return an engine that loads to the device twice."""
    return Engine(name, twice(load), form, imports or ("tensorizer",), touch=False, **more)


def saver(name: str, save: Callable[[Tensors, Path], Any], read: Callable[[Path], Tensors],
          *imports: str) -> Engine:  # fmt: skip
    """Return an engine that saves from the device."""
    return Engine(name, saving(save, read), "", imports, touch=False)


def step(name: str, run: Callable[[Given], Measured]) -> Engine:
    """Return an engine that tests."""
    return Engine(name, run, "", (), touch=False)


def case(name: str, title: str, engines: tuple[Engine, ...], model: str = "device", **more: Any
         ) -> Case:  # fmt: skip
    """Return a case of a device, with files in memory."""
    more = {"memory": True, "part": "weighed"} | more
    return Case(f"device/{name}", title, engines, model, device=True, **more)


UP = Engine("pinned copy", pinned_copy(back=False), "", (), baseline=True, touch=False)
BACK = replace(UP, name="pinned copy back", run=pinned_copy(back=True))
LOAD = engine("tensorizer", loading())
CLONE = engine("tensorizer clone", loading(clone=True))
PEERS = (
    engine("InstantTensor", instanttensor, "safetensors", "instanttensor"),
    engine("safetensors prefetch", prefetch, "safetensors", "safetensors.torch", site="prefetch"),
    engine("safetensors", safetensors, "safetensors", "safetensors.torch"),
    engine("run:ai", run_ai, "safetensors", "runai_model_streamer"),
    engine("fastsafetensors", fastsafetensors, "safetensors", "fastsafetensors"),
)
PT = (engine("torch.load mmap", torch_load(mmap=True), "pt", "torch"),
      engine("torch.load", torch_load(mmap=False), "pt", "torch"))  # fmt: skip

CASES = [
    case("tests", "the tests for devices",
         (step("pytest", tests(os.environ.get("DEVICE_TESTS", "tests/python/gpu"))),
          step("compute-sanitizer", memcheck)), "few", rounds=1),
    case("load", "load from the page cache to a device",
         (LOAD, engine("tensorizer iterate", iterating),
          engine("tensorizer safetensors", loading(), "safetensors"), CLONE,
          engine("tensorizer verify crc32", loading(verify_hash="crc32")),
          engine("tensorizer verify", loading(verify_hash=True)),
          replace(LOAD, name="tensorizer NUMA=0", env={"TENSORIZER_NUMA": "0"}), *PEERS,
          engine(OLD, predecessor, site="old"), UP),
         quick=("tensorizer", "tensorizer iterate", "safetensors", "pinned copy")),
    case("20k", "load 20,000 tensors from the page cache to a device",
         (LOAD, CLONE, *PEERS, *PT, UP), "device-20k", quick=("tensorizer", "torch.load")),
    case("torch", "load a file of torch.save from the page cache to a device",
         (replace(LOAD, form="pt"), *PT, UP), quick=("tensorizer",)),
    case("encrypted", "load an encrypted file from the page cache to a device",
         (replace(LOAD, form="encrypted"), UP), quick=("tensorizer",)),
    case("cold", "load from a disk to a device, nothing in the page cache",
         (LOAD, replace(LOAD, name="tensorizer DIRECT_IO=0", env={"TENSORIZER_DIRECT_IO": "0"}),
          *PEERS, baselines.DIRECT), memory=False, cold=True, quick=("tensorizer",)),
    case("save", "save from a device to memory",
         (saver("tensorizer", save_ours, read_ours, "tensorizer"),
          saver("tensorizer save_async", save_async, read_ours, "tensorizer"),
          saver("safetensors", save_file, read_file, "safetensors.torch"),
          saver("torch.save", torch.save, lambda path: torch.load(path, weights_only=True)), BACK),
         quick=("tensorizer", "torch.save")),
    case("settings", "load to a device with other settings",
         (LOAD, *(replace(LOAD, name=f"tensorizer {name}={value}", env={name: str(value)})
                  for name, values in SWEPT.items() for value in values)), rounds=3,
         quick=("tensorizer",)),
]  # fmt: skip
