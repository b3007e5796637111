"""Measure loads to a device tensor by tensor, beside safetensors' `prefetch`, on the emulated CUDA.

    python benchmarks/landing.py [--quick] [--bus MBPS ...] [--peer FOLDER]

The peer is safetensors 0.9.0rc1, in a folder or a virtual environment of its own:

    pip install --no-deps --target FOLDER safetensors==0.9.0rc1

``--quick`` measures everything once, and one bus only. The report in Markdown goes to the standard
output. The files, 5 GB, are kept for the next run in TMPDIR, or ``/tmp``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from landing_files import (
    CHECKED_LARGE,
    CHECKED_SMALL,
    EMULATOR,
    FORMATS,
    LARGE,
    SETTINGS,
    SMALL,
    Model,
    build,
    build_runtime,
    prepare,
)
from landing_report import GET_TENSOR, PREFETCH, PREFETCH_ALL, Row, large_table, small_table
from run import describe

BUSES = (2000, 5000, 20_000)
ROUNDS = 5
#: The consumer's seconds per byte, and the buffer for which the peak of memory is measured.
PAUSE, BUFFER = 0.5e-9, 256_000_000
#: Engines of the peer, by the names of their rows.
PEERS = {PREFETCH: "prefetch", PREFETCH_ALL: "prefetch_all", GET_TENSOR: "get_tensor"}
#: Engines that hand out tensors before all have landed.
STREAMING = ("iterate", "own_prefetch", "prefetch")
#: Our engines for small tensors, by the beginning of the names of their rows.
SMALL_ENGINES = {
    "iterate": "iterate",
    "load": "load",
    "load(clone=True)": "clone",
    "load(out=)": "out",
}


class Worker:
    """A process that loads on one device when asked to."""

    def __init__(self, device: str, environment: Mapping[str, str]) -> None:
        command = [sys.executable, str(Path(__file__).with_name("landing_worker.py")), device]
        if device == "cuda":
            command = ["sh", str(EMULATOR / "run.sh"), *command]
        self._process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> Row:
        """Send a request; return the result."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"failed: {request}")
        found: Row = json.loads(line)
        return found

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()


@dataclass(frozen=True)
class Task:
    """One load that is measured in every round, or verified."""

    row: str
    engine: str
    model: Model
    ending: str = "safetensors"
    device: str = "cuda"
    #: The figures of the row that it gives.
    part: str = "plain"
    #: Options of the request to the worker: "pause", "buffer_bytes".
    options: tuple[tuple[str, float], ...] = ()

    @property
    def worker(self) -> tuple[bool, str]:
        """True if it is the peer's, and the device."""
        return self.engine in PEERS.values(), self.device

    def request(self) -> dict[str, Any]:
        path = str(self.model.path(self.ending))
        return {"engine": self.engine, "path": path, **dict(self.options)}


#: Workers by device; the first part of a key is True for the peer's.
Workers = dict[tuple[bool, str], Worker]


class Bench:
    """Runs tasks on the emulated CUDA, with the peer where its folder is given."""

    def __init__(self, peer: Path | None, rounds: int) -> None:
        emulator = build()
        self.rounds, self.has_peer, self.peer = rounds, peer is not None, "none"
        self._peer: dict[str, str] = {}
        if peer is not None:
            packages = next(iter(sorted(peer.glob("lib/python*/site-packages"))), peer)
            if not (packages / "safetensors").is_dir():
                raise SystemExit(f"no safetensors in {packages}")
            found = next(packages.glob("safetensors-*.dist-info"), packages)
            self.peer = found.name.removesuffix(".dist-info")
            self._peer = {"PYTHONPATH": str(packages), "LD_PRELOAD": str(build_runtime(emulator))}

    @contextlib.contextmanager
    def workers(self, tasks: Iterable[Task], settings: Mapping[str, str]) -> Iterator[Workers]:
        """Start the workers that tasks need."""
        with contextlib.ExitStack() as stack:
            started: Workers = {}
            for is_peer, device in dict.fromkeys(task.worker for task in tasks):
                environment = self._peer if is_peer else {}
                if device == "cpu":
                    environment = {k: v for k, v in environment.items() if k != "LD_PRELOAD"}
                worker = Worker(device, {**environment, **settings})
                started[is_peer, device] = stack.enter_context(worker)
            yield started

    def verify(self, tasks: list[Task]) -> int:
        """Compare all bytes that tasks load, on a device with all checks and slow streams."""
        with self.workers(tasks, {"FAKE_CUDA_MEM_MB": SETTINGS["FAKE_CUDA_MEM_MB"]}) as workers:
            for task in tasks:
                reference = str(task.model.path("safetensors"))
                found = workers[task.worker].ask(
                    task="verify", reference=reference, **task.request()
                )
                if found["count"] != task.model.count:
                    raise SystemExit(f"{task}: {found['count']} tensors")
        return len(tasks)

    def measure(self, tasks: list[Task], bus: int) -> dict[tuple[str, str], Row]:
        """Return medians by row and part; all tasks take turns, and the first round is dropped."""
        found: list[list[Row]] = [[] for _ in tasks]
        with self.workers(tasks, SETTINGS | {"FAKE_CUDA_BUS_MBPS": str(bus)}) as workers:
            for round_ in range(self.rounds + 1):
                for task, kept in zip(tasks, found, strict=True):
                    row = workers[task.worker].ask(task="measure", **task.request())
                    if row["count"] != task.model.count:
                        raise SystemExit(f"{task}: {row['count']} tensors")
                    if round_ > 0:
                        kept.append(row)
                print(f"  round {round_} of {self.rounds}", end="\r", flush=True, file=sys.stderr)
        pairs = zip(tasks, found, strict=True)
        return {(task.row, task.part): medians(rows) for task, rows in pairs}


