"""Tensors one by one for groups."""

from ranks.common import caught, dist, fetch_together, group, tensorizer, torch
from ranks.groups import BATCH, of_kind, same


def every_format(folder, kinds):
    """Every rank takes all tensors, and others of the same group load in between."""
    fetch_together(BATCH)
    with group() as (_, _):
        for kind in kinds:
            uri, options, made = of_kind(folder, kind)
            iterator = tensorizer.iterate(
                uri, "cpu", group=dist.group.WORLD, buffer_bytes=300_000, **options
            )
            first = [next(iterator)]
            loaded = tensorizer.load(uri, group=dist.group.WORLD, **options)
            same({name: loaded[name] for name in made}, made, kind)
            found = dict(first + list(iterator))
            assert found.keys() == made.keys()
            same({name: found[name] for name in made}, made, kind)


def other_wants(folder):
    """Ranks take other tensors, and other slices of one."""
    fetch_together(BATCH)
    with group() as (rank, _):
        uri, _, made = of_kind(folder, "tensors")
        names = ["rows", "words"] if rank else ["cube", "rows"]
        slices = {"rows": (slice(rank, 200 + rank), slice(rank, None))}
        found = dict(
            tensorizer.iterate(
                uri, names=names, slices=slices, group=dist.group.WORLD, buffer_bytes=100_000
            )
        )
        assert sorted(found) == sorted(names)
        for name, tensor in found.items():
            assert torch.equal(tensor, made[name][slices.get(name, ...)]), name


def closed_early(folder):
    """The others need not wait for a rank that takes no more."""
    fetch_together(BATCH)
    with group() as (rank, _):
        uri, _, made = of_kind(folder, "tensors")
        iterator = tensorizer.iterate(uri, group=dist.group.WORLD, buffer_bytes=100_000)
        next(iterator)
        if rank == 0:
            iterator.close()
            error = "GroupError"
        else:
            error, _ = caught(lambda: list(iterator))
        # What comes later is mixed up with nothing of it.
        same(tensorizer.load(uri, group=dist.group.WORLD), made)
        return error
