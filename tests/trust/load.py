"""Threads and processes that load, save, slice and cancel for a while, and what they cost.

Memory, descriptors and threads of a process are the same after its first rounds and after its last;
a thousand loads in one process leave nothing; interpreters end, and processes fork, at any moment.
"""

import argparse
import ctypes
import gc
import json
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import parts
import torch
from scenes import (
    NEW,
    OLD,
    TensorDeserializer,
    by_path,
    environment,
    http_server,
    lazily,
    mapped,
    save_path,
    scratch,
    sliced,
    tensorizer,
    value_of,
)

#: Most MiB that memory may grow by from the first rounds to the last.
MOST_MB = 64
THREADS, PROCESSES = 64, 16
#: A short campaign divides both by this, and the loads in one process.
FEWER = 8
#: The shares of the time that a process has, after each of which its costs are looked at.
PHASES = (0.25, 0.25, 0.5)
#: Seconds that a crowd may take at most where its loads and saves are counted.
LIMIT = 300.0
#: Seconds at most for all but the crowd, and their share of a shorter time.
OTHERS, SHARE = 600.0, 0.6


class Enough(Exception):
    """Raised by a progress callback to cancel."""


def cancelled_load(folder: Path) -> float:
    def stop(done: int, total: int) -> None:
        raise Enough

    try:
        tensorizer.load(folder / "f.tensors", "cpu", progress=stop)
    except Enough:
        return OLD
    raise AssertionError("the load was not cancelled")


def cancelled_save(folder: Path) -> float:
    def stop(done: int, total: int) -> None:
        raise Enough

    try:
        tensorizer.save(
            dict(tensorizer.load(folder / "f.tensors")), folder / "f.tensors", progress=stop
        )
    except Enough:
        return by_path(folder)
    raise AssertionError("the save was not cancelled")


def saved(folder: Path) -> float:
    save_path(folder, OLD)
    return by_path(folder)


def forgotten(folder: Path) -> float:
    file = TensorDeserializer(folder / "f.tensors", "cpu", lazy_load=True)
    return value_of({name: file[name].clone() for name in file})


def missing(folder: Path) -> float:
    try:
        tensorizer.load(folder / "nothing", "cpu")
    except FileNotFoundError:
        return OLD
    raise AssertionError("loads what is not there")


def by_url(url: str) -> Callable[[Path], float]:
    return lambda _: value_of(tensorizer.load(url, "cpu", num_readers=2))


def by_cache(url: str) -> Callable[[Path], float]:
    return lambda folder: value_of(tensorizer.load(url, "cpu", cache_dir=folder.parent / "cache"))


WORK = {"load": by_path, "lazy": lazily, "mapped": mapped, "slice": sliced, "save": saved,
        "cancelled load": cancelled_load, "cancelled save": cancelled_save,
        "forgotten": forgotten, "missing": missing}  # fmt: skip


