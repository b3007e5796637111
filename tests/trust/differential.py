"""Hostile `.tensors` files that we take are read by the old package too: to the same bytes.

Where it refuses them, or reads something else, that is one of the differences that are known.
"""

import argparse
import collections
import json
import os
import random
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import parts
import tensorizer
import torch
from hostile_bases import Base, golden, mutated, saved
from hostile_ways import LARGE, nbytes, params
from old_reader import digest
from tensors_bytes import read_index, tightened

HERE = Path(__file__).resolve().parent
OLD = Path(os.environ.get("TENSORIZER_OLD_PYTHON", HERE.parents[1] / ".venv-old/bin/python"))
#: Errors of the old package for files that we accept, and the reasons.
REFUSED = {
    "not understood": "empty and meta tensors of opaque dtypes make a file unreadable there",
    "unsupported tensor type": "numpy has strings for dtypes that its torch has not",
}
#: Seconds that it may take for a file.
SLOW = 60


class Old:
    """A process with the old package."""

    def __init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.process = subprocess.Popen(
            [OLD, "-W", "ignore", HERE / "old_reader.py"], env=environment, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert self.line() == "ready\n"

    def line(self) -> str:
        assert self.process.stdout
        ready = select.select([self.process.stdout], [], [], SLOW)[0]
        return self.process.stdout.readline() if ready else ""

    def read(self, path: Path, encrypted: bool) -> dict:
        assert self.process.stdin
        try:
            self.process.stdin.write(f"{path} {'key' if encrypted else 'plain'}\n")
            line = self.line()
        except BrokenPipeError:
            line = ""
        return json.loads(line) if line else {"error": "it crashed, or hung"}

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def ours(path: Path, encrypted: bool) -> list | None:
    options = {"encryption": params()} if encrypted else {}
    try:
        loaded = tensorizer.load(path, "cpu", **options)
    except (ValueError, OSError, MemoryError, NotImplementedError, tensorizer.CryptographyError):
        return None
    if any(nbytes(tensor) > LARGE for tensor in loaded.values()):
        # Of the meta device: zeros, however many.
        return None
    return [
        [list(name) if isinstance(name, tuple) else name, str(tensor.dtype),
         list(tensor.shape), digest(tensor)]
        for name, tensor in loaded.items()
    ]  # fmt: skip


def compared(mine: list, other: dict, data: bytes) -> str | None:
    """Return how the two agree, or None."""
    if "tensors" in other and json.loads(json.dumps(mine)) == other["tensors"]:
        return "the same"
    bodies = read_index(data)[0]
    ends = (body.data_at + body.data_len for body in bodies)
    if any(end != body.header_at for end, body in zip(ends, bodies[1:], strict=False)):
        return "bytes between tensors taken for headers by the old package"
    known = (why for said, why in REFUSED.items() if said in other.get("error", ""))
    return next(known, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts.ending(parser)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if not OLD.exists():
        print(json.dumps({"campaign": "old package", "skipped": f"there is no {OLD}"}))
        return
    torch.set_num_threads(1)
    old, findings, outcomes = Old(), [], collections.Counter()
    # Until here the old package has been started, which takes seconds.
    began = time.monotonic()
    number = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bases = [*golden(), Base("tensors", tightened(saved(folder)), "f.tensors")]
        path = folder / "f.tensors"
        while not parts.enough(arguments, began, number):
            rng = random.Random(f"{arguments.seed}/{number}")
            base = rng.choice(bases)
            path.write_bytes(mutated(base, rng))
            mine = ours(path, base.encrypted)
            if mine is None:
                outcomes["refused by this release"] += 1
            else:
                other = old.read(path, base.encrypted)
                how = compared(mine, other, path.read_bytes())
                outcomes[how or "differs"] += 1
                if how is None:
                    findings.append(f"file {number} of seed {arguments.seed}: {other}"[:700])
                    print(f"FINDING {findings[-1]}, ours: {mine}"[:1500], file=sys.stderr)
                    if "crashed" in other.get("error", ""):
                        old.close()
                        old = Old()
            number += 1
    old.close()
    print(json.dumps({
        "campaign": "old package", "inputs": number, "what": "files, read by both",
        "kinds": dict(outcomes.most_common()), "findings": findings,
        "seconds": round(time.monotonic() - began, 1),
    }))  # fmt: skip
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
