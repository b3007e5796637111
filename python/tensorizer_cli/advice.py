"""One sentence of advice, derived from the figures of a load."""

from __future__ import annotations

from dataclasses import dataclass

from .file_description import size
from .output import plural

#: Seconds; in shorter loads it is not known whether more connections would help.
_SHORT = 1.0


@dataclass(frozen=True)
class LoadFigures:
    """The measured figures of a load.

    ``seconds`` divides the time of the whole load among the stages; ``read_seconds`` is the sum
    over all connections. ``source`` is ``"network"``, ``"disk"``, ``"page cache"`` or ``"object"``.
    """

    bytes: int
    whole: float
    seconds: dict[str, float]
    read_seconds: float
    source: str
    path: str
    connections: int
    most: int
    chosen: bool
    device: str
    fallbacks: list[str]
    #: Page faults during the load that needed no disk.
    faults: int = 0
    #: True if a local file was used in place.
    mapped: bool = False
    #: True if direct reads left nothing of a local file in the page cache.
    bypasses_cache: bool = False
    #: True if the system gives huge pages to memory that requests them.
    huge_pages: bool = True

    @property
    def limit(self) -> str:
        """The part that took most of the time: a stage, or the source of the bytes."""
        stage = max(self.seconds, key=self.seconds.__getitem__)
        return self.source if stage == "read" else stage


def advice(figures: LoadFigures) -> str:
    """Return advice on what would make the load faster, or would not."""
    if figures.limit == "network":
        return _network(figures)
    return {
        "disk": "the file came from a disk, past the page cache, and so does its next load; with "
        "TENSORIZER_DIRECT_IO=0 that comes from memory, if there is room"
        if figures.bypasses_cache
        else "the file came from a disk; its next load comes from memory, if there is room",
        "page cache": "the file was in memory, and used in place"
        if figures.mapped
        else "the file was in memory, and copying it takes the time; --mmap (mmap=True) uses it in "
        "place, for files that are only read",
        "open": "opening the file takes longer than reading its bytes: more connections would not "
        "help; open the file once and keep it, or save small files as one",
        "plan": "so many small tensors that planning the load takes the time",
        "first touch": "the system gives new memory slowly; tensors that exist already "
        "(load(out=...)) spare that"
        + ("" if figures.huge_pages else ", and so do huge pages (transparent_hugepage=madvise)"),
        "decrypt": "decryption; it runs on each reader's core, so that more cores would help",
        "hash": "comparison with hashes; verify_hash='crc32' costs less, and none is needed where "
        "the file was verified before",
        "memory": "the device takes the bytes no faster than this; more staging memory "
        "(TENSORIZER_PINNED_MB) helps only where copies come in bursts",
        "copy": "the bus to the device; more readers would not help",
    }[figures.limit]


def _network(figures: LoadFigures) -> str:
    rate = size(round(figures.bytes / max(figures.read_seconds, 1e-9)))
    said = f"{plural(figures.connections, 'connection')} of {rate}/s each; "
    if figures.chosen:
        return said + "more may help: without --readers their number is chosen automatically"
    if figures.most == 1:
        return said + "this server or this memory limit allows no more than one"
    if figures.connections >= figures.most:
        return said + "this is the most that is chosen automatically; more --readers may help"
    if figures.whole < _SHORT:
        return said + "the load was too short to find out whether more would help"
    return said + "more would not help: twice as many did not bring 15 % more, or CPUs are busy"
