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

import parts
import tracing
from call_faults import deny
from scenes import (
    NEW,
    OLD,
    SAVES,
    Save,
    environment,
    http_server,
    scratch,
    tensorizer,
    uploads,
    value_of,
    visible,
)


class Campaign:
    """Counts kills, and what they have left."""

    def __init__(self, seed: int, part: int, jobs: int) -> None:
        self.random = random.Random(f"{seed}/{part}")
        self.part, self.jobs = part, jobs
        self.kills: Counter[str] = Counter()
        self.found: Counter[str] = Counter()
        self.findings: list[str] = []

    def check(self, kind: str, where: str, verdict: Callable[[], str | None]) -> None:
        """Count a kill, and note what is wrong after it."""
        self.kills[kind] += 1
        try:
            try:
                wrong = verdict()
            except OSError as error:
                # A server may yet do what had reached it whole, while that is read.
                if "the file changed since it was opened" not in str(error):
                    raise
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
    order = [str(call).split(" (")[0] for call in undisturbed.calls]
    order = [place for place in order if parts.mine(name + place, campaign.part, campaign.jobs)]
    campaign.random.shuffle(order)
    for place in order:
        kind.again()
        outcome = killed_before(kind.body, place, kind.scene.refused)
        if outcome.status == -signal.SIGKILL:
            where = f"before {outcome.calls[-1]}"
            campaign.check(name, where, lambda: kind.one_of(campaign, kind.before(), NEW))
        yield


def killed_before(body: Callable, place: str, refused: tuple = ()) -> tracing.Outcome:
    """Run a function that is killed before a call, if it comes to that."""
    wanted = {place.split(maxsplit=1)[0]} | ({"openat"} if refused else set())
    return tracing.run(body, deny(refused, place, "kill"), wanted=wanted)


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

    places = [str(call).split(" (")[0] for call in tracing.run(load).calls]
    while True:
        campaign.random.shuffle(places)
        for place in places:
            shutil.rmtree(cache, ignore_errors=True)
            outcome = killed_before(load, place)
            # The number of some calls, such as polls, varies: this one may not have come.
            if outcome.status == -signal.SIGKILL:
                campaign.check("cache fill", f"before {outcome.calls[-1]}", right)
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
    parts.ending(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds whose names have this text")
    parts.option(parser)
    arguments = parser.parse_args()
    began = time.monotonic()
    if skipped := tracing.why_not():
        print(json.dumps({"campaign": "kills", "skipped": skipped}))
        return
    campaign = Campaign(arguments.seed, parts.divide(arguments.jobs), arguments.jobs)
    quick = (("TENSORIZER_ATTEMPTS", "3"),)
    with contextlib.ExitStack() as stack:
        parts.large_pages()
        folder = stack.enter_context(scratch())
        stack.enter_context(environment(quick))
        url = stack.enter_context(http_server(folder))
        kinds = [Kind(scene, folder / f"{n}") for n, scene in enumerate(SAVES)]
        # Their servers take long to start.
        if "upload" in arguments.only or (not arguments.only and parts.is_long(arguments)):
            kinds += [Kind(scene, folder / scene.name, hidden=False)
                      for scene in uploads(stack, folder)]  # fmt: skip
        runs: list[tuple[str, Iterator[None]]] = []
        for kind in kinds:
            longest = 0.4 if "upload" in kind.scene.name else 0.05
            runs += [(kind.scene.name, at_each_call(campaign, kind))]
            runs += [(kind.scene.name, at_any_time(campaign, kind, longest))]
        runs += [("cache fill", cache_fills(campaign, folder, url))]
        runs = [(name, run) for name, run in runs if arguments.only in name]

        def enough() -> bool:
            return parts.enough(arguments, began, sum(campaign.kills.values()))

        while runs and not enough():
            for one in list(runs):
                if enough():
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
