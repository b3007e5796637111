"""Objects that a process has begun to use, in a child that is forked off it at a random moment.

Each is asked for something in the child: what comes is right, or an error that is typed, within a
time limit. The parent's own object goes on as if there were no child, and its file is right.
"""

import argparse
import contextlib
import gc
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import parts
import torch
from scenes import (
    NEW,
    OLD,
    SIZES,
    TensorDeserializer,
    TensorSerializer,
    by_path,
    environment,
    http_server,
    open_stream,
    save_path,
    scratch,
    tensorizer,
    tensors,
    value_of,
)
from tensorizer.safetensors import safe_open

#: Seconds that a child may take, and the parent with it.
LATE, ALL = 20.0, 60.0
#: Errors that an object of the parent may raise in a child.
TYPED = (OSError, ValueError, RuntimeError)


@dataclass
class Made:
    """An object that the parent has begun to use.

    Attributes:
        ask: Calls on it in a child, by name; each returns its value, or None.
        end: Ends it in the parent, and returns the value that is right there.

    """

    ask: dict[str, Callable[[], float | None]]
    end: Callable[[], float | None]


Makes = Callable[[Path, str, random.Random], Made]


def nothing(call: Callable[[], object]) -> Callable[[], None]:
    """Return a call whose result is of no interest."""

    def called() -> None:
        call()

    return called


def future(folder: Path, url: str, chance: random.Random) -> Made:
    """A save that is under way, perhaps."""
    made = tensorizer.save_async(tensors(NEW), folder / "f.tensors")
    time.sleep(chance.uniform(0, 0.01))

    def result() -> float:
        made.result(timeout=LATE)
        return NEW

    def end() -> float:
        made.result(timeout=ALL)
        return by_path(folder)

    ask = {"result": nothing(result), "done": nothing(made.done), "bytes": nothing(lambda:
           made.saved_bytes), "exception": nothing(lambda: made.exception(timeout=LATE)),
           "callback": nothing(lambda: made.add_done_callback(print))}  # fmt: skip
    return Made(ask, end)


def iterated(place: Callable[[Path, str], object]) -> Makes:
    """Return what begins to iterate."""

    def make(folder: Path, url: str, chance: random.Random) -> Made:
        made = tensorizer.iterate(place(folder, url), "cpu", buffer_bytes=1 << 20)
        found = dict([next(made)] if chance.random() < 0.5 else [])

        def rest() -> float:
            return value_of(found | dict(made))

        return Made({"rest": rest, "next": nothing(lambda: next(made)),
                     "close": nothing(made.close)}, rest)  # fmt: skip

    return make


def opened(place: Callable[[Path, str], object], **options: object) -> Makes:
    """Return what opens a file."""

    def make(folder: Path, url: str, chance: random.Random) -> Made:
        made = TensorDeserializer(place(folder, url), "cpu", lazy_load=True, **options)
        if chance.random() < 0.5:
            made["small"]

        def read() -> float:
            return value_of({name: made[name] for name in made})

        def sliced() -> float:
            return value_of({name: made.slice(name)[:] for name in made})

        def end() -> float:
            with contextlib.closing(made):
                return read()

        ask = {"read": read, "slices": sliced, "close": nothing(made.close),
               "names": nothing(lambda: list(made))}  # fmt: skip
        return Made(ask, end)

    return make


def written(folder: Path, url: str, chance: random.Random) -> Made:
    """A file that is being written."""
    made = TensorSerializer(folder / "f.tensors")
    whole = tensors(NEW)
    made.write_state_dict({"small": whole["small"]})

    def more() -> None:
        made.write_state_dict({"large": whole["large"]})

    def end() -> float:
        more()
        made.close()
        return by_path(folder)

    return Made({"write": more, "close": made.close}, end)


def stream(folder: Path, url: str, chance: random.Random) -> Made:
    """A stream of a server that is being read; one of a file is Python's own, with one position."""
    data = (folder / "f.tensors").read_bytes()
    made = open_stream(url)
    first = chance.randrange(len(data))
    if made.read(first) != data[:first]:
        raise AssertionError("wrong bytes before the fork")

    def rest() -> float:
        at = made.tell()
        if made.read() != data[at:]:
            raise AssertionError(f"wrong bytes from {at} on")
        return OLD

    def end() -> float:
        if made.tell() != first:
            raise AssertionError("the child has moved the parent's position")
        with contextlib.closing(made):
            return rest()

    def again() -> float:
        made.seek(0)
        if made.read() != data:
            raise AssertionError("wrong bytes from the beginning")
        return OLD

    return Made({"read": rest, "seek": nothing(again), "close": made.close}, end)


def write_stream(folder: Path, url: str, chance: random.Random) -> Made:
    """A stream that is being written."""
    data = (folder / "f.tensors").read_bytes()
    made = open_stream(folder / "f.tensors", "wb")
    first = chance.randrange(len(data))
    made.write(data[:first])

    def end() -> float:
        made.write(data[first:])
        made.close()
        return by_path(folder)

    return Made({"write": nothing(lambda: made.write(b"x")), "close": made.close}, end)