def cost() -> dict[str, int]:
    """Return what this process has now: MiB, descriptors, threads."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"MiB": pages * resource.getpagesize() >> 20,
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task"))}  # fmt: skip


def grown(first: dict[str, int], last: dict[str, int]) -> list[str]:
    """Return what is more than it was."""
    allowed = {"MiB": MOST_MB, "descriptors": 2, "threads": 2}
    return [f"{name} were {first[name]}, are {last[name]}"
            for name in first if last[name] > first[name] + allowed[name]]  # fmt: skip


@dataclass
class Crowd:
    """Processes at once, and how long they work.

    Attributes:
        fewer: As many times fewer processes and threads than in a long campaign.
        seconds: How long they work.
        rounds: What each thread does at most in each phase.

    """

    fewer: int
    seconds: float
    rounds: int

    @staticmethod
    def of(asked: argparse.Namespace) -> "Crowd":
        found = Crowd(1 if parts.is_long(asked) else FEWER, LIMIT, 1 << 62)
        if asked.inputs is None:
            found.seconds = asked.seconds - min(OTHERS, asked.seconds * SHARE)
        else:
            found.rounds = -(-asked.inputs // (len(PHASES) * sum(found.threads())))
        return found

    def threads(self) -> list[int]:
        """Return how many each process has: the first has most, of the others each one or four."""
        others = range(1, PROCESSES // self.fewer)
        return [THREADS // self.fewer, *(1 + 3 * (number % 2) for number in others)]


def worker(folder: Path, url: str, threads: int, crowd: Crowd, seed: int) -> dict:
    """Work in threads, in two halves, and compare what they cost."""
    done, wrong = Counter(), []
    work = WORK | {"http": by_url(url), "cache": by_cache(url)}

    def one(number: int, until: float) -> None:
        chance = random.Random(seed * 1000 + number)
        mine = folder / str(number)
        if not mine.exists():
            mine.mkdir()
            save_path(mine, OLD)
        for _ in range(crowd.rounds):
            if time.monotonic() >= until or len(wrong) >= 20:
                break
            name = chance.choice(list(work))
            try:
                if work[name](mine) != OLD:
                    wrong.append(f"{name}: wrong data")
            except Exception as error:
                wrong.append(f"{name}: {type(error).__name__}: {error}")
            done[name] += 1

    costs = []
    for share in PHASES:
        until = time.monotonic() + crowd.seconds * share
        running = [threading.Thread(target=one, args=(n, until)) for n in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        costs.append(cost())
    # Before all has been met once, there is nothing to compare with.
    wrong += grown(costs[1], costs[2]) if sum(done.values()) > 20 * threads else []
    return {"done": done, "findings": wrong, "costs": costs}


def forked(work: Callable[[], dict], seconds: float) -> Iterator[dict]:
    """Run it in a process of its own; yield what it says, or how it ended."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        # After a fork torch has no threads, and does not see it at once.
        torch.set_num_threads(1)
        os.write(writing, json.dumps(work()).encode())
        os._exit(0)
    os.close(writing)
    yield {}
    with open(reading) as file:
        late = not select.select([file], [], [], seconds)[0]
        if late:
            os.kill(pid, signal.SIGKILL)
        text = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status or not text:
        yield {"findings": [f"a process hangs after {seconds:.0f} s" if late else
                            f"a process ends with {status}"], "done": {}}  # fmt: skip
    else:
        yield json.loads(text)


def run_crowd(crowd: Crowd, folder: Path, url: str, seed: int) -> tuple[Counter, list[str]]:
    """Run all the processes at once."""
    running = []
    for number, threads in enumerate(crowd.threads()):
        mine = folder / f"process{number}"
        mine.mkdir()
        process = forked(
            partial(worker, mine, url, threads, crowd, seed + number), crowd.seconds + 120
        )
        next(process)
        running.append(process)
    done, findings = Counter(), []
    for process in running:
        said = next(process)
        done += Counter(said["done"])
        findings += said["findings"]
    return done, findings


def many(folder: Path, url: str, count: int) -> tuple[Counter, list[str]]:
    """Load over and over in one process."""

    def work() -> dict:
        ways = [by_path, mapped, lazily, forgotten, by_url(url)]
        findings = []
        for number in range(count):
            if number == count // 4:
                first = cost()
            if ways[number % len(ways)](folder) != OLD:
                findings.append("wrong data")
        return {"done": {"one of many": count}, "findings": findings + grown(first, cost())}

    process = forked(work, 300)
    next(process)
    said = next(process)
    return Counter(said["done"]), said["findings"]


#: Daemon threads work while the interpreter ends.
ENDING = """
import sys, threading, time
sys.path.insert(0, sys.argv[4])
import load
from pathlib import Path
folder, url, delay = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
def work(name):
    while True:
        load.WORK[name](folder / name) if name in load.WORK else load.by_url(url)(folder)
for name in ("load", "save", "http", "cancelled load"):
    if name in load.WORK:
        (folder / name).mkdir(exist_ok=True)
        load.save_path(folder / name, load.OLD)
    threading.Thread(target=work, args=(name,), daemon=True).start()
time.sleep(delay)
"""


