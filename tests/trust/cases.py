"""Runs numbered cases of loads that a server disturbs, many at once in processes of their own.

Each load ends with the right tensors or with an error that says which file, in a bounded time and
with bounded memory. `--case NUMBER` runs one again, and prints what it was.
"""

import argparse
import json
import os
import resource
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import parts
import torch
from scenes import OLD, tensorizer

#: Seconds of patience for loads here; the usual ones are in the documents.
PATIENCE = (("TENSORIZER_ATTEMPTS", "3"), ("TENSORIZER_STALL_SECONDS", "1"),
            ("TENSORIZER_TOTAL_SECONDS", "4"), ("TENSORIZER_CONNECT_SECONDS", "2"))  # fmt: skip
#: A load has several requests, each with its own patience; the machine may be busy.
LONGEST = 45.0
#: MiB that a process may have more in the end, for eight loads at once of a file of 1.5 MB.
MOST_MB = 400
#: Cases of one process, and how many run at once.
BATCH, AT_ONCE = 64, 8


def options(doc: str) -> argparse.ArgumentParser:
    """Return a parser of the arguments of such a campaign."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parts.ending(parser)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first case")
    parser.add_argument("--case", type=int, help="run one case, and say what it is")
    parser.add_argument("--verbose", action="store_true")
    parts.option(parser)
    return parser


def judged(number: int, load: Callable[[], float], believed: bool = True) -> dict:
    """Load in one case, and tell how that ended.

    Args:
        number: Of the case.
        load: Returns the value of what it has loaded.
        believed: Whether the server may be: from another nothing may be loaded.

    """
    began = time.monotonic()
    found: dict = {"case": number}
    try:
        value = load()
        found["ended"] = "right"
        if value != OLD:
            found["wrong"] = f"loads {value}"
        elif not believed:
            found["wrong"] = "loads from a server that is not to be believed"
    except AssertionError as error:
        found |= {"ended": "wrong", "wrong": str(error)}
    except Exception as error:
        found["ended"] = type(error).__name__
        if not isinstance(error, OSError | tensorizer.FormatError):
            found["wrong"] = f"an error of no kind: {type(error).__name__}: {error}"
        elif "f.tensors" not in f"{error} {getattr(error, 'filename', '')}":
            found["wrong"] = f"the error does not name the file: {error}"
        found["said"] = str(error)
    took = time.monotonic() - began
    if took > LONGEST:
        found["wrong"] = f"takes {took:.1f} s"
    return found | {"seconds": round(took, 2)}


Outcome = Callable[[int], dict]


def worker(outcome: Outcome, numbers: list[int], said: int) -> None:
    """Run cases at once, and say how each ended, and how much memory all took."""
    lock, left = threading.Lock(), list(numbers)
    # After a fork torch makes its threads anew, and fails where several have it do so at once.
    torch.set_num_threads(1)

    def work() -> None:
        while True:
            with lock:
                if not left:
                    return
                number = left.pop()
            text = json.dumps(outcome(number)) + "\n"
            with lock:
                os.write(said, text.encode())

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    threads = [threading.Thread(target=work) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    os.write(said, (json.dumps({"memory": more}) + "\n").encode())


def run_batch(outcome: Outcome, numbers: list[int]) -> Iterator[dict]:
    """Yield how cases ended in a process of their own, and what is wrong with how it did."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        worker(outcome, numbers, writing)
        os._exit(0)
    os.close(writing)
    done, end = set(), time.monotonic() + LONGEST * (len(numbers) / AT_ONCE + 1)
    with open(reading) as lines:
        while select.select([lines], [], [], max(0, end - time.monotonic()))[0]:
            line = lines.readline()
            if not line:
                break
            found = json.loads(line)
            done.add(found.get("case"))
            yield found
        else:
            os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        missing = sorted(set(numbers) - done)
        yield {"case": missing[:10], "ended": "died", "wrong": f"the process ends with {status}"}


class Campaign:
    """Batches of cases, and what was found."""

    def __init__(self, case: Callable[[int], dict], kind: str, asked: argparse.Namespace) -> None:
        self.case, self.kind, self.asked = case, kind, asked
        self.began = time.monotonic()
        self.part = parts.divide(1 if asked.case is not None else asked.jobs)
        self.kinds: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.findings: list[str] = []
        self.most, self.slowest = 0, 0.0

    def find(self, what: str) -> None:
        self.findings.append(what)
        print(f"FINDING {what}", file=sys.stderr, flush=True)

    def take(self, number: int, found: dict) -> None:
        """Take in how a case ended, or a batch of them from a number on."""
        if "memory" in found:
            self.most = max(self.most, found["memory"])
            if found["memory"] > MOST_MB:
                self.find(f"cases from {number}: {found['memory']} MiB more")
            return
        if isinstance(found["case"], int):
            self.kinds[self.case(found["case"])[self.kind]] += 1
            self.slowest = max(self.slowest, found["seconds"])
        self.ended[found["ended"]] += 1
        if self.asked.verbose:
            print(found)
        if "wrong" in found:
            self.find(f"case {found['case']}: {found['wrong']}")

    def run(self, batch: Callable[[list[int]], Iterator[dict]]) -> None:
        """Run the case that was asked for and print it, or this process's batches in their time."""
        if self.asked.case is not None:
            print(self.case(self.asked.case), list(batch([self.asked.case])))
            sys.exit()
        asked, size = self.asked, BATCH
        if asked.inputs is not None:
            size = min(size, -(-asked.inputs // asked.jobs))
        first = asked.seed + self.part * size
        while not parts.enough(asked, self.began, sum(self.kinds.values())):
            for found in batch(list(range(first, first + size))):
                self.take(first, found)
            first += asked.jobs * size

    def end(self, name: str, what: str) -> None:
        """Say what was found, and end the process by it."""
        print(json.dumps({
            "campaign": name, "inputs": sum(self.kinds.values()), "what": what,
            "kinds": dict(self.kinds.most_common()), "ended": dict(self.ended.most_common()),
            "most_mb": self.most, "slowest": self.slowest, "findings": self.findings,
            "seconds": round(time.monotonic() - self.began, 1),
        }))  # fmt: skip
        sys.exit(bool(self.findings))
