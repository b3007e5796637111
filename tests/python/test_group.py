"""Loading by a group of ranks: every byte is fetched by one, and all end alike."""

import itertools
import math
import random

import pytest
import torch
from ranks import groups
from servers import Nginx
from tensorizer._native import Reader
from tensorizer.group import plan
from tensorizer.group.plan import Batch, Wanted

FORMATS = ["tensors", "enc.tensors", "safetensors", "index", "pt"]
#: Addresses are opened by one rank for all.
by_address = pytest.mark.skipif(
    not hasattr(Reader, "from_address"), reason="the native code opens no addresses"
)

# Plans


def some_tensors(rng):
    """Tensors of random shapes, of which some rows are wanted, or all at once."""
    for number in range(rng.randint(0, 6)):
        shape = tuple(rng.choice([1, 2, 3, 5, 8, 40]) for _ in range(rng.randint(0, 4)))
        first = rng.randrange(shape[0]) if shape else 0
        rows = (first, rng.randint(first + 1, shape[0])) if shape else (0, 1)
        itemsize = rng.choice([1, 2, 4, 8, 16])
        yield Wanted(2 * number, shape, itemsize, rows, rng.random() < 0.2)


def indices(ranges):
    return itertools.product(*(range(*ends) for ends in ranges))


def at(shape, index):
    """Return the number of an element, in the order of its bytes."""
    number = 0
    for dim, step in zip(shape, index, strict=True):
        number = number * dim + step
    return number


@pytest.mark.parametrize("seed", range(40))
def test_every_byte_is_in_one_box(seed):
    rng = random.Random(seed)
    wanted = list(some_tensors(rng))
    members, most = rng.randint(1, 5), rng.choice([1, 7, 64, 100, 1000, 10**6])
    batches = plan.batches(wanted, members, most)
    by_number = {tensor.number: tensor for tensor in wanted}
    seen = {tensor.number: [] for tensor in wanted}
    for number, batch in enumerate(batches):
        assert batch.owner == number % members
        assert batch.pieces
        end = 0
        for piece in batch.pieces:
            tensor = by_number[piece.number]
            elements = list(indices(piece.ranges))
            assert piece.start % 64 == 0 and end <= piece.start < end + 64
            end = piece.start + piece.nbytes
            assert piece.nbytes == len(elements) * tensor.itemsize
            places = [at(tensor.shape, index) for index in elements]
            assert places == list(range(places[0], places[0] + len(places))), "not together"
            if tensor.whole or not tensor.shape:
                assert len(places) == math.prod(tensor.shape)
            seen[piece.number] += places
        assert batch.nbytes == end
        only = by_number[batch.pieces[0].number]
        more = len(batch.pieces) == 1 and (only.whole or batch.nbytes == only.itemsize)
        assert batch.nbytes <= most or more
    for tensor in wanted:
        rows = ((0, 1),) if not tensor.shape else (tensor.rows,)
        if tensor.whole and tensor.shape:
            rows = ((0, tensor.shape[0]),)
        below = math.prod(tensor.shape[1:])
        expected = list(range(rows[0][0] * below, rows[0][1] * below)) if tensor.shape else [0]
        assert seen[tensor.number] == expected, "in order, each once"


def test_batches_are_as_large_as_they_may_be():
    many = [Wanted(number, (1000, 10), 4, (0, 1000), False) for number in range(20)]
    batches = plan.batches(many, 4, 100_000)
    assert sum(batch.nbytes for batch in batches) >= 20 * 40_000
    assert len(batches) == 10  # two tensors each
    one = plan.batches([Wanted(0, (1000, 10), 4, (0, 1000), False)], 4, 10_000)
    assert [batch.nbytes for batch in one] == [10_000] * 4
    assert plan.batches([], 4, 100) == []
    assert plan.batches([Wanted(0, (3,), 4, (0, 3), True)], 1, 1)[0] == Batch(
        0, (plan.Piece(0, ((0, 3),), 0, 12),), 12
    )


@pytest.mark.parametrize("seed", range(20))
def test_overlaps(seed):
    rng = random.Random(seed)
    for _ in range(50):
        shape = [rng.randint(1, 6) for _ in range(rng.randint(0, 3))]
        whole = torch.arange(math.prod(shape)).reshape(shape)
        boxes = []
        for _ in range(2):
            ends = [sorted((rng.randint(0, dim), rng.randint(0, dim))) for dim in shape]
            boxes.append(tuple(map(tuple, ends)))
        left, right = (whole[tuple(slice(*ends) for ends in box)] for box in boxes)
        common = plan.overlap(*boxes)
        both = set(left.flatten().tolist()) & set(right.flatten().tolist())
        if common is None:
            assert not both
            continue
        here, there = (tuple(slice(*ends) for ends in part) for part in common)
        assert torch.equal(left[here], right[there])
        assert set(left[here].flatten().tolist()) == both


def test_rows_of_all():
    assert plan.rows_of_all([]) == {}
    assert plan.rows_of_all([{}, {}]) == {}
    found = plan.rows_of_all(
        [{5: (2, 4), 1: (0, 0)}, {5: (7, 9), 3: (1, 2)}, {1: (3, 4), 3: (0, 0)}]
    )
    assert found == {1: (3, 4), 3: (1, 2), 5: (2, 9)}
    assert list(found) == [1, 3, 5]
    assert plan.rows_of_all([{0: (0, 0)}, {0: (0, 0)}]) == {0: (0, 0)}


# Real ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same tensors in every format."""
    folder = tmp_path_factory.mktemp("group")
    groups.write(folder)
    return folder


@pytest.fixture(scope="module")
def nginx(tmp_path_factory):
    server = Nginx(tmp_path_factory.mktemp("nginx"))
    yield server
    server.stop()


@pytest.mark.parametrize("world", [2, 4])
def test_every_format(ranks, folder, world):
    ranks.run("groups.every_format", world, folder, FORMATS)


@pytest.mark.parametrize("kind", FORMATS)
def test_other_wants_at_each_rank(ranks, folder, kind):
    ranks.run("groups.other_wants", 4, folder, kind)


@pytest.mark.parametrize(
    "program", ["many_batches", "local_files", "subgroups", "two_threads", "again"]
)
def test_groups(ranks, folder, program):
    ranks.run(f"groups.{program}", 4, folder)


def test_other_collectives_of_the_group_go_on(ranks, folder):
    assert min(ranks.run("groups.beside_others", 4, folder)) > 0


def test_who_is_no_member(ranks, folder):
    wrong = ["ValueError", "this process is no member of the group that makes this call"]
    assert ranks.run("groups.alone", 2, folder) == [wrong] * 2


@pytest.fixture
def addresses(folder, nginx, moto):
    found = []
    for name in ("g.tensors", "g.safetensors", "g.pt"):
        nginx.root.joinpath(name).write_bytes((folder / name).read_bytes())
        moto.client().upload_file(str(folder / name), "bucket", f"group/{name}")
        found += [f"{nginx.http}/{name}", f"s3://bucket/group/{name}"]
    return found


def test_streams(ranks, addresses, moto):
    ranks.run("groups.group_of_streams", 4, addresses, env=moto.settings())


@by_address
def test_addresses(ranks, addresses, moto):
    ranks.run("groups.group_of_addresses", 4, addresses, env=moto.settings())
