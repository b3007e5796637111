"""Ours and the peers, in turns, each in a process of its own, beside the rate of a pinned copy."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from bench import Bench, Model
from models import OUT
from rows import Row

STEP = "compare"
LOADERS = ("InstantTensor", "safetensors prefetch", "safetensors", "run:ai", "fastsafetensors")
SAVERS = ("ours save", "ours save_async", "safetensors save", "torch.save")
UP, BACK = "pinned copy", "pinned copy back"
#: Engines that only read or copy.
BASELINES = (UP, BACK, "direct reads")


@dataclass(frozen=True)
class Case:
    """One comparison; the rate of a pinned copy comes first."""

    name: str
    title: str
    place: str
    model: str
    formats: tuple[str, ...]
    engines: tuple[str, ...]
    #: The engines at toy size: each takes seconds to start.
    toy: tuple[str, ...] = ()
    cold: bool = False


#: A case needs few formats, so that there is room for them; the files of the one before go when
#: there is none.
CASES = (
    Case("tmpfs", "load from memory", "tmpfs", "large", ("tensors", "safetensors"),
         (UP, "ours", "ours iterate", "ours safetensors", "ours clone", "ours in place",
          "ours verify-crc32", "ours verify", "ours float32", "ours NUMA=0", *LOADERS,
          "tensorizer 2.12.1"),
         (UP, "ours", "ours in place", "ours verify", "ours float32", "safetensors")),
    Case("save", "save to memory", "tmpfs", "large", ("tensors", OUT),
         (BACK, *SAVERS), (BACK, *SAVERS[:1])),
    Case("tmpfs-pt", "load from memory", "tmpfs", "large", ("tensors", "pt"),
         (UP, "ours", "torch.load mmap", "torch.load")),
    Case("tmpfs-encrypted", "load from memory", "tmpfs", "large", ("tensors", "encrypted"),
         (UP, "ours", "ours decrypt")),
    Case("tmpfs-20k", "load 20,000 small tensors from memory", "tmpfs", "20k",
         ("tensors", "safetensors", "pt"),
         (UP, "ours", "ours clone", "ours in place", *LOADERS, "torch.load mmap", "torch.load"),
         (UP, "ours", "torch.load mmap")),
    Case("save-20k", "save 20,000 small tensors to memory", "tmpfs", "20k",
         ("tensors", OUT), (BACK, *SAVERS)),
    Case("disk", "load from disk, nothing in the page cache", "disk", "large",
         ("tensors", "safetensors"), (UP, "direct reads", "ours", "ours DIRECT_IO=0", "ours GDS=1",
          "ours safetensors", *LOADERS),
         (UP, "ours"),
         cold=True),
    Case("save-disk", "save to disk, with fsync", "disk", "large", ("tensors", OUT),
         (BACK, *SAVERS)),
    Case("disk-pt", "load from disk, nothing in the page cache", "disk", "large",
         ("tensors", "pt"), (UP, "direct reads", "ours", "torch.load mmap", "torch.load"),
         cold=True),
    Case("disk-20k", "load 20,000 small tensors from disk, nothing in the page cache", "disk",
         "20k", ("tensors", "safetensors", "pt"),
         (UP, "direct reads", "ours", *LOADERS, "torch.load mmap"), cold=True),
)  # fmt: skip


def chosen(bench: Bench, case: Case) -> list[str]:
    """Return which engines a run measures."""
    if bench.engines:
        return [name for name in case.engines if name in bench.engines]
    return list(case.toy if bench.toy else case.engines)


def forget(folder: Path, model: str) -> None:
    """Take the files of a model out of the page cache."""
    os.sync()
    for path in folder.glob(f"{model}.*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def estimate_seconds(bench: Bench, case: Case, engine: str) -> float:
    """Return what an engine may take, from what it took before."""
    took = [float(row["took"]) for row in bench.rows.of(STEP, case=case.name, engine=engine)]
    took = took or [float(row["took"]) for row in bench.rows.of(STEP, engine=engine)]
    return 1.3 * max(took) if took else (5 if bench.toy else 45)


def measure(bench: Bench, case: Case, engine: str, round_: int) -> Row:
    place, model = bench.places[case.place], bench.models[case.model]
    if case.cold:
        forget(place.folder, model.name)
    row = bench.engine(engine, place, model, loads=1 if case.cold else 2)
    copies = bench.rows.of(STEP, case=case.name, engine=case.engines[0], round=round_)
    if row["status"] == "ok" and copies and copies[0]["status"] == "ok":
        row["of_pinned"] = round(float(row["rate"]) / float(copies[0]["rate"]), 4)
    return row


def remaining_units(bench: Bench, case: Case) -> list[tuple[int, str]]:
    """Return the rounds and engines that are still to be measured, in turns.

    An engine that is not there, or fails, is not tried again in the case.
    """
    bad = {
        row.get("engine") for row in bench.rows.of(STEP, case=case.name) if row["status"] != "ok"
    }
    return [
        (round_, engine)
        for round_ in range(bench.rounds)
        for engine in chosen(bench, case)
        if engine not in bad and f"{STEP}/{case.name}/{engine}/{round_}" not in bench.rows.ends
    ]


def compare(bench: Bench, only: list[str]) -> None:
    """Measure every case."""
    for case in CASES:
        if (only and case.name not in only) or not remaining_units(bench, case):
            continue
        model = bench.models[case.model]
        print(f"{case.name}: {case.title}, {model.count:,} tensors", flush=True)
        if not ensure_files(bench, case, model):
            continue
        # One that fails is gone from the next list.
        while units := remaining_units(bench, case):
            round_, engine = units[0]
            fields: Row = {"step": STEP, "case": case.name, "engine": engine, "round": round_}
            bench.unit(
                f"{STEP}/{case.name}/{engine}/{round_}",
                fields,
                estimate_seconds(bench, case, engine),
                lambda case=case, engine=engine, round_=round_: measure(
                    bench, case, engine, round_
                ),
            )


def ensure_files(bench: Bench, case: Case, model: Model) -> bool:
    """Have the files of a case, or add a row that says why there are none."""
    key = f"{STEP}/{case.name}"
    row: Row = {"step": STEP, "case": case.name}
    try:
        bench.need_model(bench.places[case.place], model, case.formats)
    except RuntimeError as error:
        bench.rows.end(key, row | {"status": "failed", "why": str(error)})
        print(f"  {key}: failed: {error}", flush=True)
        return False
    if key in bench.rows.ends:
        # There is room now.
        bench.rows.end(key, row | {"status": "ok"})
    return True
