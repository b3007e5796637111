"""Tensors one by one for groups."""

import ctypes
import datetime
import itertools
import os
import resource
import signal
import threading
import time
from pathlib import Path

from ranks.common import assert_equal, caught, cut, dist, fetch_together, group, tensorizer, torch
from ranks.groups import BATCH, of_kind, same


def iterate(uri, **options):
    """Begin to take tensors together with the other ranks, a few at a time."""
    options = {"buffer_bytes": 100_000, "group": dist.group.WORLD} | options
    return tensorizer.iterate(uri, "cpu", **options)


def every_format(folder, kinds):
    """Every rank takes all tensors, and others of the same group load in between."""
    fetch_together(BATCH)
    with group() as (_, _):
        for kind in kinds:
            uri, options, made = of_kind(folder, kind)
            iterator = iterate(uri, buffer_bytes=300_000, **options)
            first = [next(iterator)]
            loaded = tensorizer.load(uri, group=dist.group.WORLD, **options)
            same({name: loaded[name] for name in made}, made, kind)
            found = dict(first + list(iterator))
            assert found.keys() == made.keys()
            same({name: found[name] for name in made}, made, kind)
            # Of those that are held, none has the memory of another.
            ends = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in found.values())
            assert all(one[1] <= other[0] for one, other in itertools.pairwise(ends))


def other_wants(folder):
    """Ranks take other tensors, other slices of one, other shards, or none."""
    fetch_together(BATCH)
    with group() as (rank, world):
        for kind in ("tensors", "enc.tensors", "pt"):
            uri, options, made = of_kind(folder, kind)
            names = ["rows", "words"] if rank else ["cube", "rows"]
            slices = {"rows": (slice(rank, 200 + rank), slice(rank, None))}
            found = dict(iterate(uri, names=names, slices=slices, **options))
            assert sorted(found) == sorted(names)
            for name, tensor in found.items():
                assert torch.equal(tensor, made[name][slices.get(name, ...)]), name
            shard = tensorizer.Shard(rank, rank=rank, world=world)
            found = dict(iterate(uri, names=["rows", "cube"], shard=shard, **options))
            for name, tensor in found.items():
                assert_equal(tensor, cut(made[name], rank, world, rank), name)
            found = dict(iterate(uri, names=["cube"] if rank else [], **options))
            same(found, {"cube": made["cube"]} if rank else {})
            found = dict(iterate(uri, dtype=torch.float64, buffer_bytes=1 + rank, **options))
            assert_equal(found["rows"], made["rows"].double())


def closed_early(folder):
    """The others need not wait for a rank that takes no more."""
    fetch_together(BATCH)
    with group() as (rank, _):
        uri, _, made = of_kind(folder, "tensors")
        iterator = iterate(uri)
        next(iterator)
        if rank == 0:
            iterator.close()
            error = "GroupError"
        else:
            error, _ = caught(lambda: list(iterator))
        # Later calls are mixed up with nothing of it.
        same(tensorizer.load(uri, group=dist.group.WORLD), made)
        return error


def closed_by_another_thread(folder, rounds):
    """A waiting thread sees that its iterator was closed; the other rank, by which rank.

    From round to round it is closed later: before the thread exchanges something, or after.
    """
    fetch_together(BATCH)
    seen = []
    with group() as (rank, _):
        uri, _, _ = of_kind(folder, "tensors")
        for number in range(rounds):
            iterator = iterate(uri)
            next(iterator)
            if rank:
                dist.barrier()
                seen.append(caught(lambda one=iterator: list(one)))
                continue
            found = []

            def run(one=iterator, found=found):
                found.append(caught(lambda: list(one)))

            thread = threading.Thread(target=run)
            thread.start()
            while iterator._waiting_thread is None and thread.is_alive():
                time.sleep(0)
            time.sleep(1e-3 * number)
            iterator.close()
            thread.join()
            # Only now does the other rank ask for tensors.
            dist.barrier()
            seen += found
    return sorted(map(tuple, seen))


