"""Runs a function in a forked child and stops it at system calls, by ptrace, on x86-64.

What a caller answers at a call is done to it: it fails, it moves fewer bytes, the process dies. A
child that is to be stopped at calls of some names alone has a filter of seccomp, which lets all
others pass at full speed.
"""

import contextlib
import ctypes
import errno
import functools
import gc
import json
import os
import platform
import re
import signal
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
TRACEME, PEEKUSER, POKEUSER, CONT, SYSCALL, SETOPTIONS, INFO = 0, 3, 6, 7, 24, 0x4200, 0x420E
#: Stops at calls are told from signals; threads are traced; filters stop; the child dies with its
#: tracer.
OPTIONS = 0x1 | 0x8 | 0x80 | 0x100000
#: Kinds of stops at system calls, as the kernel tells them.
ENTRY, EXIT, FILTERED = 1, 2, 3
#: Constants of `prctl`, and instructions of seccomp filters: load a word, compare, return.
NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER = 38, 22, 2
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
STOPPED_BY_FILTER = 7
STOP, PASS = 0x7FF00000, 0x7FFF0000
WALL = 0x40000000
RAX, RDX, ORIG_RAX = 10 * 8, 12 * 8, 15 * 8
#: Closing one of these descriptors, which are never open, begins or ends the tracing of calls.
BEGIN, END = 99991, 99992
#: Seconds until what was opened is closed.
PATIENCE = 10.0
#: Calls that a header may be too old for.
NEWER = {451: "cachestat", 452: "fchmodat2"}
#: Calls whose third argument is how many bytes they move at most, and how many buffers.
PLAIN = {"read", "write", "pread64", "pwrite64", "recvfrom", "sendto"}
VECTORED = {"readv", "writev", "preadv", "pwritev", "preadv2", "pwritev2"}
#: Calls whose first argument is a descriptor, as far as these are told apart.
OF_DESCRIPTORS = PLAIN | VECTORED | {
    "fsync", "fdatasync", "ftruncate", "fallocate", "fstat", "lseek", "ioctl", "fcntl", "flock",
    "recvmsg", "sendmsg", "getsockopt", "setsockopt", "shutdown", "epoll_wait", "epoll_ctl",
    "fadvise64", "fchmod", "fchown", "syncfs", "getdents64",
}  # fmt: skip

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def why_not() -> str | None:
    """Return why nothing can be traced here, or None."""
    if platform.machine() != "x86_64":
        return f"ptrace is used on x86-64 only, this is {platform.machine()}"
    if not HEADER.exists():
        return f"{HEADER}, which names the system calls, is not installed"

    def nothing() -> None:
        pass

    try:
        return None if "result" in (run(nothing).said or {}) else "a traced child does not end"
    except OSError as error:
        return f"ptrace is not permitted: {error}"


@functools.cache
def names() -> dict[int, str]:
    """Return the names of the system calls."""
    found = re.findall(r"#define __NR_(\w+) (\d+)", HEADER.read_text())
    return NEWER | {int(number): name for name, number in found}


@dataclass
class Call:
    """A system call that has begun; ``result`` is known when it has ended."""

    name: str
    #: The number of calls of this name before it.
    index: int
    args: tuple[int, ...]
    thread: int
    result: int | None = None
    #: The path among its arguments, if there is one.
    path: str = ""
    #: The file, socket or the like that its descriptor is of.
    file: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.index}" + (f" ({self.path})" if self.path else "")


@dataclass
class Outcome:
    """The end of a child: its status, its result and its calls."""

    #: Its exit status, or minus the signal that ended it; None if it took too long.
    status: int | None
    #: The result of its function, or the error that it raised.
    said: dict | None
    calls: list[Call] = field(default_factory=list)


class Filter:
    """Stops calls of some names, and the marks."""

    def __init__(self, wanted: set[str]) -> None:
        numbers = {name: number for number, name in names().items()}
        # At offset 0 is the number of a call, at 16 its first argument.
        program = [(LOAD, 0, 0, 0)]
        for name in sorted(wanted):
            program += [(EQUAL, 0, 1, numbers[name]), (RETURN, 0, 0, STOP)]
        program += [(EQUAL, 0, 4, numbers["close"]), (LOAD, 0, 0, 16), (EQUAL, 1, 0, BEGIN),
                    (EQUAL, 0, 1, END), (RETURN, 0, 0, STOP), (RETURN, 0, 0, PASS)]  # fmt: skip
        code = b"".join(struct.pack("HBBI", *line) for line in program)
        self.code = ctypes.create_string_buffer(code, len(code))
        head = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(self.code))
        self.head = ctypes.create_string_buffer(head, len(head))

    def install(self) -> None:
        """Have this process obey it from now on, and its threads."""
        for arguments in ((NO_NEW_PRIVILEGES, 1, 0), (SET_SECCOMP, FILTER, self.head)):
            if _libc.prctl(*arguments, 0, 0):
                raise OSError(ctypes.get_errno(), "prctl")


def ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> int:
    """Call ptrace, of which -1 is an error."""
    result = _libc.ptrace(request, pid, address, data)
    if result == -1 and request != PEEKUSER:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


class Memory:
    """The memory of a traced process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.file = open(f"/proc/{pid}/mem", "rb+", buffering=0)  # noqa: SIM115

    def read(self, address: int, length: int) -> bytes:
        return os.pread(self.file.fileno(), length, address)

    def write(self, address: int, data: bytes) -> None:
        os.pwrite(self.file.fileno(), data, address)

    def text(self, address: int) -> str:
        found = b""
        while b"\0" not in found and len(found) < 4096:
            try:
                found += self.read(address + len(found), 256 - (address + len(found)) % 256)
            except OSError:
                return ""
        return found.split(b"\0")[0].decode(errors="replace")

    def path(self, address: int) -> str:
        """Return a path; that of a name in an open folder begins with the path of the folder."""
        text = self.text(address)
        held = re.match(r"/proc/self(/fd/[0-9]+)(/.*)", text)
        if held:
            with contextlib.suppress(OSError):
                return os.readlink(f"/proc/{self.pid}{held[1]}") + held[2]
        return text

    def buffers(self, address: int, count: int) -> list[tuple[int, int]]:
        parts = struct.unpack(f"{2 * count}Q", self.read(address, 16 * count))
        return list(zip(parts[::2], parts[1::2], strict=True))


#: An action on a call: nothing, an error number, a result without the call, "half" or "one"
#: of its bytes, or the death of the process before it.
Action = int | str | None


class _Tracer:
    def __init__(self, pid: int, decide: Callable, ended: Callable, filtered: bool) -> None:
        self.pid, self.decide, self.ended, self.filtered = pid, decide, ended, filtered
        self.names, self.counts = names(), Counter()
        self.memory = Memory(pid)
        self.looking = False
        self.inside: dict[int, tuple[Call, Callable | None]] = {}
        self.calls: list[Call] = []

    def stopped_at_call(self, thread: int) -> None:
        buffer = ctypes.create_string_buffer(88)
        ptrace(INFO, thread, 88, ctypes.addressof(buffer))
        kind = buffer.raw[0]
        if kind in (ENTRY, FILTERED):
            number, *args = struct.unpack_from("7Q", buffer.raw, 24)
            self.enter(thread, self.names.get(number, f"call_{number}"), tuple(args))
        elif kind == EXIT and thread in self.inside:
            call, undo = self.inside.pop(thread)
            if undo:
                undo()
            call.result = ctypes.c_long(ptrace(PEEKUSER, thread, RAX)).value
            self.ended(call, self.memory)

    def enter(self, thread: int, name: str, args: tuple[int, ...]) -> None:
        if name == "close" and args[0] in (BEGIN, END):
            self.looking = args[0] == BEGIN
            return
        if not self.looking:
            return
        call = Call(name, self.counts[name], args, thread, path=self.path(name, args))
        if name in OF_DESCRIPTORS:
            with contextlib.suppress(OSError):
                call.file = os.readlink(f"/proc/{self.pid}/fd/{args[0]}")
        self.counts[name] += 1
        self.calls.append(call)
        undo = self.act(thread, call, self.decide(call, self.memory))
        if undo or not self.filtered:
            self.inside[thread] = (call, undo)

    def path(self, name: str, args: tuple[int, ...]) -> str:
        at = {"open": 0, "stat": 0, "link": 1, "rename": 1, "unlink": 0, "rmdir": 0, "mkdir": 0,
              "readlink": 0, "openat": 1, "statx": 1, "newfstatat": 1, "unlinkat": 1, "mkdirat": 1,
              "linkat": 3, "renameat": 3, "renameat2": 3, "access": 0}.get(name)  # fmt: skip
        return "" if at is None else self.memory.path(args[at])

    def act(self, thread: int, call: Call, action: Action) -> Callable | None:
        if action is None:
            return None
        if action == "kill":
            os.kill(self.pid, signal.SIGKILL)
            return None
        if isinstance(action, int) or action == "nothing":
            result = -action if isinstance(action, int) else 0
            ptrace(POKEUSER, thread, ORIG_RAX, -1)
            return lambda: ptrace(POKEUSER, thread, RAX, result)
        before = call.args[2]
        if call.name in PLAIN:
            ptrace(POKEUSER, thread, RDX, fewer(before, action))
            return lambda: ptrace(POKEUSER, thread, RDX, before)
        parts = self.memory.buffers(call.args[1], before)
        left, kept = fewer(sum(length for _, length in parts), action), 0
        while left > parts[kept][1]:
            left, kept = left - parts[kept][1], kept + 1
        place = call.args[1] + 16 * kept + 8
        self.memory.write(place, struct.pack("Q", left))
        ptrace(POKEUSER, thread, RDX, kept + 1)

        def undo() -> None:
            self.memory.write(place, struct.pack("Q", parts[kept][1]))
            ptrace(POKEUSER, thread, RDX, before)

        return undo

    def until_the_end(self, seconds: float) -> int | None:
        """Return how the child ended, or None if it was killed for taking too long."""
        late = False

        def too_long(*_: object) -> None:
            nonlocal late
            late = True
            os.kill(self.pid, signal.SIGKILL)

        before = signal.signal(signal.SIGALRM, too_long)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            status = self.follow()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        return None if late else status

    def follow(self) -> int:
        """Let it run from stop to stop; return how it ended."""
        seen = {self.pid}
        self.go_on(self.pid, 0)
        while True:
            thread, status = os.waitpid(-self.pid, WALL)
            if os.WIFEXITED(status) or os.WIFSIGNALED(status):
                if thread == self.pid:
                    return os.waitstatus_to_exitcode(status)
                continue
            number, event = os.WSTOPSIG(status), status >> 16
            with contextlib.suppress(ProcessLookupError):  # killed meanwhile
                if number == signal.SIGTRAP | 0x80 or event == STOPPED_BY_FILTER:
                    self.stopped_at_call(thread)
                    number = 0
                elif event or (number == signal.SIGSTOP and thread not in seen):
                    number = 0
                seen.add(thread)
                self.go_on(thread, number)

    def go_on(self, thread: int, number: int) -> None:
        """Let a thread run to its next stop, with a signal if there is one."""
        ends = thread in self.inside or not self.filtered
        ptrace(SYSCALL if ends else CONT, thread, 0, number)


def fewer(count: int, how: str) -> int:
    """Return how many bytes a call moves instead."""
    return max(1, count // 2) if how == "half" else 1


def run(
    body: Callable,
    decide: Callable = lambda call, memory: None,
    ended: Callable = lambda call, memory: None,
    seconds: float = 120,
    wanted: set[str] | None = None,
) -> Outcome:
    """Run a function in a child; what it returns must be JSON.

    Args:
        decide: Gets each call as it begins, and the memory of the child; returns an `Action`.
        ended: Gets each call when it has ended.
        seconds: The time that it may take.
        wanted: Names of the calls that it is stopped at, without their ends; None: all.

    """
    filter = Filter(wanted) if wanted is not None else None
    reading, writing = os.pipe()
    # The child looks for cycles among its own objects only: to look at all copies their pages.
    gc.freeze()
    pid = os.fork()
    if pid == 0:
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.close(reading)
        os.setpgid(0, 0)
        _libc.ptrace(TRACEME, 0, None, None)
        os.kill(os.getpid(), signal.SIGSTOP)
        if filter:
            filter.install()
        ignored: list[str] = []
        sys.unraisablehook = lambda what: ignored.append(f"{what.exc_value!r} in {what.object!r}")
        before = descriptors()
        said = marked(body)
        # A traceback keeps objects alive, perhaps in a cycle.
        gc.collect()
        # Threads that sync in the background, or are left behind by a call that ended, end soon.
        ends = time.monotonic() + PATIENCE
        while (left := descriptors() - before) and any(" of /" in one for one in left):
            if time.monotonic() > ends:
                break
            time.sleep(0.02)
        said |= {"ignored": ignored, "left": sorted(left)}
        os.write(writing, json.dumps(said).encode())
        os._exit(0)
    gc.unfreeze()
    os.close(writing)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    try:
        os.waitpid(pid, WALL | os.WUNTRACED)
        ptrace(SETOPTIONS, pid, 0, OPTIONS)
        tracer = _Tracer(pid, decide, ended, filter is not None)
        status = tracer.until_the_end(seconds)
        tracer.memory.file.close()
        with open(reading, "rb") as file:
            said = file.read()
        return Outcome(status, json.loads(said) if said else None, tracer.calls)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        raise


def descriptors() -> set[str]:
    """Return what the descriptors of this process are of, with their numbers."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(f"{number} of {os.readlink(f'/proc/self/fd/{number}')}")
    return found


def mark(descriptor: int) -> None:
    """Begin or end the tracing of calls."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


def marked(body: Callable) -> dict:
    """Call it between the marks; an error is told by its classes, number and text."""
    mark(BEGIN)
    try:
        result = body()
    except BaseException as error:
        mark(END)
        kinds = [kind.__name__ for kind in type(error).__mro__]
        text = f"{error}" + (f" {error.filename}" if isinstance(error, OSError) else "")
        trace = traceback.format_exc()
        return {
            "kinds": kinds,
            "text": text,
            "number": getattr(error, "errno", None),
            "trace": trace,
        }
    mark(END)
    return {"result": result}


#: Errors by their names.
NAMED = {name: getattr(errno, name) for name in ("EIO", "ENOSPC", "EINTR", "EAGAIN", "ENOMEM")}
