"""Replays the writes of saves as a machine would have them that lost its power at any moment.

The calls of each kind of save are traced with what they write. After each of them, bytes that were
not synced are there, lost or torn in any mixture, and so are the names that folders got since they
were synced. What is then read is what was there before or what was saved; once the save has ended
it is that, whatever was lost.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import parts
import tracing
from call_faults import deny
from scenes import NEW, OLD, SAVES, Save, scratch
from tracing import Call, Memory

KEEP_SIZE = 1
#: Calls that would change files in ways that this program does not follow.
UNFOLLOWED = {"copy_file_range", "sendfile", "splice", "pwritev2", "io_uring_enter"}


@dataclass
class Event:
    """Something that a save does to the disk."""

    kind: str
    #: The file that is written or synced, or that gets a name.
    inode: int = 0
    offset: int = 0
    data: bytes = b""
    #: Names that come and go, from the folder of the scene on.
    path: str = ""
    gone: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.path or self.inode}"


@dataclass
class Disk:
    """Contents by inode, and inodes by path; folders are None."""

    files: dict[int, bytes] = field(default_factory=dict)
    names: dict[str, int | None] = field(default_factory=dict)

    @staticmethod
    def of(folder: Path) -> "Disk":
        disk = Disk()
        for path in sorted(folder.rglob("*")):
            inode = None if path.is_dir() else path.stat().st_ino
            disk.names[str(path.relative_to(folder))] = inode
            if inode is not None:
                disk.files[inode] = path.read_bytes()
        return disk

    def make(self, folder: Path) -> None:
        """Write it all."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, inode in sorted(self.names.items()):
            if inode is None:
                # Below a folder that was lost nothing is found.
                if (folder / name).parent.is_dir():
                    (folder / name).mkdir()
            elif (folder / name).parent.is_dir():
                (folder / name).write_bytes(self.files.get(inode, b""))

    def digest(self) -> bytes:
        sha = hashlib.sha256()
        for name, inode in sorted(self.names.items()):
            content = b"folder" if inode is None else self.files.get(inode, b"")
            sha.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
        return sha.digest()


class Recorder:
    """Makes events of calls."""

    def __init__(self, folder: Path, refused: tuple) -> None:
        self.folder, self.denied = folder, deny(refused, None, None)
        self.events: list[Event] = []
        self.begun: dict[int, tuple] = {}
        self.names = set(Disk.of(folder).names)
        self.unfollowed: set[str] = set()

    def inode(self, memory: Memory, descriptor: int) -> int | None:
        """Return that of a descriptor, if it is of the scene."""
        path = f"/proc/{memory.pid}/fd/{descriptor}"
        try:
            below = os.readlink(path).startswith(str(self.folder))
            return os.stat(path).st_ino if below else None
        except OSError:
            return None

    def begin(self, call: Call, memory: Memory) -> tracing.Action:
        if call.name in {"write", "writev", "pwrite64", "pwritev"}:
            inode = self.inode(memory, call.args[0])
            if inode is not None:
                parts = [(call.args[1], call.args[2])]
                if call.name.endswith("v"):
                    parts = memory.buffers(call.args[1], call.args[2])
                at = call.args[3]
                if call.name in {"write", "writev"}:
                    info = Path(f"/proc/{memory.pid}/fdinfo/{call.args[0]}").read_text()
                    at = int(info.split()[1])
                data = b"".join(memory.read(*part) for part in parts if part[1])
                self.begun[call.thread] = (inode, at, data)
        elif call.name in {"fsync", "fdatasync", "ftruncate", "fallocate"} | UNFOLLOWED:
            self.begun[call.thread] = (self.inode(memory, call.args[0]),)
        elif call.name in {"rename", "renameat", "renameat2"}:
            old = memory.path(call.args[0 if call.name == "rename" else 1])
            self.begun[call.thread] = (old,)
        return self.denied(call, memory)

    def relative(self, path: str) -> str | None:
        found = os.path.relpath(path, self.folder)
        return None if found.startswith("..") else found

    def end(self, call: Call, memory: Memory) -> None:
        begun = self.begun.pop(call.thread, None)
        if call.result is None or call.result < 0:
            return
        path = self.relative(call.path) if call.path.startswith("/") else None
        if begun and len(begun) == 3:
            inode, at, data = begun
            self.events.append(Event("write", inode, at, data[: call.result]))
        elif begun and begun[0] and call.name in {"fsync", "fdatasync"}:
            self.events.append(Event("sync", begun[0]))
        elif begun and begun[0] and call.name == "ftruncate":
            self.events.append(Event("truncate", begun[0], call.args[1]))
        elif begun and begun[0] and call.name == "fallocate" and not call.args[1] & KEEP_SIZE:
            self.unfollowed.add("fallocate that makes files longer")
        elif call.name in UNFOLLOWED and begun and begun[0]:
            self.unfollowed.add(call.name)
        elif path is None:
            return
        elif call.name in {"openat", "open"}:
            if path not in self.names and (self.folder / path).is_file():
                self.named(path)
        elif call.name in {"link", "linkat"} and path != ".":
            self.named(path)
        elif call.name in {"rename", "renameat", "renameat2"}:
            self.named(path, self.relative(begun[0]) or "")
        elif call.name in {"unlink", "unlinkat", "rmdir"}:
            self.names.discard(path)
            self.events.append(Event("remove", gone=path))
        elif call.name in {"mkdir", "mkdirat"}:
            self.names.add(path)
            self.events.append(Event("mkdir", os.stat(self.folder / path).st_ino, path=path))

    def named(self, path: str, gone: str = "") -> None:
        self.names.add(path)
        self.names.discard(gone)
        inode = os.stat(self.folder / path).st_ino
        self.events.append(Event("rename" if gone else "name", inode, path=path, gone=gone))