def medians(rows: list[Row]) -> Row:
    """Return the median of each figure; None for one that an engine does not have."""
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    return {
        key: None if None in values else statistics.median(values)
        for key, values in columns.items()
    }


def large_tasks(model: Model, has_peer: bool) -> list[Task]:
    """Return the loads of a large file, ours and the peer's in turns."""
    rows = [("iterate", "iterate", ending) for ending in FORMATS]
    rows += [("load", "load", ending) for ending in FORMATS]
    rows = [(f"{name}, .{ending}", engine, ending) for name, engine, ending in rows]
    rows.append(("prefetch, .safetensors", "own_prefetch", "safetensors"))
    if has_peer:
        rows[1:1] = [(PREFETCH, "prefetch", "safetensors")]
        rows[4:4] = [(PREFETCH_ALL, "prefetch_all", "safetensors")]
    streaming = [row for row in rows if row[1] in STREAMING]
    tasks = [Task(row, engine, model, ending) for row, engine, ending in rows]
    for part, option in (("consumer", ("pause", PAUSE)), ("limited", ("buffer_bytes", BUFFER))):
        tasks += [
            Task(row, engine, model, ending, part=part, options=(option,))
            for row, engine, ending in streaming
        ]
    return tasks


def small_tasks(model: Model, has_peer: bool) -> list[Task]:
    """Return the loads of small tensors, to the device and to the CPU."""
    tasks = [
        Task(f"{name}, .{ending}", engine, model, ending, device, part=device)
        for name, engine in SMALL_ENGINES.items()
        for ending in FORMATS
        for device in ("cuda", "cpu")
    ]
    tasks.append(Task("prefetch, .safetensors", "own_prefetch", model, part="cuda"))
    if has_peer:
        tasks.insert(2, Task(PREFETCH, "prefetch", model, part="cuda"))
        tasks.insert(3, Task(GET_TENSOR, "get_tensor", model, device="cpu", part="cpu"))
    return tasks


def verified(bench: Bench) -> str:
    """Compare all bytes that every engine loads of smaller files; return a sentence."""
    tasks = large_tasks(CHECKED_LARGE, bench.has_peer)
    tasks += small_tasks(CHECKED_SMALL, bench.has_peer)
    # Each load once: a pause changes no bytes.
    tasks = [task for task in tasks if task.part != "consumer"]
    size = (CHECKED_LARGE.total_bytes + CHECKED_SMALL.total_bytes) / 1e6
    return f"{bench.verify(tasks)} loads of files of {size:.0f} MB were compared byte by byte."


def heading(bench: Bench) -> str:
    """Return the beginning of the report: the machine and the settings."""
    machine = describe()
    settings = " ".join(f"{name}={value}" for name, value in SETTINGS.items())
    rounds = f"{bench.rounds} round{'s' * (bench.rounds > 1)} after one that is dropped"
    return "\n".join([
        "# Tensors that land one by one",
        "",
        f"{machine['cpu']}, {machine['memory']}, torch {machine['versions']['torch']}, commit "
        f"{machine['commit']}, {str(machine['date'])[:10]}. Medians of {rounds}; engines in turns.",
        f"The peer: {bench.peer}. {verified(bench)} CPU seconds include the emulator's.",
        f"The emulated CUDA: {settings}.",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--bus", type=int, nargs="+", metavar="MBPS")
    parser.add_argument("--peer", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    buses = options.bus or (BUSES[:1] if options.quick else BUSES)
    prepare()
    bench = Bench(options.peer, 1 if options.quick else ROUNDS)
    print(heading(bench), flush=True)
    for bus in buses:
        found = bench.measure(large_tasks(LARGE, bench.has_peer), bus)
        print(f"\n## {LARGE.total_bytes / 1e9:.2f} GB in {LARGE.count} tensors, a bus of "
              f"{bus / 1e3:g} GB/s\n\n{large_table(found, bus, BUFFER)}", flush=True)  # fmt: skip
    for model in SMALL:
        found = bench.measure(small_tasks(model, bench.has_peer), buses[0])
        print(f"\n## {model.count:,} tensors of 1 KiB, a bus of {buses[0] / 1e3:g} GB/s\n\n"
              f"{small_table(found, model)}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
