"""The tests of the core under sanitizers, and a program in C++; one under valgrind's memcheck.

What cannot be run here is said with its reason.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
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
    return tests("address", "--tests")


def thread() -> tuple[int, list[str]]:
    # Rust's library is built under it as well: otherwise its locks look like races. The targets of
    # fuzzing, the other program of tests, have one thread.
    return tests("thread", "--test", "public", "-Zbuild-std")


def tests(sanitizer: str, *more: str) -> tuple[int, list[str]]:
    """Run the unit tests of the core and others of its tests, without the network."""
    environment = target(sanitizer)
    environment["RUSTFLAGS"] = f"-Zsanitizer={sanitizer} -Cforce-frame-pointers -Copt-level=1"
    # Tests ask for more memory than there is, and are refused. What a lost device may still write
    # to is never freed, on purpose; memcheck looks for leaks.
    environment["ASAN_OPTIONS"] = "allocator_may_return_null=1:detect_leaks=0"
    environment["TSAN_OPTIONS"] = "allocator_may_return_null=1"
    command = [*CARGO, "test", "--package", "tensorizer", "--no-default-features", "--lib",
               "--no-fail-fast", "--target", TRIPLE, *more]  # fmt: skip
    return tested(command, environment, r"ERROR: \w+Sanitizer.*|WARNING: ThreadSanitizer.*")


def tested(command: list[str], environment: dict[str, str], bad: str) -> tuple[int, list[str]]:
    """Run tests; return how many passed, and what was found."""
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True,
                         errors="replace", check=False)  # fmt: skip
    said = ran.stdout + ran.stderr
    passed = len(re.findall(r"^test \S.* \.\.\. ok$", said, re.MULTILINE))
    findings = re.findall(f"{bad}|^test .* FAILED$", said, re.MULTILINE)
    if ran.returncode and not findings:
        findings = [said[-800:]]
    return passed, findings


#: Tests that Miri can run: few system calls, nothing of libsodium's, nothing that takes long.
INTERPRETED = ["api::tensor", "cancel::", "engine::plan::queue", "engine::target::gather",
               "engine::workers", "format::dtype", "format::name::", "mem::", "sys::buffers",
               "sys::process"]  # fmt: skip


def miri() -> tuple[int, list[str]]:
    """Have the tests of memory and of threads interpreted, by the rules for pointers."""
    environment = target("miri")
    # Tests read files and the clock; libraries make pointers of numbers; leaks are as for `tests`.
    flags = ["disable-isolation", "permissive-provenance", "ignore-leaks"]
    environment["MIRIFLAGS"] = " ".join(f"-Zmiri-{flag}" for flag in flags)
    environment["PROPTEST_CASES"] = "8"
    command = [*CARGO, "miri", "test", "--package", "tensorizer", "--no-default-features", "--lib",
               "--", *INTERPRETED]  # fmt: skip
    return tested(command, environment, r"error: Undefined Behavior.*|error: unsupported.*")


def memcheck() -> tuple[int, list[str]]:
    """Run a program that saves and loads, built with what `make test-rust` has compiled."""
    build = ["cargo", "build", "--quiet", "--release", "--config", "tests/rust/checked.toml",
             "--workspace", "--features", "tensorizer/fuzzing",
             "--example", "round_trip"]  # fmt: skip
    subprocess.run(build, cwd=ROOT, check=True, stdout=sys.stderr)
    folder = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    program = str(folder / "release/examples/round_trip")
    command = ["valgrind", "--error-exitcode=9", "--leak-check=full",
               "--errors-for-leak-kinds=definite",
               "--num-callers=25", program]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"(\d+) round trips", ran.stdout)
    return int(found[1]) if found else 0, [ran.stderr[:2000]] if ran.returncode else []


#: Checks of tests/cpp/deployment.cpp that need nothing but files of tensors.
CHECKS = ["header", "in place", "errors", "other formats", "threads"]


def cmake() -> str | None:
    beside = Path(sys.executable).with_name("cmake")
    return str(beside) if beside.exists() else shutil.which("cmake")


def cpp() -> tuple[int, list[str]]:
    """Run a program over the C++ header and the installed library, whose memory is watched too."""
    import tensorizer
    import torch
    from safetensors.torch import save_file

    build = Path(target("cpp")["CARGO_TARGET_DIR"])
    flags = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize=vptr"
    paths = f"{tensorizer.cmake_prefix_path};{torch.utils.cmake_prefix_path}"
    configure = [cmake(), "-S", ROOT / "tests/cpp", "-B", build, f"-DCMAKE_PREFIX_PATH={paths}",
                 f"-DCMAKE_CXX_FLAGS={flags} -fno-sanitize-recover=undefined"]  # fmt: skip
    for command in (configure, [cmake(), "--build", build]):
        subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = {"weight": torch.randn(40, 30), "bias": torch.arange(5)}
        tensorizer.save(weights, folder / "weights.tensors")
        torch.save(weights, folder / "checkpoint.pt")
        save_file(weights, folder / "weights.safetensors")
        (folder / "shards").mkdir()
        for key, tensor in weights.items():
            save_file({key: tensor}, folder / "shards" / f"{key}.safetensors")
        index = {"weight_map": {key: f"{key}.safetensors" for key in weights}}
        (folder / "shards/model.safetensors.index.json").write_text(json.dumps(index))
        # Memory that torch keeps until the process ends is no leak of ours.
        environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
        ran = subprocess.run([build / "deployment", folder, *CHECKS], env=environment,
                             capture_output=True, text=True, check=False)  # fmt: skip
    done = ran.stdout.splitlines()
    return len(done), [] if done == CHECKS else [f"after {done}: {ran.stderr[:2000]}"]


def no_cpp() -> str | None:
    if cmake() is None:
        return "there is no cmake: pip install cmake"
    try:
        import safetensors.torch  # noqa: F401
        import tensorizer  # noqa: F401
    except ImportError as error:
        return str(error)
    return None


def no_nightly() -> str | None:
    if runs("rustup", "run", "nightly", "rustc", "--version"):
        return None
    return "there is no nightly Rust: rustup toolchain install nightly"


def no_valgrind() -> str | None:
    return None if runs("valgrind", "--version") else "there is no valgrind: apt install valgrind"


def no_miri() -> str | None:
    if not runs(*CARGO, "miri", "--version"):
        return "there is no Miri: rustup component add --toolchain nightly miri"
    return no_source()


def no_source() -> str | None:
    """Say so where what is built with Rust's own library cannot be."""
    root = subprocess.run([*CARGO[:3], "rustc", "--print", "sysroot"], capture_output=True,
                          text=True, check=False).stdout.strip()  # fmt: skip
    if not (Path(root or "/nowhere") / "lib/rustlib/src").exists():
        return ("there is no source of Rust's library: "
                "rustup component add --toolchain nightly rust-src")  # fmt: skip
    return no_nightly()