def time_limit(folder):
    """The other rank does not come; it is not the group that has failed."""
    with group() as (rank, _):
        uri, _, _ = of_kind(folder, "tensors")
        if rank == 0:
            begun = time.monotonic()
            error, text = caught(
                lambda: tensorizer.load(uri, "cpu", group=dist.group.WORLD, timeout=1)
            )
            assert time.monotonic() - begun < 30
            Path(folder, "late").touch()
            return [error, "timeout=1 s passed while waiting for the other members" in text]
        until = time.monotonic() + 60
        while not Path(folder, "late").exists() and time.monotonic() < until:
            time.sleep(0.01)
        return []


def slow_rank(folder):
    """The other rank comes, and then takes no more."""
    fetch_together(BATCH)
    with group() as (rank, _):
        uri, _, _ = of_kind(folder, "tensors")
        begun = time.monotonic()
        if rank == 0:
            error, text = caught(lambda: list(iterate(uri, timeout=3)))
            assert time.monotonic() - begun < 30
            Path(folder, "late").touch()
            return [error, "timeout=3 s passed while waiting for the other members" in text]
        iterator = iterate(uri)
        next(iterator)
        while not Path(folder, "late").exists() and time.monotonic() < begun + 60:
            time.sleep(0.01)
        return [caught(lambda: list(iterator))[0]]


def fail(*_):
    raise OSError(5, "Input/output error", "somewhere")


def interrupt(*_):
    raise KeyboardInterrupt


def errors(folder):
    """Fail at rank 1 at the call and on the way; return what each rank says."""
    fetch_together(BATCH)
    found = {}
    with group() as (rank, _):
        uri, _, made = of_kind(folder, "tensors")
        damaged, there = f"{folder}/damaged.tensors", rank == 1
        calls = {
            "name": lambda: iterate(uri, names=["nope"] if there else ["rows"]),
            "slice": lambda: iterate(uri, slices={"rows": (5, 0, 1)} if there else None),
            "file": lambda: iterate(f"{uri}.none" if there else uri),
            "hash": lambda: list(iterate(damaged, verify_hash=True)),
            "progress": lambda: list(iterate(uri, progress=fail if there else False)),
            "interrupt": lambda: list(iterate(uri, progress=interrupt if there else False)),
            "order": lambda: iterate(uri, order="ready"),
        }
        for name, call in calls.items():
            found[name] = caught(call)
            same(tensorizer.load(uri, group=dist.group.WORLD, names=["t0"]), {"t0": made["t0"]})
    return found


def killed(folder):
    """Lose rank 1 between two tensors."""
    fetch_together(BATCH)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    uri, _, _ = of_kind(folder, "tensors")
    iterator = iterate(uri)
    next(iterator)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    return [*caught(lambda: list(iterator)), time.monotonic() - begun]


def traffic(uri, count):
    """Take the tensors of a file, of which every rank has the same, from a server."""
    with group():
        taken = 0
        for name, tensor in iterate(uri, buffer_bytes=16 << 20):
            assert_equal(tensor, torch.full_like(tensor, int(name.removeprefix("w"))))
            taken += 1
        assert taken == count


def memory(uri, buffer_bytes, columns):
    """Return by how much taking tensors that are dropped raises the most memory of this rank."""

    def most():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    # M_MMAP_THRESHOLD: what is freed goes back to the system.
    assert ctypes.CDLL(None).mallopt(-3, 1 << 20)
    with group() as (rank, world):
        shard = tensorizer.Shard(1, rank, world) if columns else None
        # Code and connections take memory once.
        next(tensors := iterate(uri, buffer_bytes=1 << 20, shard=shard))
        tensors.close()
        before = most()
        for name, tensor in iterate(uri, buffer_bytes=buffer_bytes, shard=shard):
            assert (tensor == int(name.removeprefix("w"))).all()
            del tensor
        return most() - before


def local_files(folder):
    """Of a local file each rank reads what it wants; none waits for another."""
    with group() as (rank, _):
        uri, _, made = of_kind(folder, "tensors")
        iterator = iterate(uri, names=["rows"] if rank else None)
        next(iterator)
        if rank == 0:
            iterator.close()
        else:
            assert list(iterator) == []
        same(tensorizer.load(uri, group=dist.group.WORLD), made)
