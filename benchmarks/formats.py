"""Measure reading and writing of safetensors, and torch checkpoints, beside what others do.

    python benchmarks/formats.py [--quick] [--rounds N] [--only CASE ...] [--record]

CASE may be a pattern, as ``'large*'``. ``--record`` keeps the figures and the report under
``benchmarks/records``. ``--quick`` uses toy sizes and one round, to try the programs.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
from pathlib import Path

import format_models
from cases import FULL, QUICK
from forks import Measurement, preload
from format_cases import CASES, Case
from format_files import local, one_file, prepare
from format_report import PREFIX, case_table, write
from machine import version
from run import HERE, describe, forget, record, summary, warm
from serve import server

#: Packages that only these cases measure.
PACKAGES = ("runai-model-streamer-s3", "transformers", "huggingface_hub", "boto3")
#: The server that an address needs, by its scheme.
SERVERS = {"http": "nginx", "s3": "nginx", "upload": "s3"}


def measure(
    case: Case, folder: Path, address: str, rounds: int, quick: bool
) -> list[dict[str, object]]:
    """Let all engines and baselines take turns, so that a noisy minute hits all of them."""
    paths = local(folder, case)
    if case.baselines and paths:
        paths = list({*paths, one_file(folder, case)})
    results: dict[str, list] = {name: [] for name in (*case.engines, *case.baselines)}
    if not case.cold:
        warm(paths)
    for round_ in range(rounds):
        for name, found in results.items():
            if case.cold:
                forget(paths)
            given = (name, case, folder, address, quick)
            found.append(Measurement(name, f"{case.work}:once", *given).result())
        print(f"  round {round_ + 1} of {rounds}", end="\r", flush=True)
    return [
        summary(case.name, name, name in case.baselines, found) for name, found in results.items()
    ]


def chosen(only: list[str]) -> list[Case]:
    """Return the cases that were asked for."""
    for pattern in only:
        if not fnmatch.filter([case.name for case in CASES], pattern):
            raise SystemExit(f"no case is named {pattern}")
    return [
        case
        for case in CASES
        if not only or any(fnmatch.fnmatchcase(case.name, pattern) for pattern in only)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    if options.quick and options.record:
        parser.error("toy sizes are not recorded")
    rounds = options.rounds or (1 if options.quick else 5)
    folder = HERE / "data" / ("quick" if options.quick else "full")
    # --quick imports the slowest modules once, for all processes.
    preload("torch", *([format_models.CLASS, "boto3"] if options.quick else []))
    prepare(folder, QUICK if options.quick else FULL)
    format_models.prepare(folder, options.quick)
    machine = describe()
    more = {package: version(package) for package in PACKAGES}
    machine["versions"] = {**machine["versions"], **more}  # type: ignore[dict-item]
    rows: list[dict[str, object]] = []
    for case in chosen(options.only):
        print(f"{case.name}: {case.title}")
        kind = SERVERS.get(case.scheme or "")
        with server(kind, folder) if kind else contextlib.nullcontext("-") as address:
            if address is None:
                print("nginx is not installed: not measured")
                continue
            mine = measure(case, folder, address, rounds, options.quick)
        rows += mine
        print(case_table(case, mine))
    if not options.record:
        return
    path = record(machine, rows, PREFIX)
    print(f"recorded in {path} and {write(path.parent, str(machine['date']))}")


if __name__ == "__main__":
    main()