class States:
    """States that a disk may be in when the power goes."""

    def __init__(self, before: Disk, folders: dict[str, int], events: list[Event]) -> None:
        self.before, self.events = before, events
        #: Inodes of folders by path.
        self.folders = folders
        for event in events:
            if event.kind == "mkdir":
                self.folders[event.path] = event.inode

    def pending(self, upto: int) -> tuple[list[int], list[int]]:
        """Return the numbers of the events that no sync has made last."""
        data, names = [], []
        for number, event in enumerate(self.events[:upto]):
            rest = [later.inode for later in self.events[number:upto] if later.kind == "sync"]
            if event.kind in {"write", "truncate"}:
                if event.inode not in rest:
                    data.append(number)
            elif event.kind != "sync":
                parents = {os.path.dirname(path) for path in (event.path, event.gone) if path}
                if any(self.folders[parent] not in rest for parent in parents):
                    names.append(number)
        return data, names

    def after(self, upto: int, lost: set[int], torn: set[int]) -> Disk:
        """Return the disk after the first events, without some, of some a part."""
        disk = Disk(dict(self.before.files), dict(self.before.names))
        written: dict[int, bytearray] = {}
        for number, event in enumerate(self.events[:upto]):
            if number in lost:
                continue
            if event.kind in {"write", "truncate"}:
                content = written.setdefault(
                    event.inode, bytearray(disk.files.get(event.inode, b""))
                )
                if event.kind == "truncate":
                    content[:] = content[: event.offset].ljust(event.offset, b"\0")
                    continue
                data = event.data
                if number in torn:
                    # A torn write has its length, and the bytes of its first pages.
                    kept = len(data) // 2 // 4096 * 4096
                    data = data[:kept] + bytes(len(data) - kept)
                end = event.offset + len(data)
                if len(content) < end:
                    content.extend(bytes(end - len(content)))
                content[event.offset : end] = data
            elif event.kind != "sync":
                disk.names.pop(event.gone, None)
                if event.path:
                    disk.names[event.path] = None if event.kind == "mkdir" else event.inode
        disk.files |= {inode: bytes(content) for inode, content in written.items()}
        return disk

    def some(self, upto: int, chance: random.Random, count: int) -> Iterator[Disk]:
        """Yield different ones: all is there, all is lost, and mixtures."""
        data, names = self.pending(upto)
        seen = set()
        for number in range(count):
            lost = set()
            torn = set()
            if number == 1:
                lost = set(data) | set(names)
            elif number == 2:
                lost = set(data)
            elif number == 3:
                lost = set(names)
            elif number > 3:
                likely = chance.random()
                lost = {one for one in data + names if chance.random() < likely}
                torn = {one for one in data if chance.random() < 0.3}
            disk = self.after(upto, lost, torn)
            if disk.digest() not in seen:
                seen.add(disk.digest())
                yield disk


