"""``tensorizer load``: measures the load of a file, and finds what limits its speed."""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from typing import Any

import torch
from tensorizer import stats
from tensorizer._native import local_path, time_first_touch
from tensorizer.file.arguments import resolve_device
from tensorizer.tensors.handles import bytes_of

from . import keys
from .advice import advice, limit
from .file import checkpoint_folder, open_file
from .file_description import size
from .output import Report, plural, without_password
from .progress import Progress

_PAGE = 4096
#: Bytes of a block, in which the system counts what was read from disks for a process.
_BLOCK = 512
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
#: The stages that move bytes at the same time, in the order in which a byte passes them.
_STAGES = ("read", "first touch", "decrypt", "hash", "memory", "copy")
_MEANINGS = {
    "open": "connecting, the first bytes, the index",
    "plan": "planning the reads",
    "decrypt": "decryption",
    "hash": "comparison with hashes",
    "memory": "waiting for staging memory: for the device, if all of it is in use",
    "copy": "starting copies to the device",
}


def load(options: argparse.Namespace) -> int:
    """Load every byte of a file, and report."""
    report = Report(options)
    time_first_touch(True)
    try:
        figures = _measured(options)
    finally:
        time_first_touch(False)
    seconds, bytes_done = figures["seconds"], figures["bytes"]
    report.line(
        f"{plural(figures['tensors'], 'tensor')}, {size(bytes_done)} in {seconds:.3f} s, "
        f"{bytes_done / seconds / 1e9:.2f} GB/s, to {figures['device']}"
    )
    report.line(f"path  {figures['path']}")
    faults = f"new memory from the system: {figures['page_faults']:,} page faults"
    meanings = {**_MEANINGS, "read": f"reading: {figures['source']}", "first touch": faults}
    for name, part in figures["stages"].items():
        report.line(f"{name:<11}  {part:>9.3f} s  {part / seconds:>6.1%}  {meanings[name]}")
    report.lines(f"slower way  {fallback}" for fallback in figures["fallbacks"])
    report.line(f"limit  {figures['limit']}: {figures['advice']}")
    report.result(**figures)
    return 0


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    """Load a file; return the fields for JSON."""
    device = resolve_device(options.device)
    # Only tensors that stay in host memory are mapped.
    mapped = options.mmap and device.type == "cpu"
    if checkpoint_folder(options.file) is not None:
        if options.mmap:
            raise ValueError(f"{options.file} is a checkpoint: --mmap is for other files")
        # Imported now, so that the time is not counted as the file's.
        import tensorizer.distributed.whole_tensors  # noqa: F401
    before, used, bar = (stats() or {"call": 0})["call"], _usage(), Progress(options)
    begun = time.perf_counter()
    with (
        bar as progress,
        open_file(
            options.file, options, keys.decryption(options), progress=progress, mmap=options.mmap
        ) as file,
    ):
        file.check_key()
        opened = time.perf_counter() - begun
        faults = _usage().ru_minflt
        tensors = file.load_all(device, options.verify_hash)
        touched = time.perf_counter()
        faults = _usage().ru_minflt - faults
        if mapped:
            # Mapped bytes are read when they are touched.
            for tensor in tensors:
                bytes_of(tensor)[::_PAGE].sum()
        elif device.type == "cuda":
            torch.cuda.synchronize(device)
        ended = time.perf_counter()
        from_disk = (_usage().ru_inblock - used.ru_inblock) * _BLOCK
        calls = stats(since=before)
        local, parallel = (file.is_local, file.first.parallel) if file.first else (True, False)
    whole = ended - begun
    threads = max((call["threads"] for call in calls), default=1)
    spent = _stages(calls)
    read_seconds = spent["read"] + spent["first touch"]
    spent["read" if mapped else "copy"] += (ended - touched) * max(threads, 1)
    # The time of the whole is divided in proportion to the time of the threads.
    planned = min(sum(call["stages"]["plan"] for call in calls), whole - opened)
    scale = (whole - opened - planned) / (sum(spent.values()) or 1.0)
    moving = {name: part * scale for name, part in spent.items()}
    stages = {"open": opened, "plan": planned, **moving}
    source = "disk" if from_disk * 2 > file.total else "page cache"
    source = source if local else "network"
    names = {call["reading"] for call in calls} - {""}
    figures: dict[str, Any] = {
        "file": without_password(options.file),
        "format": file.reader.format,
        "encrypted": file.reader.encrypted,
        "tensors": len(file),
        "bytes": file.total,
        "device": next((call["device"] for call in calls if call["device"]), str(device)),
        "seconds": round(whole, 6),
        "bytes_per_second": round(file.total / whole),
        "path": _path(options.file, source, threads if parallel else 0, names, mapped),
        "source": source,
        "connections": threads,
        "connections_at_most": max((call["most_threads"] for call in calls), default=1),
        "stages": {name: round(part, 6) for name, part in stages.items()},
        "shares": {name: round(part / whole, 4) for name, part in stages.items()},
        "page_faults": faults,
    }
    figures["limit"] = limit(figures)
    figures["advice"] = advice(
        figures,
        read_seconds=read_seconds,
        chosen=options.num_readers is not None,
        mapped=mapped,
        bypasses_cache=any(name.startswith("direct reads") for name in names),
        huge_pages=_huge_pages(),
    )
    figures["fallbacks"] = list(dict.fromkeys(why for call in calls for why in call["fallbacks"]))
    return figures


def _usage() -> resource.struct_rusage:
    """Return what this process has used: page faults that needed no disk, and blocks of disks."""
    return resource.getrusage(resource.RUSAGE_SELF)


def _stages(calls: list[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds of all threads in each stage that moves bytes."""
    found = {name: sum(call["stages"].get(name, 0.0) for call in calls) for name in _STAGES}
    # The first touch is timed as a part of reading.
    found["read"] -= found["first touch"]
    return found


def _huge_pages() -> bool:
    """Tell whether the system gives huge pages to memory that requests them."""
    try:
        return "[never]" not in _HUGE_PAGES.read_text()
    except OSError:
        return True


def _path(file: str, source: str, threads: int, names: set[str], mapped: bool) -> str:
    """Return the path that the bytes took; no threads mean that they came front to back."""
    if source == "network":
        ranges = f"ranges over {plural(threads, 'connection')}"
        return ranges if threads else "front to back over 1 connection"
    if threads == 0:
        return "a local stream, front to back"
    where = "the cache of servers' files" if local_path(file) is None else "a local file"
    how = "mapped" if mapped else ", ".join(sorted(names)) or "buffered reads"
    return f"{where}, {how}, {plural(threads, 'reader')}"
