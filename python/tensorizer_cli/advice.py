"""One sentence of advice, derived from the figures of a load."""

from __future__ import annotations

from typing import Any

from .file_description import size
from .output import plural

#: Seconds; in shorter loads it is not known whether more connections would help.
_SHORT = 1.0


def limit(figures: dict[str, Any]) -> str:
    """Return the part that took most of the time: a stage, or the source of the bytes.

    ``figures`` are those of ``load --json``.
    """
    stages: dict[str, float] = figures["stages"]
    stage = max(stages, key=stages.__getitem__)
    source: str = figures["source"]
    return source if stage == "read" else stage


def advice(
    figures: dict[str, Any],
    *,
    read_seconds: float,
    chosen: bool = False,
    mapped: bool = False,
    bypasses_cache: bool = False,
    huge_pages: bool = True,
) -> str:
    """Return advice on what would make the load faster, or would not.

    Args:
        figures: Those of ``load --json``.
        read_seconds: Seconds of reading, summed over all connections.
        chosen: True if ``--num-readers`` was given.
        mapped: True if a local file was used in place.
        bypasses_cache: True if direct reads left nothing of a local file in the page cache.
        huge_pages: True if the system gives huge pages to memory that requests them.

    """
    found = limit(figures)
    if found == "network":
        return _network(figures, read_seconds, chosen)
    return {
        "disk": "the file came from a disk, past the page cache, and so does its next load; with "
        "TENSORIZER_DIRECT_IO=0 that comes from memory, if there is room"
        if bypasses_cache
        else "the file came from a disk; its next load comes from memory, if there is room",
        "page cache": "the file was in memory, and used in place"
        if mapped
        else "the file was in memory, and copying it takes the time; --mmap (mmap=True) uses it in "
        "place, for files that are only read",
        "open": "opening the file takes longer than reading its bytes: more connections would not "
        "help; open the file once and keep it, or save small files as one",
        "plan": "so many small tensors that planning the load takes the time",
        "first touch": "the system gives new memory slowly; tensors that exist already "
        "(load(out=...)) spare that"
        + ("" if huge_pages else ", and so do huge pages (transparent_hugepage=madvise)"),
        "decrypt": "decryption; it runs on each reader's core, so that more cores would help",
        "hash": "comparison with hashes; in Python, verify_hash='crc32' costs less; none is needed "
        "where the file was verified before",
        "memory": "the device takes the bytes no faster than this; more staging memory "
        "(TENSORIZER_PINNED_MB) helps only where copies come in bursts",
        "copy": "the bus to the device; more readers would not help",
    }[found]


def _network(figures: dict[str, Any], read_seconds: float, chosen: bool) -> str:
    rate = size(round(figures["bytes"] / max(read_seconds, 1e-9)))
    connections, most = figures["connections"], figures["connections_at_most"]
    said = f"{plural(connections, 'connection')} of {rate}/s each; "
    if chosen:
        return said + "more may help: without --num-readers their number is chosen automatically"
    if most == 1:
        return said + "this server or this memory limit allows no more than one"
    if connections >= most:
        return said + "this is the most that is chosen automatically; more --num-readers may help"
    if figures["seconds"] < _SHORT:
        return said + "the load was too short to find out whether more would help"
    return said + "more would not help: twice as many did not bring 15 % more, or CPUs are busy"
