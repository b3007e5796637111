"""Loads of a file that is not in the page cache, by several processes of one machine."""

import ctypes
import mmap
import os
import time

from ranks.common import dist, group, tensorizer, torch


def pages_in_memory(file):
    """Return how many pages of a file are in the page cache."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapping:
        first = ctypes.c_char.from_buffer(mapping)
        found = (ctypes.c_ubyte * -(-len(mapping) // mmap.PAGESIZE))()
        size = ctypes.c_size_t(len(mapping))
        assert ctypes.CDLL(None).mincore(ctypes.byref(first), size, found) == 0
        del first
    return sum(one & 1 for one in found)


def forget(path):
    """Take a file out of the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        until = time.monotonic() + 60
        while True:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            # The kernel leaves pages that it uses itself at this moment.
            if not pages_in_memory(file):
                break
            assert time.monotonic() < until, f"{path} stays in the page cache"
            time.sleep(0.01)


def bytes_from_disk():
    """Return how many bytes this process has had read from disks."""
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("read_bytes"))


def together(path, as_group):
    """Load at all ranks at once; return the bytes that this one has had read from the disk."""
    with group():
        dist.barrier()
        before = bytes_from_disk()
        options = {"group": dist.group.WORLD} if as_group else {}
        loaded = tensorizer.load(path, "cpu", **options)
        assert tensorizer.stats()["reading"] == "page cache"
        read = bytes_from_disk() - before
        sums = [int(tensor.sum(dtype=torch.int64)) for tensor in loaded.values()]
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, sums)
        assert found == [sums] * len(found)
    return read
