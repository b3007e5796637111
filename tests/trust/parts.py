"""Divides a campaign among processes, and adds up what they say."""

import argparse
import ctypes
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path

#: Figures of which the highest counts; all others are added up.
HIGHEST = {"seconds", "slowest", "most_mb"}
SET_DEATH_SIGNAL = 1
#: Seconds from which on a campaign is a long one.
LONG = 60.0
#: Advice of `madvise`, and the size of the pages that it makes.
COLLAPSE, LARGE = 25, 2 << 20


def option(parser: argparse.ArgumentParser) -> None:
    """Add the option that says how many processes there are."""
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")


def ending(parser: argparse.ArgumentParser) -> None:
    """Add the options that say when a campaign ends."""
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--inputs", type=int, help="end after as many, whatever time they take")


def is_long(asked: argparse.Namespace) -> bool:
    """Return whether a campaign has the time for what takes long to begin."""
    return asked.inputs is None and asked.seconds >= LONG


def enough(asked: argparse.Namespace, began: float, inputs: int) -> bool:
    """Return whether a process has done its share of the inputs, or has used up its seconds."""
    if asked.inputs is None:
        return time.monotonic() >= began + asked.seconds
    return inputs * getattr(asked, "jobs", 1) >= asked.inputs


def end_with(parent: int, by: signal.Signals) -> None:
    """Have a child end when its parent has, by a signal."""
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, by)
    if os.getppid() != parent:
        os._exit(1)


def end(*_: object) -> None:
    """End by an exception, once."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.exit(1)


def divide(jobs: int) -> int:
    """Fork so many processes, and return in each its number, from 0 on.

    The one that was there before does not return: it waits for them, prints what they say, added
    up, and ends as the worst of them.
    """
    if jobs == 1:
        return 0
    files = [tempfile.TemporaryFile() for _ in range(jobs)]  # noqa: SIM115
    sys.stdout.flush()
    parent, pids = os.getpid(), []
    for number, file in enumerate(files):
        pid = os.fork()
        if pid == 0:
            # SIGTERM raises, so that its servers end with it; a second one ends it at once.
            signal.signal(signal.SIGTERM, end)
            end_with(parent, signal.SIGTERM)
            os.dup2(file.fileno(), 1)
            return number
        pids.append(pid)
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    said: dict = {}
    for number, (file, status) in enumerate(zip(files, ended, strict=True)):
        file.seek(0)
        lines = file.read().decode(errors="replace").splitlines()
        results = [line for line in lines if line.startswith('{"campaign"')]
        print("".join(f"{line}\n" for line in lines if line not in results), end="")
        if results:
            said = added(said, json.loads(results[-1]))
        if status and not (results and json.loads(results[-1]).get("findings")):
            lost = {"findings": [f"process {number} of {jobs} ends with {status}"]}
            said = added(said, lost)
    print(json.dumps(said))
    sys.exit(1 if said.get("findings") else max(map(abs, ended)))


def in_child(work: Callable[[], object], seconds: float) -> tuple[int | None, object, str]:
    """Run a function in a fork of this process.

    Return its exit status, or minus the signal that ended it, or None if it was late; what the
    function returned; and what it printed last.
    """
    with tempfile.TemporaryFile() as result, tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                for number in (1, 2):
                    os.dup2(output.fileno(), number)
                result.write(json.dumps(work()).encode())
                result.flush()
                status = 0
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(status)
        ended = os.pidfd_open(pid)
        late = not select.select([ended], [], [], seconds)[0]
        os.close(ended)
        if late:
            os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for file in (result, output):
            file.seek(0)
        text = result.read()
        said = output.read().decode(errors="replace")[-1500:]
    return None if late else status, json.loads(text) if text else None, said


def large_pages() -> None:
    """Bring memory together in large pages, of which a fork copies less: it takes a third as long.

    What the kernel does not do stays as it is.
    """
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        ends, rights, _, _, inode, *_ = line.split()
        first, last = (int(end, 16) for end in ends.split("-"))
        if inode != "0" or rights != "rw-p":
            continue
        for place in range(-(-first // LARGE) * LARGE, last - LARGE + 1, LARGE):
            advise(place, LARGE, COLLAPSE)


def added(one: dict, other: dict) -> dict:
    """Return what two processes say as one would."""
    found = dict(one)
    for name, value in other.items():
        before = found.get(name)
        if before is None or isinstance(value, str):
            found[name] = value
        elif name in HIGHEST:
            found[name] = max(before, value)
        elif isinstance(value, dict):
            found[name] = added(before, value)
        else:
            found[name] = before + value
    return found


def mine(name: str, part: int, jobs: int) -> bool:
    """Return whether an input is one of a process's own."""
    return zlib.crc32(name.encode()) % jobs == part
