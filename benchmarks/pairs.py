"""Compare the speed of this checkout with that of another one, measured in turns.

    python benchmarks/pairs.py OTHER [--rounds N] [--only CASE ...] [--record FILE]

OTHER is the folder ``python`` of another checkout with its libraries built. Every row of
``benchmarks/cases.py`` that is ours is measured N times in each tree, each time in a process of its
own, the two trees in turns. ``--record`` writes the table to a file.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
from pathlib import Path

from cases import CASES, FULL, Case
from forks import preload
from run import HERE, files_of, forget, prepare, run, warm
from serve import server

HERE_PYTHON = str(HERE.parent / "python")


def once(tree: str, engine: str, case: Case, folder: Path) -> float:
    """Measure one row once, with the package of a tree."""
    if case.cold:
        forget(files_of(folder, case.model))
    found = run(engine, folder, case.model, quick=False, packages=tree)
    return float(found["seconds"])  # type: ignore[arg-type]


def row(case: Case, engine: str, times: dict[str, list[float]]) -> str:
    """Return a line of the table; below 1, this tree is slower."""
    before, now = times.values()
    middle = statistics.median(before), statistics.median(now)
    shown = [f"{value:.3f}" for value in (min(before), middle[0], min(now), middle[1])]
    best, usual = min(before) / min(now), middle[0] / middle[1]
    return f"| {case.name} | {engine} | {' | '.join(shown)} | {best:.2f} | {usual:.2f} |"


def main() -> None:
    """Measure, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    folder = HERE / "data/full"
    preload("torch")
    prepare(folder, FULL)
    lines = [
        "| case | what | other best s | median s | this best s | median s | best | median |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    for case in CASES:
        engines = [engine for engine in case.engines if engine.startswith("ours")]
        if given.only and case.name not in given.only:
            continue
        place = server(case.server, folder) if case.server else contextlib.nullcontext("-")
        with place as host:
            if host is None:
                continue
            os.environ["BENCHMARK_SERVER"] = host
            for engine in engines:
                if not case.cold:
                    warm(files_of(folder, case.model))
                times: dict[str, list[float]] = {given.other: [], HERE_PYTHON: []}
                for number in range(given.rounds):
                    turns = list(times)[:: 1 if number % 2 else -1]
                    for tree in turns:
                        times[tree].append(once(tree, engine, case, folder))
                lines.append(row(case, engine, times))
                print(lines[-1], flush=True)
    if given.record:
        given.record.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
