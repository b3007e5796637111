"""Try mutants against the tests: `python tests/mutants/run.py LIST TREE`.

LIST is `rust.json` or `python.json`; each result is written there as soon as it is known:

- `found`, by the test that is named
- `not found` by any test of `subjects.py`, nor, for Rust, by those of the core
- `not found by Rust's tests`: those of Python were not tried
- `unclear`: the test fails without the mutant too
- `gone`: its lines are not in this tree
- `does not compile`, `not in a function` or `surplus`: not tried

TREE is a built checkout of its own, whose files are changed and put back. For another tree than
that of the draw, `--again` tries the mutants that were found, first by the tests that found them;
it prints the results, and leaves the list as it is. `--built` uses the build of the last run.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from place import SWITCH, VARIABLE, Mutant, locate, mutated, switched
from subjects import test_files

#: A hang, by which a mutant is found: hardly any CPU time in so many seconds, or more CPU seconds
#: than any tests need. What else runs on the machine must not count: these run at low priority.
IDLE, HARDLY_ANY, MOST = 200, 10, 1500
#: Exit statuses of pytest if a test has another name now, and if there are no tests.
NO_TESTS = (4, 5)
#: Mutants of each group of Rust that are tried, of those that compile.
WANTED = 20
#: Unit tests that exercise each group, and tests that take longest, which are tried last.
UNIT_TESTS = {"io": ["io::"], "engine": ["engine::", "api::", "codec::", "mem::"]}
SLOW = (
    "random_schedules",
    "decryption_never_waits",
    "workers_stop_growing",
    "every_tensor_is_delivered_once",
    "hashes_and_staging_buffers_never",
    "every_data_source_gives",
    "data_are_decrypted_in_chunks",
    "manifest_detects",
    "encrypted_tensors_round_trip",
    "refused_allocations",
    "every_staged_byte",
    "changed_bytes_never",
    "any_bytes_after_the_index",
)
SKIPPED = [argument for name in SLOW for argument in ("--skip", name)]
RUST_FAILED = re.compile(r"^test (\S+) .*FAILED$", re.MULTILINE)
#: The test files of each round: all mutants are tried against the closest before any against more.
ROUNDS = (slice(0, 1), slice(1, 2), slice(2, None))
#: Results of what is no mutant that can be tried in one build with others.
UNFIT = ("does not compile", "not in a function", "gone")
CHECKED = ["--config", "tests/rust/checked.toml", "--release"]
CORE = ["--package", "tensorizer", "--features", "fuzzing"]
MODULE = ["--package", "tensorizer-python"]


def run(tree: Path, command: list[str], number: int = 0) -> tuple[int | None, str]:
    """Run a command with a mutant; return how it ended, None if it hangs, and its output."""
    python = tree / ".venv/bin"
    torch = subprocess.run(
        [python / "python", tree / "benchmarks/torch_lib.py"], capture_output=True, text=True
    ).stdout.strip()
    environment = {
        **os.environ,
        VARIABLE: str(number),
        "VIRTUAL_ENV": str(tree / ".venv"),
        "PATH": f"{python}:{os.environ['PATH']}",
        "LIBTORCH_USE_PYTORCH": "1",
        "LD_LIBRARY_PATH": torch,
        "PYO3_BUILD_EXTENSION_MODULE": "1",
    }
    with subprocess.Popen(
        ["nice", "-n", "19", *command],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        assert process.stdout
        ended, hangs = threading.Event(), threading.Event()
        threading.Thread(target=watch, args=(process, ended, hangs), daemon=True).start()
        output = ""
        for line in process.stdout:
            output += line
            if RUST_FAILED.match(line):
                end(process)
        ended.set()
        return None if hangs.is_set() else process.wait(), output


def watch(process: subprocess.Popen[str], ended: threading.Event, hangs: threading.Event) -> None:
    """End a process that hangs."""
    used, before = [0.0], 0.0
    while not ended.wait(1):
        now = cpu_seconds(process.pid)
        # Processes that have ended may take their seconds with them.
        used.append(used[-1] + max(0.0, now - before))
        before = now
        idle = len(used) > IDLE and used[-1] - used[-IDLE] < HARDLY_ANY
        if idle or used[-1] > MOST:
            hangs.set()
            end(process)
            return


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants."""
    seconds = 0.0
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            children = (thread / "children").read_text().split()
            seconds += sum(cpu_seconds(int(child)) for child in children)
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        seconds += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return seconds


