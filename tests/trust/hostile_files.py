"""Loads thousands of hostile files every way, in children of a process that forks after the import.

No file may crash or hang the program, have it panic, take more memory than its bytes justify, load
otherwise one way than another, or pass a hash that does not fit.
"""

import argparse
import json
import os
import random
import re
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import hostile_ways
import parts
import tensorizer  # noqa: F401  # what is loaded before the forks
import torch
from hostile_bases import Base, all_bases, mutated

#: Files a child.
BATCH = 40
#: Seconds after which a file has hung: a thousand times what one takes, since machines are busy.
HANGS = 300
#: Bytes beyond those of a fresh child that a batch may take.
MEMORY = 400 << 20
#: The command takes one file of so many, and as a process of its own one of so many.
COMMANDS, PROCESSES = 100, 1000


def peak() -> int:
    """Return the most bytes that this process has had; `getrusage` counts its parent too."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) << 10


def child(bases: list[Base], seed: int, numbers: range, folder: Path, told: int) -> None:
    """Load files and tell of each how it went."""
    torch.set_num_threads(1)
    kinds = sorted({base.kind for base in bases})
    for number in numbers:
        rng = random.Random(f"{seed}/{number}")
        # Half of them are of our own format.
        kind = rng.choice((rng.choice(kinds), "tensors" if "tensors" in kinds else kinds[0]))
        base = rng.choice([base for base in bases if base.kind == kind])
        data = mutated(base, rng)
        path = folder / base.path
        path.write_bytes(data)
        os.write(told, f"{number} begins {base.kind}\n".encode())
        found = hostile_ways.try_all(base, path, data, rng)
        if number % COMMANDS == 0:
            found += hostile_ways.commands(base, path)
        if number % PROCESSES == PROCESSES - 1:
            found += hostile_ways.processes(base, path, rng)
        if base.folder or base.kind in ("shards", "shard"):
            path.write_bytes(base.data)
        else:
            path.unlink()
        for what in found:
            line = what.replace("\n", " ")
            os.write(told, f"{number} {line}\n".encode(errors="backslashreplace"))
    os.write(told, f"{numbers[-1]} ways {json.dumps(hostile_ways.tried)}\n".encode())
    os.write(told, f"{numbers[-1]} peak {peak()}\n".encode())


class Campaign:
    """Batches of files, each in a child, and what was found."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.findings: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.ways: Counter[str] = Counter()
        self.inputs = 0

    def find(self, number: int, what: str) -> None:
        self.findings.append(f"file {number} of seed {self.seed}: {what}")
        print(f"FINDING {self.findings[-1]}", file=sys.stderr, flush=True)

    def batch(self, bases: list[Base], numbers: range, folder: Path) -> int:
        """Run a batch; return how many of its files were tried."""
        reading, writing = os.pipe()
        said = folder / "said"
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(reading)
                with said.open("wb") as file:
                    os.dup2(file.fileno(), 1)
                    os.dup2(file.fileno(), 2)
                child(bases, self.seed, numbers, folder, writing)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(writing)
        at = self.listen(reading, pid)
        os.close(reading)
        _, status = os.waitpid(pid, 0)
        text = said.read_text(errors="replace")
        if status:
            how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {status}"
            self.find(max(at, numbers[0]), f"the process ended by {how}: {text[-500:]}")
        elif "panicked" in text or "Traceback" in text:
            self.find(max(at, numbers[0]), f"a panic in files {numbers}: {text[-800:]}")
        return (at - numbers[0] + 1) if status and at >= 0 else len(numbers)

    def listen(self, reading: int, pid: int) -> int:
        """Take in what a child tells; return the file that it was at."""
        rest, at = b"", -1
        while True:
            if not select.select([reading], [], [], HANGS)[0]:
                self.find(at, f"nothing happened for {HANGS} s")
                os.kill(pid, signal.SIGKILL)
                return at
            some = os.read(reading, 1 << 16)
            if not some:
                return at
            *lines, rest = (rest + some).split(b"\n")
            for line in lines:
                word, _, what = line.decode(errors="replace").partition(" ")
                at = int(word)
                self.take(at, what)

    def take(self, number: int, what: str) -> None:
        if what.startswith("begins "):
            self.inputs += 1
            self.kinds[what.removeprefix("begins ")] += 1
        elif what.startswith("ways "):
            self.ways += Counter(json.loads(what.removeprefix("ways ")))
        elif what.startswith("peak "):
            if int(what.removeprefix("peak ")) > self.usual + MEMORY:
                self.find(number, f"its batch took {what} bytes, a fresh process {self.usual}")
        elif what.startswith("was "):
            self.outcomes[re.sub(r" .*", "", what.removeprefix("was "))] += 1
        else:
            self.find(number, what)

    @property
    def usual(self) -> int:
        return peak()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts.ending(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    parser.add_argument("--only", help="kind of files")
    parts.option(parser)
    arguments = parser.parse_args()
    began = time.monotonic()
    part = parts.divide(arguments.jobs)
    campaign = Campaign(arguments.seed)
    folder = Path(tempfile.mkdtemp(prefix="hostile"))
    try:
        bases = all_bases(folder)
        bases = [base for base in bases if arguments.only in (None, base.kind)]
        at = arguments.first + part * BATCH
        end = arguments.first + (1 << 62 if arguments.inputs is None else arguments.inputs)
        while at < end and not parts.enough(arguments, began, campaign.inputs):
            left = range(at, min(at + BATCH, end))
            while left:
                left = left[campaign.batch(bases, left, folder) :]
            at += BATCH * arguments.jobs
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({
        "campaign": "hostile files", "inputs": campaign.inputs, "what": "hostile files",
        "kinds": dict(campaign.kinds.most_common()),
        "ways": dict(campaign.ways.most_common()),
        "ended": dict(campaign.outcomes.most_common()), "findings": campaign.findings,
        "seconds": round(time.monotonic() - began, 1),
    }))  # fmt: skip
    sys.exit(bool(campaign.findings))


if __name__ == "__main__":
    main()
