"""Jobs that save into one folder at the same time, and a process that loads from it meanwhile."""

import os
import signal
import threading
import time

import torch
import torch.distributed.checkpoint as dcp
from ranks.common import group
from ranks.dcp_failures import ROWS, state_of
from tensorizer.distributed import Reader, Writer
from torch.distributed.checkpoint.api import CheckpointException


def value_of(folder, columns):
    """Return the number that a whole checkpoint is full of."""
    target = {"rows": torch.zeros(2 * ROWS, columns), "value": 0}
    dcp.load(target, storage_reader=Reader(folder, verify_hash=True), no_dist=True)
    ends = {end.item() for end in target["rows"].aminmax()}
    assert ends == {target["value"]}, f"a mixture: {ends} and {target['value']}"
    return target["value"]


def save(folder, columns, first, count, seconds):
    """Save one value after the other as a rank of the job of its environment; return those saved.

    A rank with KILL_AFTER is killed so many seconds after its job began. The process of JOB=reader
    loads for some seconds.
    """
    if os.environ["JOB"] == "reader":
        return read(folder, columns, seconds)
    first += 1000 * int(os.environ["JOB"])
    saved, error, start = [], None, None
    try:
        with group() as (rank, world):
            after = os.environ.get("KILL_AFTER")
            if after:
                threading.Timer(float(after), os.kill, (os.getpid(), signal.SIGKILL)).start()
            start = time.monotonic()
            for value in range(first, first + count):
                dcp.save(state_of(rank, world, value, columns), storage_writer=Writer(folder))
                saved.append(value)
    except (CheckpointException, RuntimeError) as found:
        # The other rank was killed.
        error = f"{type(found).__name__}: {found}"
    return {"saved": saved, "error": error, "seconds": time.monotonic() - start}


def read(folder, columns, seconds):
    """Load again and again; return the values that were found, and how often a file was gone."""
    seen, gone = [], 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            seen.append(value_of(folder, columns))
        except CheckpointException as error:
            failures = [one for one, _ in error.failures.values()]
            assert all(isinstance(one, FileNotFoundError) for one in failures), failures
            gone += 1
    return {"seen": seen, "gone": gone}
