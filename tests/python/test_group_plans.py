"""Plans of what members of a group fetch and exchange: pure functions, for up to 1,024 ranks."""

import itertools
import math
import random

import pytest
import torch
from tensorizer.group import exchange, plan, tree
from tensorizer.group.plan import HEADER, Batch, Boxes, SharedTensor
from tensorizer.group.tensor_requests import (
    RequestStructure,
    SharedRows,
    TensorRequest,
    merge_requests,
)


def some_tensors(rng):
    """Tensors of random shapes, of which some rows are wanted, or all at once."""
    for number in range(rng.randint(0, 6)):
        shape = tuple(rng.choice([1, 2, 3, 5, 8, 40]) for _ in range(rng.randint(0, 4)))
        first = rng.randrange(shape[0]) if shape else 0
        rows = (first, rng.randint(first + 1, shape[0])) if shape else (0, 1)
        itemsize = rng.choice([1, 2, 4, 8, 16])
        yield SharedTensor(2 * number, shape, itemsize, rows, rng.random() < 0.2)


@pytest.mark.parametrize("seed", range(10))
def test_pieces_add_up_to_the_bytes_of_the_wanted_tensors(seed):
    wanted = list(some_tensors(random.Random(seed)))
    pieces = (piece for batch in plan.batches(wanted, 2, 10**6) for piece in batch.pieces)
    assert sum(piece.nbytes for piece in pieces) == sum(tensor.nbytes for tensor in wanted)