def end(process: subprocess.Popen[str]) -> None:
    """End a process and those that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def by_rust(tree: Path, arguments: list[str], number: int) -> str | None:
    """Run a binary of Rust's tests; return the first that fails, or None."""
    code, output = run(tree, arguments, number)
    if code == 0:
        return None
    failed = RUST_FAILED.search(output)
    return failed[1] if failed else "a hang" if code is None else f"a crash ({code})"


def by_python(tree: Path, tests: list[str], number: int) -> str | None:
    """Run tests of Python until one fails; return it, or None."""
    there = [test for test in tests if (tree / test.partition("::")[0]).exists()]
    if not there:
        return None
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not long"]
    command = [str(tree / ".venv/bin/python"), "-m", "pytest", *options, "--tb=no", *there]
    code, output = run(tree, command, number)
    if code in (0, *NO_TESTS):
        return None
    failed = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", output, re.MULTILINE)
    return failed[1] if failed else "a hang" if code is None else f"a crash ({code})"


class Results:
    """The list, written anew with each result."""

    def __init__(self, path: Path, again: bool, built: bool) -> None:
        self.path, self.again, self.built = path, again, built
        self.mutants: list[Mutant] = json.loads(path.read_text())
        self.decided: set[int] = set()

    def open(self) -> list[Mutant]:
        wanted = "found" if self.again else None
        some = [mutant for mutant in self.mutants if mutant.get("result") == wanted]
        return [mutant for mutant in some if mutant["number"] not in self.decided]

    def put(self, mutant: Mutant, result: str, by: str | None = None) -> None:
        where = f"{mutant['number']} {mutant['file']}:{mutant['line']}"
        self.decided.add(mutant["number"])
        print(time.strftime("%H:%M:%S"), where, result, by or "", flush=True)
        if self.again:
            return
        mutant["result"] = result
        if by:
            mutant["by"] = by
        self.write()

    def tried(self, mutant: Mutant, chosen: slice) -> None:
        """Note the test files that have not found a mutant, so that they are not run again."""
        if self.again:
            return
        files = mutant.get("tried", [])
        mutant["tried"] = [
            *files,
            *(f for f in test_files(mutant["file"])[chosen] if f not in files),
        ]
        self.write()

    def write(self) -> None:
        self.path.write_text(json.dumps(self.mutants, indent=1) + "\n")


def python_mutants(tree: Path, results: Results) -> None:
    """Try mutants of Python: all against the closest tests, then the survivors against others."""
    for chosen in ROUNDS:
        for mutant in results.open():
            place = locate(tree, mutant)
            if place is None:
                results.put(mutant, "gone")
                continue
            text = place.path.read_text()
            try:
                place.path.write_text(mutated(text, place.start, mutant))
                by = by_python(tree, tests_of(mutant, chosen), mutant["number"])
            finally:
                place.path.write_text(text)
            decide(tree, results, mutant, by, chosen)


def tests_of(mutant: Mutant, chosen: slice) -> list[str]:
    """Return the test files of a round, with the test that found the mutant before."""
    before = mutant.get("by", "").partition("[")[0]
    tried = [] if before else mutant.get("tried", [])
    files = [file for file in test_files(mutant["file"])[chosen] if file not in tried]
    return [*([before] if before.startswith("tests/") else []), *files]


def decide(tree: Path, results: Results, mutant: Mutant, by: str | None, chosen: slice) -> None:
    """Record the result of a round; a test that fails without the mutant too has not found it."""
    if by and by.startswith("tests/") and by_python(tree, [by], 0):
        results.put(mutant, "unclear", by)
    elif by:
        results.put(mutant, "found", by)
    elif chosen is ROUNDS[-1]:
        results.put(mutant, "not found")
    else:
        results.tried(mutant, chosen)


