"""Has every system call of small saves and loads fail once, one in each run.

Which calls there are a first run tells, of each kind of save and load (`scenes.py`). Then a child
is forked for each call and fault. It must end with the right data or an error that says which
file; a failed save leaves what was there, and nothing else.

All calls on files that are saved or loaded have their turn. Of others that are alike, with the same
name, the same folder or kind of file and the same flags, such as all `read` of the certificates of
the system, the first, the last and four more by chance stand for all: `inputs` are the faults that
were tried, `of` those that there are.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import parts
import tracing
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
    uploads,
    value_of,
    visible,
)
from tracing import Call, Outcome

#: These do not fail, or not in a way that a program could be told of: the C library ends the
#: process, or the kernel gives no error.
SPARED = {
    "futex": "glibc ends the process where the kernel says what it never says",
    "rt_sigprocmask": "only wrong arguments fail",
    "rt_sigaction": "only wrong arguments fail",
    "rt_sigreturn": "does not return",
    "sigaltstack": "of Rust's runtime, for messages of a stack overflow: a panic by intention",
    "exit": "does not return",
    "exit_group": "does not return",
    "set_robust_list": "glibc does not look",
    "rseq": "glibc ends the thread by intention",
    "getrandom": "fails only without the system call, then libsodium ends the process",
    "getpid": "never fails",
    "geteuid": "never fails",
    "gettid": "never fails",
    "munmap": "frees memory; glibc's own",
    "brk": "never says an error; malloc asks mmap then, which is had fail",
    "close": "has no way to be told",
    "tgkill": "of glibc's abort alone",
}
#: Calls that fail only for lack of memory, or of threads.
MEMORY = {"mmap", "mremap", "mprotect", "madvise"}
THREADS = {"clone", "clone3", "fork", "vfork"}
ERRORS = {"EIO": 5, "EINTR": 4, "EAGAIN": 11, "ENOSPC": 28, "ENOMEM": 12, "EACCES": 13}
SHORT: dict[str, tracing.Action] = {"half": "half", "one byte": "one", "nothing": "nothing"}
SOCKETS = {"ECONNRESET": 104, "EPIPE": 32, "EINTR": 4, "EAGAIN": 11, "ENOBUFS": 105}


#: Faults of calls that fail in one way only, by the name of the call or the kind of descriptor.
ONLY = {"epoll_wait": "EINTR", "anon_inode:[eventfd]": "EAGAIN"}


def faults(call: str, is_socket: bool, file: str = "") -> dict[str, tracing.Action]:
    """Return the faults of a call, by name."""
    if call in SPARED:
        return {}
    if file.startswith("/") and call in tracing.PLAIN:
        # Files always have an answer.
        return {name: action for name, action in (ERRORS | SHORT).items() if name != "EAGAIN"}
    if only := ONLY.get(call) or ONLY.get(file):
        return {only: ERRORS[only]}
    if call in MEMORY:
        return {"ENOMEM": 12}
    if call in THREADS:
        return {"EAGAIN": 11}
    found: dict[str, tracing.Action] = dict(SOCKETS if is_socket else ERRORS)
    if call in tracing.PLAIN | tracing.VECTORED:
        found |= SHORT
    return found


SOCKET_CALLS = {"socket", "connect", "recvfrom", "sendto", "recvmsg", "sendmsg", "getsockopt",
                "setsockopt", "getpeername", "getsockname", "shutdown", "epoll_create1",
                "epoll_ctl", "epoll_wait", "eventfd2", "poll", "bind"}  # fmt: skip
OUR_ERRORS = {"FormatError", "TruncatedError", "HashMismatchError", "CryptographyError", "OSError",
              "PairMismatchError", "MemoryError"}  # fmt: skip
#: O_TMPFILE, which includes the flag of folders.
UNNAMED = 0o20200000
OS_ERRORS = {kind.__name__ for kind in (OSError, *OSError.__subclasses__())}
#: Calls by which hidden files are removed, locked or looked at before: after these one may stay
#: until the next save.
TIDYING = {"unlink", "unlinkat", "flock", "ioctl", "newfstatat", "statx"}
#: Calls of Python's own file objects, whose errors name no file.
OF_PYTHON = {"lseek", "newfstatat", "ioctl", "read", "write"}


#: The number of calls that stand for all that are alike, but for files that are saved or loaded.
FEW = 6
#: The arguments by which calls of one name are told apart.
TELLING = {"mmap": (2, 3), "mprotect": (2,), "madvise": (2,), "openat": (2,), "fcntl": (1,),
           "ioctl": (1,), "epoll_ctl": (1,), "setsockopt": (1, 2)}  # fmt: skip


def like(call: Call) -> tuple:
    """Return what is equal of calls that are alike: name, folder, kind of file, and arguments."""
    arguments = tuple(call.args[at] for at in TELLING.get(call.name, ()))
    file = re.sub(r"\d+", "", call.file)
    return call.name, os.path.dirname(call.path), os.path.dirname(file) or file, arguments


class Campaign:
    """Runs kinds one after the other, and collects."""

    def __init__(self, arguments: argparse.Namespace, part: int, folder: Path) -> None:
        self.random, self.verbose = random.Random(arguments.seed), arguments.verbose
        self.call, self.jobs, self.part = arguments.call, arguments.jobs, part
        self.scratch = str(folder)
        self.kinds: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.findings: list[str] = []
        self.planned = 0

    def finding(self, where: str, what: str) -> None:
        self.findings.append(f"{where}: {what}")
        print(f"FINDING {where}: {what}", file=sys.stderr, flush=True)

    def plan(self, scene: str, outcome: Outcome) -> Iterator[tuple[str, str, tracing.Action]]:
        """Return the calls and faults of a run, in a random order."""
        if outcome.status != 0 or not outcome.said or "result" not in outcome.said:
            self.finding(scene, f"fails undisturbed: {outcome.status} {outcome.said}")
            return iter(())
        pairs, tried = [], {id(call) for call in self.tried(scene, outcome.calls)}
        for call in outcome.calls:
            for name, action in faults(call.name, call.name in SOCKET_CALLS, call.file).items():
                place = f"{call.name} {call.index}"
                if self.call in ("", place, f"{place} {name}") and self.mine(f"{scene} {place}"):
                    self.planned += 1
                    if self.call or id(call) in tried:
                        pairs.append((place, name, action))
        self.random.shuffle(pairs)
        return iter(pairs)

    def mine(self, fault: str) -> bool:
        """Return whether a fault is one for this process."""
        return parts.mine(fault, self.part, self.jobs)

    def tried(self, scene: str, calls: list[Call]) -> Iterator[Call]:
        """Yield the calls of a run that stand for all."""
        likes: dict[tuple, list[Call]] = {}
        for call in calls:
            likes.setdefault(like(call), []).append(call)
        for same in likes.values():
            ours = f"{same[0].path} {same[0].file}".count(self.scratch)
            if ours or len(same) <= FEW:
                yield from same
            else:
                chosen = random.Random(scene).sample(same[1:-1], FEW - 2)
                yield from (same[0], *chosen, same[-1])

    def run(self, kind: "Kind") -> Iterator[Callable]:
        """Yield the planned runs of a kind as functions, so that kinds take turns."""
        kind.again()
        never = deny(kind.refused, None, None)
        for place, fault, action in self.plan(kind.name, tracing.run(kind.body, never)):
            yield partial(self.one, kind, place, fault, action)

    def one(self, kind: "Kind", place: str, fault: str, action: tracing.Action) -> None:
        """Have a call fail, and see what comes of it."""
        kind.again()
        wanted = {place.split(maxsplit=1)[0]} | ({"openat"} if kind.refused else set())
        outcome = tracing.run(kind.body, deny(kind.refused, place, action), wanted=wanted)
        self.kinds[fault] += 1
        where = f"{kind.name}, {place} {fault} {path_of(outcome, place)}".rstrip()
        try:
            verdict = judge(outcome) or kind.look(outcome, place)
        except Exception as error:
            verdict = f"what is left cannot be read: {type(error).__name__}: {error}"
        if verdict:
            self.finding(where, verdict)
        said = outcome.said or {}
        how = "right" if "result" in said else said.get("kinds", ["died"])[0]
        self.ended[how] += 1
        if self.verbose and how != "right":
            print(f"{where}: {how}: {said.get('text', '').strip().splitlines()[-1:]}", flush=True)


def nothing() -> None:
    """Have nothing to prepare."""


@dataclass
class Kind:
    """A kind of save or load, and what is wrong after a call of it has failed."""

    name: str
    body: Callable
    look: Callable[[Outcome, str], str | None]
    #: Puts back what was there before.
    again: Callable[[], None] = nothing
    refused: tuple = ()


def path_of(outcome: Outcome, place: str) -> str:
    """Return the path that a call has, or that of its descriptor."""
    found = (call for call in outcome.calls if f"{call.name} {call.index}" == place)
    return next((call.path or call.file for call in found), "")


def deny(refused: tuple, place: str | None, action: tracing.Action) -> Callable:
    """Return what a tracer asks at each call."""

    def decide(call: Call, _: tracing.Memory) -> tracing.Action:
        if str(call).split(" (")[0] == place:
            return action
        for what, number in refused:
            if (
                what == "O_TMPFILE"
                and call.name == "openat"
                and call.args[2] & 0o20200000 == 0o20200000
            ):
                return number
        return None

    return decide


def judge(outcome: Outcome) -> str | None:
    """Return what is wrong with how a child ended."""
    if outcome.status is None:
        return "hangs"
    if outcome.status != 0:
        return f"ends with {outcome.status}"
    if not outcome.said:
        return "says nothing"
    if outcome.said["ignored"]:
        return f"ignores {outcome.said['ignored']}"
    # Connections stay for the next call.
    left = [one for one in outcome.said["left"] if " of /" in one]
    if left:
        return f"leaves descriptors open: {left}"
    if "result" in outcome.said:
        return None
    kinds = set(outcome.said["kinds"])
    if "AssertionError" in kinds:
        return outcome.said["text"]
    return None


def unremoved(place: str, outcome: Outcome) -> bool:
    """Return whether the call that failed was to remove a hidden file, or to look at it before."""
    paths = [call.path for call in outcome.calls if f"{call.name} {call.index}" == place]
    return place.split(maxsplit=1)[0] in TIDYING or any("/." in path for path in paths)


def names_the_file(outcome: Outcome, scene: Save | Load, place: str) -> str | None:
    """Return what an error lacks: a type that says what to do, and the file."""
    said = outcome.said or {}
    if "kinds" not in said or "MemoryError" in said["kinds"]:
        return None
    kinds = {*said["kinds"]}
    if "CheckpointException" in kinds:  # has the text of the others
        kinds = {kind for kind in OUR_ERRORS | OS_ERRORS if f"{kind}: " in said["text"]}
    if scene.name == "operator" and said["kinds"][0] == "RuntimeError":
        kinds = OUR_ERRORS  # operators have text only
        if "cannot allocate" in said["text"]:
            return None
    if scene.name == "pair" and "UnpicklingError" in kinds:
        return None  # what torch says of a pickle that is cut short
    if not (OUR_ERRORS | OS_ERRORS) & kinds:
        return f"an error of no kind: {said['kinds'][0]}: {said['text']}"
    # Folders are opened, and synced, by themselves.
    path = path_of(outcome, place)
    named = scene.file in said["text"] or (path.startswith("/") and path in said["text"])
    if not named and place.split(maxsplit=1)[0] not in OF_PYTHON:
        return f"the error does not name the file: {said['kinds'][0]}: {said['text']}"
    return None


def save_runs(campaign: Campaign, scene: Save, folder: Path) -> Iterator[Callable]:
    """Yield the runs of a kind of save."""
    name = f"save, {scene.name}"
    folder.mkdir()
    if scene.over:
        scene.save(folder, OLD)
    kept = folder.with_name(f"{folder.name}.kept")
    shutil.copytree(folder, kept)

    def again() -> None:
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)

    def look(outcome: Outcome, place: str) -> str | None:
        before, left = visible(kept), visible(folder)
        found = scene.found(folder)
        said = outcome.said or {}
        if "result" in said:
            if found != NEW:
                return f"the save said nothing and {found} is there"
            return stays([name for name in left if "/." in f"/{name}"], place, outcome)
        if lacks := names_the_file(outcome, scene, place):
            return lacks
        if "complete and has its name" in said["text"]:
            # The file of a rank is no checkpoint yet, and one half of a pair is undone.
            there = {NEW, None} if scene.name == "checkpoint" else {NEW}
            there |= {OLD} if "f.tensors.tensors" in said["text"] else set()
            return None if found in there else f"says that the file is there, and {found} is"
        if found != (OLD if scene.over else None):
            return f"failed, and {found} is there: {said['kinds'][0]}: {said['text']}"
        folders = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_dir()}
        extra = [name for name in left if name not in before and name not in folders]
        return stays(extra, place, outcome)

    def stays(extra: list[str], place: str, outcome: Outcome) -> str | None:
        """Return what is left although it could be removed, or by the next save too."""
        hidden = all("/." in f"/{name}" for name in extra) and unremoved(place, outcome)
        # Files of ranks that belong to no checkpoint may stay too.
        if extra and not hidden and not all("/rank-" in name for name in extra):
            return f"leaves {extra}"
        if extra:
            scene.save(folder, NEW)
            extra = [name for name in extra if name in visible(folder)]
        return f"leaves {extra}, after another save too" if extra else None

    with environment(scene.environment):
        body = partial(scene.save, folder, NEW)
        yield from campaign.run(Kind(name, body, look, again, scene.refused))


def load_runs(campaign: Campaign, scene: Load, folder: Path) -> Iterator[Callable]:
    """Yield the runs of a kind of load."""
    folder.mkdir()
    scene.prepare(folder)
    # Modules that a load imports late are imported before the forks.
    scene.load(folder)

    def body() -> float:
        return scene.load(folder)

    def look(outcome: Outcome, place: str) -> str | None:
        if outcome.said and outcome.said.get("result", OLD) != OLD:
            return f"loads {outcome.said['result']}"
        return names_the_file(outcome, scene, place)

    yield from campaign.run(Kind(f"load, {scene.name}", body, look))


def server_runs(campaign: Campaign, folder: Path, url: str) -> Iterator[Callable]:
    """Yield the runs of loads from a server, with and without a cache."""
    cache = folder / "cache"

    def load(**options: object) -> float:
        return value_of(tensorizer.load(url, "cpu", verify_hash=True, num_readers=1, **options))

    def right(outcome: Outcome, place: str) -> str | None:
        if outcome.said and outcome.said.get("result", OLD) != OLD:
            return f"loads {outcome.said['result']}"
        return names_the_file(outcome, Load("", nothing, load), place)

    def filled(outcome: Outcome, place: str) -> str | None:
        again = load(cache_dir=cache)
        return right(outcome, place) or (None if again == OLD else f"then loads {again}")

    fresh = partial(shutil.rmtree, cache, ignore_errors=True)
    yield from campaign.run(Kind("load, http", load, right))
    yield from campaign.run(Kind("load, cache fill", partial(load, cache_dir=cache), filled, fresh))


def upload_runs(campaign: Campaign, folder: Path, scene: Save) -> Iterator[Callable]:
    """Yield the runs of saves to a cloud, each of a value that was not there before."""
    scene.save(folder, OLD)
    there, next_one = OLD, NEW

    def save() -> None:
        scene.save(folder, next_one)

    def look(outcome: Outcome, place: str) -> str | None:
        nonlocal there, next_one
        before, saved, found = there, next_one, scene.found(folder)
        there, next_one = found if found in (before, saved) else before, saved + 1
        if outcome.said and "result" in outcome.said:
            return None if found == saved else f"the save said nothing and {found} is there"
        # An answer may get lost behind what it answers.
        wrong = None if found in (before, saved) else f"failed, and {found} is there"
        return wrong or names_the_file(outcome, scene, place)

    yield from campaign.run(Kind(f"save, {scene.name}", save, look))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts.ending(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds whose names have this text")
    parser.add_argument(
        "--call", default="", help="a call alone, such as 'fsync 0' or 'fsync 0 EIO'"
    )
    parser.add_argument("--verbose", action="store_true")
    parts.option(parser)
    arguments = parser.parse_args()
    began = time.monotonic()
    if skipped := tracing.why_not():
        print(json.dumps({"campaign": "faults", "skipped": skipped}))
        return
    part = parts.divide(arguments.jobs)
    # Tries and pauses of a few seconds are of no interest here.
    quick = (("TENSORIZER_ATTEMPTS", "2"), ("TENSORIZER_STALL_SECONDS", "2"))
    with contextlib.ExitStack() as stack:
        parts.large_pages()
        folder = stack.enter_context(scratch())
        campaign = Campaign(arguments, part, folder)
        stack.enter_context(environment(quick))
        runs = {f"save, {scene.name}": save_runs(campaign, scene, folder / f"save{number}")
                for number, scene in enumerate(SAVES)}  # fmt: skip
        runs |= {f"load, {scene.name}": load_runs(campaign, scene, folder / f"load{number}")
                 for number, scene in enumerate(LOADS)}  # fmt: skip
        if arguments.only in "load, http, cache fill":
            url = stack.enter_context(http_server(folder))
            runs["load, http, cache fill"] = server_runs(campaign, folder, url)
        # Their servers take long to start.
        if "upload" in arguments.only or (not arguments.only and parts.is_long(arguments)):
            runs |= {f"save, {scene.name}": upload_runs(campaign, folder, scene)
                     for scene in uploads(stack, folder)}  # fmt: skip
        runs = [run for name, run in runs.items() if arguments.only in name]

        def enough() -> bool:
            return parts.enough(arguments, began, sum(campaign.kinds.values()))

        while runs and not enough():
            for run in list(runs):
                if enough():
                    break
                try:
                    next(run)()
                except StopIteration:
                    runs.remove(run)
    done = sum(campaign.kinds.values())
    print(json.dumps({
        "campaign": "faults", "inputs": done, "what": "calls that failed", "of": campaign.planned,
        "kinds": dict(campaign.kinds.most_common()), "ended": dict(campaign.ended.most_common()),
        "findings": campaign.findings, "seconds": round(time.monotonic() - began, 1),
    }))  # fmt: skip
    sys.exit(bool(campaign.findings))


if __name__ == "__main__":
    main()
