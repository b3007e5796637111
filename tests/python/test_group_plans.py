"""Plans of what members of a group fetch and exchange: pure functions, for up to 1,024 ranks."""

import itertools
import math
import random

import pytest
import torch
from tensorizer.group import exchange, plan, tree
from tensorizer.group.plan import Batch, Wanted
from tensorizer.group.wishes import Structure, Wish, merged


def some_tensors(rng):
    """Tensors of random shapes, of which some rows are wanted, or all at once."""
    for number in range(rng.randint(0, 6)):
        shape = tuple(rng.choice([1, 2, 3, 5, 8, 40]) for _ in range(rng.randint(0, 4)))
        first = rng.randrange(shape[0]) if shape else 0
        rows = (first, rng.randint(first + 1, shape[0])) if shape else (0, 1)
        itemsize = rng.choice([1, 2, 4, 8, 16])
        yield Wanted(2 * number, shape, itemsize, rows, rng.random() < 0.2)


@pytest.mark.parametrize("seed", range(10))
def test_what_is_fetched_has_so_many_bytes(seed):
    wanted = list(some_tensors(random.Random(seed)))
    pieces = (piece for batch in plan.batches(wanted, 2, 10**6) for piece in batch.pieces)
    assert sum(piece.nbytes for piece in pieces) == sum(tensor.nbytes for tensor in wanted)


@pytest.mark.parametrize(
    ("total", "members", "expected"),
    [(0, 1, 4 << 20), (50 << 20, 4, 4 << 20), (10**9, 4, 8_333_333), (10**11, 4, 32 << 20)],
)
def test_little_of_a_file_is_on_the_way_before_anything_is_exchanged(total, members, expected):
    assert exchange.batch_bytes(total, members) == expected


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


def wishes_of(rng, members, count):
    """Random wishes: of each member the rows of some tensors of 9 rows; some want the same."""
    kinds = []
    for _ in range(rng.randint(1, members)):
        some = sorted(rng.sample(range(count), rng.randint(0, count)))
        kinds.append([(n, *sorted(rng.sample(range(9), 2)), 9) for n in some])
    return [rng.choice(kinds) for _ in range(members)]


def merge(wishes, count, in_one_piece=()):
    """Return what each member finds."""
    groups = {}
    for rank, wish in enumerate(wishes):
        data = wish.structure.encoded()
        groups.setdefault(data, []).append((rank, wish.table))
    of_all = [(Structure.decoded(data), tables) for data, tables in groups.items()]
    size = len(wishes)
    return [merged(of_all, count, in_one_piece, (rank, size)) for rank in range(size)]


@pytest.mark.parametrize("seed", range(100))
def test_members_share_what_they_want_alike_and_fetch_the_rest_alone(seed):
    rng = random.Random(seed)
    count = 6
    wanted = wishes_of(rng, rng.randint(1, 6), count)
    in_one_piece = rng.sample(range(count), rng.randint(0, 2))
    found = merge([Wish.of(one) for one in wanted], count, in_one_piece)
    rows = [{n: set(range(start, stop)) for n, start, stop, _ in one} for one in wanted]
    for rank, one in enumerate(found):
        shared = {n for of_part in one.shared.values() for n in of_part}
        # Each tensor that it wants comes once, and no other one.
        assert sum(map(len, one.shared.values())) == len(shared)
        assert shared.isdisjoint(one.alone)
        assert shared | one.alone == {n for n, some in rows[rank].items() if some}
        assert one.exchanges == any(other.shared for other in found)
        for ranks, of_part in one.shared.items():
            assert rank in ranks and len(ranks) > 1 and list(ranks) == sorted(ranks)
            assert list(of_part) == sorted(of_part)
            for number, (start, stop) in of_part.items():
                # The others of the part know the same, and want some of it.
                for other in ranks:
                    assert found[other].shared[ranks][number] == (start, stop)
                    assert rows[other][number] <= set(range(start, stop))
                union = set().union(*(rows[other][number] for other in ranks))
                assert {start, stop - 1} <= union
                if number not in in_one_piece:
                    assert union == set(range(start, stop))
        for number in one.alone:
            others = [some[number] for of, some in enumerate(rows) if of != rank and number in some]
            assert all(rows[rank][number].isdisjoint(some) for some in others)
            assert number not in in_one_piece or not any(others)
    assert [list(one.shared) for one in found] == [sorted(one.shared) for one in found]


