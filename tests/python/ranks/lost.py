"""Loads and saves by groups that fail at one rank, or lose it."""

import datetime
import itertools
import os
import signal
import sys
import threading
import time
import traceback

from ranks.common import (
    assert_equal,
    caught,
    dist,
    fetch_together,
    group,
    placed,
    tensorizer,
    torch,
)
from ranks.groups import large
from tensorizer.file.exchange import Exchange
from tensorizer.group import blocks, connections, members
from tensorizer.group.members import Members
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

#: Bytes of a batch at most: each rank has more than ten, so that it can be lost between them.
BATCH = 1 << 15
#: The same of a load that is interrupted somewhere, and takes some 50 ms.
SHORT_BATCH = 1 << 12
#: Seconds that ranks wait for each other where one does not come.
WAIT = 10


def wait_at_most(seconds):
    """Have ranks wait so long for each other from now on: all of them have come."""
    dist.barrier()
    limit_waits(seconds)


def limit_waits(seconds):
    """Have this rank wait so long for others from now on."""
    limit = datetime.timedelta(seconds=seconds)
    dist.distributed_c10d._set_pg_timeout(limit, dist.group.WORLD)


def on_the_way(function, number, act):
    """Do something before the ``number``-th batch that a function of this rank gets."""
    own, count = getattr(Exchange, function), iter(range(1 << 30))

    def changed(*args):
        if next(count) == number:
            act()
        return own(*args)

    setattr(Exchange, function, changed)


def load(uri, **options):
    return tensorizer.load(uri, group=dist.group.WORLD, **options)


def columns():
    """Return the option by which each rank wants columns of its own of two tensors."""
    dim = {"rows": 1, "cube": 1}.get
    return {"shard": tensorizer.Shard(dim, dist.get_rank(), dist.get_world_size())}


def drop_connections():
    """Forget the connections that are kept, so that the next call makes new ones."""
    for calls in connections._SEQUENCES[dist.group.WORLD].values():
        calls.kept = None


def works(uri):
    """Check that the next call works, with a batch of each rank."""
    before = blocks._MOST_BYTES
    fetch_together(1 << 19)
    found, made = load(uri, names=["rows", "t0"]), large()
    fetch_together(before)
    for name, tensor in found.items():
        assert_equal(tensor, made[name])


def fail():
    raise OSError(5, "Input/output error", "somewhere")


