"""Run the benchmarks: every engine in a process of its own, in turns, bytes verified.

    python benchmarks/run.py [--quick] [--rounds N] [--only CASE ...] [--record]

``--record`` keeps the figures under ``benchmarks/records`` and renews the tables and the plot of
the documents. ``--quick`` uses toy sizes, to try the programs.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import checkpoints
import torch
from cases import BASELINES, CASES, FULL, QUICK, Case, Model
from forks import Measurement, preload
from machine import commit, version
from serve import server

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
OLD_PYTHON = Path(os.environ.get("TENSORIZER_OLD_PYTHON", ROOT / ".venv-old/bin/python"))


def prepare(folder: Path, models: dict[str, Model]) -> None:
    """Write each model once in every format, with the sums that verify what is loaded."""
    import tensorizer
    from engines import checksum
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for model in models.values():
        path = folder / model.name
        if Path(f"{path}.json").exists():
            continue
        if model.name == "adam":
            state = checkpoints.nested(model.tensors())
            checkpoints.save(state, f"{path}.pt", ours=False)
            checkpoints.save(state, f"{path}.pair.pt", ours=True)
            Path(f"{path}.json").write_text(json.dumps(checksum(model.tensors())))
            continue
        print(f"making {model.name}: {model.count} tensors, {model.total_bytes:,} bytes")
        tensors = model.tensors()
        tensorizer.save(tensors, f"{path}.tensors")
        params = tensorizer.EncryptionParams(bytes(range(32)))
        tensorizer.save(tensors, f"{path}.encrypted", encryption=params)
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, f"{path}.safetensors")
        torch.save({name: tensor.clone() for name, tensor in tensors.items()}, f"{path}.pt")
        Path(f"{path}.json").write_text(json.dumps(checksum(tensors)))


def files_of(folder: Path, model: str) -> list[Path]:
    """Return the files of a model, in every format."""
    return list(folder.glob(f"{model}.*"))


def forget(paths: list[Path]) -> None:
    """Take files out of the page cache."""
    os.sync()
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def warm(paths: list[Path]) -> None:
    """Bring files into the page cache."""
    for path in paths:
        with path.open("rb") as file:
            while file.read(64 << 20):
                pass


def run(
    name: str, folder: Path, model: str, quick: bool, packages: str | None = None
) -> Mapping[str, object]:
    """Run an engine or a baseline once, in a process that begins with torch imported.

    ``packages`` is a folder whose packages come before all others.
    """
    if name in BASELINES:
        return Measurement(name, "baselines:measure", name, folder, model).result()
    if "2.12.1" in name:
        found = sorted(OLD_PYTHON.parents[1].glob("lib/python*/site-packages"))
        if not found:
            raise FileNotFoundError(
                f"no packages beside {OLD_PYTHON}: make .make/old installs them"
            )
        packages = str(found[0])
    given = (name, str(folder), model, quick)
    return Measurement(name, "engines:main", *given, packages=packages).result()


def measure(case: Case, folder: Path, rounds: int, quick: bool) -> list[dict[str, object]]:
    """Let all engines and baselines take turns, so that a noisy minute hits all of them."""
    results: dict[str, list[Mapping[str, object]]] = {n: [] for n in case.engines + case.baselines}
    files = files_of(folder, case.model)
    if not case.cold:
        warm(files)
    for round_ in range(rounds):
        for name, found in results.items():
            if case.cold:
                forget(files)
            found.append(run(name, folder, case.model, quick))
        print(f"  round {round_ + 1} of {rounds}", end="\r", flush=True)
    return [
        summary(case.name, name, name in case.baselines, found) for name, found in results.items()
    ]


def summary(
    case: str, engine: str, baseline: bool, results: list[Mapping[str, object]]
) -> dict[str, object]:
    """Return what is recorded of the runs of one engine."""
    seconds = sorted(float(r["seconds"]) for r in results)
    # Before every byte was touched: for a mapping this says little.
    calls = sorted(float(r.get("load_seconds", r["seconds"])) for r in results)
    return {
        "case": case,
        "engine": engine,
        "baseline": baseline,
        "n": len(results),
        "min": seconds[0],
        "median": seconds[len(seconds) // 2],
        "max": seconds[-1],
        "call_median": calls[len(calls) // 2],
        "bytes": results[0].get("bytes", 0),
        "extra_bytes": max(int(r.get("extra_bytes", 0)) for r in results),
        "cpu_seconds": min(float(r.get("cpu_seconds", 0)) for r in results),
    }


def describe() -> dict[str, object]:
    """Say what was measured on what."""

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor()
    names = "torch safetensors runai-model-streamer fastsafetensors boto3 requests tensorizer"
    return {
        "date": datetime.datetime.now().isoformat(timespec="minutes"),
        "commit": commit(),
        "cpu": f"{os.cpu_count()} x {cpu}",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') >> 30} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names.split()} | {"old tensorizer": "2.12.1"},
    }


def record(machine: dict[str, object], rows: list[dict[str, object]], prefix: str = "") -> Path:
    """Keep the figures of one run in a file of their own."""
    target = HERE / "records" / f"{os.cpu_count()}-core-{platform.machine()}"
    target.mkdir(parents=True, exist_ok=True)
    stem = f"{prefix}{str(machine['date'])[:10]}-{machine['commit']}"
    names = (f"{stem}.jsonl", *(f"{stem}-{number}.jsonl" for number in range(2, 100)))
    path = next(target / name for name in names if not (target / name).exists())
    lines = [json.dumps(machine), *(json.dumps(row) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 5)
    folder = HERE / "data" / ("quick" if options.quick else "full")
    models = QUICK if options.quick else FULL
    preload("torch")
    prepare(folder, models)
    from figures import table
    from report import render

    machine = describe()
    rows: list[dict[str, object]] = []
    for case in CASES:
        if options.only and case.name not in options.only:
            continue
        print(f"{case.name}: {case.title}")
        with server(case.server, folder) if case.server else contextlib.nullcontext() as address:
            if case.server and address is None:
                print(f"{case.server} is not installed: not measured")
                continue
            os.environ["BENCHMARK_SERVER"] = address or ""
            if case.name == "redis":
                run("ours to_redis", folder, case.model, options.quick)
            mine = measure(case, folder, rounds, options.quick)
        rows += mine
        print(table(case, mine))
    if options.record:
        path = record(machine, rows)
        render(path.parent)
        print(f"recorded in {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
