"""Ranks of one group that ask for something else each."""

from ranks.common import assert_equal, cut, dist, fetch_together, group, placed, tensorizer, torch
from ranks.groups import BATCH, of_kind, same
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard


def other(folder, kinds):
    """Every rank asks for something else, or for nothing.

    Of the first format in all ways, and of the others in every second way.
    """
    fetch_together(BATCH)
    with group() as (_, world):
        mesh = init_device_mesh("cpu", (world,))
        square = init_device_mesh("cpu", (2, world // 2))
        for at, kind in enumerate(kinds):
            uri, options, made = of_kind(folder, kind)

            def load(uri=uri, options=options, **more):
                return tensorizer.load(uri, group=dist.group.WORLD, **options, **more)

            ways = [by_name, by_filter, by_slices, by_rows, by_shard]
            ways += [
                lambda load, made: like_others(load, made, mesh, square),
                lambda load, made: into_memory(load, made, mesh),
            ]
            for way in ways if at == 0 else ways[at % 2 :: 2]:
                way(load, made)


def by_name(load, made):
    rank = dist.get_rank()
    names = [["rows", "t1"], ["cube"], [], list(made)][rank % 4]
    same(load(names=names), {name: made[name] for name in names})
    # Nothing at all.
    assert load(names=[]) == {}


def by_filter(load, made):
    wants = [lambda n: n < "t", lambda n: False, lambda n: n == "words", lambda n: True]
    wanted = wants[dist.get_rank() % 4]
    chosen = {n: t for n, t in made.items() if wanted(n)}
    found = load(filter_func=wanted)
    assert found.keys() == chosen.keys()
    for name, tensor in found.items():
        assert_equal(tensor, chosen[name])


def by_slices(load, made):
    """Slices of other dimensions, of one tensor at all ranks."""
    rank = dist.get_rank()
    slices = [(0, 20, 290), (1, 3, 4), (slice(5, 100, 7), slice(50)), (3,)][rank % 4]
    index = {0: slice(20, 290), 1: (slice(None), slice(3, 4)), 2: slices, 3: slices}[rank % 4]
    found = load(names=["rows", "t0"], slices={"rows": slices})
    same(found, {"rows": made["rows"][index], "t0": made["t0"]})


def by_rows(load, made):
    """The same rows at all ranks, which are not the first ones."""
    found = load(names=["rows", "cube"], slices={"rows": (0, 100, 290), "cube": (0, 1, 3)})
    same(found, {"rows": made["rows"][100:290], "cube": made["cube"][1:3]})


def by_shard(load, made):
    """Shards, of another dimension at each rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shard = tensorizer.Shard(rank % 2, rank, world)
    two = [name for name in made if made[name].dim() > 1]
    found = load(names=two, shard=shard)
    same(found, {name: cut(made[name], rank % 2, world, rank) for name in two})


def like_others(load, made, mesh, square):
    """DTensors, and what is no DTensor."""
    like = {
        "rows": placed(made["rows"], mesh, [Shard(1)]),
        "cube": placed(made["cube"], square, [Shard(1), Shard(2)]),
        "words": placed(made["words"], square, [Replicate(), Shard(0)]),
        "t4": torch.empty(16, 16, device="meta"),
        "step": 3,
    }
    found = load(like=like)
    assert list(found) == ["rows", "cube", "words", "t4"]
    for name in ("rows", "cube", "words"):
        assert isinstance(found[name], DTensor)
        assert_equal(found[name].to_local(), like[name].to_local(), name)
    assert_equal(found["t4"], made["t4"])


def into_memory(load, made, mesh):
    """Memory of others: whole, of DTensors, and views into something larger."""
    rank, world = dist.get_rank(), dist.get_world_size()
    around = torch.full((302, 200), 7.0)
    out = {
        "rows": around[1:-1],
        "cube": placed(torch.zeros(3, 40, 90), mesh, [Shard(1)]),
        "t1": torch.zeros(7, 5),
    }
    out = {name: out[name] for name in list(out)[: 1 + rank % 3]}
    assert load(out=out) is not out
    if "cube" in out:
        assert_equal(out["cube"].to_local(), cut(made["cube"], 1, world, rank))
    assert_equal(around[1:-1], made["rows"])
    assert (around[0] == 7).all() and (around[-1] == 7).all()
    if "t1" in out:
        assert_equal(out["t1"], made["t1"])
