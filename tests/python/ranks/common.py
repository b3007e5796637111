"""Shared code of the programs of ranks: a process group, models on meshes, comparisons."""

import contextlib
import datetime
import os

import tensorizer
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # before ranks are forked
from tensorizer.file import collective_load, open_file
from tensorizer.group import blocks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

#: Ways to distribute the parameters of a model.
KINDS = ("plain", "fsdp", "hsdp", "tp", "both")
#: Seconds that a rank waits for others, unless a program says otherwise.
WAIT = 60


@contextlib.contextmanager
def group(wait=WAIT):
    """Join the process group that the environment names; yield the rank and their number."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=wait))
    try:
        yield dist.get_rank(), dist.get_world_size()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def fetch_together(batch_bytes=None):
    """Have local files fetched together too, as if ranks were on machines of their own."""
    collective_load._machine = lambda: None
    if batch_bytes is not None:
        blocks._MOST_BYTES, blocks._SMALLEST_SHARE = batch_bytes, 1


def counting_shares():
    """Return a list to which the bytes are added that this rank reads for a group from now on."""
    counts, fill = [], open_file.OpenFile.fill

    def counting(self, tensors, *args):
        counts.append(sum(tensor.nbytes for tensor in tensors))
        return fill(self, tensors, *args)

    open_file.OpenFile.fill = counting
    return counts


def mesh_of(kind, device="cpu"):
    """Return the mesh of a kind of model, of all ranks."""
    world = dist.get_world_size()
    if kind in ("both", "hsdp"):
        return init_device_mesh(device, (2, world // 2), mesh_dim_names=("outer", "inner"))
    return init_device_mesh(device, (world,), mesh_dim_names=("all",))


class Net(torch.nn.Module):
    """Layers of which hardly any dimension is a multiple of the ranks, with a tied parameter."""

    def __init__(self, width=14):
        super().__init__()
        self.words = torch.nn.Embedding(11, 6)
        self.up = torch.nn.Linear(6, width)
        self.down = torch.nn.Linear(width, 6, bias=False)
        self.norm = torch.nn.BatchNorm1d(6)
        self.out = torch.nn.Linear(6, 11)
        self.out.weight = self.words.weight
        self.register_buffer("scale", torch.full((3,), 0.5))
        self.norm.weight.requires_grad_(False)

    def forward(self, numbers):
        hidden = self.down(torch.relu(self.up(self.words(numbers))))
        return self.out(self.norm(hidden)) * self.scale[0]


def whole_net(seed=1):
    """Return the model that every rank has as a whole."""
    torch.manual_seed(seed)
    net = Net()
    # Buffers of its own, which are drawn: sums differ in their last bits by the count of threads.
    net.norm.running_mean.normal_()
    net.norm.running_var.uniform_(0.5, 2)
    net.norm.num_batches_tracked.add_(1)
    return net.eval()


def net_of(kind, *, meta=False, seed=2):
    """Return a model that is distributed in one way; its values are not those of `whole_net`."""
    torch.manual_seed(seed)
    with torch.device("meta" if meta else "cpu"):
        net = Net().eval()
    mesh = mesh_of(kind)
    if kind in ("tp", "both"):
        parallelize_module(
            net,
            mesh["inner"] if kind == "both" else mesh,
            {"up": ColwiseParallel(), "down": RowwiseParallel()},
        )
    if kind == "hsdp":
        fully_shard(net, mesh=mesh)
    if kind in ("fsdp", "both"):
        # Tied parameters are in one group.
        for layer in (net.up, net.down):
            fully_shard(layer, mesh=mesh["outer"] if kind == "both" else mesh)
        fully_shard(net, mesh=mesh["outer"] if kind == "both" else mesh)
    return net


def placed(tensor, mesh, placements):
    """Return the part of this rank of a tensor that all ranks have, without an exchange."""
    return distribute_tensor(tensor.clone(), mesh, placements, src_data_rank=None)


def as_whole(tensor):
    """Return a tensor as all ranks have it together."""
    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_equal(found, expected, what=""):
    """Compare tensors of every dtype, bit for bit."""
    assert found.dtype == expected.dtype and found.shape == expected.shape, (
        what, found.dtype, found.shape, expected.dtype, expected.shape,
    )  # fmt: skip
    left, right = (one.detach().cpu().contiguous() for one in (found, expected))
    assert torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)), (
        what, found, expected,
    )  # fmt: skip


def assert_same_state(net, whole, what=""):
    """Compare the parameters and buffers of a model with those of one that is whole."""
    expected = dict(whole.named_parameters()) | dict(whole.named_buffers())
    found = dict(net.named_parameters()) | dict(net.named_buffers())
    assert found.keys() == expected.keys(), what
    for name, tensor in found.items():
        assert_equal(as_whole(tensor), expected[name], (what, name))


def tensors(seed=0):
    """Return tensors whose dimensions are no multiples of anything."""
    torch.manual_seed(seed)
    shapes = [(10, 6), (7, 5), (3,), (1, 9), (16, 16), (0, 4), (5, 4, 3), ()]
    made = {f"t{number}": torch.randn(shape) for number, shape in enumerate(shapes)}
    made["half"] = torch.arange(77).to(torch.bfloat16)
    made["bool"] = torch.arange(6) % 2 == 0
    made["wide"] = torch.arange(40, dtype=torch.int64).view(2, 20)
    made["complex"] = torch.randn(4, 3, dtype=torch.complex64)
    made["small"] = torch.randn(9, 3).to(torch.float8_e4m3fn)
    return made


def cut(tensor, dim, count, index):
    """Return what ``torch.chunk`` gives a rank."""
    parts = tensor.chunk(count, dim)
    return parts[index] if index < len(parts) else tensor.narrow(dim, 0, 0)


def caught(call):
    """Return the class and the message of what a call raises."""
    try:
        call()
    except BaseException as error:
        return [type(error).__name__, str(error)]
    return None


__all__ = [
    "KINDS", "WAIT", "DTensor", "Net", "Replicate", "Shard", "as_whole", "assert_equal",
    "assert_same_state", "caught", "cut", "dist", "fetch_together", "group",
    "mesh_of", "net_of", "os", "placed", "tensorizer", "tensors", "torch", "whole_net",
]  # fmt: skip
