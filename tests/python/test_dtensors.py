"""Loading what a process has of tensors: DTensors of every placement, and shards."""

import itertools
import math
import random

import pytest
import tensorizer
import torch
from ranks import dtensors, modules
from ranks.common import cut
from tensorizer import Shard
from tensorizer.tensors import sharding
from tensorizer.tensors.sharding import Part
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard as Sharded
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

MESHES = [(4,), (7,), (2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (2, 8), (2, 2, 2), (3, 1, 2)]
SIZES = (0, 1, 2, 3, 5, 6, 7, 8, 11, 16, 17)


def joined(part, whole):
    """Return a part of a tensor, put together from its boxes."""
    if part is None:
        return whole
    found = torch.full(part.shape, -1, dtype=whole.dtype)
    for box in part.boxes:
        box.of_part(found).copy_(box.of_whole(whole))
    assert (found >= 0).all(), "boxes do not cover the part"
    assert sum(math.prod(box.shape) for box in part.boxes) == found.numel(), "boxes overlap"
    return found


# Shards of ranks that know nothing of DTensors


def test_shards_are_those_of_chunk():
    for size, world, dims in itertools.product(SIZES, range(1, 9), (1, 2, 3)):
        for dim in range(-dims, dims):
            shape = [3] * dims
            shape[dim] = size
            whole = torch.arange(math.prod(shape)).reshape(shape)
            parts = [Shard(dim, rank, world).part("x", shape) for rank in range(world)]
            for rank, part in enumerate(parts):
                assert torch.equal(joined(part, whole), cut(whole, dim, world, rank))
            together = torch.cat([joined(part, whole) for part in parts], dim)
            assert torch.equal(together, whole)


def test_shards_by_name():
    shard = Shard(lambda name: {"a": 1, "b": None}[name], 1, 2)
    assert shard.part("a", [4, 4]) == Part.of_ranges([(0, 4), (2, 4)]).__class__(
        (4, 2), shard.part("a", [4, 4]).boxes
    )
    assert shard.part("b", [4, 4]) is None
    with pytest.raises(IndexError, match="dimension 1 of tensor 'a', which has 1"):
        shard.part("a", [4])
    with pytest.raises(IndexError, match="dimension 0 of tensor 'x', which has 0"):
        Shard(0, 0, 1).part("x", [])
    for rank, world in ((-1, 2), (2, 2), (0, 0)):
        with pytest.raises(ValueError, match=f"rank {rank} of {world}"):
            Shard(0, rank, world)


# DTensors: every rank of many meshes, in one process


@pytest.fixture(params=MESHES, ids=str)
def every_rank(request):
    """Yield a mesh as each of its ranks has it, one after another."""

    def ranks():
        world = math.prod(request.param)
        for rank in range(world):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
            try:
                yield init_device_mesh("cpu", request.param)
            finally:
                dist.destroy_process_group()

    return ranks()


def as_dtensor(local, mesh, placements, whole):
    return DTensor.from_local(
        local.contiguous(), mesh, placements, run_check=False, shape=whole.shape,
        stride=whole.stride(),
    )  # fmt: skip


def split(whole, mesh, placements):
    """Return what torch itself gives a rank, from the first dimension of the mesh to the last."""
    for at, placement in enumerate(placements):
        if not isinstance(placement, Replicate):
            parts, _ = placement._split_tensor(whole, mesh.size(at), with_padding=False)
            whole = parts[mesh.get_coordinate()[at]]
    return whole


def some_placements(rng, count, dims):
    made = []
    for _ in range(count):
        dim, kind = rng.randrange(dims), rng.random()
        strided = _StridedShard(dim, split_factor=rng.choice([2, 3, 4]))
        made.append(Replicate() if kind < 0.2 else Sharded(dim) if kind < 0.6 else strided)
    return made


def test_parts_are_those_of_torch(every_rank):
    rng = random.Random(3)
    for mesh in every_rank:
        for _ in range(40):
            shape = [rng.choice(SIZES) for _ in range(rng.randint(1, 3))]
            whole = torch.arange(math.prod(shape)).reshape(shape)
            placements = some_placements(rng, mesh.ndim, len(shape))
            local = split(whole, mesh, placements)
            part = sharding.part_of(as_dtensor(local, mesh, placements, whole))
            assert torch.equal(joined(part, whole), local), (shape, placements)


def test_fsdp_cuts_what_tensor_parallelism_has_cut(every_rank):
    """The dimensions of the mesh from right to left, also where that gives other sizes."""
    for mesh in every_rank:
        if mesh.ndim != 2:
            continue
        (outer, inner), (row, column) = mesh.shape, mesh.get_coordinate()
        placements = [_StridedShard(0, split_factor=inner), Sharded(0)]
        for size in (*range(40), 57, 101, 50257):
            whole = torch.arange(size)
            local = cut(cut(whole, 0, inner, column), 0, outer, row)
            part = sharding.part_of(as_dtensor(local, mesh, placements, whole))
            assert torch.equal(joined(part, whole), local), (size, mesh.get_coordinate())


def test_every_element_has_its_rank():
    """All ranks of a mesh together have each element as often as it is replicated."""
    rng = random.Random(4)
    for shape in MESHES:
        world = math.prod(shape)
        tensor = [rng.choice(SIZES[1:]) for _ in range(2)]
        whole = torch.arange(math.prod(tensor)).reshape(tensor)
        placements = some_placements(rng, len(shape), 2)
        copies = math.prod(
            n for n, p in zip(shape, placements, strict=True) if isinstance(p, Replicate)
        )
        count = torch.zeros_like(whole)
        for rank in range(world):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
            mesh = init_device_mesh("cpu", shape)
            part = sharding.part_of(
                as_dtensor(split(whole, mesh, placements), mesh, placements, whole)
            )
            for box in part.boxes if part is not None else ():
                box.of_whole(count).add_(1)
            if part is None:
                count.add_(1)
            dist.destroy_process_group()
        assert (count == copies).all(), (shape, tensor, placements)


def test_a_local_tensor_that_torch_would_not_cut_so():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(8)
        with pytest.raises(NotImplementedError, match=r"of shape \[5\]: expected \[4\]"):
            sharding.part_of(as_dtensor(whole[:5], mesh, [Sharded(0)], whole))
    finally:
        dist.destroy_process_group()


# Real ranks

#: Most bytes that a first request brings, the index included.
FIRST_REQUEST = 2 << 20
FORMATS = ["tensors", "enc.tensors", "safetensors", "index", "pt"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same tensors in every format."""
    folder = tmp_path_factory.mktemp("dtensors")
    dtensors.write(folder)
    return folder


def test_every_placement_from_every_format(ranks, folder):
    counts = ranks.run("dtensors.every_placement", 4, folder, FORMATS)
    assert min(counts[0]) > 80
    assert counts == [counts[0]] * 4


def test_shards_from_every_format(ranks, folder):
    ranks.run("dtensors.plain_shards", 4, folder, FORMATS)


def test_options(ranks, folder):
    ranks.run("dtensors.options", 4, folder)


def test_like_accepts_plain_meta_and_sharded_tensors(ranks, folder):
    ranks.run("dtensors.what_to_be_like", 4, folder)


def test_a_rank_outside_the_mesh(ranks, folder):
    ranks.run("dtensors.outside_the_mesh", 4, folder)


def test_from_a_pipe(ranks, folder):
    ranks.run("dtensors.from_a_pipe", 2, folder)


def test_from_servers(ranks, folder, nginx, moto):
    addresses = []
    for name in ("f.tensors", "f.safetensors"):
        nginx.root.joinpath(name).write_bytes((folder / name).read_bytes())
        moto.client().upload_file(str(folder / name), "bucket", f"ranks/{name}")
        addresses += [f"{nginx.http}/{name}", f"s3://bucket/ranks/{name}"]
    ranks.run("dtensors.from_addresses", 4, addresses, env=moto.settings())


def test_a_rank_reads_only_its_own_bytes(ranks, nginx):
    """4 of 16 MiB, and what a first request brings."""
    large = torch.arange(1 << 22, dtype=torch.float32)
    for name in ("tensors", "safetensors"):
        path = nginx.root / f"large.{name}"
        tensorizer.save({"before": torch.zeros(1 << 19), "large": large}, path)
        links = [nginx.root / f"{name}.{rank}.{name}" for rank in range(4)]
        for link in links:
            link.hardlink_to(path)
        found = ranks.run("dtensors.bytes_of_ranks", 4, [f"{nginx.http}/{p.name}" for p in links])
        assert found == [4 << 20] * 4
        for link in links:
            assert 4 << 20 <= nginx.sent(link.name) <= (4 << 20) + FIRST_REQUEST


def test_invalid_loads_of_dtensors_are_refused_on_each_rank(ranks, folder):
    """Each rank raises the error by itself."""
    for rank, found in enumerate(ranks.run("dtensors.refused", 2, folder)):
        for case in ("partial", "partial out", "partial module"):
            assert found[case][0] == "NotImplementedError"
            assert "expected Shard or Replicate" in found[case][1]
        like = "tensor 't0': the file holds [10, 6], and the tensor in out= or like= has [12, 6]"
        assert found["shape"] == ["ValueError", like]
        assert found["plain shape"] == found["shape"]
        assert found["shape out"][0] == found["dtype out"][0] == found["turned"][0] == "ValueError"
        assert "the file holds torch.float32 [5, 6]" in found["dtype out"][1]
        assert "expected memory in row-major order" in found["turned"][1]
        for case in ("slice", "slice of shard"):
            assert found[case] == ["ValueError",
                "both a slice and a shard of 't0' are asked for"]  # fmt: skip
        assert found["two"] == ["ValueError", "out=, like= and shard= exclude each other"]
        assert found["missing"][0] == "KeyError"
        assert found["no dimension"] == ["IndexError",
            "dimension 1 of tensor 't2', which has 1"], rank  # fmt: skip


# Modules


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models in every format."""
    folder = tmp_path_factory.mktemp("modules")
    modules.write(folder)
    return folder


def test_modules(ranks, models):
    """FSDP2, with replicas, tensor parallelism, and both; then the model is used."""
    endings = ["tensors", "safetensors", "pt"]
    assert ranks.run("modules.load", 4, models, endings) == [[20, 5, 5]] * 4


@pytest.mark.parametrize(
    ("program", "world"),
    [
        ("training", 2),
        ("others_of_fsdp", 2),
        ("dtypes", 2),
        ("only_the_own_bytes", 4),
        ("ties_that_differ", 2),
        ("others", 2),
    ],
)
def test_modules_with(ranks, models, program, world):
    ranks.run(f"modules.{program}", world, models)


def test_modules_from_servers(ranks, models, nginx, moto):
    addresses = []
    for name in ("net.tensors", "net.safetensors", "net.pt"):
        nginx.root.joinpath(name).write_bytes((models / name).read_bytes())
        moto.client().upload_file(str(models / name), "bucket", f"ranks/{name}")
        addresses += [f"{nginx.http}/{name}", f"s3://bucket/ranks/{name}"]
    ranks.run("modules.from_addresses", 2, addresses, env=moto.settings())


def test_modules_that_do_not_fit(ranks, models):
    for wrong, hashes, count in ranks.run("modules.refused_and_warned", 2, models):
        assert wrong[0] == "RuntimeError"
        assert "size mismatch for up.weight: the file holds [15, 6]" in wrong[1]
        assert [error[0] for error in hashes] == ["HashMismatchError"] * 2
        assert count == 2


# Weights that FSDP holds elsewhere


@pytest.mark.parametrize(
    ("program", "world"),
    [
        ("after_a_forward_pass", 4),
        ("saves_after_a_forward_pass", 2),
        ("summoned", 2),
        ("files_of_vllm", 2),
    ],
)
def test_modules_used_before(ranks, tmp_path, program, world):
    ranks.run(f"held.{program}", world, tmp_path)


def test_flat_parts_of_the_first_fsdp_are_refused(ranks, tmp_path):
    for rank, found in enumerate(ranks.run("held.flat", 2, tmp_path)):
        assert len(found) == 2 * 2 * 4
        for what, errors in found.items():
            if rank == 0 and what.endswith("rank0_only"):
                assert errors == [None]
                continue
            for kind, text in errors:
                assert kind == "RuntimeError", (what, text)
                assert "FSDP has flattened the parameters of this" in text, (what, text)
                assert text.endswith("inside FullyShardedDataParallel.summon_full_params(module)")


def test_sharded_states_of_the_first_fsdp_are_refused(ranks, tmp_path):
    for found in ranks.run("held.sharded_states", 2, tmp_path):
        for kind, text in found:
            assert kind == "NotImplementedError"
            assert "is a ShardedTensor, of which this process has a part: save it by" in text
        assert len(found) == 4
