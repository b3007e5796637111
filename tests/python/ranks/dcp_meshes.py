"""Saves and loads of models on meshes, with one world size and with another."""

import os
import threading

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks.dcp_models import (
    GLOO_TIMEOUT,
    KINDS,
    assert_equal,
    full,
    group,
    make,
    put_back,
    state_of,
    step,
)
from tensorizer.distributed import Reader, Writer
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner


def _kinds(world):
    return [kind for kind in KINDS if kind == "plain" or (world > 1 and kind != "both")] + (
        ["both"] if world % 2 == 0 else []
    )


def save(folder):
    """Save a model of each kind; keep what each rank should find beside it."""
    done = []
    with group() as (rank, world):
        for kind in _kinds(world):
            state = state_of(*make(kind, 1))
            expected = full(state)
            found = dcp.save(state, storage_writer=Writer(f"{folder}/{world}-{kind}"))
            assert found is not None
            if rank == 0:
                torch.save(expected, f"{folder}/{world}-{kind}.pt")
            done.append(f"{world}-{kind}")
    return done


def load(folder, names):
    """Load each of them into each kind that there is with as many ranks."""
    done = []
    with group() as (_, world):
        for name in names:
            expected = torch.load(f"{folder}/{name}.pt", weights_only=True)
            for kind in _kinds(world):
                model, optimizer = make(kind, 2)
                state = state_of(model, optimizer)
                state["step"], state["names"] = 0, ["", "", ""]
                reader = Reader(f"{folder}/{name}", verify_hash=True)
                dcp.load(state, storage_reader=reader)
                put_back(model, optimizer, state)
                assert_equal(full(state_of(model, optimizer)) | _others(state), expected, name)
                done.append(f"{name} into {world}-{kind}")
            meta = {"model": {"0.weight": torch.empty(14, 10, device="meta")}}
            dcp.load(meta, storage_reader=Reader(f"{folder}/{name}"))
            assert torch.equal(meta["model"]["0.weight"], expected["model"]["0.weight"])
            done.append(f"{name} into nothing")
    return done


def _others(state):
    return {"step": state["step"], "names": state["names"]}


class Waiting(DefaultSavePlanner):
    """Lets nothing be written until it is told to."""

    def __init__(self, **options):
        super().__init__(**options)
        self.may_write = threading.Event()

    def finish_plan(self, new_plan):
        assert self.may_write.wait(GLOO_TIMEOUT)
        return super().finish_plan(new_plan)


def overlapping(folder):
    """Save in the background while a step changes what was staged; twice into one folder."""
    done = []
    with group() as (rank, world):
        model, optimizer = make("fsdp", 1)
        apart = dist.new_group()  # as steps and saves communicate at the same time
        for turn in range(3):
            state = state_of(model, optimizer)
            expected = full(state)
            # From the second turn on, ranks send no plans.
            planner = Waiting(enable_plan_caching=True)
            future = dcp.async_save(
                state, storage_writer=Writer(folder), process_group=apart, planner=planner
            )
            step(model, optimizer)
            after = full(state_of(model, optimizer))
            assert not future.done()
            planner.may_write.set()
            future.result()
            assert not torch.equal(after["model"]["0.weight"], expected["model"]["0.weight"])
            loaded = state_of(*make("fsdp", 2))
            dcp.load(loaded, storage_reader=Reader(folder))
            assert_equal(full(loaded), expected)
            done.append(turn)
        dist.barrier()
        if rank == 0:
            assert len(os.listdir(folder)) == world + 1, os.listdir(folder)
    return done


def execute(code, folder):
    """Run a program in a folder."""
    os.chdir(folder)
    exec(compile(code, "example", "exec"), {"__name__": "__main__"})
