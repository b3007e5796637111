"""Measure distributed checkpoints beside the writers and readers of torch.

    python benchmarks/dcp.py [--quick] [--rounds N] [--only CASE ...] [--record]

A case is ``disk-1``, ``cold-4``, ``s3-2``, with the number of ranks; a pattern chooses several.
Every engine saves, and then loads what it has saved, in the same round. ``--record`` keeps the
figures and the report under ``benchmarks/records``. ``--quick`` uses toy sizes and one round.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from dcp_report import CASES, PREFIX, Case, case_tables, write
from forks import Measurement, preload
from machine import version
from run import HERE, describe, forget, record, summary, warm
from serve import server

#: Seconds that one save or load may take.
TIMEOUT = 300


def ranks(world: int, *arguments: object) -> Mapping[str, object]:
    """Run ranks once, in processes that begin with torch imported; return what the first says."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(sock.getsockname()[1])}
    with contextlib.ExitStack() as stack:
        started = []
        for rank in range(world):
            given = (f"rank {rank} of {arguments[0]}", "dcp_engines:run", rank, world, arguments)
            started.append(Measurement(*given))
            stack.callback(started[-1].close)
        first, *_ = [one.result(TIMEOUT) for one in started]
    return first


def baseline(name: str, folder: Path) -> Mapping[str, object]:
    """Measure what the machine can do."""
    return Measurement(name, "baselines:measure", name, folder, "baseline").result(TIMEOUT)


def measure(case: Case, folder: Path, rounds: int, size: tuple) -> list[dict[str, object]]:
    """Let all engines and baselines take turns, so that a noisy minute hits all of them."""
    saves: dict[str, list] = {name: [] for name in (*case.engines, *case.save_baselines)}
    loads: dict[str, list] = {name: [] for name in (*case.engines, *case.load_baselines)}
    for round_ in range(rounds):
        for number, engine in enumerate(case.engines):
            place = folder / "checkpoint"
            shutil.rmtree(place, ignore_errors=True)
            os.sync()
            address = f"s3://bucket/{round_}-{number}" if case.s3 else str(place)
            saves[engine].append(ranks(case.world, engine, True, address, size))
            files = [path for path in place.rglob("*") if path.is_file()]
            (forget if case.cold else warm)(files)
            loads[engine].append(ranks(case.world, engine, False, address, size))
        for found in (saves, loads):
            for name in set(found) - set(case.engines):
                os.sync()
                (forget if case.cold else warm)([folder / "baseline.tensors"])
                found[name].append(baseline(name, folder))
        print(f"  round {round_ + 1} of {rounds}", end="\r", flush=True)
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    return [
        summary(f"{case.name} {what}", name, name not in case.engines, found)
        for what, of_all in (("save", saves), ("load", loads))
        if what == "load" or not case.cold
        for name, found in of_all.items()
    ]


@contextlib.contextmanager
def place_of(case: Case) -> Iterator[None]:
    """Start the server that a case needs."""
    if not case.s3:
        yield
        return
    with server("objects", HERE) as address:
        os.environ |= {
            "AWS_ENDPOINT_URL_S3": f"http://{address}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    if options.quick and options.record:
        parser.error("toy sizes are not recorded")
    import dcp_state

    size = dcp_state.QUICK if options.quick else dcp_state.FULL
    preload("dcp_engines")
    machine = describe()
    machine["versions"] = {**machine["versions"], "s3fs": version("s3fs")}  # type: ignore[dict-item]
    rows: list[dict[str, object]] = []
    (HERE / "data").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=HERE / "data") as name:
        folder = Path(name)
        (folder / "baseline.tensors").write_bytes(os.urandom(dcp_state.total_bytes(size)))
        for case in CASES:
            if options.only and not any(fnmatch.fnmatch(case.name, one) for one in options.only):
                continue
            print(f"{case.name}: {case.title}")
            with place_of(case):
                mine = measure(case, folder, options.rounds or (1 if options.quick else 5), size)
            rows += mine
            print(case_tables(case, mine))
    if options.record:
        path = record(machine, rows, PREFIX)
        print(f"recorded in {path} and {write(path.parent, str(machine['date']))}")


if __name__ == "__main__":
    main()
