"""How well the number of readers is found: every fixed number beside what a load does by itself.

    python benchmarks/concurrency.py [--quick] [--rounds N] [--only SOURCE ...] [--record]

Models are loaded from the page cache, from a cold file, from nginx on this machine, and from a
server 50 ms away that gives each connection 100 MB/s: with `num_readers` 1, 2, 4 and so on, and
without it. Each load has a process of its own; within a round all take turns, in another order each
round, so that a busy minute of the machine meets all of them. Bytes are verified in the first
round. What is to be near 1 is the default's time, and its CPU time, over that of the best number.

``--record`` keeps the figures under ``benchmarks/records``. ``--quick`` uses a toy size.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from cases import FULL, QUICK
from engines import checksum, load_http, load_ours, load_runai, warm_up
from machine import have_memory
from run import describe, files_of, forget, prepare, record, warm
from serve import server

HERE = Path(__file__).resolve().parent
#: Engines that are measured beside fixed numbers of readers.
DEFAULT, RUNAI = "default", "run:ai"


@dataclass(frozen=True)
class Source:
    """A source of the model: a local file or a server."""

    name: str
    title: str
    numbers: tuple[int, ...]
    server: str | None = None
    cold: bool = False
    beside: tuple[str, ...] = ()
    model: str = "large"


SOURCES = [
    Source("warm", "a local file in the page cache", (1, 2, 4, 8, 16, 32)),
    Source("cold", "a local file that is not in the page cache", (1, 2, 4, 8, 16, 32), cold=True,
           beside=(RUNAI,)),
    Source("warm-3k", "3,000 tensors in the page cache", (1, 2, 4, 8), model="3k"),
    Source("warm-20k", "20,000 tensors in the page cache", (1, 2, 4, 8), model="20k"),
    Source("http-20k", "20,000 tensors, nginx on this machine", (1, 2, 4, 8, 16), server="nginx",
           model="20k"),
    Source("http", "nginx on this machine", (1, 2, 4, 8, 16, 32, 64), server="nginx"),
    Source("slow", "a server 50 ms away, 100 MB/s a connection", (1, 2, 4, 8, 16, 32, 64),
           server="slow"),
]  # fmt: skip


def load(name: str, engine: str, folder: str, verify: bool) -> dict[str, object]:
    """Load once, in this process."""
    source = next(known for known in SOURCES if known.name == name)
    path = Path(folder) / source.model
    warm_up(RUNAI if engine == RUNAI else "ours")
    options = {} if engine == DEFAULT else {"num_readers": int(engine)} if engine != RUNAI else {}
    loader = load_runai if engine == RUNAI else load_http if source.server else load_ours
    have_memory(path.with_name(f"{source.model}.tensors").stat().st_size)
    before = sum(os.times()[:2])
    start = time.perf_counter()
    tensors = loader(path, **options)
    seconds = time.perf_counter() - start
    result = {"seconds": seconds, "cpu_seconds": sum(os.times()[:2]) - before}
    result["bytes"] = sum(tensor.nbytes for tensor in tensors.values())
    if verify and checksum(tensors) != json.loads(Path(f"{path}.json").read_text()):
        raise RuntimeError(f"{name}, {engine}: loaded other bytes than were written")
    return result


def in_process(source: str, engine: str, folder: Path, verify: bool) -> dict[str, float]:
    """Load once, in a process of its own."""
    command = [sys.executable, __file__, "--load", source, engine, str(folder)]
    command += ["--verify"] if verify else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{source}, {engine}:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(source: Source, folder: Path, rounds: int) -> list[dict[str, object]]:
    """Let all numbers take turns."""
    engines = [DEFAULT, *map(str, source.numbers)]
    engines += [engine for engine in source.beside if is_installed(engine)]
    found: dict[str, list[dict[str, float]]] = {engine: [] for engine in engines}
    if not source.cold:
        warm(files_of(folder, source.model))
    order = random.Random(17)
    for round_ in range(rounds):
        for engine in order.sample(engines, len(engines)):
            if source.cold:
                forget(files_of(folder, source.model))
            found[engine].append(in_process(source.name, engine, folder, verify=round_ == 0))
        print(f"  round {round_ + 1} of {rounds}", end="\r", flush=True)
    rows = []
    for engine, results in found.items():
        seconds = sorted(result["seconds"] for result in results)
        rows.append({
            "case": f"concurrency-{source.name}",
            "engine": engine,
            "n": rounds,
            "min": seconds[0],
            "median": statistics.median(seconds),
            "max": seconds[-1],
            "cpu_seconds": min(result["cpu_seconds"] for result in results),
            "bytes": results[0]["bytes"],
        })  # fmt: skip
    return rows


def is_installed(engine: str) -> bool:
    try:
        warm_up(engine)
    except ImportError:
        return False
    return True


def table(source: Source, rows: list[dict]) -> str:
    """Return a Markdown table, and how far the default is from the best fixed number."""
    fixed = [row for row in rows if row["engine"].isdigit()]
    lines = ["| readers | median s | min to max | CPU s | GB/s |", "|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['engine']} | {row['median']:.3f} | {row['min']:.3f} to {row['max']:.3f} "
            f"| {row['cpu_seconds']:.2f} | {row['bytes'] / row['median'] / 1e9:.2f} |"
        )
    default = next(row for row in rows if row["engine"] == DEFAULT)
    for figure in ("median", "min", "cpu_seconds"):
        best = min(fixed, key=lambda row: row[figure])
        ratio = default[figure] / best[figure]
        lines.append(f"default / best fixed ({best['engine']}), {figure}: {ratio:.3f}")
    return "\n".join((f"{source.name}: {source.title}", *lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--load", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--verify", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        print(json.dumps(load(*options.load, verify=options.verify)))
        sys.stdout.flush()
        # Freeing memory is not part of what is measured.
        os._exit(0)
    folder = HERE / "data" / ("quick" if options.quick else "full")
    chosen = [source for source in SOURCES if not options.only or source.name in options.only]
    sizes = QUICK if options.quick else FULL
    prepare(folder, {source.model: sizes[source.model] for source in chosen})
    machine = describe()
    rows: list[dict[str, object]] = []
    for source in chosen:
        serving = server(source.server, folder) if source.server else contextlib.nullcontext()
        with serving as address:
            if source.server and address is None:
                print(f"{source.server} is not installed: not measured")
                continue
            os.environ["BENCHMARK_SERVER"] = address or ""
            mine = measure(source, folder, options.rounds or (1 if options.quick else 5))
        rows += mine
        print(table(source, mine), flush=True)
    if options.record:
        print(f"recorded in {record(machine, rows)}")


if __name__ == "__main__":
    main()
