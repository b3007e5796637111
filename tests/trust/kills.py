"""Kills saves, uploads and fills of a cache, before each of their system calls and at any time.

What is found is what was there before or what was saved, never between; what a killed save has left
is gone after the next one; after a killed fill of a cache loads are right.
"""

import argparse
import contextlib
import json
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import tracing
from faults import LONG, deny
from scenes import (
    NEW,
    OLD,
    SAVES,
    Save,
    environment,
    http_server,
    s3_server,
    scratch,
    tensorizer,
    upload,
    value_of,
    visible,
)


class Campaign:
    """Counts kills, and what they have left."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.kills: Counter[str] = Counter()
        self.found: Counter[str] = Counter()
        self.findings: list[str] = []

    def check(self, kind: str, where: str, verdict: Callable[[], str | None]) -> None:
        """Count a kill, and note what is wrong after it."""
        self.kills[kind] += 1
        try:
            wrong = verdict()
        except Exception as error:
            wrong = f"what is left cannot be read: {type(error).__name__}: {error}"
        if wrong:
            self.findings.append(f"{kind}, {where}: {wrong}")
            print(f"FINDING {self.findings[-1]}", file=sys.stderr, flush=True)


class Kind:
    """Something that is killed."""

    def __init__(self, scene: Save, folder: Path, hidden: bool = True) -> None:
        self.scene, self.folder = scene, folder
        self.kept = folder.with_name(f"{folder.name}.kept")
        self.tidies = hidden
        folder.mkdir()
        if scene.over:
            scene.save(folder, OLD)
        shutil.copytree(folder, self.kept)

    def again(self) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(self.kept, self.folder)
        if not self.tidies and self.scene.over:
            self.scene.save(self.folder, OLD)

    def body(self) -> None:
        self.scene.save(self.folder, NEW)

    def one_of(self, campaign: Campaign, *values: float | None) -> str | None:
        """Return what is wrong in the folder, of which the next save makes order."""
        found = self.scene.found(self.folder)
        campaign.found["old" if found == values[0] else "new"] += 1
        if found not in values:
            return f"{found} is there, neither of {values}"
        self.scene.save(self.folder, 99)
        if self.scene.found(self.folder) != 99:
            return "the next save is not found"
        hidden = [name for name in visible(self.folder) if "/." in f"/{name}"]
        return f"the next save leaves {hidden}" if hidden and self.tidies else None

    def before(self) -> float | None:
        return OLD if self.scene.over else None


def at_each_call(campaign: Campaign, kind: Kind) -> Iterator[None]:
    """Kill it before each of its calls."""
    name = kind.scene.name
    kind.again()
    undisturbed = tracing.run(kind.body, deny(kind.scene.refused, None, None))
    if undisturbed.status != 0:
        campaign.findings.append(f"{name} fails undisturbed: {undisturbed.said}")
        return
    order = list(range(len(undisturbed.calls)))
    campaign.random.shuffle(order)
    for number in order:
        kind.again()
        denied, calls = deny(kind.scene.refused, None, None), []

        def decide(call, memory, number=number, calls=calls, denied=denied):
            calls.append(call)
            return "kill" if len(calls) > number else denied(call, memory)

        outcome = tracing.run(kind.body, decide)
        if outcome.status == -signal.SIGKILL:
            where = f"before call {number}, {calls[-1]}"
            campaign.check(name, where, lambda: kind.one_of(campaign, kind.before(), NEW))
        yield


def at_any_time(campaign: Campaign, kind: Kind, longest: float) -> Iterator[None]:
    """Kill it while it saves one value after the other."""
    if kind.scene.refused:
        return
    while True:
        kind.again()
        shared = mmap.mmap(-1, 16)
        shared[:] = struct.pack("2d", OLD, OLD)
        pid = os.fork()
        if pid == 0:
            value = NEW
            while True:
                shared[8:] = struct.pack("d", value)
                kind.scene.save(kind.folder, value)
                shared[:8] = struct.pack("d", value)
                value += 1
                if not kind.scene.over:
                    os._exit(0)
        delay = campaign.random.uniform(0, longest)
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
        ended = os.waitpid(pid, 0)[1]
        done, begun = struct.unpack("2d", shared[:])
        values = (kind.before() if done == OLD else done, begun)
        where = f"after {delay:.4f} s"
        if ended == signal.SIGKILL:
            campaign.check(f"{kind.scene.name}, any time", where,
                           lambda v=values: kind.one_of(campaign, *v))  # fmt: skip
        elif ended:
            campaign.findings.append(f"{kind.scene.name} ends with {ended}")
        yield


def cache_fills(campaign: Campaign, folder: Path, url: str) -> Iterator[None]:
    """Kill loads that fill a cache, alone and two at once."""
    cache = folder / "cache"

    def load() -> float:
        return value_of(tensorizer.load(url, "cpu", verify_hash=True, cache_dir=cache))

    def right() -> str | None:
        found = [load(), load()]
        return None if found == [OLD, OLD] else f"loads {found}"

    while True:
        for number in range(400):
            shutil.rmtree(cache, ignore_errors=True)
            calls = []

            def decide(call, memory, number=number, calls=calls):
                calls.append(call)
                return "kill" if len(calls) > number else None

            outcome = tracing.run(load, decide)
            if outcome.status == 0:
                break
            campaign.check("cache fill", f"before call {number}, {calls[-1]}", right)
            yield
            shutil.rmtree(cache, ignore_errors=True)
            pids = []
            for _ in range(2):
                pid = os.fork()
                if pid == 0:
                    with contextlib.suppress(BaseException):
                        load()
                    os._exit(0)
                pids.append(pid)
            delay = campaign.random.uniform(0, 0.03)
            time.sleep(delay)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            killed = [os.waitpid(pid, 0)[1] for pid in pids]
            if any(killed):
                campaign.check("cache fill by two", f"after {delay:.4f} s", right)
            yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds whose names have this text")
    arguments = parser.parse_args()
    began = time.monotonic()
    if skipped := tracing.why_not():
        print(json.dumps({"campaign": "kills", "skipped": skipped}))
        return
    campaign = Campaign(arguments.seed)
    quick = (("TENSORIZER_ATTEMPTS", "3"),)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch())
        stack.enter_context(environment(quick))
        url = stack.enter_context(http_server(folder))
        kinds = [Kind(scene, folder / f"{n}") for n, scene in enumerate(SAVES)]
        # It takes its time to start.
        if arguments.only in "upload" and (arguments.only or arguments.seconds >= LONG):
            uri = stack.enter_context(s3_server())
            kinds.append(Kind(upload(uri), folder / "s3", hidden=False))
        runs: list[tuple[str, Iterator[None]]] = []
        for kind in kinds:
            longest = 0.4 if kind.scene.name == "upload" else 0.05
            runs += [(kind.scene.name, at_each_call(campaign, kind))]
            runs += [(kind.scene.name, at_any_time(campaign, kind, longest))]
        runs += [("cache fill", cache_fills(campaign, folder, url))]
        runs = [(name, run) for name, run in runs if arguments.only in name]
        until = began + arguments.seconds
        while runs and time.monotonic() < until:
            for one in list(runs):
                if time.monotonic() >= until:
                    break
                if next(one[1], one) is one:
                    runs.remove(one)
    print(json.dumps({
        "campaign": "kills", "inputs": sum(campaign.kills.values()), "what": "kills survived",
        "kinds": dict(campaign.kills.most_common()), "ended": dict(campaign.found),
        "findings": campaign.findings, "seconds": round(time.monotonic() - began, 1),
    }))  # fmt: skip
    sys.exit(bool(campaign.findings))


if __name__ == "__main__":
    main()
