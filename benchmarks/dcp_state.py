"""State of a trainer: a transformer and the state of Adam, sharded among ranks in dimension 0.

Bytes are pieces of one random block, so that every rank can make its own, and compare what it has
loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

#: Width, layers and words; parameters of four bytes, three of each: 1.0 GB, or 1.5 MB.
FULL, QUICK = (1024, 5, 19_900), (64, 2, 500)
#: Elements of the random block.
BLOCK = 8 << 20
KINDS = ("model", "exp_avg", "exp_avg_sq")


def shapes(size: tuple[int, int, int]) -> dict[str, tuple[int, ...]]:
    """Return the parameters."""
    width, layers, words = size
    found: dict[str, tuple[int, ...]] = {"embed.weight": (words, width)}
    for layer in range(layers):
        for name, rows, columns in (
            ("attention.qkv", 3 * width, width),
            ("attention.out", width, width),
            ("mlp.up", 4 * width, width),
            ("mlp.down", width, 4 * width),
        ):
            found[f"layers.{layer}.{name}.weight"] = (rows, columns)
            found[f"layers.{layer}.{name}.bias"] = (rows,)
        for norm in ("norm1", "norm2"):
            found[f"layers.{layer}.{norm}.weight"] = (width,)
            found[f"layers.{layer}.{norm}.bias"] = (width,)
    return found


def total_bytes(size: tuple[int, int, int]) -> int:
    """Return the bytes of all ranks."""
    return sum(3 * 4 * torch.Size(shape).numel() for shape in shapes(size).values())


class State:
    """The part of one rank."""

    def __init__(self, size: tuple[int, int, int], mesh: DeviceMesh) -> None:
        self.mesh, self.shapes = mesh, shapes(size)
        generator = torch.Generator().manual_seed(17)
        self.block = torch.randint(-(2**31), 2**31 - 1, (2 * BLOCK,), generator=generator).to(
            torch.int32
        )

    def expected(self, kind: str, name: str, local: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the bits of a tensor of this rank, piece by piece."""
        text = f"{kind} {name} {self.mesh.get_local_rank()}"
        at = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") % BLOCK
        for start in range(0, local.numel(), BLOCK):
            yield self.block[at : at + min(BLOCK, local.numel() - start)]

    def pieces(self, tensors: dict) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pieces of the tensors, and what they are to be."""
        for kind, named in tensors.items():
            for name, tensor in named.items():
                bits = tensor.to_local().view(-1).view(torch.int32)
                at = 0
                for piece in self.expected(kind, name, bits):
                    yield bits[at : at + len(piece)], piece
                    at += len(piece)

    def make(self, filled: bool) -> dict[str, dict[str, torch.Tensor]]:
        """Return the state: what is to be saved, or memory that was touched, to load into."""
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

    def verify(self, tensors: dict) -> bool:
        """Compare every byte."""
        return all(torch.equal(found, expected) for found, expected in self.pieces(tensors))
