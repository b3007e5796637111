"""``tensorizer load``: measures the load of a file, and finds what limits its speed."""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from typing import Any

import torch
from tensorizer import stats
from tensorizer._native import time_first_touch
from tensorizer.file.arguments import resolve_device
from tensorizer.streams.addresses import is_address

from . import keys
from .advice import LoadFigures, advice
from .checkpoint import open_file, prepare
from .file_description import size
from .output import Report, plural, without_password
from .progress import ProgressBar

_PAGE = 4096
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


def run(options: argparse.Namespace) -> int:
    """Load every byte of a file, and report."""
    report = Report(options)
    shown = without_password(options.file)
    time_first_touch(True)
    try:
        figures, file = _measured(options)
    finally:
        time_first_touch(False)
    shares = {name: part / figures.whole for name, part in figures.seconds.items()}
    rate = figures.bytes / figures.whole
    said = advice(figures)
    report.finding(
        f"{plural(file['tensors'], 'tensor')}, {size(figures.bytes)} in {figures.whole:.3f} s, "
        f"{rate / 1e9:.2f} GB/s, to {figures.device}"
    )
    report.finding(f"path  {figures.path}")
    for name, share in shares.items():
        if name == "first touch":
            meaning = f"new memory from the system: {figures.faults:,} page faults"
        else:
            meaning = _MEANINGS.get(name, f"reading: {figures.source}")
        report.finding(
            f"{name.ljust(11)}  {figures.seconds[name]:>9.3f} s  {share:>6.1%}  {meaning}"
        )
    for fallback in figures.fallbacks:
        report.finding(f"slower way  {fallback}")
    report.finding(f"limit  {figures.limit}: {said}")
    report.result(
        file=shown,
        **file,
        bytes=figures.bytes,
        device=figures.device,
        seconds=round(figures.whole, 6),
        bytes_per_second=round(rate),
        path=figures.path,
        source=figures.source,
        connections=figures.connections,
        connections_at_most=figures.most,
        stages={name: round(part, 6) for name, part in figures.seconds.items()},
        shares={name: round(share, 4) for name, share in shares.items()},
        page_faults=figures.faults,
        limit=figures.limit,
        advice=said,
        fallbacks=figures.fallbacks,
    )
    return 0


def _measured(options: argparse.Namespace) -> tuple[LoadFigures, dict[str, Any]]:
    device = resolve_device(options.device)
    # Only tensors that stay in host memory are mapped.
    mapped = options.mmap and device.type == "cpu"
    prepare(options.file, options.mmap)
    before = (stats() or {"call": 0})["call"]
    from_disk = _from_disk()
    begun = time.perf_counter()
    with open_file(
        options.file,
        keys.decryption(options),
        options.readers,
        options.mmap,
        options.memory_limit,
    ) as file:
        file.check_key()
        opened, total = time.perf_counter() - begun, file.total
        faults = _page_faults()
        with ProgressBar(total, options) as progress:
            tensors = file.load_all(device, options.verify)
            # Mapped bytes are read when they are touched.
            touched = time.perf_counter()
            faults = _page_faults() - faults
            if mapped:
                for tensor in tensors:
                    plain = tensor.resolve_conj().resolve_neg().contiguous()
                    plain.reshape(-1).view(torch.uint8)[::_PAGE].sum()
            elif device.type == "cuda":
                torch.cuda.synchronize(device)
            touched = time.perf_counter() - touched
            progress.add(total)
        whole = time.perf_counter() - begun
        from_disk = _from_disk() - from_disk
        calls = stats(since=before)
        facts = {
            "format": file.reader.format,
            "encrypted": file.reader.encrypted,
            "tensors": len(file),
        }
        local, parallel = (file.is_local, file.first.parallel) if file.first else (True, False)
    threads = max((call["threads"] for call in calls), default=1)
    seconds = _stages(calls)
    read = seconds["read"] + seconds["first touch"]
    key = "read" if mapped else "copy"
    seconds[key] += touched * max(threads, 1)
    source = _source(options.file, local, from_disk, total)
    names = {call["reading"] for call in calls} - {""}
    figures = LoadFigures(
        bytes=total,
        whole=whole,
        seconds=_of_whole(seconds, calls, opened, whole),
        read_seconds=read,
        source=source,
        path=_path(options.file, source, threads if parallel else 0, names, mapped),
        connections=threads,
        most=max((call["most_threads"] for call in calls), default=1),
        chosen=options.readers is not None,
        device=", ".join(dict.fromkeys(call["device"] for call in calls)) or str(device),
        fallbacks=list(dict.fromkeys(why for call in calls for why in call["fallbacks"])),
        faults=faults,
        mapped=mapped,
        bypasses_cache=any(name.startswith("direct reads") for name in names),
        huge_pages=_huge_pages(),
    )
    return figures, facts


def _stages(calls: list[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds of all threads in each stage that moves bytes."""
    found = {name: sum(call["stages"].get(name, 0.0) for call in calls) for name in _STAGES}
    # The first touch is timed as a part of reading.
    found["read"] -= found["first touch"]
    return found


def _page_faults() -> int:
    """Return the page faults of this process so far that needed no disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _of_whole(
    stages: dict[str, float], calls: list[dict[str, Any]], opened: float, whole: float
) -> dict[str, float]:
    """Divide the time of the whole among stages, in proportion to the time of the threads."""
    planned = min(sum(call["stages"]["plan"] for call in calls), whole - opened)
    moving = max(whole - opened - planned, 0.0)
    spent = sum(stages.values()) or 1.0
    shares = {name: moving * stage / spent for name, stage in stages.items()}
    return {"open": opened, "plan": planned, **shares}


def _from_disk() -> int:
    """Return the bytes that were read from disks for this process."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes")), 0)


def _huge_pages() -> bool:
    """Tell whether the system gives huge pages to memory that requests them."""
    try:
        return "[never]" not in _HUGE_PAGES.read_text()
    except OSError:
        return True


def _source(file: str, local: bool, from_disk: int, total: int) -> str:
    if not local:
        return "network"
    return "disk" if from_disk * 2 > total else "page cache"


def _path(file: str, source: str, threads: int, names: set[str], mapped: bool) -> str:
    """Return the path that the bytes took; no threads mean that they came front to back."""
    if source == "network":
        if threads == 0:
            return "front to back over 1 connection"
        return f"ranges over {plural(threads, 'connection')}"
    if threads == 0:
        return "a local stream, front to back"
    where = "the cache of servers' files" if is_address(file) else "a local file"
    how = "mapped" if mapped else ", ".join(sorted(names)) or "buffered reads"
    return f"{where}, {how}, {plural(threads, 'reader')}"
