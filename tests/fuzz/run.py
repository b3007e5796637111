"""Builds the fuzz targets and runs each for its share of the time, in two ways.

By libFuzzer and under AddressSanitizer, which needs a nightly Rust: inputs that reach something new
are kept. Then blindly: changes of those inputs, many times as fast. They are targets of cargo-fuzz
too: `cargo +nightly fuzz run --fuzz-dir tests/fuzz NAME`.
"""

import argparse
import gzip
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "trust"))

import tensors_bytes  # noqa: E402

TRIPLE = "x86_64-unknown-linux-gnu"
#: The flags that cargo-fuzz sets.
FLAGS = (
    "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 "
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters "
    "-Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares "
    "-Zsanitizer=address -Cforce-frame-pointers"
)
#: The first byte of an input that makes a target take the other bytes as a whole file.
AS_THEY_ARE = {"tensors_file": 3, "safetensors_file": 3, "torch_zip": 3}
#: Targets that build with all else, and one whose libraries take minutes to compile.
PLAIN = ["names", "index", "header", "crypt_block", "safetensors_header", "safetensors_file",
         "tensors_file", "torch_zip", "shards", "plan"]  # fmt: skip
NETWORK = ["http_reply"]
#: Megabytes that a process may have, and the seconds that an input may take.
MEMORY, SLOW = 3000, 10


def why_not() -> str | None:
    """Return what is missing here."""
    if shutil.which("rustup") is None:
        return "there is no rustup"
    found = subprocess.run(["rustup", "run", "nightly", "rustc", "--print", "sysroot"],
                           capture_output=True, text=True, check=False)  # fmt: skip
    if found.returncode:
        return "there is no nightly Rust: rustup toolchain install nightly"
    return None


def build_blind(targets: list[str]) -> Path:
    """Build the program that tries inputs without coverage; return its path."""
    folder = Path(os.environ.get("CARGO_TARGET_DIR", HERE / "target")) / "blind"
    command = ["cargo", "build", "--release", "--bin", "blind"]
    if set(targets) & set(NETWORK):
        command += ["--features", "fuzzing"]
    environment = {**os.environ, "CARGO_TARGET_DIR": str(folder)}
    subprocess.run(command, cwd=HERE, env=environment, check=True, stdout=sys.stderr)
    return folder / "release/blind"


def run_blind(
    program: Path, targets: list[str], corpus: Path, seconds: float, seed: int
) -> tuple[dict[str, int], list[str]]:
    """Try inputs blindly; return how many of each target, and what was found."""
    command = [str(program), f"{seconds:.0f}", str(seed), str(corpus), *targets]
    ran = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    tried = {name: int(count) for name, count in map(str.split, ran.stdout.splitlines())}
    return tried, [ran.stderr[-1500:]] if ran.returncode else []


def build(targets: list[str]) -> Path:
    """Build the targets and return the folder that they are in."""
    folder = Path(os.environ.get("CARGO_TARGET_DIR", HERE / "target"))
    environment = {**os.environ, "RUSTFLAGS": FLAGS, "CARGO_TARGET_DIR": str(folder)}
    command = ["rustup", "run", "nightly", "cargo", "build", "--release", "--target", TRIPLE]
    if set(targets) & set(NETWORK):
        command += ["--features", "fuzzing"]
    for target in targets:
        command += ["--bin", target]
    subprocess.run(command, cwd=HERE, env=environment, check=True, stdout=sys.stderr)
    return folder / TRIPLE / "release"


def seeds(target: str, folder: Path) -> None:
    """Put files of ours, sound and damaged, into the corpus of a target that takes whole files."""
    folder.mkdir(parents=True, exist_ok=True)
    if target == "names":
        for number, name in enumerate(
            ("a\nb.c", '\x1e["a",0]\n\x1e["a",1]\n\x1e["b"]', "<V2\0torch.bfloat16")
        ):
            (folder / f"seed{number}").write_bytes(name.encode())
    if target not in ("tensors_file", "index"):
        return
    first = bytes([AS_THEY_ARE[target]]) if target in AS_THEY_ARE else b"\0\1"
    for path in (HERE.parent / "golden").glob("*.tensors.gz"):
        data = gzip.decompress(path.read_bytes())
        try:
            data = tensors_bytes.tightened(data)
        except (ValueError, IndexError, struct.error):
            # Its damaged index cannot be made smaller, and 256 KiB would slow the fuzzer down.
            continue
        if len(data) <= 4096:
            (folder / path.name.removesuffix(".gz")).write_bytes(first + data)


def run(
    target: str, programs: Path, corpus: Path, seconds: int, seed: int
) -> tuple[int, list[str]]:
    """Run a target; return how many inputs it tried, and what it found."""
    artifacts = HERE / "artifacts" / target
    artifacts.mkdir(parents=True, exist_ok=True)
    command = [
        str(programs / target), f"-max_total_time={seconds}", f"-rss_limit_mb={MEMORY}",
        f"-timeout={SLOW}", f"-seed={seed + 1}", "-max_len=4200", "-print_final_stats=1",
        "-entropic=0", "-reduce_inputs=0",
        f"-artifact_prefix={artifacts}/", str(corpus / target),
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    tried = re.search(r"stat::number_of_executed_units:\s*(\d+)", ran.stderr)
    last = re.findall(r"^#(\d+)\s", ran.stderr, re.MULTILINE)
    count = int(tried[1]) if tried else int(last[-1]) if last else 0
    if ran.returncode == 0:
        return count, []
    said = re.findall(r"panicked at .*\n.*|ERROR: .*|Test unit written to .*", ran.stderr)
    return count, [f"{target}: {' | '.join(said)[:600] or ran.stderr[-600:]}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="of all targets together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", nargs="+", default=PLAIN + NETWORK)
    parser.add_argument("--programs", type=Path, help="folder of built targets")
    parser.add_argument("--blind", type=Path, help="the built program")
    parser.add_argument("--corpus", type=Path, help="kept from run to run")
    arguments = parser.parse_args()
    missing = why_not()
    targets = arguments.targets
    programs = arguments.programs or (None if missing else build(targets))
    blind = arguments.blind or build_blind(targets)
    began = time.monotonic()
    half = arguments.seconds / (1 if missing else 2)
    watched, findings = Counter(), []
    with tempfile.TemporaryDirectory() as temporary:
        corpus = arguments.corpus or Path(temporary)
        for target in targets:
            seeds(target, corpus / target)
            if programs is not None:
                share = max(1, int(half / len(targets)))
                watched[target], found = run(target, programs, corpus, share, arguments.seed)
                findings += found
        tried, found = run_blind(blind, targets, corpus, half, arguments.seed)
        findings += found
    for what in findings:
        print(f"FINDING {what}", file=sys.stderr, flush=True)
    how = missing or f"{watched.total():,} of them under AddressSanitizer"
    print(json.dumps({
        "campaign": "fuzzing", "inputs": watched.total() + sum(tried.values()),
        "what": f"inputs, {how}", "kinds": dict(watched + Counter(tried)), "findings": findings,
        "seconds": round(time.monotonic() - began, 1),
    }))  # fmt: skip
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
