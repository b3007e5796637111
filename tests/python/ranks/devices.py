"""Loads by groups of which the ranks have CUDA devices."""

import ctypes
import datetime

from ranks.common import (
    WAIT,
    Shard,
    assert_equal,
    counting_shares,
    cut,
    dist,
    fetch_together,
    os,
    placed,
    tensorizer,
    torch,
)
from ranks.groups import BATCH, large, of_kind
from torch.distributed.device_mesh import init_device_mesh


def load(folder, backend):
    """Load to the device of each rank: whole tensors, parts, DTensors and memory that is there."""
    fetch_together(BATCH)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=WAIT))
    uri, _, _ = of_kind(folder, "tensors")
    made = large()

    def loaded(**options):
        return tensorizer.load(uri, group=dist.group.WORLD, **options)

    for options in ({}, {"verify_hash": True}):
        found = loaded(device="cuda", **options)
        assert found.keys() == made.keys()
        for name, tensor in found.items():
            assert tensor.device == device
            assert_equal(tensor, made[name], name)
    shard = tensorizer.Shard(0, rank, world)
    found = loaded(device="cuda", names=["rows"], shard=shard)
    assert_equal(found["rows"], cut(made["rows"], 0, world, rank))
    out = {"rows": torch.zeros(300, 200, device=device), "cube": torch.zeros(3, 40, 90)}
    loaded(out=out)
    for name, tensor in out.items():
        assert_equal(tensor, made[name], name)
    if backend == "nccl":
        mesh = init_device_mesh("cuda", (world,))
        like = {"rows": placed(made["rows"].to(device), mesh, [Shard(1)])}
        found = loaded(like=like)
        assert_equal(found["rows"].to_local(), like["rows"].to_local())
    # The ranks of one group may want tensors on different devices.
    found = loaded(device="cuda" if rank else "cpu", names=["words"])
    assert found["words"].is_cuda == bool(rank)
    assert_equal(found["words"], made["words"])
    dist.barrier()
    dist.destroy_process_group()


def over_the_bus(folder, backend):
    """Load a file to the device of each rank; return the bytes that each rank wants, has read, and
    has sent over the bus, which only the emulated CUDA counts.
    """
    fetch_together()
    copied = getattr(ctypes.CDLL(None), "fake_cuda_stat", lambda _: 0)
    copied.restype, copied.argtypes = ctypes.c_uint64, [ctypes.c_char_p]
    rank, uri, wanted = int(os.environ["RANK"]), f"{folder}/bus.tensors", 12 << 20
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=WAIT))
    if rank == 0:
        tensorizer.save({f"w{n}": torch.full((1 << 18,), float(n)) for n in range(12)}, uri)
    dist.barrier()
    read, before = counting_shares(), copied(b"bytes copied")
    found = tensorizer.load(uri, "cuda", group=dist.group.WORLD)
    torch.cuda.synchronize()
    sent = copied(b"bytes copied") - before
    for name, tensor in found.items():
        assert tensor.is_cuda
        assert_equal(tensor, torch.full((1 << 18,), float(name.removeprefix("w"))), name)
    dist.barrier()
    dist.destroy_process_group()
    return wanted, sum(read), sent
