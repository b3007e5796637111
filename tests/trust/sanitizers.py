"""The tests of the core under sanitizers, and one program under valgrind's memcheck.

What cannot be run here is said with its reason.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRIPLE = "x86_64-unknown-linux-gnu"
CARGO = ["rustup", "run", "nightly", "cargo"]


def runs(*command: str) -> bool:
    """Tell whether a program is there and works."""
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def target(kind: str) -> dict[str, str]:
    """Return an environment in which cargo keeps what it builds apart from all else."""
    folder = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / kind
    return {**os.environ, "CARGO_TARGET_DIR": str(folder)}


def address() -> tuple[int, list[str]]:
    return tests("address")


def thread() -> tuple[int, list[str]]:
    # With the library of Rust under it as well: else its locks look like races.
    return tests("thread", "-Zbuild-std")


def tests(sanitizer: str, *more: str) -> tuple[int, list[str]]:
    """Run the unit and integration tests of the core, without network and devices."""
    environment = target(sanitizer)
    environment["RUSTFLAGS"] = f"-Zsanitizer={sanitizer} -Cforce-frame-pointers"
    command = [*CARGO, "test", "--package", "tensorizer", "--no-default-features", "--lib",
               "--tests", "--no-fail-fast", "--target", TRIPLE, *more]  # fmt: skip
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True,
                         errors="replace", check=False)  # fmt: skip
    said = ran.stdout + ran.stderr
    passed = sum(map(int, re.findall(r"test result: \w+\. (\d+) passed", said)))
    findings = re.findall(r"(?:ERROR|WARNING): \w+Sanitizer.*|^test .* FAILED$", said, re.MULTILINE)
    if ran.returncode and not findings:
        findings = [said[-800:]]
    return passed, findings


def memcheck() -> tuple[int, list[str]]:
    """Run a program that saves and loads."""
    environment = target("memcheck")
    build = ["cargo", "build", "--quiet", "--package", "tensorizer", "--no-default-features",
             "--example", "round_trip"]  # fmt: skip
    subprocess.run(build, cwd=ROOT, env=environment, check=True, stdout=sys.stderr)
    program = f"{environment['CARGO_TARGET_DIR']}/debug/examples/round_trip"
    command = ["valgrind", "--error-exitcode=9", "--leak-check=full",
               "--errors-for-leak-kinds=definite",
               "--num-callers=25", program]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"(\d+) round trips", ran.stdout)
    return int(found[1]) if found else 0, [ran.stderr[:2000]] if ran.returncode else []


def no_nightly() -> str | None:
    if runs("rustup", "run", "nightly", "rustc", "--version"):
        return None
    return "there is no nightly Rust: rustup toolchain install nightly"


def no_valgrind() -> str | None:
    return None if runs("valgrind", "--version") else "there is no valgrind: apt install valgrind"


def no_miri() -> str | None:
    if not runs(*CARGO, "miri", "--version"):
        return "there is no Miri: rustup component add --toolchain nightly miri"
    return "it knows neither libsodium nor the system calls that files are read with"


def no_threads() -> str | None:
    root = subprocess.run([*CARGO[:3], "rustc", "--print", "sysroot"], capture_output=True,
                          text=True, check=False).stdout.strip()  # fmt: skip
    if not (Path(root or "/nowhere") / "lib/rustlib/src").exists():
        return ("there is no source of Rust's library, without which its locks look like races: "
                "rustup component add --toolchain nightly rust-src")  # fmt: skip
    return no_nightly()


#: For each what is missing here, and what is run.
KINDS: dict[str, tuple[str, Callable[[], str | None], Callable[[], tuple[int, list[str]]] | None]]
KINDS = {
    "address": ("AddressSanitizer", no_nightly, address),
    "memcheck": ("memcheck", no_valgrind, memcheck),
    "miri": ("Miri", no_miri, None),
    "thread": ("ThreadSanitizer", no_threads, thread),
    "helgrind": ("helgrind", lambda: "Rust's locks are futexes, which it does not know", None),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    name, why_not, run = KINDS[parser.parse_args().kind]
    began = time.monotonic()
    missing = why_not()
    if missing or run is None:
        print(json.dumps({"campaign": name, "skipped": f"not run: {missing}"}))
        return
    inputs, findings = run()
    print(json.dumps({
        "campaign": name, "inputs": inputs, "what": "round trips" if run is memcheck else "tests",
        "findings": findings, "seconds": round(time.monotonic() - began, 1),
    }))  # fmt: skip
    # A run of no tests shows nothing.
    sys.exit(bool(findings) or inputs == 0)


if __name__ == "__main__":
    main()
