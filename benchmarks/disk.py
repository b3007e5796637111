"""Measure loads of files that are not in the page cache, and of single tensors.

    python benchmarks/disk.py [--quick] [--only PART ...] [--rounds N]

The report in Markdown goes to the standard output. Parts:

cpu        a whole file to the CPU, beside run:ai; both read around the page cache
device     a whole file, and an eighth of the rows or columns of each tensor, to the emulated CUDA
           with a bus of 5 GB/s; bytes are compared beforehand, on a device that copies them
processes  three processes load one file at once: bytes that the disk gives all of them
tensor     one tensor of 1 to 2 MiB from the page cache, beside safetensors and a clone

Every load but those of ``tensor`` has a process of its own, in turns. Its memory was taken and
given back before: a virtual machine may have returned what is free to its host. CPU seconds are
those of the process. ``--quick`` measures a small file once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from landing_files import CHECKED_LARGE, EMULATOR, LARGE, SETTINGS, Model, build, prepare
from run import describe, forget

WORKER = str(Path(__file__).with_name("disk_worker.py"))
RUN_AI, PROCESSES = "run:ai", 3
BUS = {"FAKE_CUDA_BUS_MBPS": "5000"}
#: Sizes of single tensors, and loads of each.
SIZES, REPEATS = (1 << 20, 3 << 19, (2 << 20) - 64), 200

Row = dict[str, float]


def start(
    engine: str, model: Model, *options: str, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a process that loads a file."""
    command = [sys.executable, WORKER, engine, model.name, *options]
    if "cuda" in options:
        command = ["sh", str(EMULATOR / "run.sh"), *command]
    return subprocess.Popen(
        command,
        env=os.environ | dict(environment or {}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen[str]) -> Row:
    """Wait for what a process has found."""
    out, _ = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"failed: {process.args}")
    found: Row = json.loads(out.splitlines()[-1])
    return found


