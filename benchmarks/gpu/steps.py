"""Steps that are not comparisons: the tests, compute-sanitizer, and the host's share."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from bench import HERE, ROOT, STARTED_TWICE, Bench, OutOfTimeError
from processes import Ended
from reporting import LEAST, OUT_OF_TIME, STEP as TESTS
from rows import Row

TESTS_FOLDER = "tests/python/gpu"
#: The tests of a run at toy size: make test-cuda runs them all.
TOY_TESTS = "test_load or test_save"
#: Paths of compute-sanitizer if it is not on the PATH.
SANITIZER_PATHS = (
    "usr/local/cuda*/bin/compute-sanitizer",
    "usr/local/cuda*/compute-sanitizer/compute-sanitizer",
    "opt/nvidia/*/bin/compute-sanitizer",
)
#: Exit code of compute-sanitizer if it has found an error.
ERRORS_FOUND = 99


def run_tests(bench: Bench) -> Ended:
    """Run the tests that have no row yet."""
    folder = ROOT / bench.tests
    folder = folder if folder.is_dir() else folder.parent
    # The configuration of pyproject.toml needs a plugin that may not be there.
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(ROOT), "-q"]
    command += ["-p", "no:cacheprovider", "-p", "reporting"]
    command += ["--confcutdir", str(folder), bench.tests]
    command += ["-k", TOY_TESTS] if bench.toy and bench.tests == TESTS_FOLDER else []
    # Modules that the tests share are in the folder above theirs.
    paths = [bench.env.get("PYTHONPATH"), str(HERE), str(folder.parent)]
    env = {
        "REQUIRE_CUDA": "1",
        "PYTHONPATH": ":".join(path for path in paths if path),
        "GPU_ROWS": str(bench.rows.path),
        "GPU_DEADLINE": str(bench.clock.deadline),
    }
    ended = bench.process(command, limit=3600, **env)
    bench.rows.load()
    if ended.code == OUT_OF_TIME:
        raise OutOfTimeError
    return ended


def end_test(bench: Bench, key: str, why: str) -> None:
    bench.rows.end(key, {"step": TESTS, "status": "failed", "why": why})


def tests(bench: Bench) -> None:
    """Run the tests for GPUs, each once; where one ends the process, those after it too."""
    while TESTS not in bench.rows.ends:
        for key in bench.rows.unfinished(f"{TESTS}/"):
            if bench.rows.times_begun(key) >= 2:
                end_test(bench, key, STARTED_TWICE)
        bench.clock.need(LEAST)
        print("tests", flush=True)
        before = len(bench.rows.of(TESTS))
        ended = run_tests(bench)
        for key in bench.rows.unfinished(f"{TESTS}/"):
            end_test(bench, key, f"the process ended in it: {ended.why()}")
        found = len(bench.rows.of(TESTS))
        # 0 and 1: all of them have run; 5: none was left.
        if found and ended.code in (0, 1, 5):
            bench.rows.end(TESTS, {"step": TESTS, "status": "ok"})
        elif found == before:
            why = f"pytest did not run: {ended.why()}"
            bench.rows.end(TESTS, {"step": TESTS, "status": "failed", "why": why})
        for row in bench.rows.of(TESTS, status="failed"):
            print(f"  {row['key']}: failed: {str(row['why']).splitlines()[-1][-200:]}", flush=True)
        print(f"  {found} tests", flush=True)


def sanitizer() -> str | None:
    """Return the path of compute-sanitizer, or None."""
    found = (str(path) for pattern in SANITIZER_PATHS for path in Path("/").glob(pattern))
    return shutil.which("compute-sanitizer") or next(found, None)


def memcheck(bench: Bench) -> Row:
    program = sanitizer()
    if program is None:
        return {"status": "absent", "why": "compute-sanitizer is not there"}
    folder = bench.places["disk"].folder
    folder.mkdir(parents=True, exist_ok=True)
    command = [program, "--tool", "memcheck", "--error-exitcode", str(ERRORS_FOUND), sys.executable]
    ended = bench.process([*command, str(HERE / "sanitized.py"), str(folder)])
    words = (ended.out + ended.error)[-1500:]
    return {"status": "failed" if ended.code else "ok", "why": ended.why() if ended.code else words}


def sanitize(bench: Bench) -> None:
    """Have compute-sanitizer look at a small load and a small save."""
    bench.unit("sanitizer/memcheck", {"step": "sanitizer"}, 60, lambda: memcheck(bench))


def shares(bench: Bench) -> Iterator[str]:
    size = ("--gigabytes", "0.02", "--rounds", "2", "--tensors", "20", "200")
    options = (*(size if bench.toy else ()), "--folder", bench.places["tmpfs"].folder)
    ended = bench.program("host_share.py", *options, FAKE_CUDA_FREE_COPIES="1")
    if ended.code != 0:
        raise RuntimeError(ended.why())
    yield from ended.out.splitlines()


def host_share(bench: Bench) -> None:
    """Measure the host's share of a load, which only the emulated CUDA can."""

    def work() -> Row:
        bench.places["tmpfs"].folder.mkdir(parents=True, exist_ok=True)
        try:
            return {"status": "ok", "shares": [json.loads(line) for line in shares(bench)]}
        except RuntimeError as error:
            return {"status": "failed", "why": str(error)}

    bench.unit("host-share", {"step": "host-share"}, 60, work)