#: By kind: its name, the check for what is missing here, and the function that runs it.
KINDS: dict[str, tuple[str, Callable[[], str | None], Callable[[], tuple[int, list[str]]] | None]]
KINDS = {
    "address": ("AddressSanitizer", no_nightly, address),
    "cpp": ("C++ under AddressSanitizer", no_cpp, cpp),
    "memcheck": ("memcheck", no_valgrind, memcheck),
    "miri": ("Miri", no_miri, miri),
    "thread": ("ThreadSanitizer", no_source, thread),
    "helgrind": ("helgrind", lambda: "Rust's locks are futexes, which it does not know", None),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    arguments = parser.parse_args()
    name, why_not, run = KINDS[arguments.kind]
    began = time.monotonic()
    missing = why_not()
    if missing or run is None:
        print(json.dumps({"campaign": name, "skipped": missing}))
        sys.exit(os.environ.get("CI") == "true" and run is not None)
    inputs, findings = run()
    what = {memcheck: "round trips", cpp: "checks"}.get(run, "tests")
    print(json.dumps({
        "campaign": name, "inputs": inputs, "what": what,
        "findings": findings, "seconds": round(time.monotonic() - began, 1),
    }))  # fmt: skip
    # A run of no tests shows nothing.
    sys.exit(bool(findings) or inputs == 0)


if __name__ == "__main__":
    main()
