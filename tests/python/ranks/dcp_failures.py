"""Saves and loads that fail on one rank, or in which one is killed."""

import functools
import os
import resource
import signal
import threading
import time
from unittest import mock

import faults
import tensorizer
import torch
import torch.distributed.checkpoint as dcp
from ranks.dcp_models import group
from tensorizer.distributed import Reader, Writer, writer as writer_module
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

#: Rows of what each rank saves; how many bytes depends on the columns.
ROWS = 100


def state_of(rank, world, value, columns=1000):
    """Return a tensor of which each rank has rows, and what is no tensor."""
    mesh = init_device_mesh("cpu", (world,))
    local = torch.full((ROWS, columns), float(value))
    return {"rows": DTensor.from_local(local, mesh, [Shard(0)]), "value": value}


def save(folder, value, columns=1000):
    """Save; a rank with KILL_AFTER is killed so many seconds after it began."""
    with group() as (rank, world):
        state = state_of(rank, world, value, columns)
        after = os.environ.get("KILL_AFTER")
        if after:
            threading.Timer(float(after), os.kill, (os.getpid(), signal.SIGKILL)).start()
        start = time.monotonic()
        dcp.save(state, storage_writer=Writer(folder))
        os.environ.pop("FAULT_KILL_AT", None)
        faults.read()
        return time.monotonic() - start


def _failed(call):
    """Return the names of the errors by rank."""
    try:
        call()
    except CheckpointException as error:
        return {
            rank: [type(one).__name__, getattr(one, "errno", None), str(one)]
            for rank, (one, _) in error.failures.items()
        }
    return {}


def full(folder, value):
    """Save where the last rank may not write so much."""
    with group() as (rank, world):
        state = state_of(rank, world, value)
        if rank == world - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        found = _failed(lambda: dcp.save(state, storage_writer=Writer(folder)))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        return found


def of_passphrase(passphrase):
    """Return parameters with the least work for the derivation of a key."""
    return tensorizer.EncryptionParams.from_string(passphrase, opslimit=1, memlimit=1 << 13)


def keys(folder):
    """Save with a key of each rank, of one passphrase; load with it, and with another on one."""
    with group() as (rank, world):
        encryption = of_passphrase("a passphrase-hu5hw0rd")
        state = state_of(rank, world, 3)
        dcp.save(state, storage_writer=Writer(folder, encryption=encryption))
        decryption = tensorizer.DecryptionParams.from_string
        target = state_of(rank, world, 0)
        dcp.load(
            target, storage_reader=Reader(folder, encryption=decryption("a passphrase-hu5hw0rd"))
        )
        assert (target["rows"].to_local() == 3).all()
        assert target["value"] == 3
        given = decryption("another" if rank == 1 else "a passphrase-hu5hw0rd")
        return _failed(lambda: dcp.load(target, storage_reader=Reader(folder, encryption=given)))


def verify(folder, value):
    """Load with hashes compared, and without them."""
    with group() as (rank, world):
        target = state_of(rank, world, 0)
        reader = Reader(folder, verify_hash=True)
        found = _failed(lambda: dcp.load(target, storage_reader=reader))
        dcp.load(target, storage_reader=Reader(folder))
        assert target["value"] == value
        return found


def one_elsewhere(folder, elsewhere):
    """Load where one rank finds something else than the others, by its constructor or later."""
    with group() as (rank, world):
        found = []
        for at in range(world):
            place = elsewhere if rank == at else folder
            for planner in (None, default_planner._EmptyStateDictLoadPlanner()):
                target = state_of(rank, world, 0) if planner is None else {}
                call = functools.partial(_load_state_dict, target, planner=planner)
                found.append(_failed(lambda: call(storage_reader=Reader(place))))  # noqa: B023
            target = state_of(rank, world, 0)
            call = functools.partial(dcp.load, target, checkpoint_id=place)
            found.append(_failed(lambda: call(storage_reader=Reader())))  # noqa: B023
        # And the group is still of use.
        target = state_of(rank, world, 0)
        dcp.load(target, storage_reader=Reader(folder))
        return found, target["value"]


def retried(folder):
    """Save with one writer into one folder: fails, then does not."""
    with group() as (rank, world):
        writer = Writer(folder)
        state = state_of(rank, world, 1)
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        assert list(_failed(lambda: dcp.save(state, storage_writer=writer))) == [0]
        left = len(os.listdir(folder))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        dcp.save(state, storage_writer=writer)
        return [left, len(os.listdir(folder))]


def s3(folder, value):
    """Save to an address and load from it."""
    with group() as (rank, world):
        dcp.save(state_of(rank, world, value), storage_writer=Writer(folder))
        target = state_of(rank, world, 0)
        dcp.load(target, storage_reader=Reader(folder, verify_hash=True))
        return bool((target["rows"].to_local() == value).all()) and target["value"] == value


class Breaks(default_planner.DefaultSavePlanner):
    """Gives all but the last item."""

    def resolve_data(self, write_item):
        if write_item is self.plan.items[-1]:
            raise ValueError("no more")
        return super().resolve_data(write_item)


def broken_upload(folder, value):
    """Save what one rank fails to give once it has sent parts of its object."""
    with group() as (rank, world):
        state = {"more": state_of(rank, world, value)["rows"]} | state_of(
            rank, world, value, 60_000
        )
        planner = Breaks() if rank == 1 else None
        with mock.patch.object(writer_module, "_BATCH_BYTES", 1):
            return _failed(lambda: dcp.save(state, storage_writer=Writer(folder), planner=planner))


def in_a_process(folder, value):
    """Save in the background by other processes."""
    with group() as (rank, world):
        future = dcp.async_save(
            state_of(rank, world, value),
            storage_writer=Writer(folder, encryption=of_passphrase("p-hu5hw0rd")),
            async_checkpointer_type=dcp.state_dict_saver.AsyncCheckpointerType.PROCESS,
        )
        future.result()
        target = state_of(rank, world, 0)
        decryption = tensorizer.DecryptionParams.from_string("p-hu5hw0rd")
        dcp.load(target, storage_reader=Reader(folder, encryption=decryption))
        return target["value"]
