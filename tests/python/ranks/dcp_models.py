"""A model on a mesh with its optimizer, which ranks save and load."""

import contextlib
import datetime
import os

import tensorizer.distributed  # noqa: F401  # before ranks are forked
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp  # noqa: F401
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

#: Seconds that a rank waits for another.
GLOO_TIMEOUT = 60
#: Ways to distribute the parameters.
KINDS = ("plain", "fsdp", "tp", "both")


@contextlib.contextmanager
def group(timeout=GLOO_TIMEOUT):
    """Join the process group that the environment names; yield the rank and their number."""
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", timeout=limit)
    try:
        yield dist.get_rank(), dist.get_world_size()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def make(kind, seed):
    """Return a model after one step, and its optimizer. No dimension is a multiple of the ranks."""
    torch.manual_seed(seed)
    world = int(os.environ["WORLD_SIZE"])
    model = torch.nn.Sequential(
        torch.nn.Linear(10, 14), torch.nn.Linear(14, 9), torch.nn.Embedding(11, 6),
        torch.nn.Linear(3, 1),
    )  # fmt: skip
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
    if kind == "tp":
        parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
    if kind == "both":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], plan)
        for layer in model:
            fully_shard(layer, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed, weight_decay=0.01)
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    """Change every parameter and moment."""
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    optimizer.zero_grad()


def state_of(model, optimizer):
    """Return what a trainer saves."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optim": of_optimizer, "step": 7, "names": ["a", None, 2.5]}


def put_back(model, optimizer, state):
    """Give a model and an optimizer what was loaded."""
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )


def full(value):
    """Return copies of what is nested, with DTensors as wholes."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: full(one) for name, one in value.items()}
    if isinstance(value, list):
        return [full(one) for one in value]
    return value


def assert_equal(found, expected, where=""):
    """Every bit of every tensor, and everything else."""
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name, one in expected.items():
            assert_equal(found[name], one, f"{where}.{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for number, one in enumerate(expected):
            assert_equal(found[number], one, f"{where}.{number}")
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, where
        assert torch.equal(found, expected), where
    else:
        assert found == expected, where