def build(tree: Path, mutants: list[Mutant], results: Results) -> list[str]:
    """Put all mutants into one build; return its binaries, and drop those that do not compile."""
    original = {path: path.read_text() for path in (tree / "src").rglob("*.rs")}
    try:
        while True:
            lines = put_in(tree, mutants, original)
            for mutant in [each for each in mutants if each["number"] not in lines]:
                results.put(mutant, "gone" if locate(tree, mutant) is None else "not in a function")
                mutants.remove(mutant)
            code, output = run(tree, ["cargo", "test", *CHECKED, *CORE, "--lib", "--no-run"])
            if code == 0:
                break
            wrong = set()
            for name, line in re.findall(r"--> (src/\S+?):(\d+):", output):
                wrong |= {
                    number
                    for number, (path, first, last) in lines.items()
                    if path == tree / name and first <= int(line) <= last
                }
            if not wrong:
                sys.exit(output[-5000:])
            for mutant in [each for each in mutants if each["number"] in wrong]:
                results.put(mutant, "does not compile")
                mutants.remove(mutant)
        for command in (["test", *CORE, "--test", "public", "--no-run"], ["build", *MODULE]):
            code, more = run(tree, ["cargo", command[0], *CHECKED, *command[1:]])
            if code:
                sys.exit(more[-5000:])
            output += more
    finally:
        for path, text in original.items():
            if path.read_text() != text:
                path.write_text(text)
    module = tree / "target/release/libtensorizer_python.so"
    shutil.copy(module, tree / "python/tensorizer/_C.abi3.so")
    return [str(tree / name) for name in re.findall(r"Executable .*\((\S+)\)", output)]


def put_in(
    tree: Path, mutants: list[Mutant], original: dict[Path, str]
) -> dict[int, tuple[Path, int, int]]:
    """Write the sources with all mutants in them; return the file and the lines of each."""
    for path, text in original.items():
        if path.read_text() != text:
            path.write_text(text)
    places = [(place, mutant) for mutant in mutants if (place := locate(tree, mutant))]
    lines: dict[int, tuple[Path, int, int]] = {}
    for path in {place.path for place, _ in places}:
        inside = [(place.start, mutant) for place, mutant in places if place.path == path]
        text, spans = switched(original[path], inside)
        path.write_text(text)
        lines |= {number: (path, *span) for number, span in spans.items()}
    root = tree / "src/lib.rs"
    root.write_text(root.read_text() + SWITCH)
    return lines


def rust_mutants(tree: Path, results: Results) -> None:
    """Try mutants of Rust, all of them in one build: as those of Python, but Rust's tests first."""
    binaries = tree / "target/mutants.json"
    if not results.built:
        binaries.write_text(json.dumps(build(tree, results.open(), results)))
    unit, public = json.loads(binaries.read_text())
    for group in UNIT_TESTS:
        compiled = [each for each in results.mutants if each["group"] == group]
        compiled = [each for each in compiled if each.get("result") not in UNFIT]
        for mutant in compiled[WANTED:]:
            if "result" not in mutant:
                results.put(mutant, "surplus")
    for tests in (own_folder, unit_tests, public_tests):
        for mutant in results.open():
            if by := by_rust(tree, tests(mutant, unit, public), mutant["number"]):
                results.put(mutant, "found", by)
    for chosen in ROUNDS:
        for mutant in results.open():
            by = by_python(tree, tests_of(mutant, chosen), mutant["number"])
            if by is None and chosen is ROUNDS[-1] and mutant["group"] == "engine":
                by = by_rust(tree, [unit, *SLOW], mutant["number"])
                by = by or by_rust(tree, [public, *SLOW], mutant["number"])
            decide(tree, results, mutant, by, chosen)


def own_folder(mutant: Mutant, unit: str, public: str) -> list[str]:
    """Return the unit tests of a mutant's own folder."""
    return [unit, "::".join(Path(mutant["file"]).parent.parts[1:]) + "::", *SKIPPED]


def unit_tests(mutant: Mutant, unit: str, public: str) -> list[str]:
    """Return the unit tests of a mutant's group."""
    return [unit, *UNIT_TESTS[mutant["group"]], *SKIPPED]


def public_tests(mutant: Mutant, unit: str, public: str) -> list[str]:
    """Return the tests of the core's interface."""
    return [public, *SKIPPED]


def main() -> None:
    """Try the mutants of a list."""
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    results = Results(Path(arguments[0]), "--again" in sys.argv, "--built" in sys.argv)
    tree = Path(arguments[1]).resolve()
    (python_mutants if results.path.name == "python.json" else rust_mutants)(tree, results)


if __name__ == "__main__":
    main()