def order(events: list[Event], folders: dict[str, int]) -> Iterator[str]:
    """Yield what is out of order: names of bytes that were not synced, and names that were not."""
    for number, event in enumerate(events):
        if event.kind not in {"name", "rename"} or os.path.basename(event.path).startswith("."):
            continue
        for earlier, other in enumerate(events[:number]):
            if other.kind in {"write", "truncate"} and other.inode == event.inode:
                syncs = [e for e in events[earlier:number] if e.kind == "sync"]
                if event.inode not in [sync.inode for sync in syncs]:
                    yield f"{event} before its bytes are synced"
                    break
        folder = folders[os.path.dirname(event.path)]
        if folder not in [later.inode for later in events[number:] if later.kind == "sync"]:
            yield f"{event}, whose folder is not synced"


class Campaign:
    """Counts what was replayed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.states: Counter[str] = Counter()
        self.found: Counter[str] = Counter()
        self.findings: list[str] = []

    def finding(self, text: str) -> None:
        if text not in self.findings:
            self.findings.append(text)
            print(f"FINDING {text}", file=sys.stderr, flush=True)

    def run(self, scene: Save, folder: Path, each: int) -> Iterator[None]:
        """Record a save, then replay it again and again; each step is one replay."""
        folder.mkdir()
        if scene.over:
            scene.save(folder, OLD)
        before = Disk.of(folder)
        folders = {"": folder.stat().st_ino}
        folders |= {p: os.stat(folder / p).st_ino for p, i in before.names.items() if i is None}
        recorder = Recorder(folder, scene.refused)
        outcome = tracing.run(lambda: scene.save(folder, NEW), recorder.begin, recorder.end)
        if outcome.status != 0 or recorder.unfollowed:
            self.finding(f"{scene.name}: {outcome.said}, {recorder.unfollowed}")
            return
        states = States(before, folders, recorder.events)
        whole = states.after(len(recorder.events), set(), set())
        if whole.digest() != Disk.of(folder).digest():
            self.finding(f"{scene.name}: the replay differs from what was saved")
            return
        for wrong in order(recorder.events, folders):
            self.finding(f"{scene.name}: {wrong}")
        values = (OLD if scene.over else None, NEW)
        replay = folder.with_name(f"{folder.name}.replay")
        while True:
            for upto in range(len(recorder.events) + 1):
                ended = upto == len(recorder.events)
                for disk in states.some(upto, self.random, each):
                    disk.make(replay)
                    self.states[scene.name] += 1
                    where = f"{scene.name}, after {upto} of {len(recorder.events)} events"
                    where += f" ({recorder.events[upto - 1]})" if upto else ""
                    try:
                        found = scene.found(replay)
                    except Exception as error:
                        self.finding(f"{where}: {type(error).__name__}: {error}")
                        continue
                    self.found["new" if found == NEW else "old"] += 1
                    if found not in values:
                        self.finding(f"{where}: {found} is there")
                    elif ended and found != NEW:
                        self.finding(f"{where}: the save has ended, and {found} is there")
                yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts.ending(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds whose names have this text")
    arguments = parser.parse_args()
    began = time.monotonic()
    if skipped := tracing.why_not():
        print(json.dumps({"campaign": "power", "skipped": skipped}))
        return
    campaign = Campaign(arguments.seed)
    with scratch() as folder:
        runs = [campaign.run(scene, folder / f"{number}", 12)
                for number, scene in enumerate(SAVES) if arguments.only in scene.name]  # fmt: skip

        def enough() -> bool:
            return parts.enough(arguments, began, sum(campaign.states.values()))

        while runs and not enough():
            for run in list(runs):
                if enough():
                    break
                if next(run, run) is run:
                    runs.remove(run)
    print(json.dumps({
        "campaign": "power", "inputs": sum(campaign.states.values()),
        "what": "states of a disk that lost its power", "kinds": dict(campaign.states),
        "ended": dict(campaign.found), "findings": campaign.findings,
        "seconds": round(time.monotonic() - began, 1),
    }))  # fmt: skip
    sys.exit(bool(campaign.findings))


if __name__ == "__main__":
    main()