class Odd(Exception):
    """An error that cannot be sent."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def fail_oddly():
    raise Odd("one", "two")


def calls_that_fail(folder, there):
    """Return calls that fail at one rank, by what is wrong."""
    uri, encrypted = f"{folder}/g.tensors", f"{folder}/g.enc.tensors"
    damaged = f"{folder}/damaged.tensors"
    small, fits = torch.zeros(3), torch.zeros(300, 200)

    def key(first):
        return tensorizer.DecryptionParams.from_key(bytes([first, *range(1, 32)]))

    return {
        "name": lambda: load(uri, names=["nope"] if there else ["rows"]),
        "filter": lambda: load(uri, filter_func=(lambda _: fail()) if there else None),
        "slice": lambda: load(uri, slices={"rows": (5, 0, 1)} if there else None),
        "arguments": lambda: load(
            uri, like={"rows": fits}, shard=tensorizer.Shard(0, 1, 4) if there else None
        ),
        "reader": lambda: load(uri, num_readers=0 if there else 1),
        "out": lambda: load(uri, out={"rows": small if there else fits}),
        "file": lambda: load(f"{uri}.none" if there else uri),
        "other file": lambda: load(f"{folder}/other.tensors" if there else uri),
        "format": lambda: load(f"{folder}/text" if there else uri),
        "key": lambda: load(encrypted, encryption=key(int(there))),
        "no key": lambda: load(encrypted, encryption=None if there else key(0)),
        "hash": lambda: load(damaged, verify_hash=True),
        # The second of them has the second batch.
        "one hash": lambda: load(
            damaged if there else uri, names=["rows", "cube"], verify_hash=True
        ),
        "device": lambda: load(uri, device="cuda:99" if there else "cpu"),
        "memory": lambda: load(f"{folder}/huge.tensors", names=["huge"] if there else ["small"]),
    }


def errors(folder):
    """Fail at rank 1 in each of some ways, and at the first; return what each rank says."""
    fetch_together(BATCH)
    uri = f"{folder}/g.tensors"
    found = {}
    with group() as (rank, _):
        calls = calls_that_fail(folder, rank == 1)
        calls["first file"] = lambda: load(uri if rank else f"{uri}.none")
        for name, call in calls.items():
            found[name] = caught(call)
        works(uri)
    return found


def servers_that_fail(folder, servers):
    """Load from servers, by kind of failure one address for each rank."""
    found = {}
    with group() as (rank, _):
        for name, addresses in servers.items():
            fetch_together(1 << 20)
            found[name] = caught(lambda url=addresses[rank]: load(url))
            works(f"{folder}/g.tensors")
    return found


def errors_on_the_way(folder):
    """Fail at one rank while batches are on their way."""
    fetch_together(BATCH)
    uri = f"{folder}/g.tensors"
    found = {}

    def say(name, function, at, act, **options):
        own = getattr(Exchange, function)
        if dist.get_rank() == at:
            on_the_way(function, *act)
        try:
            load(uri, **options)
            found[name] = None
        except BaseException as error:
            found[name] = [type(error).__name__, str(error), getattr(error, "__notes__", None)]
        setattr(Exchange, function, own)
        works(uri)

    with group() as (rank, world):
        # Each pair of ranks exchanges by itself.
        pairs = {"shard": tensorizer.Shard(0, rank // 2, world // 2)}
        say("pair", "_read", 1, (0, fail), names=["rows", "words"], **pairs)
        # Ranks with different parts, which share one member: it tells the others.
        names = [["rows", "cube"], ["rows"], ["cube"], []][rank]
        say("parts", "_read", 1, (0, fail), names=names)
        say("read", "_read", 1, (3, fail))
        say("first", "_read", 1, (0, fail))
        say("odd", "_read", 1, (3, fail_oddly))
        say("delivery", "_handed_out", 3, (3, fail))
        say("read columns", "_read", 2, (1, fail), names=["rows", "cube"], **columns())
        say("pack", "_packed", 2, (1, fail), names=["rows", "cube"], **columns())
        say("columns", "_handed_out", 1, (1, fail), names=["rows", "cube"], **columns())
    return found


def failing_reads(folder, turns):
    """Fail to read at one rank after another, another block each time; return what each says."""
    fetch_together(BATCH)
    found = []
    with group() as (rank, world):
        for turn in range(turns):
            own = Exchange._read
            if rank == turn % world:
                on_the_way("_read", turn // world % 4, fail)
            found.append(caught(lambda: load(f"{folder}/g.tensors")))
            Exchange._read = own
        works(f"{folder}/g.tensors")
    return found


def inside(number, act):
    """Do something while tensors are exchanged for the ``number``-th time."""
    run, count = Members._run, iter(range(1 << 30))

    def running(self, data, begins):
        is_place = data.nbytes > 4096 and next(count) == number
        if is_place:
            threading.Timer(1e-4, act).start()
        run(self, data, begins)
        if is_place:
            time.sleep(60)  # the load must not end before

    Members._run = running


def killed(folder, how, victim, where, wait=WAIT):
    """Lose a rank in a load: before or while a block is read, between two, or inside one."""
    fetch_together(BATCH)
    uri = f"{folder}/g.tensors"
    dist.init_process_group("gloo")
    wait_at_most(wait)
    place, number, by_columns = where
    if how == "SIGSTOP" and victim == 0:
        # The others would look for it that long in the store, which it hosts.
        connections._SEARCH_SECONDS = 1.0
    if dist.get_rank() == victim:

        def act():
            os.kill(os.getpid(), getattr(signal, how))

        inside(number, act) if place == "inside" else on_the_way(place, number, act)
    begun = time.monotonic()
    try:
        load(uri, **(columns() if by_columns else {}))
    except BaseException as error:
        return [type(error).__name__, str(error), time.monotonic() - begun, traceback.format_exc()]
    return None


def killed_before(folder, how):
    """Lose rank 2 before it comes to the call."""
    fetch_together(BATCH)
    uri = f"{folder}/g.tensors"
    dist.init_process_group("gloo")
    works(uri)
    wait_at_most(3)
    if dist.get_rank() == 2:
        os.kill(os.getpid(), getattr(signal, how))
        time.sleep(8)
        return None
    if dist.get_rank() > 0:
        # They look late, and the first rank, which hosts the store, has nothing more to do then.
        connections._LONGEST_PAUSE = 0.6
    begun = time.monotonic()
    return [*caught(lambda: load(uri)), time.monotonic() - begun]


def interrupted(folder, turns):
    """Ctrl-C at one rank after another, at any time: in the middle, and while it waits."""
    fetch_together(SHORT_BATCH)
    uri = f"{folder}/g.tensors"
    found = []
    meet = connections.CallSequence._meet
    with group() as (rank, world):
        wait_at_most(WAIT)
        store = dist.distributed_c10d._get_default_store()
        works(uri)
        begun = time.monotonic()
        load(uri)
        if rank == 0:
            store.set("seconds", str(time.monotonic() - begun))
        # Interrupts are spread over a load, however long it takes on this machine.
        step = float(store.get("seconds")) / (turns // world)
        for turn in range(turns):
            kill = (step * (turn // world + 0.5), os.kill, (os.getpid(), signal.SIGINT))
            timer = threading.Timer(*kill)

            def begin(*args, timer=timer):
                timer.start()
                return meet(*args)

            mine = rank == turn % world
            # The others cannot know of what happens before.
            connections.CallSequence._meet = begin if mine else meet
            begun = time.monotonic()
            try:
                try:
                    load(uri, **(columns() if turn % 3 == 2 else {}))
                    outcome = "done"
                except tensorizer.GroupError:
                    outcome = "told"
                except Exception:
                    outcome = traceback.format_exc()
                took = time.monotonic() - begun
                if mine:
                    timer.join()
                    time.sleep(0.1)
            except KeyboardInterrupt:
                outcome, took = "interrupted", time.monotonic() - begun
            found.append((outcome, took > 0.9 * WAIT))
            connections.CallSequence._meet = meet
            # Waits for all ranks, however their calls have ended.
            store.set(f"turn {turn} {rank}", "here")
            ended = [f"turn {turn} {other}" for other in range(world)]
            store.wait(ended, datetime.timedelta(seconds=60))
            works(uri)
    return found


def interrupted_at_lines(folder, step):
    """Ctrl-C at one line after another that the main thread runs of a group's code.

    Return the outcome and seconds of each. The end of the start of a thread is such a line. The
    others cannot know of what happens before the call has begun. Every second call makes new
    connections, which are opened when they are first used.
    """
    # Three batches: more of them would have the same lines again and again.
    fetch_together(1 << 17)
    uri = f"{folder}/g.tensors"
    files = {connections.__file__, members.__file__}
    begun = threading.Event()
    connect = connections.CallSequence.connect

    def connecting(*args):
        begun.set()
        return connect(*args)

    def interrupting(number):
        lines = iter(range(1 << 30))
        where = []

        def trace(frame, event, _):
            code = frame.f_code
            starts = code is threading.Thread.start.__code__
            if not starts and code.co_filename not in files:
                return None
            is_place = event == ("return" if starts else "line")
            if is_place and begun.is_set() and not where and next(lines) == number:
                where.append(frame.f_lineno)
                raise KeyboardInterrupt
            return trace

        return trace, where

    found = []
    with group() as (rank, world):
        wait_at_most(WAIT)
        store = dist.distributed_c10d._get_default_store()
        works(uri)
        for number in itertools.count(0, step):
            trace, where = interrupting(number)
            if number % 2:
                drop_connections()
            begun.clear()
            connections.CallSequence.connect = connecting
            if rank == (number // step) % world:
                sys.settrace(trace)
            since = time.monotonic()
            try:
                load(uri, names=["rows", "cube"], **(columns() if number % 4 > 1 else {}))
                outcome = "done"
            except tensorizer.GroupError:
                outcome = "told"
            except KeyboardInterrupt:
                outcome = "interrupted"
            finally:
                sys.settrace(None)
            connections.CallSequence.connect = connect
            found.append((outcome, time.monotonic() - since))
            store.set(f"line {number} {rank}", "x" * len(where))
            others = [f"line {number} {other}" for other in range(world)]
            store.wait(others, datetime.timedelta(seconds=60))
            if not any(store.get(other) for other in others):
                return found
            works(uri)
    return found


def connecting(folder):
    """Ctrl-C at a rank when all have met and it has not begun to connect."""
    fetch_together(BATCH)
    uri = f"{folder}/g.tensors"
    with group() as (rank, _):
        works(uri)
        drop_connections()
        connect = dist.ProcessGroupGloo

        def begin(*args):
            os.kill(os.getpid(), signal.SIGINT)
            # Time for a main thread to see it.
            time.sleep(0.5)
            return connect(*args)

        if rank == 0:
            dist.ProcessGroupGloo = begin
        begun = time.monotonic()
        found = [*caught(lambda: load(uri)), time.monotonic() - begun]
        dist.ProcessGroupGloo = connect
        works(uri)
        return found


def late(folder):
    """Ctrl-C at a rank that waits for others to come, which come when its call has ended."""
    fetch_together(BATCH)
    uri = f"{folder}/g.tensors"
    meet = connections.CallSequence._meet

    def begin(*args):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        return meet(*args)

    with group() as (rank, _):
        works(uri)
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            connections.CallSequence._meet = begin
        else:
            store.wait(["interrupted"], datetime.timedelta(seconds=60))
        begun = time.monotonic()
        found = [*caught(lambda: load(uri)), time.monotonic() - begun]
        connections.CallSequence._meet = meet
        store.set("interrupted", "")
        works(uri)
        return found


def save(folder, how):
    """Lose rank 2 in the middle of a save."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made = {f"t{n}": placed(torch.full((64, 1 << 12), float(n)), mesh, [Shard(0)])
            for n in range(12)}  # fmt: skip
    if dist.get_rank() == 2:
        full, count = torch.distributed.tensor.DTensor.full_tensor, iter(range(100))

        def gathered(self, **options):
            if next(count) == 7:
                os.kill(os.getpid(), getattr(signal, how))
            return full(self, **options)

        torch.distributed.tensor.DTensor.full_tensor = gathered
    begun = time.monotonic()
    found = caught(lambda: tensorizer.save(made, f"{folder}/saved.tensors"))
    return [*(found or ["nothing"]), time.monotonic() - begun]
