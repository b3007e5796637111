"""Build, test and measure on a machine with a CUDA device, in one command.

    python benchmarks/gpu/run.py [--wheel FILE] [--gigabytes 16] [--rounds 3] [--only CASE ...]

Without ``--wheel`` the package that is installed is used, or else the sources are built with pip.
Then come the tests of ``tests/python/gpu``, with ``REQUIRE_CUDA=1``; then every engine that is
installed, in turns, each in a process of its own, from memory (``--tmpfs``) and from disk
(``--disk``). ``--record`` keeps the figures under ``benchmarks/records``. ``--dry-run`` does all of
it on the stand-in for a device, with toy sizes: its figures say nothing.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent)]

from cases import Case  # noqa: E402
from machine import commit, version  # noqa: E402

PEERS = (
    "InstantTensor",
    "safetensors prefetch",
    "safetensors",
    "run:ai",
    "fastsafetensors",
    "torch.load mmap",
    "tensorizer 2.12.1",
)


CASES = [
    Case("tmpfs", "from memory", "large",
         ("ours", "pinned copy", "ours clone", "ours in place", "ours verify-crc32",
          "ours verify", "ours decrypt", "ours float32", *PEERS)),
    Case("tmpfs-20k", "20,000 small tensors from memory", "20k",
         ("ours", "pinned copy", "ours clone", *PEERS)),
    Case("disk", "from disk, nothing in the page cache", "large", ("ours", *PEERS), cold=True),
    Case("save", "save to memory", "large", ("ours save", "ours save_async", "safetensors save")),
]  # fmt: skip


def install(wheel: str | None) -> None:
    """Make the package importable: from a wheel, as it is, or from the sources."""
    if wheel:
        target = "/tmp/tensorizer-wheel"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        subprocess.run([*pip, "--no-index", "--target", target, wheel], check=True)
        sys.path.insert(0, target)
        os.environ["PYTHONPATH"] = os.pathsep.join([target, os.environ.get("PYTHONPATH", "")])
    elif importlib.util.find_spec("tensorizer") is None:
        pip = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps"]
        subprocess.run([*pip, str(ROOT)], check=True)


def run_tests() -> None:
    environment = os.environ | {"REQUIRE_CUDA": "1"}
    options = ["-p", "no:cacheprovider", "--confcutdir", "tests/python/gpu", "--durations=0"]
    command = [sys.executable, "-m", "pytest", *options, "tests/python/gpu"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


def prepare(folder: Path, name: str, count: int, total: int, formats: set[str]) -> None:
    """Write a model in every format that some engine reads."""
    import tensorizer
    import torch

    from engine import KEY, sums

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    each = total // count // 2 // 64 * 64
    flat = torch.empty(count * each, dtype=torch.float16)
    generator = torch.Generator().manual_seed(17)
    block = torch.randint(-(2**62), 2**62, (min(flat.numel() // 4, 1 << 24),), generator=generator)
    for number, part in enumerate(flat.split(block.numel() * 4)):
        # Every part is another one, or a part that goes to the wrong place would not show.
        part.view(torch.int64).copy_(block[: part.numel() // 4] + number)
    tensors = {f"layers.{i}.weight": flat[i * each :][:each].view(64, -1) for i in range(count)}
    print(f"making {path}: {count} tensors, {flat.nbytes:,} bytes", flush=True)
    Path(f"{path}.json").write_text(json.dumps(sums(tensors)))
    tensorizer.save(tensors, f"{path}.tensors")
    if "encrypted" in formats:
        tensorizer.save(tensors, f"{path}.encrypted", encryption=tensorizer.EncryptionParams(KEY))
    if "safetensors" in formats:
        from safetensors.torch import save_file

        save_file(tensors, f"{path}.safetensors")
    if "pt" in formats:
        torch.save({name: tensor.clone() for name, tensor in tensors.items()}, f"{path}.pt")


def forget(folder: Path) -> None:
    os.sync()
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def run(engine: str, folder: Path, model: str) -> dict[str, object]:
    old = os.environ.get("TENSORIZER_OLD_PYTHON", str(ROOT / ".venv-old/bin/python"))
    if "2.12.1" in engine and not Path(old).is_file():
        return {"absent": "TENSORIZER_OLD_PYTHON names no Python that has it"}
    python = old if "2.12.1" in engine else sys.executable
    command = [python, str(HERE / "engine.py"), engine, str(folder), model]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        return {"absent": "it took more than 300 s"}
    if done.returncode != 0:
        if engine.startswith("ours"):
            raise RuntimeError(f"{engine} failed:\n{done.stderr[-3000:]}")
        return {"absent": f"it failed: {done.stderr.strip().splitlines()[-1:]}"}
    result = json.loads(done.stdout.splitlines()[-1])
    if not result.get("absent") and not result["verified"]:
        raise RuntimeError(f"{engine} loaded other bytes than were written")
    return result


def measure(case: Case, folder: Path, rounds: int) -> list[dict[str, object]]:
    """Let all engines take turns."""
    results: dict[str, list[dict[str, object]]] = {engine: [] for engine in case.engines}
    for round_ in range(rounds):
        for engine in case.engines:
            if results[engine] and results[engine][-1].get("absent"):
                continue
            if case.cold:
                forget(folder)
            results[engine].append(run(engine, folder, case.model))
        print(f"  round {round_ + 1} of {rounds}", flush=True)
    rows = []
    for engine, found in results.items():
        row: dict[str, object] = {"case": case.name, "engine": engine}
        good = [result for result in found if not result.get("absent")]
        if not good:
            rows.append(row | {"absent": found[0]["absent"]})
            continue
        seconds = sorted(float(result["seconds"]) for result in good)
        again = sorted(float(result.get("again_seconds", 0)) for result in good)
        rows.append(
            row
            | {
                "n": len(good),
                "min": seconds[0],
                "median": seconds[len(seconds) // 2],
                "max": seconds[-1],
                "again_median": again[len(again) // 2],
                "bytes": good[0]["bytes"],
                "stats": good[-1].get("stats"),
            }
        )
    return rows


def table(rows: list[dict[str, object]]) -> str:
    """Return a Markdown table; ratios are of rates, above 1 where ours is faster."""
    ours = next((row for row in rows if "median" in row), None)
    lines = ["| engine | median s | min to max | GB/s | again s | ours is faster by |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for row in rows:
        if "absent" in row:
            lines.append(f"| {row['engine']} | not measured: {row['absent']} | | | | |")
            continue
        rate = row["bytes"] / row["median"]
        assert ours is not None
        ratio = "-" if row is ours else f"{ours['bytes'] / ours['median'] / rate:.2f}"
        lines.append(
            f"| {row['engine']} | {row['median']:.3f} | {row['min']:.3f} to {row['max']:.3f} "
            f"| {rate / 1e9:.2f} | {row['again_median']:.3f} | {ratio} |"
        )
    return "\n".join(lines)


def describe(dry: bool) -> dict[str, object]:
    import torch

    names = ("torch", "safetensors", "instanttensor", "fastsafetensors", "runai-model-streamer")
    return {
        "date": datetime.datetime.now().isoformat(timespec="minutes"),
        "commit": commit(),
        "device": "stand-in" if dry else torch.cuda.get_device_name(),
        "cpus": os.cpu_count(),
        "versions": {name: version(name) for name in names},
    }


def need_stand_in() -> None:
    """End where the library has no device for tests."""
    probe = "from tensorizer import _native; raise SystemExit(not _native.staged(-1))"
    if subprocess.run([sys.executable, "-c", probe], check=False).returncode:
        sys.exit("build with TENSORIZER_STAND_IN=1: this library has no device for tests")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", help="a built wheel, for machines without a compiler")
    parser.add_argument("--gigabytes", type=float, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--disk", type=Path, default=HERE.parent / "data")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    dry = options.dry_run
    install(options.wheel)
    if dry:
        os.environ |= {"TENSORIZER_FAKE_DEVICE": "7", "BENCHMARK_DEVICE": "cpu"}
        need_stand_in()
        options.gigabytes, options.rounds = 0.02, 1
        options.tmpfs = options.disk = HERE.parent / "data"
    elif not options.no_tests:
        run_tests()
    machine = describe(dry)
    print(json.dumps(machine))
    memory, disk = (base / "tensorizer-gpu" for base in (options.tmpfs, options.disk))
    rows: list[dict[str, object]] = []
    try:
        for case in CASES:
            if options.only and case.name not in options.only:
                continue
            print(f"{case.name}: {case.title}", flush=True)
            folder = disk if case.cold else memory
            total = int(options.gigabytes * 1e9)
            small = case.model == "20k"
            count = (200 if dry else 20_000) if small else (10 if dry else 320)
            total = total // 8 if small else total
            formats = {"safetensors", "pt"} | ({"encrypted"} if case.name == "tmpfs" else set())
            if not (folder / f"{case.model}.json").exists():
                prepare(folder, case.model, count, total, formats)
            mine = measure(case, folder, options.rounds)
            rows += mine
            print(table(mine), flush=True)
    finally:
        for folder in (memory, disk):
            shutil.rmtree(folder, ignore_errors=True)
    if options.record:
        name = str(machine["device"]).lower().replace(" ", "-")
        target = HERE.parent / "records" / name
        target.mkdir(parents=True, exist_ok=True)
        path = target / f"{str(machine['date'])[:10]}-{machine['commit']}.jsonl"
        lines = [json.dumps(machine), *(json.dumps(row) for row in rows)]
        path.write_text("\n".join(lines) + "\n")
        print(f"recorded in {path}")


if __name__ == "__main__":
    main()
