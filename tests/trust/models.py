"""The code that threads share, under schedules that are chosen: each model of `src/**/models.rs`.

A model runs the code itself over shuttle's locks and threads (`src/sys/sync.rs`). What fails can be
run again by the schedule that it prints.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ["cargo", "test", "--release", "--config", "tests/rust/checked.toml",
         "--package", "tensorizer", "--features", "models", "--lib",
         "--no-run", "--message-format=json"]  # fmt: skip


def build() -> str:
    """Build the tests with what `make test-rust` has compiled; return the path of their program."""
    built = subprocess.run(BUILD, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    made = [json.loads(line) for line in built.stdout.splitlines()]
    programs = [row["executable"] for row in made if row.get("profile", {}).get("test")]
    return str(programs[-1])


def models(program: str) -> list[str]:
    """Return the names of all models."""
    listed = subprocess.run([program, "models::", "--list"], capture_output=True, text=True,
                            check=True)  # fmt: skip
    return re.findall(r"(?m)^(\S+): test$", listed.stdout)


def run(program: str, model: str, seconds: float, seed: int) -> tuple[int, str | None]:
    """Run a model; return the number of schedules, and what it found."""
    environment = os.environ | {"MODEL_SECONDS": str(seconds), "MODEL_SEED": str(seed)}
    command = [program, "--exact", model, "--nocapture"]
    try:
        ran = subprocess.run(command, env=environment, capture_output=True, text=True,
                             errors="replace", timeout=seconds * 2 + 300, check=False)  # fmt: skip
    except subprocess.TimeoutExpired:
        return 0, f"{model}: a schedule does not end"
    schedules = sum(map(int, re.findall(r"(\d+) schedules", ran.stdout)))
    if ran.returncode:
        return schedules, f"{model}: {(ran.stdout + ran.stderr)[-1500:]}"
    return schedules, None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="for all, when they are built")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a part of the names")
    arguments = parser.parse_args()
    if shutil.which("cargo") is None:
        print(json.dumps({"campaign": "models", "skipped": "there is no cargo"}))
        return
    program = build()
    began = time.monotonic()
    names = [name for name in models(program) if arguments.only in name]
    kinds, findings = {}, []
    for name in names:
        seconds = arguments.seconds / len(names)
        count, finding = run(program, name, seconds, arguments.seed)
        kinds[name.rpartition("::")[2].replace("_", " ")] = count
        findings += [finding] if finding else []
    print(json.dumps({
        "campaign": "models", "inputs": sum(kinds.values()), "what": "schedules", "kinds": kinds,
        "findings": findings, "seconds": round(time.monotonic() - began, 1),
    }))  # fmt: skip
    # A run of no schedules shows nothing.
    sys.exit(bool(findings) or not kinds or not all(kinds.values()))


if __name__ == "__main__":
    main()