def in_turns(rounds: int, loads: Mapping[str, Callable[[], Row]]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {name: [] for name in loads}
    for _ in range(rounds):
        for name, load in loads.items():
            found[name].append(load())
    return found


def median(rows: Iterable[Row], value: Callable[[Row], float]) -> float:
    return statistics.median(map(value, rows))


def table(title: str, head: str, lines: Iterable[str]) -> None:
    columns = head.count("|") - 1
    print(f"\n## {title}\n\n{head}\n{'|---' * columns}|", *lines, sep="\n", flush=True)


def show(title: str, found: Mapping[str, list[Row]], base: str) -> None:
    """Print a table; ratios are of the seconds of a row to those of another."""
    lines = []
    for name, rows in found.items():
        seconds = median(rows, lambda row: row["seconds"])
        ratio = seconds / median(found[base], lambda row: row["seconds"])
        cpu = [row["cpu_seconds"] / row["read_bytes"] * 1e9 for row in rows]
        in_flight = ""
        if rows[0].get("most_in_flight"):
            share = median(rows, lambda row: row["in_flight"] / row["most_in_flight"])
            in_flight = f"{share:.2f} of {rows[0]['most_in_flight'] / 2**20:.0f} MiB"
        lines.append(
            f"| {name} | {seconds:.3f} | {min(row['seconds'] for row in rows):.3f} to "
            f"{max(row['seconds'] for row in rows):.3f} | {ratio:.2f} "
            f"| {median(rows, lambda row: row['read_bytes'] / row['bytes']):.3f} "
            f"| {statistics.median(cpu):.3f} ({min(cpu):.3f} to {max(cpu):.3f}) | {in_flight} |"
        )
    head = f"| load | median s | min to max | to {base} | read / wanted | CPU s per GB read |"
    head += " direct reads in flight |"
    table(title, head, lines)


def cpu(model: Model, rounds: int) -> None:
    for engine in ("ours", RUN_AI):
        result(start(engine, model, "--cold", "--verify"))

    def load(engine: str) -> Callable[[], Row]:
        return lambda: result(start(engine, model, "--cold"))

    found = in_turns(rounds, {engine: load(engine) for engine in ("ours", RUN_AI)})
    show(f"Cold to the CPU, {model.total_bytes / 1e9:.2f} GB", found, RUN_AI)


def device(model: Model, rounds: int) -> None:
    build()
    prepare((CHECKED_LARGE,))
    parts = {"an eighth of the rows": "rows", "an eighth of the columns": "columns"}
    engines = {"whole": "ours", **parts}
    options = ("--device", "cuda", "--cold")
    for engine in engines.values():
        result(start(engine, CHECKED_LARGE, *options, "--verify"))

    def load(engine: str) -> Callable[[], Row]:
        return lambda: result(start(engine, model, *options, environment=SETTINGS | BUS))

    found = in_turns(rounds, {name: load(engine) for name, engine in engines.items()})
    show(f"Cold to the emulated device, {model.total_bytes / 1e9:.2f} GB", found, "whole")


def processes(model: Model, rounds: int) -> None:
    settings = {
        "`LOCAL_WORLD_SIZE=3`": {"LOCAL_WORLD_SIZE": str(PROCESSES)},
        "as strangers": {"LOCAL_WORLD_SIZE": "1"},
    }

    def together(environment: Mapping[str, str]) -> Row:
        forget([model.path("tensors")])
        loads = [start("ours", model, "--wait", environment=environment) for _ in range(PROCESSES)]
        for load in loads:
            assert load.stdout is not None
            load.stdout.readline()
        begun = time.perf_counter()
        for load in loads:
            assert load.stdin is not None
            load.stdin.write("go\n")
            load.stdin.flush()
        rows = [result(load) for load in loads]
        total = sum(row["read_bytes"] for row in rows)
        seconds = max(row["seconds"] for row in rows)
        return {"read": total, "seconds": min(seconds, time.perf_counter() - begun)}

    found = in_turns(
        rounds, {name: lambda given=given: together(given) for name, given in settings.items()}
    )
    size = model.path("tensors").stat().st_size
    lines = [
        f"| {name} | {median(rows, lambda row: row['read'] / size):.2f} "
        f"| {median(rows, lambda row: row['seconds']):.3f} |"
        for name, rows in found.items()
    ]
    head = "| three processes | bytes from the disk / file | seconds of the last |"
    table(f"One cold file of {size / 1e9:.2f} GB, three processes at once", head, lines)


def tensor(*_: object) -> None:
    import peers
    import tensorizer
    import torch
    from safetensors.torch import save_file

    lines = []
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = f"{folder}/f.tensors", f"{folder}/f.safetensors"
        for size in SIZES:
            one = {"a": torch.randint(-128, 127, (size,), dtype=torch.int8)}
            tensorizer.save(one, ours)
            save_file(one, theirs)
            engines: dict[str, Callable[[], Mapping[str, torch.Tensor]]] = {
                "ours": lambda: tensorizer.load(ours, "cpu"),
                "clone": lambda: peers.safetensors_cloned([theirs]),
            }
            times: dict[str, list[float]] = {name: [] for name in engines}
            for repeat in range(REPEATS):
                for name, load in engines.items():
                    begun = time.perf_counter()
                    loaded = load()
                    times[name].append((time.perf_counter() - begun) * 1e6)
                    if repeat == 0 and not torch.equal(loaded["a"], one["a"]):
                        raise SystemExit(f"{name}: loaded other bytes than were written")
            mine, other = (statistics.median(times[name]) for name in engines)
            lines.append(f"| {size / 2**20:.1f} | {mine:.0f} | {other:.0f} | {mine / other:.2f} |")
    head = "| MiB | ours, µs | `load_file` and a clone, µs | ratio |"
    table("One tensor from the page cache", head, lines)


PARTS = {"cpu": cpu, "device": device, "processes": processes, "tensor": tensor}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    model = CHECKED_LARGE if options.quick else LARGE
    prepare((model,))
    machine = describe()
    print("# Files that are not in the page cache, and single tensors\n")
    print(f"{str(machine['date'])[:10]}, {machine['cpu']}, Linux {machine['kernel']},", end=" ")
    print(f"{machine['versions']}.".replace("'", ""))
    for name in options.only:
        PARTS[name](model, options.rounds or (1 if options.quick else 7))


if __name__ == "__main__":
    main()
