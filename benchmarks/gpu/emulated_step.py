"""Ours and the peers on the emulated CUDA: the host's share, and when tensors are there."""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path

from bench import Bench, Model
from landing_files import SETTINGS, build_runtime
from rows import Row, Rows

STEP = "emulated"
ENGINES = (
    "ours", "ours iterate", "ours safetensors", "ours two devices", "safetensors prefetch",
    "safetensors",
    "fastsafetensors", "run:ai", "InstantTensor",
)  # fmt: skip
TOY = ("ours", "ours iterate", "safetensors")
#: MB/s of the bus; 0 takes no time, and shows what the host takes.
BUSES = (0, 5000)
#: Pinning makes pages present, as it does on a machine with a device.
MORE = {"FAKE_CUDA_PIN_POPULATE": "1", "FAKE_CUDA_MEM_MB": "12000"}


def runtime(bench: Bench) -> dict[str, str]:
    """Have libraries that look for the run time of CUDA by its name find the emulated one."""
    preloaded = os.environ["LD_PRELOAD"]
    library = build_runtime(Path(preloaded.split()[0]).parent)
    plain = library.with_name("libcudart.so")
    plain.unlink(missing_ok=True)
    plain.symlink_to(library.name)
    paths = [str(library.parent), bench.env.get("LD_LIBRARY_PATH", "")]
    return {
        "LD_PRELOAD": f"{library} {preloaded}",
        "LD_LIBRARY_PATH": ":".join(filter(None, paths)),
    }


def run(bench: Bench, engine: str, model: Model, task: str, env: dict[str, str]) -> Row:
    """Have an engine load a model in a process of its own; return its row."""
    folder = bench.places["tmpfs"].folder
    if site := bench.sites.get(engine):
        env = env | {"PYTHONPATH": ":".join(filter(None, [site, bench.env.get("PYTHONPATH")]))}
    ended = bench.program("counted.py", engine, folder, model.name, task, **env)
    if ended.code != 0 or not ended.out.strip():
        why = ended.why()
        # A run time of its own asks the driver for tables that only the real one has.
        if "operation not supported" in why:
            return {"status": "absent", "why": why.strip().splitlines()[-1]}
        return {"status": "failed", "why": why}
    found = json.loads(ended.out.splitlines()[-1])
    if "absent" in found:
        return {"status": "failed" if engine == "ours" else "absent", "why": found["absent"]}
    if not found.get("verified", True):
        return {"status": "failed", "why": "other bytes than were written"}
    return {"status": "ok", **found}


def measure(bench: Bench) -> None:
    """Measure every engine with every model and bus, in turns."""
    env = runtime(bench)
    place = bench.places["tmpfs"]
    chosen = [e for e in ENGINES if e in bench.engines] if bench.engines else list(ENGINES)
    if bench.toy and not bench.engines:
        chosen = list(TOY)
    for model in bench.models.values():
        print(f"{STEP}: {model.count:,} tensors, {model.total:,} bytes", flush=True)
        bench.need_model(place, model, ("tensors", "safetensors"))
        good = []
        for engine in chosen:
            key, fields = f"{STEP}/{model.name}/{engine}", {"step": STEP, "model": model.name}
            bench.unit(
                f"{key}/verify",
                fields | {"engine": engine, "task": "verify"},
                30,
                lambda engine=engine, model=model: run(bench, engine, model, "verify", env),
            )
            if bench.rows.ends[f"{key}/verify"]["status"] == "ok":
                good.append(engine)
        for round_ in range(bench.rounds):
            for bus in BUSES:
                settings = env | SETTINGS | MORE | {"FAKE_CUDA_BUS_MBPS": str(bus)}
                for engine in good:
                    fields = {"step": STEP, "model": model.name, "engine": engine, "bus": bus}
                    bench.unit(
                        f"{STEP}/{model.name}/{engine}/{bus}/{round_}",
                        fields | {"task": "count", "round": round_},
                        15,
                        lambda engine=engine, model=model, settings=settings: run(
                            bench, engine, model, "count", settings
                        ),
                    )


def middle(rows: list[Row], field: str) -> float:
    return statistics.median(float(row[field]) for row in rows)


def spread(rows: list[Row], field: str) -> str:
    found = sorted(float(row[field]) for row in rows)
    return f"{statistics.median(found):.3f} ({found[0]:.3f} to {found[-1]:.3f})"


def table(rows: Rows, model: str) -> list[str]:
    """Return the table of a model; ratios are of median seconds, above 1 where ours is faster."""
    verified = rows.of(STEP, model=model, task="verify")
    if not verified:
        return []
    lines = ["", f"**On the emulated device** ({model})", "",
             "| engine | host alone, GB/s | CPU s per GB | s at 5 GB/s | again | bus busy "
             "| first tensor, ms | calls | pinned MiB | device memory / tensors "
             "| ours is faster by |",
             "|---|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    ours = rows.of(STEP, model=model, engine="ours", task="count", bus=BUSES[1], status="ok")
    for row in verified:
        engine = row["engine"]
        if row["status"] != "ok":
            why = " ".join(str(row["why"]).split())[-120:].replace("|", "/")
            lines.append(f"| {engine} | {row['status']}: {why} | | | | | | | | | |")
            continue
        alone, bus = (
            rows.of(STEP, model=model, engine=engine, task="count", bus=bus, status="ok")
            for bus in BUSES
        )
        if not alone or not bus:
            continue
        size = middle(alone, "bytes")
        again = statistics.median(row["again"]["seconds"] for row in bus)
        faster = f"{middle(bus, 'seconds') / middle(ours, 'seconds'):.2f}" if ours else "-"
        lines.append(
            f"| {engine} | {size / middle(alone, 'seconds') / 1e9:.1f} "
            f"| {middle(alone, 'cpu') / size * 1e9:.3f} | {spread(bus, 'seconds')} | {again:.3f} "
            f"| {statistics.median(row['busy'] / row['seconds'] for row in bus):.2f} "
            f"| {middle(bus, 'first') * 1e3:.0f} | {middle(bus, 'calls'):,.0f} "
            f"| {middle(bus, 'pinned') / (1 << 20):.0f} | {middle(bus, 'device') / size:.2f} "
            f"| {'-' if engine.startswith('ours') else faster} |"
        )
    return lines