def endings(folder: Path, url: str, chance: random.Random) -> str | None:
    """Have an interpreter end while threads work; return what is wrong with how it did."""
    delay = chance.uniform(0, 0.5)
    command = [
        sys.executable,
        "-c",
        ENDING,
        str(folder),
        url,
        str(delay),
        str(Path(__file__).parent),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    # Threads that come back from torch's own calls then, before Python 3.14, abort it.
    said = {"terminate called without an active exception", "terminate called recursively"}
    lines = set(done.stderr.splitlines())
    if lines - said or done.returncode not in (0, -signal.SIGABRT if lines else 0):
        return (
            f"an interpreter that ends after {delay:.3f} s: {done.returncode} {done.stderr[-500:]}"
        )
    return None


def forks(folder: Path, url: str, chance: random.Random) -> str | None:
    """Fork while threads work: the child loads, what is open too, and saves."""

    def work() -> dict:
        findings, stop = [], threading.Event()
        opened = [TensorDeserializer(place, "cpu", lazy_load=True)
                  for place in (folder / "f.tensors", url)]  # fmt: skip

        # Tensors that threads share have locks of torch's own: each reads some for itself.
        def together(_: object) -> float:
            found = {value_of({n: file.slice(n)[:] for n in file}) for file in opened}
            return found.pop() if len(found) == 1 else NEW

        def one(number: int) -> None:
            mine = folder / f"fork{number}"
            mine.mkdir(exist_ok=True)
            save_path(mine, OLD)
            ways = [saved, by_path, by_url(url), cancelled_load, together, together]
            while not stop.is_set():
                if ways[number](mine) != OLD:
                    findings.append("wrong data in the parent")

        threads = [threading.Thread(target=one, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for _ in range(5):
            time.sleep(chance.uniform(0, 0.05))
            pid = os.fork()
            if pid == 0:
                signal.alarm(60)
                mine = folder / f"child{os.getpid()}"
                mine.mkdir()
                save_path(mine, NEW)
                right = by_path(mine) == NEW and by_url(url)(mine) == OLD and by_path(folder) == OLD
                right = right and together(mine) == OLD
                shutil.rmtree(mine)
                os._exit(0 if right else 1)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if status:
                findings.append(f"a forked child ends with {status}")
        stop.set()
        for thread in threads:
            thread.join()
        return {"findings": findings, "done": {}}

    process = forked(work, 200)
    next(process)
    return "; ".join(next(process)["findings"]) or None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts.ending(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="one of: crowd, many, endings, forks")
    arguments = parser.parse_args()
    began = time.monotonic()
    chance = random.Random(arguments.seed)
    done, findings = Counter(), []
    with (
        scratch() as folder,
        environment((("TENSORIZER_CACHE_GB", "1"),)),
        http_server(folder) as url,
    ):
        by_path(folder)
        if arguments.only in ("", "crowd"):
            found = run_crowd(Crowd.of(arguments), folder, url, arguments.seed)
            done, findings = done + found[0], findings + found[1]
        if arguments.only in ("", "many"):
            count = 1000 if parts.is_long(arguments) else 40
            found = many(folder, url, count)
            done, findings = done + found[0], findings + found[1]
        turns = {"endings": endings, "forks": forks}
        ended = not any(arguments.only in ("", name) for name in turns)
        while not ended:
            for name, turn in turns.items():
                if arguments.only in ("", name):
                    wrong = turn(folder, url, chance)
                    done[name] += 1
                    findings += [wrong] if wrong else []
                ended = parts.enough(arguments, began, sum(done.values()))
    for finding in findings:
        print(f"FINDING {finding}", file=sys.stderr)
    print(json.dumps({
        "campaign": "load", "inputs": sum(done.values()),
        "what": "loads, saves and other calls",
        "kinds": dict(done.most_common()), "findings": findings[:50],
        "seconds": round(time.monotonic() - began, 1),
    }))  # fmt: skip
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