def library(folder: Path, url: str, chance: random.Random) -> Made:
    """A file that is opened as the library safetensors does."""
    tensorizer.save(tensors(OLD), folder / "f.safetensors")
    made = safe_open(folder / "f.safetensors", "pt")

    def read() -> float:
        return value_of({name: made.get_tensor(name) for name in SIZES})

    def sliced() -> float:
        return value_of({name: made.get_slice(name)[:] for name in SIZES})

    return Made({"read": read, "slices": sliced, "metadata": nothing(made.metadata)}, read)


def mapped_tensors(folder: Path, url: str, chance: random.Random) -> Made:
    """Tensors over a map of the file, which both may change."""
    made = tensorizer.load(folder / "f.tensors", "cpu", mmap=True)

    def change() -> float:
        for step in (1, -1):
            for tensor in made.values():
                tensor.add_(step)
        return value_of(made)

    return Made({"read": lambda: value_of(made), "change": change}, change)


def local(folder: Path, url: str) -> object:
    return folder / "f.tensors"


def remote(folder: Path, url: str) -> object:
    return url


def object_of(folder: Path, url: str) -> object:
    return (folder / "f.tensors").open("rb")


KINDS: dict[str, Makes] = {
    "SaveFuture": future,
    "iterate": iterated(local),
    "iterate, http": iterated(remote),
    "file": opened(local),
    "file, http": opened(remote),
    "file object": opened(object_of),
    "verified": opened(local, verify_hash=True),
    "serializer": written,
    "stream": stream,
    "stream that is written": write_stream,
    "safe_open": library,
    "mapped": mapped_tensors,
}


def asked(made: Made, names: list[str]) -> list[list[str]]:
    """Ask for several things in a child; return how each ended."""
    torch.set_num_threads(1)
    ended = []
    for name in names:
        try:
            value = made.ask[name]()
            right = value is None or value == OLD
            ended.append([name, "done" if right else f"wrong: {value}"])
        except StopIteration:
            ended.append([name, "done"])
        except TYPED as error:
            ended.append([name, f"{type(error).__name__}: {error}"])
    made.ask.clear()
    gc.collect()
    return ended


def turn(kind: str, folder: Path, url: str, chance: random.Random) -> Iterator[tuple[str, str]]:
    """Make an object, fork, ask in the child, end it in the parent; yield how all ended."""
    save_path(folder, OLD)
    made = KINDS[kind](folder, url, chance)
    names = chance.choices(sorted(made.ask), k=chance.randint(0, 3))
    status, ended, output = parts.in_child(lambda: asked(made, names), LATE)
    if status is None:
        yield "finding", f"a child hangs that was asked for {names}: {output}"
    elif status:
        yield "finding", f"a child ends with {status} that was asked for {names}: {output}"
    for name, how in ended or []:
        wrong = how.startswith("wrong") or how.startswith("AssertionError")
        yield "finding" if wrong else how.partition(":")[0], f"{name} in a child: {how}"
    value = made.end()
    expected = {"SaveFuture": NEW, "serializer": NEW}.get(kind, OLD)
    if value != expected:
        yield "finding", f"{value} in the parent, expected {expected}, after {names}"


def guarded(kind: str, url: str, seed: str) -> dict:
    """Run one turn in a folder of its own; return what ended how, and what is wrong."""
    ended: Counter[str] = Counter()
    findings = []
    with scratch() as folder:
        try:
            for how, text in turn(kind, folder, url, random.Random(seed)):
                if how == "finding":
                    findings.append(text)
                else:
                    ended[how] += 1
        except Exception as error:
            findings.append(f"in the parent: {type(error).__name__}: {error}")
        left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
        findings += [f"files are left: {left}"] if left else []
    return {"ended": ended, "findings": findings}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts.ending(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds whose names have this text")
    parts.option(parser)
    arguments = parser.parse_args()
    began = time.monotonic()
    part = parts.divide(arguments.jobs)
    kinds: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    findings: list[str] = []
    chosen = [name for name in KINDS if arguments.only in name]
    with scratch() as folder, environment(()), http_server(folder) as url:
        while not parts.enough(arguments, began, sum(kinds.values())):
            number = sum(kinds.values())
            kind, seed = chosen[number % len(chosen)], f"{arguments.seed}/{part}/{number}"
            kinds[kind] += 1
            # The parent is a child of the campaign, which goes on even if it crashes.
            status, said, output = parts.in_child(lambda k=kind, s=seed: guarded(k, url, s), ALL)
            wrong = said["findings"] if said else [f"the parent ends with {status}: {output}"]
            ended += Counter(said["ended"]) if said else Counter()
            for text in wrong:
                findings.append(f"{kind}, seed {seed}: {text}"[:1000])
                print(f"FINDING {findings[-1]}", file=sys.stderr, flush=True)
    print(json.dumps({
        "campaign": "forked children", "inputs": sum(kinds.values()),
        "what": "objects in a forked child", "kinds": dict(kinds.most_common()),
        "ended": dict(ended), "findings": findings[:50],
        "seconds": round(time.monotonic() - began, 1),
    }))  # fmt: skip
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
