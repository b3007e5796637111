"""Test and measure on a machine with a CUDA device: with no network, no compiler and no make.

    python benchmarks/gpu/run.py --collect DIR              # where there is a network
    python benchmarks/gpu/run.py --wheels DIR --minutes 9   # on the machine, until it says "done"

The steps: the tests of ``tests/python/gpu``, compute-sanitizer, on the emulated CUDA what ours and
the peers cost the host, ours beside the peers, from memory and from disk, and a sweep for the sizes
that suit the device. Whatever fails is a row; the run goes on. Rows are in ``rows.jsonl`` of the
folder ``--out``, from which another call goes on.

It ends with 0, with 1 if something has failed, or with 75 if its minutes are over and another call
has to go on.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import shutil
import signal
import site
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import comparisons  # noqa: E402
import emulated_step  # noqa: E402
import steps  # noqa: E402
import sweep  # noqa: E402
import tables  # noqa: E402
import wheels  # noqa: E402
from bench import Bench, Clock, Model, OutOfTimeError, Place  # noqa: E402
from machine import commit  # noqa: E402
from rows import Row, Rows  # noqa: E402

STEPS = ("tests", "sanitizer", "host-share", "emulated", "compare", "sweep")
GO_ON = 75


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--collect", type=Path, metavar="DIR", help="fill a folder with wheels, and end")
    add("--wheels", type=Path, metavar="DIR", help="use these; otherwise what is installed")
    add("--out", type=Path, metavar="DIR", help="where rows are kept: $OUT or benchmarks/data-gpu")
    add("--go-on", type=Path, metavar="FILE", help="a rows.jsonl to go on from, if OUT has none")
    add("--minutes", type=float, help="begin nothing that would not end in this time")
    add("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    add("--tests", default=steps.TESTS_FOLDER, help="a file or folder of tests")
    add("--sweep", action="store_true", help="only the sweep")
    add("--only", nargs="*", default=[], choices=[case.name for case in comparisons.CASES])
    add("--engines", nargs="*", default=[], help="only these")
    add("--site", nargs="*", default=[], metavar="ENGINE=DIR", help="packages of one engine only")
    add("--gigabytes", type=float, default=16, help="the large model; the small tensors are 1/8")
    add("--rounds", type=int, default=5)
    add("--tmpfs", type=Path, default=Path("/dev/shm"))
    add("--disk", type=Path, default=HERE.parent / "data")
    add("--toy", action="store_true", help="small, one round, few engines: to try the programs")
    add("--report", action="store_true", help="only print the tables of OUT")
    add("--record", action="store_true", help="at the end, keep the rows under benchmarks/records")
    options = parser.parse_args()
    options.out = options.out or Path(os.environ.get("OUT") or HERE.parent / "data-gpu")
    known = {name for case in comparisons.CASES for name in case.engines}
    known |= set(emulated_step.ENGINES)
    if odd := [site for site in options.site if site.partition("=")[0] not in known]:
        parser.error(f"--site {odd[0]}: expected ENGINE=DIR")
    if unknown := set(options.engines) - known:
        parser.error(f"no such engine: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    options.steps = ["sweep"] if options.sweep else options.steps
    return options


def open_rows(options: argparse.Namespace) -> Rows:
    path = options.out / "rows.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    if options.go_on is not None and not path.exists():
        shutil.copyfile(options.go_on, path)
    return Rows(path)


def prepare(options: argparse.Namespace, rows: Rows) -> Bench:
    """Make what was given importable, and say which machine this is."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")}
    if options.wheels is not None:
        site = Path(tempfile.gettempdir()) / f"tensorizer-gpu-{os.getuid()}/site"
        wheels.unpack(options.wheels, site, rows)
        env["PYTHONPATH"] = ":".join(filter(None, [str(site), env.get("PYTHONPATH")]))
    gigabytes, count, small = (0.02, 10, 200) if options.toy else (options.gigabytes, 320, 20_000)
    total = int(gigabytes * 1e9)
    return Bench(
        rows=rows,
        clock=Clock(options.minutes),
        env=env,
        places={
            "tmpfs": Place(options.tmpfs / "tensorizer-gpu", True),
            "disk": Place(options.disk / "tensorizer-gpu", False),
        },
        models={
            "large": Model("large", count, total),
            "20k": Model("20k", small, total // 8),
        },
        rounds=1 if options.toy else options.rounds,
        toy=options.toy,
        limit=60 if options.toy else 300,
        engines=options.engines,
        tests=options.tests,
        sites=dict(site.split("=", 1) for site in options.site),
    )


def describe(bench: Bench) -> Row:
    """Add a row without a key: what this call runs on."""
    ended = bench.program("describe.py")
    if ended.code != 0:
        sys.exit(f"torch cannot be used: {ended.why()}")
    found: Row = json.loads(ended.out.splitlines()[-1])
    if found["device"] is None:
        sys.exit("torch sees no CUDA device")
    date = datetime.datetime.now().isoformat(timespec="minutes")
    machine: Row = {"date": date, "commit": commit(), "arguments": sys.argv[1:]} | found
    bench.rows.add(machine)
    print(json.dumps(machine), flush=True)
    return machine


def work(options: argparse.Namespace, bench: Bench, emulated: bool) -> None:
    """Do all steps, of which each knows what was done before."""
    if "tests" in options.steps:
        steps.tests(bench)
    if "sanitizer" in options.steps:
        steps.sanitize(bench)
    if "host-share" in options.steps and emulated:
        steps.host_share(bench)
    if "emulated" in options.steps and emulated:
        emulated_step.measure(bench)
    if "compare" in options.steps:
        comparisons.compare(bench, options.only)
    if "sweep" in options.steps:
        sweep.sweep(bench)


def finish(options: argparse.Namespace, rows: Rows) -> None:
    """Print the tables and keep them beside the rows."""
    text = tables.report(rows)
    print(text)
    (options.out / "report.md").write_text(text)
    if options.record:
        machine = rows.machines[-1]
        name = str(machine["device"]).lower().replace(" ", "-")
        folder = HERE.parent / "records" / name
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{str(machine['date'])[:10]}-{commit()}.jsonl"
        # Arguments have folders of this machine.
        about = {name: value for name, value in machine.items() if name != "arguments"}
        lines = [about, *rows.ends.values()]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        # Messages have paths of this machine.
        for prefix in (f"{HERE.parents[1]}/", f"{site.getsitepackages()[0]}/", f"{sys.prefix}/"):
            text = text.replace(prefix, "")
        path.write_text(text)
        print(f"recorded in {path}")


def main() -> int:
    options = arguments()
    if options.collect is not None:
        return 0 if wheels.collect(options.collect) else 1
    rows = open_rows(options)
    if options.report:
        finish(options, rows)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    bench = prepare(options, rows)
    machine = describe(bench)
    try:
        work(options, bench, bool(machine["emulated"]))
    except OutOfTimeError:
        finish(options, rows)
        kept = ", ".join(str(place.folder) for place in bench.places.values())
        print(f"time is over; models are kept in {kept}. To go on, the same command again:")
        print(f"    {shlex.join([sys.executable, *sys.argv])}")
        print("or, where OUT is empty then, with --go-on and a copy of rows.jsonl.", flush=True)
        return GO_ON
    for place in bench.places.values():
        shutil.rmtree(place.folder, ignore_errors=True)
    finish(options, rows)
    failed = bool(rows.failures())
    print("done, with failures" if failed else "done", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