def test_a_member_of_many_parts_shares_with_all():
    """Each pair of ten members wants another tensor, and one more wants nothing."""
    pairs = list(itertools.combinations(range(10), 2))
    wanted = [
        [(n, rank, rank + 10, 20) for n, pair in enumerate(pairs) if rank in pair]
        for rank in range(10)
    ]
    found = merge([Wish.of(one) for one in [*wanted, []]], len(pairs))
    rows = {n: (low, high + 10) for n, (low, high) in enumerate(pairs)}
    assert all(one.shared == {tuple(range(11)): rows} and one.exchanges for one in found)


@pytest.mark.parametrize("seed", range(20))
def test_wishes_come_as_they_were_sent(seed):
    for one in wishes_of(random.Random(seed), 3, 8):
        wish = Wish.of(one)
        again = Structure.decoded(wish.structure.encoded())
        assert torch.equal(again.columns, wish.structure.columns)
        assert again.digest() == wish.structure.digest()
        rows = [(n, *wish.table[kind]) for n, kind in again.columns.t().tolist()]
        assert rows == [row[:3] for row in one]


@pytest.mark.parametrize("world", [8, 512, 1024])
def test_ranks_that_cut_a_model_tell_each_other_one_structure(world):
    """Of 20,000 tensors; some have fewer rows than there are ranks."""
    shapes = [8192, 1024, 1000, 8192, 28672, 28672, 10, 8192, 8192, 100]

    def wish(rank):
        each = [-(-rows // world) for rows in shapes]
        cut = [(min(rank * n, rows), min(rank * n + n, rows), rows)
               for n, rows in zip(each, shapes, strict=True)]  # fmt: skip
        return Wish.of((number, *cut[number % 10]) for number in range(20_000))

    wishes = {rank: wish(rank) for rank in {0, 1, 5, world // 2, world - 1}}
    # Those without a row of the short tensors have another one.
    assert len({one.structure.digest() for one in wishes.values()}) <= 3
    for one in wishes.values():
        # A padded all-gather: every rank receives the longest of all, once.
        assert world * len(one.structure.encoded()) <= 10_000_000
        assert len(one.table) <= 6
    for found in merge(list(wishes.values()), 20_000):
        assert found.shared == {} and not found.exchanges
        assert len(found.alone) in (14_000, 16_000, 18_000, 20_000)
    # Two of each: replicas receive what they want, and nothing else.
    twice = merge(2 * list(wishes.values()), 20_000)
    for rank, found in enumerate(twice):
        ((ranks, of_part),) = found.shared.items()
        assert ranks == (rank % 5, rank % 5 + 5) and not found.alone
        assert len(of_part) in (14_000, 16_000, 18_000, 20_000)


def test_replicas_of_half_a_thousand_ranks():
    """A mesh of 64 replicas of 8 parts, of 100,000 tensors."""
    numbers = torch.arange(100_000)
    structure = Structure(torch.stack([numbers, numbers % 10]))
    tables = [(rank, tuple((rank % 8 * n, rank % 8 * n + n) for n in range(1, 11)))
              for rank in range(512)]  # fmt: skip
    found = merged([(structure, tables)], 100_000, [], (3, 512))
    (ranks,) = found.shared
    assert ranks == tuple(range(3, 512, 8)) and len(found.shared[ranks]) == 100_000


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 31, 48, 512, 1000, 1024])
def test_a_tree_brings_all_ranks_to_the_first_in_few_steps(size):
    ends = {}
    for rank in reversed(range(size)):
        children, ends[rank] = tree.below(rank, size)
        assert all(tree.parent(child) == rank for child in children)
        assert len(children) <= (size - 1).bit_length()
        # The ranks below follow each other: those of each child come next.
        after = rank + 1
        for child in children:
            assert child == after
            after = ends[child]
        assert ends[rank] == after
        steps, at = 0, rank
        while at:
            at, steps = tree.parent(at), steps + 1
        assert steps <= size.bit_length()
    assert ends[0] == size