@pytest.mark.parametrize(
    ("total", "members", "expected"),
    [(0, 1, 4 << 20), (50 << 20, 4, 4 << 20), (10**9, 4, 8_333_333), (10**11, 4, 32 << 20)],
)
def test_batches_are_short_enough_to_begin_exchanging_early(total, members, expected):
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
    many = [SharedTensor(number, (1000, 10), 4, (0, 1000), False) for number in range(20)]
    batches = plan.batches(many, 4, 100_000)
    assert sum(batch.nbytes for batch in batches) >= 20 * 40_000
    assert len(batches) == 10  # two tensors each
    one = plan.batches([SharedTensor(0, (1000, 10), 4, (0, 1000), False)], 4, 10_000)
    assert [batch.nbytes for batch in one] == [10_000] * 4
    assert plan.batches([], 4, 100) == []
    assert plan.batches([SharedTensor(0, (3,), 4, (0, 3), True)], 1, 1)[0] == Batch(
        0, (plan.Piece(0, ((0, 3),), 0, 12, 0),), 12, 12, False
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


def boxes_of(rng, shape, members):
    """Random boxes of members, some of which want nothing, or the whole of some dimensions."""
    boxes = []
    for _ in range(members):
        ends = [rng.choice([(0, dim), tuple(sorted(rng.sample(range(dim + 1), 2)))])
                for dim in shape[: rng.randint(1, len(shape))]]  # fmt: skip
        boxes.append(tuple(ends) if rng.random() < 0.9 else None)
    return boxes


def columns_of(shape, members, dim):
    """The boxes of members that cut a dimension."""
    step = -(-shape[dim] // members)
    before = tuple((0, size) for size in shape[:dim])
    ends = [(at * step, min(at * step + step, shape[dim])) for at in range(members)]
    return [(*before, one) if one[0] < one[1] else None for one in ends]


def check_what_members_receive(wanted, members, most):
    """Pack batches as their owners do, and see that each member gets what it wants, once.

    Return the bytes that each member receives of batches that are scattered.
    """
    seen = {(one.number, member): [] for one in wanted for member in range(members)}
    by_number = {one.number: one for one in wanted}
    received = 0
    for batch in plan.batches(wanted, members, most):
        assert batch.scattered or batch.received == batch.nbytes
        received += batch.received * batch.scattered
        if batch.scattered and not by_number[batch.pieces[0].number].whole:
            assert members * (HEADER + batch.received) <= most
        for member in range(members):
            end = 0
            for piece in batch.pieces:
                one = by_number[piece.number]
                box = one.box(member)
                common = plan.common(piece.ranges, box)
                if common is None:
                    continue
                assert piece.received_start % 64 == 0 and end <= piece.received_start
                sent = common if batch.scattered else piece.ranges
                end = piece.received_start + math.prod(b - a for a, b in sent) * one.itemsize
                assert end <= batch.received
                seen[piece.number, member] += indices(common)
    for (number, member), found in seen.items():
        box = by_number[number].box(member)
        expected = [] if box is None else list(indices(box))
        assert sorted(found) == sorted(expected)
    return received


@pytest.mark.parametrize("seed", range(60))
def test_members_receive_what_they_want_once(seed):
    rng = random.Random(seed)
    members, wanted = rng.randint(2, 5), []
    for number in range(rng.randint(1, 5)):
        shape = tuple(rng.choice([1, 2, 3, 5, 8, 20]) for _ in range(rng.randint(1, 3)))
        of = boxes_of(rng, shape, members)
        if rng.random() < 0.5:
            of = columns_of(shape, members, rng.randrange(len(shape)))
        rows = [box[0] for box in of if box is not None]
        if rows:
            ends = min(a for a, _ in rows), max(b for _, b in rows)
            itemsize, whole = rng.choice([1, 2, 4, 8, 16]), rng.random() < 0.2
            wanted.append(SharedTensor(number, shape, itemsize, ends, whole, Boxes.from_ranges(of)))
    check_what_members_receive(wanted, members, rng.choice([1, 64, 1000, 5000, 10**6]))


@pytest.mark.parametrize("whole", [False, True])
def test_scalars_are_sent_only_to_members_that_request_them(whole):
    boxes = Boxes.from_ranges([((0, 1),), None, ((0, 1),)])
    assert check_what_members_receive([SharedTensor(0, (), 4, (0, 1), whole, boxes)], 3, 1000) == 0


@pytest.mark.parametrize("world", [2, 8, 64, 128])
def test_columns_are_received_once_by_many_ranks(world):
    """Square matrices of which each rank wants columns, and experts of which it wants two kinds."""
    wanted = []
    for number, (shape, dim) in enumerate(
        [((256, 1024), 1), ((256, 1000), 1), ((4, 128, 256), 1), ((4, 128, 256), 2)]
    ):
        boxes = Boxes.from_ranges(columns_of(shape, world, dim))
        wanted.append(SharedTensor(number, shape, 2, (0, shape[0]), False, boxes))
    received = check_what_members_receive(wanted, world, 4 << 20)
    # Of 1,000 columns, the first ranks have a few more than the others.
    each = sum(math.prod(one.shape) * one.itemsize for one in wanted) / world
    assert received <= 1.1 * each


def test_more_ranks_than_have_connections_to_each_other_receive_whole_rows():
    boxes = Boxes.from_ranges(columns_of((4, 1024), 256, 1))
    batches = plan.batches([SharedTensor(0, (4, 1024), 4, (0, 4), False, boxes)], 256, 4 << 20)
    assert [(batch.scattered, batch.received) for batch in batches] == [(False, 4 * 4 * 1024)]


@pytest.mark.parametrize(
    ("shape", "dim", "apart"),
    [((4, 1 << 20, 2), 1, True), ((4, 1 << 20), 1, False), ((1 << 24, 2), 0, True)],
)
def test_long_runs_of_one_rank_are_read_by_it(shape, dim, apart):
    of = columns_of(shape, 4, dim)
    rows = (0, shape[0])
    assert SharedTensor(0, shape, 2, rows, False, Boxes.from_ranges(of)).is_disjoint() == apart
    assert not SharedTensor(0, shape, 2, rows, True, Boxes.from_ranges(of)).is_disjoint()
    # Two that want the same exchange it.
    assert not SharedTensor(0, shape, 2, rows, False, Boxes.from_ranges([*of, of[0]])).is_disjoint()


def requests_of(rng, members, count):
    """Random requests: of each member the rows of some tensors of 9 rows; some want the same."""
    kinds = []
    for _ in range(rng.randint(1, members)):
        some = sorted(rng.sample(range(count), rng.randint(0, count)))
        kinds.append([(n, (tuple(sorted(rng.sample(range(9), 2))),), (9,)) for n in some])
    return [rng.choice(kinds) for _ in range(members)]


def merge(requests, count, in_one_piece=()):
    """Return what each member finds."""
    groups = {}
    for rank, request in enumerate(requests):
        data = request.structure.encoded()
        groups.setdefault(data, []).append((rank, request.table))
    of_all = [(RequestStructure.decoded(data), tables) for data, tables in groups.items()]
    size = len(requests)
    return [merge_requests(of_all, count, in_one_piece, (rank, size)) for rank in range(size)]


@pytest.mark.parametrize("seed", range(100))
def test_members_share_what_they_want_alike_and_fetch_the_rest_alone(seed):
    rng = random.Random(seed)
    count = 6
    wanted = requests_of(rng, rng.randint(1, 6), count)
    in_one_piece = rng.sample(range(count), rng.randint(0, 2))
    found = merge([TensorRequest.of(one) for one in wanted], count, in_one_piece)
    rows = [{n: set(range(*ends)) for n, (ends,), _ in one} for one in wanted]
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
            for number, ((start, stop), boxes) in of_part.items():
                # The others of the part know the same, and want some of it.
                for other in ranks:
                    assert found[other].shared[ranks][number] == of_part[number]
                    of_other = boxes.by_member[ranks.index(other)] if boxes else ((start, stop),)
                    assert rows[other][number] == set(range(*of_other[0]))
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
        [(n, ((rank, rank + 10),), (20,)) for n, pair in enumerate(pairs) if rank in pair]
        for rank in range(10)
    ]
    found = merge([TensorRequest.of(one) for one in [*wanted, []]], len(pairs))
    rows = {n: (low, high + 10) for n, (low, high) in enumerate(pairs)}
    for one in found:
        assert list(one.shared) == [tuple(range(11))] and one.exchanges
        assert {n: share.rows for n, share in one.shared[tuple(range(11))].items()} == rows
        of = one.shared[tuple(range(11))][0].boxes.by_member
        assert of == (((0, 10),), ((1, 11),), *(None,) * 9)


@pytest.mark.parametrize("seed", range(20))
def test_request_structures_survive_encoding(seed):
    for one in requests_of(random.Random(seed), 3, 8):
        request = TensorRequest.of(one)
        again = RequestStructure.decoded(request.structure.encoded())
        assert torch.equal(again.columns, request.structure.columns)
        assert again.digest() == request.structure.digest()
        ranges = [(n, request.table[kind]) for n, kind in again.columns.t().tolist()]
        assert ranges == [row[:2] for row in one]


def test_ranks_that_cut_columns_share_rows_and_know_the_box_of_each_rank():
    wanted = [[(0, ((0, 6), (2 * rank, 2 * rank + 2)), (6, 8)), (1, ((0, 5), (0, 7)), (5, 7))]
              for rank in range(4)]  # fmt: skip
    assert {TensorRequest.of(one).table for one in wanted} == {
        (((0, 6), (2 * rank, 2 * rank + 2)), ((0, 5),)) for rank in range(4)
    }
    boxes = Boxes(tuple(one[0][1] for one in wanted), (6, 2), 1)
    for found in merge([TensorRequest.of(one) for one in wanted], 2):
        assert found.shared == {
            (0, 1, 2, 3): {0: SharedRows((0, 6), boxes), 1: SharedRows((0, 5), None)}
        }
        assert not found.alone


@pytest.mark.parametrize("world", [8, 512, 1024])
def test_ranks_that_cut_a_model_tell_each_other_one_structure(world):
    """Of 20,000 tensors; some have fewer rows than there are ranks."""
    shapes = [8192, 1024, 1000, 8192, 28672, 28672, 10, 8192, 8192, 100]

    def request(rank):
        each = [-(-rows // world) for rows in shapes]
        cut = [(((min(rank * n, rows), min(rank * n + n, rows)),), (rows,))
               for n, rows in zip(each, shapes, strict=True)]  # fmt: skip
        return TensorRequest.of((number, *cut[number % 10]) for number in range(20_000))

    requests = {rank: request(rank) for rank in {0, 1, 5, world // 2, world - 1}}
    # Ranks without a row of the short tensors have another structure.
    assert len({one.structure.digest() for one in requests.values()}) <= 3
    for one in requests.values():
        # A padded all-gather: every rank receives the longest of all, once.
        assert world * len(one.structure.encoded()) <= 10_000_000
        assert len(one.table) <= 6
    for found in merge(list(requests.values()), 20_000):
        assert found.shared == {} and not found.exchanges
        assert len(found.alone) in (14_000, 16_000, 18_000, 20_000)
    # Each request twice: replicas receive what they want, and nothing else.
    twice = merge(2 * list(requests.values()), 20_000)
    for rank, found in enumerate(twice):
        ((ranks, of_part),) = found.shared.items()
        assert ranks == (rank % 5, rank % 5 + 5) and not found.alone
        assert len(of_part) in (14_000, 16_000, 18_000, 20_000)


def test_replicas_of_half_a_thousand_ranks():
    """A mesh of 64 replicas of 8 parts, of 100,000 tensors."""
    numbers = torch.arange(100_000)
    structure = RequestStructure(torch.stack([numbers, numbers % 10]))
    tables = [(rank, tuple(((rank % 8 * n, rank % 8 * n + n),) for n in range(1, 11)))
              for rank in range(512)]  # fmt: skip
    found = merge_requests([(structure, tables)], 100_000, [], (3, 512))
    (ranks,) = found.shared
    assert ranks == tuple(range(3, 512, 8)) and len(found.shared[ranks]) == 100_000


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 31, 48, 512, 1000, 1024])
def test_a_tree_brings_all_ranks_to_the_first_in_few_steps(size):
    ends = {}
    for rank in reversed(range(size)):
        children, ends[rank] = tree.children_of(rank, size)
        assert all(tree.parent_of(child) == rank for child in children)
        assert len(children) <= (size - 1).bit_length()
        # The ranks below follow each other: those of each child come next.
        after = rank + 1
        for child in children:
            assert child == after
            after = ends[child]
        assert ends[rank] == after
        steps, at = 0, rank
        while at:
            at, steps = tree.parent_of(at), steps + 1
        assert steps <= size.bit_length()
    assert ends[0] == size
