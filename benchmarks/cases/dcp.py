"""Distributed checkpoints, beside the writers and readers of torch.

The state of a trainer: a transformer and both moments of Adam, float32, cut among the ranks in
dimension 0. Bytes are pieces of one random block, so that every rank can make its own, and compare
what it has loaded.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from harness import baselines
from harness.case import Case, Engine, Given, Measured
from harness.process import cpu_seconds, ranks, status

#: Width, layers and words; parameters of four bytes, three of each: 1.0 GB, or 1.5 MB.
SIZES = ((1024, 5, 19_900), (64, 2, 500))
#: Elements of the random block.
BLOCK = 8 << 20
KINDS = ("model", "exp_avg", "exp_avg_sq")


def shapes(quick: bool) -> dict[str, tuple[int, ...]]:
    """Return the parameters."""
    width, layers, words = SIZES[quick]
    found: dict[str, tuple[int, ...]] = {"embed.weight": (words, width)}
    for layer in range(layers):
        for name, rows, columns in (
            ("attention.qkv", 3 * width, width), ("attention.out", width, width),
            ("mlp.up", 4 * width, width), ("mlp.down", width, 4 * width),
        ):  # fmt: skip
            found[f"layers.{layer}.{name}.weight"] = (rows, columns)
            found[f"layers.{layer}.{name}.bias"] = (rows,)
        for name in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"):
            found[f"layers.{layer}.{name}"] = (width,)
    return found


class State:
    """The part of one rank."""

    def __init__(self, quick: bool) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        self.mesh, self.shapes = init_device_mesh("cpu", (dist.get_world_size(),)), shapes(quick)
        generator = torch.Generator().manual_seed(17)
        self.block = torch.randint(-(2**31), 2**31 - 1, (2 * BLOCK,), generator=generator).to(
            torch.int32
        )

    def pieces(self, tensors: dict) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pieces of the tensors, and the bits that they are to have."""
        for kind, named in tensors.items():
            for name, tensor in named.items():
                text = f"{kind} {name} {self.mesh.get_local_rank()}"
                first = hashlib.sha256(text.encode()).digest()[:4]
                at = int.from_bytes(first, "little") % BLOCK
                for piece in tensor.to_local().view(-1).view(torch.int32).split(BLOCK):
                    yield piece, self.block[at : at + len(piece)]

    def make(self, filled: bool) -> dict[str, dict[str, torch.Tensor]]:
        """Return the state to be saved, or touched memory to load into."""
        from torch.distributed.tensor import DTensor, Shard

        world, rank = self.mesh.size(), self.mesh.get_local_rank()
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        for kind in KINDS:
            tensors[kind] = {}
            for name, shape in self.shapes.items():
                rows = len(range(shape[0])[rank * -(-shape[0] // world) :][: -(-shape[0] // world)])
                local = torch.empty(rows, *shape[1:]).fill_(0)
                stride = torch.empty(shape, device="meta").stride()
                tensors[kind][name] = DTensor.from_local(
                    local, self.mesh, [Shard(0)], shape=torch.Size(shape), stride=stride
                )
        if filled:
            for found, expected in self.pieces(tensors):
                found.copy_(expected)
        return tensors


def of_torch(name: str, folder: str, **options: Any) -> Any:
    """Return a writer or reader of torch."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import _fsspec_filesystem, hf_storage

    modules = {"F": checkpoint, "H": hf_storage}
    module = _fsspec_filesystem if name.startswith("Fsspec") else modules[name[0]]
    return getattr(module, name)(folder, **options)


def of_ours(name: str, folder: str, **options: Any) -> Any:
    """Return this package's writer or reader."""
    from tensorizer import distributed

    return getattr(distributed, name)(folder, **options)


#: Constructors of the writer and of the reader of each engine. All writers sync.
BOTH: dict[str, tuple[Callable[[str], Any], Callable[[str], Any]]] = {
    "tensorizer": (lambda f: of_ours("Writer", f), lambda f: of_ours("Reader", f)),
    # CRC-32 is in files of torch.save too, but torch does not compare it.
    "tensorizer crc32": (
        lambda f: of_ours("Writer", f, hashes="crc32"),
        lambda f: of_ours("Reader", f, verify_hash="crc32"),
    ),
    "FileSystem": (
        lambda f: of_torch("FileSystemWriter", f, sync_files=True),
        lambda f: of_torch("FileSystemReader", f),
    ),
    "FileSystem tuned": (
        lambda f: of_torch("FileSystemWriter", f, sync_files=True, single_file_per_rank=False,
                           thread_count=2),
        lambda f: of_torch("FileSystemReader", f),
    ),
    "HuggingFace": (
        lambda f: of_torch("HuggingFaceStorageWriter", f, save_distributed=True),
        lambda f: of_torch("HuggingFaceStorageReader", f),
    ),
    "Fsspec": (lambda f: of_torch("FsspecWriter", f), lambda f: of_torch("FsspecReader", f)),
}  # fmt: skip
IMPORTS = ("tensorizer.distributed", "torch.distributed.checkpoint", "torch._dynamo",
           "torch.distributed.tensor", "torch.distributed.device_mesh")  # fmt: skip


def rank(name: str, saves: bool, folder: str, quick: bool) -> tuple[float, float, int, bool, int]:
    """Save or load as a rank: seconds, CPU seconds, memory, whether bytes were right, bytes."""
    import torch.distributed as dist
    from torch.distributed import checkpoint

    state = State(quick)
    tensors = state.make(filled=saves)
    Path("/proc/self/clear_refs").write_text("5")
    memory, cpu = status("VmHWM"), cpu_seconds()
    dist.barrier()
    start = time.perf_counter()
    made = BOTH[name][0 if saves else 1](folder)
    if saves:
        checkpoint.save(tensors, storage_writer=made)
    else:
        checkpoint.load(tensors, storage_reader=made)
    dist.barrier()
    seconds, cpu, memory = (
        time.perf_counter() - start,
        cpu_seconds() - cpu,
        status("VmHWM") - memory,
    )
    if saves:
        # What is compared is what the files have, and not what was to be written.
        tensors = state.make(filled=False)
        checkpoint.load(tensors, storage_reader=BOTH[name][1](folder))
    right = all(torch.equal(found, expected) for found, expected in state.pieces(tensors))
    size = sum(one.to_local().nbytes for named in tensors.values() for one in named.values())
    return seconds, cpu, memory, right, size


def together(name: str, world: int, saves: bool) -> Callable[[Given], Measured]:
    """Return a save or load by several ranks."""

    def run(given: Given) -> Measured:
        if saves:
            os.sync()  # a save need not wait for what others have written
        found = ranks(world, rank, name, saves, f"{given.target}/checkpoint", given.quick)
        seconds, cpu, memory, right, size = zip(*found, strict=True)
        return Measured(max(seconds), sum(size), sum(cpu), {}, all(right), sum(memory))

    return run


def engine(name: str, world: int, saves: bool) -> Engine:
    """Return an engine; one that loads has saved before all rounds."""
    imports = (*IMPORTS, *(("s3fs",) if name == "Fsspec" else ()))
    make = None if saves else together(name, world, saves=True)
    more = {"env": {"PYTHONWARNINGS": "ignore"}, "site": "s3fs" if name == "Fsspec" else ""}
    return Engine(name, together(name, world, saves), "", imports, make=make, touch=False, **more)


LOCAL = ("tensorizer", "tensorizer crc32", "FileSystem", "FileSystem tuned", "HuggingFace")
#: torch's HuggingFaceStorageWriter has no other file system than the local one.
REMOTE = ("tensorizer", "tensorizer crc32", "Fsspec")
TOY = ("tensorizer", "FileSystem")


def cases(world: int) -> Iterator[Case]:
    """Yield the cases of a number of ranks."""
    by = f"{world} rank{'s' * (world > 1)}"
    toy = TOY if world == 2 else None
    for name, title, saves, names, beside, more in (
        ("save", "a disk", True, LOCAL, (baselines.WRITE, baselines.WRITE_DIRECT), {}),
        ("load", "the page cache", False, LOCAL, (baselines.COPY_READ,), {}),
        ("load-cold", "a disk, nothing in the page cache", False, (*TOY, "HuggingFace"),
         (baselines.DIRECT,), {"cold": True}),
        ("save-s3", "S3 on this machine", True, REMOTE, (), {"server": "objects"}),
        ("load-s3", "S3 on this machine", False, REMOTE, (), {"server": "objects"}),
    ):  # fmt: skip
        engines = (*(engine(one, world, saves) for one in names), *beside)
        what = f"{'save a checkpoint to' if saves else 'load a checkpoint from'} {title}, {by}"
        yield Case(f"dcp/{name}-{world}", what, engines, "adam", quick=toy, **more)


CASES = [case for world in (1, 2, 4) for case in cases(world)]
