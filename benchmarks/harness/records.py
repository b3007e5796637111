"""Records of measurements: JSON lines, the newest figures of each case and those before them.

A file has runs: a line about the machine, its packages, date and commit, then a line for each case
and engine. Times are seconds; ``figures`` has counts and other numbers. Unknown fields are left
out.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness.process import ROOT, SITES

Row = dict[str, Any]
#: The machine, and the rows that were measured on it in one run.
Run = tuple[Row, list[Row]]
RECORDS = ROOT / "benchmarks/records"
NEWEST, PREVIOUS = "newest.jsonl", "previous.jsonl"
PACKAGES = (
    "tensorizer", "torch", "safetensors", "runai-model-streamer", "fastsafetensors",
    "instanttensor", "transformers", "huggingface_hub", "boto3", "requests",
)  # fmt: skip


def summary(case: str, engine: str, baseline: bool, results: list[Mapping[str, Any]]) -> Row:
    """Return the row of an engine: medians of its rounds, the least CPU, the most memory."""
    seconds = [one["seconds"] for one in results]
    row = {
        "case": case, "engine": engine, "baseline": baseline, "n": len(results),
        "min": min(seconds), "median": statistics.median(seconds), "max": max(seconds),
        "call_median": statistics.median(one.get("call_seconds", one["seconds"])
                                         for one in results),
        "bytes": results[0]["bytes"],
        "cpu_seconds": min(one["cpu_seconds"] for one in results),
        "extra_bytes": max(one.get("extra_bytes", 0) for one in results),
    }  # fmt: skip
    names = dict.fromkeys(name for one in results for name in one.get("figures", {}))
    figures = {
        name: statistics.median(one["figures"][name] for one in results if name in one["figures"])
        for name in names
    }
    return row | ({"figures": figures} if figures else {})


def version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """Return the commit of the sources."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return "none"
    return found.stdout.strip() or "none"


def describe(device: bool) -> Row:
    """Return what is measured on which machine; the device is looked at if there is to be one."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    found: Row = {
        "date": datetime.datetime.now().isoformat(timespec="minutes"),
        "commit": commit(),
        "cpu": f"{os.cpu_count()} x {names[0] if names else platform.processor()}",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') >> 30} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: known for name in PACKAGES if (known := version(name))},
    }
    for folder in SITES["prefetch"]:
        for one in importlib.metadata.distributions(name="safetensors", path=[str(folder)]):
            found["versions"]["safetensors prefetch"] = one.version
    if device:
        # In another process: one that has used a device cannot be forked.
        code = "import torch; print(torch.cuda.get_device_name())"
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        found["device"] = run.stdout.strip() or "none"
    return found


def folder_of(machine: Row) -> Path:
    """Return the folder of a machine's records."""
    if "device" in machine:
        return RECORDS / machine["device"].lower().replace(" ", "-")
    return RECORDS / f"{os.cpu_count()}-core-{platform.machine()}"


def read(path: Path) -> list[Run]:
    """Return the runs of a file."""
    runs: list[Run] = []
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        if "case" in row:
            runs[-1][1].append(row)
        else:
            runs.append((row, []))
    return runs


def write(path: Path, runs: list[Run]) -> None:
    """Write runs to a file."""
    lines = [json.dumps(one) for machine, rows in runs for one in (machine, *rows)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def chosen(runs: list[Run], of: Callable[[str], bool]) -> list[Run]:
    """Return the rows of some cases, and the runs that have any."""
    kept = [(machine, [row for row in rows if of(row["case"])]) for machine, rows in runs]
    return [(machine, rows) for machine, rows in kept if rows]


def add(folder: Path, machine: Row, rows: list[Row]) -> None:
    """Add a run: its cases replace the newest ones, which replace the previous ones."""
    newest, previous = (read(folder / name) for name in (NEWEST, PREVIOUS))
    cases = {row["case"] for row in rows}
    moved = chosen(newest, cases.__contains__)
    gone = {row["case"] for _, of_run in moved for row in of_run}
    write(folder / PREVIOUS, [*chosen(previous, lambda case: case not in gone), *moved])
    kept = chosen(newest, lambda case: case not in cases)
    if kept and kept[-1][0] == machine:
        rows = [*kept.pop()[1], *rows]
    write(folder / NEWEST, [*kept, (machine, rows)])


def by_case(path: Path) -> dict[str, Run]:
    """Return the rows of each case of a file, with their machine."""
    return {
        case: (machine, [row for row in rows if row["case"] == case])
        for machine, rows in read(path)
        for case in dict.fromkeys(row["case"] for row in rows)
    }
