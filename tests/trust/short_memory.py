"""Small saves and loads with ever more memory, from none to enough.

In a child the address space may grow by so many bytes and no more. Each save or load succeeds, or
ends with an error that says that memory is short; it never aborts, and then works with the memory
back. A save that fails leaves what was there. The C library ends a process that lacks memory for
thread-local data of a library; no program can prevent this, and such ends are counted apart.

With `--filled` nothing is free in what the allocator has already either, so that any allocation may
be the one that fails. Then those of Rust's libraries that have no other way abort; the campaign of
`campaigns.json` goes without it.
"""

import argparse
import ctypes
import errno
import gc
import json
import random
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import parts
from scenes import (
    LOADS,
    NEW,
    OLD,
    SAVES,
    Load,
    Save,
    environment,
    http_server,
    scratch,
    tensorizer,
    value_of,
)

#: Seconds that a save or load may take.
LATE = 60.0
#: Bytes that are given at most beyond what a process has: enough for each of them.
MOST = 64 << 20
#: Bytes that are given at least.
LEAST = 1 << 10
#: The last words of the C library at the first use of a library's thread-local data in a thread.
NO_THREAD_DATA = "cannot allocate memory for thread-local data: ABORT"
#: Texts of errors about memory that are neither MemoryError nor ENOMEM: torch's, and of threads.
SAID = re.compile(r"alloc|memory|ENOMEM|can't start new thread|Resource temporarily unavailable")


def mapped() -> int:
    """Return the bytes of the address space that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def is_short(error: BaseException) -> bool:
    """Return whether an error, or one that it comes from, says that memory is short."""
    if getattr(error, "failures", None):
        return all(is_short(one) for one, _ in error.failures.values())
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.EAGAIN):
        return True
    if isinstance(error, (OSError, RuntimeError, ValueError, ImportError)):
        return bool(SAID.search(str(error)))
    return False


def fill() -> None:
    """Take all memory that the allocator of the process has and nothing uses."""
    allocate = ctypes.CDLL(None).malloc
    allocate.argtypes, allocate.restype = [ctypes.c_size_t], ctypes.c_void_p
    for size in (1 << 20, 1 << 16, 1 << 12, 256, 32):
        while allocate(size):
            pass


#: True if `fill` is called before each try.
filled = False


def tried(work: Callable[[], object], more: int) -> dict:
    """Do it with so many bytes more than there are; return how it ended."""
    gc.collect()
    limit = resource.getrlimit(resource.RLIMIT_AS)
    now = mapped()
    if filled:
        resource.setrlimit(resource.RLIMIT_AS, (now, limit[1]))
        fill()
    resource.setrlimit(resource.RLIMIT_AS, (now + more, limit[1]))
    error = None
    try:
        found = work()
    except BaseException as caught:
        error = caught
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    if error is None:
        return {"ended": "done", "found": found}
    ended = "short" if is_short(error) else "other"
    return {"ended": ended, "error": f"{type(error).__name__}: {error}"[:500]}


def of_save(scene: Save, folder: Path, more: int) -> dict:
    """Save with little memory, then look what is there, and save once more."""
    said = tried(lambda: scene.save(folder, NEW), more)
    found = scene.found(folder)
    allowed = {NEW} if said["ended"] == "done" else {OLD if scene.over else None, NEW}
    if found not in allowed:
        said["wrong"] = f"{found} is there, expected one of {allowed}"
    scene.save(folder, 3.0)
    if scene.found(folder) != 3.0:
        said["wrong"] = "the next save is not found"
    return said


def of_load(scene: Load, folder: Path, more: int) -> dict:
    """Load with little memory, then with enough."""
    said = tried(lambda: scene.load(folder), more)
    if said["ended"] == "done" and said["found"] != OLD:
        said["wrong"] = f"loads {said['found']}"
    if scene.load(folder) != OLD:
        said["wrong"] = "the next load is wrong"
    return said


class Campaign:
    """Counts how saves and loads ended."""

    def __init__(self, seed: int, part: int, jobs: int) -> None:
        self.random = random.Random(f"{seed}/{part}")
        self.part, self.jobs, self.turns = part, jobs, 0
        self.kinds: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.findings: list[str] = []

    def find(self, text: str) -> None:
        self.findings.append(text)
        print(f"FINDING {text}", file=sys.stderr, flush=True)

    def bytes_of(self) -> int:
        """Return how much memory there is: as often little as much."""
        return int(LEAST * (MOST / LEAST) ** self.random.random())

    def turn(self, name: str, work: Callable[[int], dict]) -> None:
        more = self.bytes_of()
        status, said, output = parts.in_child(lambda: work(more), LATE)
        self.kinds[name] += 1
        where = f"{name}, {more} bytes"
        if status is None:
            self.find(f"{where}: not ended after {LATE:.0f} s: {output}")
        elif status == 127 and NO_THREAD_DATA in output:
            self.ended["ended by the C library"] += 1
        elif status:
            self.find(f"{where}: ends with {status}: {output}")
        else:
            self.ended[said["ended"]] += 1
            if said["ended"] == "other":
                self.find(f"{where}: {said['error']}")
            if "wrong" in said:
                self.find(f"{where}: {said['wrong']}")


def places(folder: Path, url: str) -> list[tuple[str, Callable[[int], dict]]]:
    """Make a folder for each scene; return what is tried there."""
    found: list[tuple[str, Callable[[int], dict]]] = []
    for scene in SAVES:
        if scene.refused:
            continue

        def saved(more: int, scene: Save = scene) -> dict:
            with scratch() as mine:
                if scene.over:
                    scene.save(mine, OLD)
                return of_save(scene, mine, more)

        with scratch() as mine:
            # Modules that are imported late are imported here.
            scene.save(mine, OLD)
            scene.found(mine)
        found.append((f"save, {scene.name}", saved))
    for number, scene in enumerate(LOADS):
        place = folder / f"load{number}"
        place.mkdir()
        scene.prepare(place)
        scene.load(place)
        found.append((f"load, {scene.name}", partial(of_load, scene, place)))
    by_url = Load("http", lambda _: None, lambda _: value_of(tensorizer.load(url, "cpu")))
    found.append(("load, http", partial(of_load, by_url, folder)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts.ending(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds whose names have this text")
    parser.add_argument("--filled", action="store_true", help="fill the heap before")
    parts.option(parser)
    arguments = parser.parse_args()
    global filled  # noqa: PLW0603
    filled = arguments.filled
    began = time.monotonic()
    campaign = Campaign(arguments.seed, parts.divide(arguments.jobs), arguments.jobs)
    # A server that cannot be asked for want of memory is not asked often.
    with (
        scratch() as folder,
        environment((("TENSORIZER_ATTEMPTS", "2"),)),
        http_server(folder) as url,
    ):
        runs = [(name, work) for name, work in places(folder, url) if arguments.only in name]
        while not parts.enough(arguments, began, sum(campaign.kinds.values())):
            campaign.turn(*runs[sum(campaign.kinds.values()) % len(runs)])
    print(json.dumps({
        "campaign": "short memory", "inputs": sum(campaign.kinds.values()),
        "what": "saves and loads with little memory",
        "kinds": dict(campaign.kinds.most_common()), "ended": dict(campaign.ended),
        "findings": campaign.findings[:50], "seconds": round(time.monotonic() - began, 1),
    }))  # fmt: skip
    sys.exit(bool(campaign.findings))


if __name__ == "__main__":
    main()
