"""Plans of what members of a group read and exchange: pure functions, for up to 1,024 ranks."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from tensorizer.group import blocks, wishes
from tensorizer.group.blocks import BlockPlan, Layout
from tensorizer.group.wishes import Wish, decoded_columns, decoded_table, merged

#: Bytes of an element; positions of bytes are then those of elements.
ITEMSIZE = 1


def everything(shape):
    return tuple((0, size) for size in shape)


def wish_of(shapes, wanted):
    """Return the wish for boxes of tensors, by number."""
    return Wish.of((n, boxes, shapes[n], ITEMSIZE) for n, boxes in sorted(wanted.items()))


def plan_of(shapes, of_ranks, in_one_piece=(), encrypted=False):
    """Merge the wishes of ranks, and return the plan of blocks."""
    told = [wish_of(shapes, wanted) for wanted in of_ranks]
    by_columns = {}
    for rank, wish in enumerate(told):
        _, tables = by_columns.setdefault(wish.digest(), (wish.columns, []))
        tables.append((rank, wish.table))
    found = merged(
        list(by_columns.values()), len(shapes), len(of_ranks), in_one_piece, encrypted=encrypted
    )

    def layout(number):
        return Layout(shapes[number], ITEMSIZE)

    return BlockPlan(found, layout, len(of_ranks))


def at(box):
    return tuple(slice(*ends) for ends in box)


def carried_out(plan, shapes, size, most):
    """Return how often each element is read by a rank, and what each rank gets."""
    read = [np.zeros((size, math.prod(shape)), int) for shape in shapes]
    got = [[np.zeros(shape, int) for shape in shapes] for _ in range(size)]

    def reads(rank, number, box):
        read[number][rank].reshape(shapes[number])[at(box)] += 1

    for block in plan.blocks(most):
        assert plan.cost(block) <= most or len(block.numbers) == 1
        places = {one.number: one for one in block.gathered}
        for rank in range(size):
            for one in block.share(rank):
                placed, ((start, stop),) = places[one.number], one.ranges
                first = placed.rows[0] * math.prod(shapes[one.number][1:])
                assert one.position == placed.start + start - first
                read[one.number][rank][start:stop] += 1
            for one in block.gathered:
                got[rank][one.number][at((one.rows,))] += 1
        for ranks in block.shared:
            for owner, pieces in zip(ranks, plan.pieces(block, ranks), strict=True):
                for piece in pieces:
                    reads(owner, piece.number, piece.ranges)
                    for rank in ranks:
                        for box in plan.overlaps(piece, rank):
                            got[rank][piece.number][at(box)] += 1
        for number in block.numbers:
            case = plan.case(number)
            if case.of_all is None and not case.shared:
                for rank, boxes in case.boxes.items():
                    for box in boxes:
                        whole = wishes.with_all_dims(box, shapes[number])
                        reads(rank, number, whole)
                        got[rank][number][at(whole)] += 1
    return read, got


def some_boxes(rng, shape):
    """Return one box of a tensor or two that do not overlap, or all of it."""
    if rng.random() < 0.4:
        return [everything(shape)]
    box = []
    for size in shape:
        start = rng.randrange(size)
        box.append((start, rng.randint(start, size)))
    if rng.random() < 0.3 and box[0][1] < shape[0]:
        return [tuple(box), ((box[0][1], shape[0]), *box[1:])]
    return [tuple(box)]


@pytest.mark.parametrize("seed", range(150))
def test_ranks_get_what_they_want_and_each_byte_is_read_once(seed):
    rng = random.Random(seed)
    size = rng.randint(2, 6)
    shapes = [
        tuple(rng.choice([1, 2, 3, 7, 20]) for _ in range(rng.randint(1, 3)))
        for _ in range(rng.randint(0, 7))
    ]
    cuts = [{n: some_boxes(rng, shape) for n, shape in enumerate(shapes)} for _ in range(3)]
    of_ranks = []
    for rank in range(size):
        kind = rng.randrange(4)
        if kind == 0:
            wanted = {n: [everything(shape)] for n, shape in enumerate(shapes)}
        elif kind == 1:
            wanted = {
                n: [((rank * s[0] // size, (rank + 1) * s[0] // size), *everything(s[1:]))]
                for n, s in enumerate(shapes)
            }
        else:
            wanted = cuts[rng.randrange(3)]
        of_ranks.append({n: boxes for n, boxes in wanted.items() if rng.random() < 0.9})
    if seed % 5 == 0:
        of_ranks = [{n: [everything(shape)] for n, shape in enumerate(shapes)}] * size
    elif seed % 5 == 1:
        # All want the same rows.
        of_ranks = [{n: [((s[0] // 3, s[0]), *everything(s[1:]))] for n, s in enumerate(shapes)}]
        of_ranks *= size
    in_one_piece = [n for n in range(len(shapes)) if rng.random() < 0.2]
    plan = plan_of(shapes, of_ranks, in_one_piece, encrypted=rng.random() < 0.3)
    read, got = carried_out(plan, shapes, size, rng.choice([1, 10, 100, 10**6]))
    for number, shape in enumerate(shapes):
        union = np.zeros(shape, bool)
        for rank, wanted in enumerate(of_ranks):
            expected = np.zeros(shape, int)
            for box in wanted.get(number, []):
                expected[at(box)] = 1
            assert (got[rank][number] == expected).all(), (number, rank)
            union |= expected > 0
        times = read[number].sum(0).reshape(shape)
        assert (times[union] == 1).all()
        # More than is wanted is read only between columns, and of tensors in one piece.
        if len(shape) == 1 and number not in in_one_piece:
            assert (times[~union] == 0).all()
        several = sum(got[rank][number].any() for rank in range(size)) > 1
        if number in in_one_piece and several:
            # One rank reads it as a whole.
            readers = [rank for rank in range(size) if read[number][rank].any()]
            assert len(readers) == 1 and (read[number][readers[0]] == 1).all()


def test_ranks_that_want_all_have_equal_shares(monkeypatch):
    monkeypatch.setattr(blocks, "_SMALLEST_SHARE", 64)
    shapes = [(1000, 70), (3,), (999,), (5, 5, 5)]
    plan = plan_of(shapes, [{n: [everything(s)] for n, s in enumerate(shapes)}] * 4)
    (block,) = plan.blocks(10**6)
    assert block.ends == tuple((rank + 1) * block.ends[0] for rank in range(4))
    assert block.nbytes == block.ends[-1] and not block.shared
    assert [one.number for one in block.gathered] == [0, 1, 2, 3]
    lens = [sum(blocks.sized(one.ranges) for one in block.share(rank)) for rank in range(4)]
    assert sum(lens) == sum(map(math.prod, shapes)) and max(lens) - lens[-1] <= 512
    # Of few bytes, one rank reads all.
    monkeypatch.undo()
    (block,) = plan.blocks(10**6)
    assert set(block.ends) == {block.nbytes} and block.nbytes < 4 * lens[0] + 512


def test_encrypted_tensors_are_not_cut():
    wholes = {n: [((0, size),)] for n, size in enumerate((640, 64, 320, 128))}
    plan = plan_of([(640,), (64,), (320,), (128,)], [wholes] * 3, encrypted=True)
    (block,) = plan.blocks(1 << 30)
    assert block.ends == (640, 704, 1152)
    # All want the same rows: they are read as boxes.
    plan = plan_of([(640,)], [{0: [((9, 640),)]}] * 3, encrypted=True)
    assert plan.case(0).of_all is None and plan.case(0).shared == ((9, 640, (0, 1, 2)),)


def test_blocks_are_small_enough_to_begin_early_and_long_enough_for_a_server(monkeypatch):
    def usual(total, size):
        plan = plan_of([(total,)], [{0: [((0, total),)]}] * size)
        return plan.block_bytes(1 << 40) >> 20

    assert usual(10 << 20, 2) == 16  # 8 MiB for each
    assert usual(2 << 30, 4) == 64  # a 32nd
    assert usual(1 << 40, 4) == 256
    plan = plan_of([(1 << 30,)], [{0: [((0, 1 << 30),)]}] * 2)
    assert plan.block_bytes(1000) == 1000


@pytest.mark.parametrize(
    ("shape", "dim", "apart"),
    [((64, 3 << 20), 1, False), ((4, 8 << 20), 1, True), ((8, 8), 0, True), ((8, 8), 1, False)],
)
def test_long_runs_of_one_rank_are_read_by_it(shape, dim, apart):
    step = shape[dim] // 4
    of_ranks = []
    for rank in range(4):
        box = list(everything(shape))
        box[dim] = (rank * step, rank * step + step)
        of_ranks.append({0: [tuple(box)]})
    case = plan_of([shape], of_ranks).case(0)
    assert case.of_all is None and (case.shared == ()) == apart
    assert case.cost == (1 / 4 if apart else 1 / 2)


def test_parts_that_overlap_are_read_once():
    """Of rows that some ranks want, the ranks that want them read a share each."""
    plan = plan_of([(8, 5)], [{0: [((0, 6), (0, 5))]}, {0: [((4, 8), (0, 5))]}, {}])
    assert plan.case(0).shared == ((0, 4, (0,)), (4, 6, (0, 1)), (6, 8, (1,)))
    (block,) = plan.blocks(10**6)
    pieces = {ranks: plan.pieces(block, ranks) for ranks in block.shared}
    assert [one.ranges for one in pieces[0, 1][0]] == [((4, 5), (0, 5))]
    assert [one.ranges for one in pieces[0, 1][1]] == [((5, 6), (0, 5))]


def test_columns_that_no_rank_wants_are_not_read():
    plan = plan_of([(6, 100)], [{0: [((0, 6), (10, 30))]}, {0: [((0, 6), (20, 40))]}])
    (block,) = plan.blocks(10**6)
    boxes = [one.ranges for part in plan.pieces(block, (0, 1)) for one in part]
    assert boxes == [((0, 3), (10, 40)), ((3, 6), (10, 40))]


@pytest.mark.parametrize("seed", range(20))
def test_wishes_survive_encoding(seed):
    rng = random.Random(seed)
    shapes = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(rng.randint(0, 30))]
    wanted = {n: some_boxes(rng, s) for n, s in enumerate(shapes) if rng.random() < 0.7}
    wish = wish_of(shapes, wanted)
    again = Wish(decoded_columns(wish.encoded()), decoded_table(wish.encoded_table()))
    assert torch.equal(again.columns, wish.columns) and again.table == wish.table
    assert again.digest() == wish.digest()


@pytest.mark.parametrize("world", [8, 512, 1024])
def test_ranks_that_cut_a_model_tell_each_other_little(world):
    """Of 20,000 tensors; some have fewer rows than there are ranks."""
    rows = [8192, 1024, 1000, 8192, 28672, 28672, 10, 8192, 8192, 100]
    shapes = [(count, 8) for count in rows] * 2000

    def wish(rank):
        wanted = {}
        for number, (count, width) in enumerate(shapes):
            each = -(-count // world)
            ends = min(rank * each, count), min(rank * each + each, count)
            wanted[number] = [(ends, (0, width))]
        return wish_of(shapes, wanted)

    told = {rank: wish(rank) for rank in {0, 1, world // 2, world - 1}}
    # Ranks without a row of the short tensors have other columns.
    assert len({one.digest() for one in told.values()}) <= 3
    for one in told.values():
        assert len(one.encoded()) < 3000 and len(one.encoded_table()) < 200


def test_replicas_of_half_a_thousand_ranks():
    """A mesh of 64 replicas of 8 parts, of 100,000 tensors: replicas give each other their part."""
    numbers = torch.arange(100_000)
    columns = torch.stack([numbers, numbers % 10])

    def table(rank):
        parts = [((rank % 8 * n, rank % 8 * n + n),) for n in range(1, 11)]
        return tuple(wishes.Kind((box,), (8 * (n + 1),), 0) for n, box in enumerate(parts))

    found = merged(
        [(columns, [(rank, table(rank)) for rank in range(512)])], 100_000, 512, [], encrypted=False
    )
    assert len(found.cases) == 10
    for case in found.cases:
        assert [rows.ranks for rows in case.shared] == [tuple(range(n, 512, 8)) for n in range(8)]
        assert case.cost == 2 / 8


def test_wishes_of_very_many_kinds_are_not_compared_one_by_one(monkeypatch):
    monkeypatch.setattr(wishes, "_MAX_COMPARED_BOXES", 20)
    shapes = [(30,)] * 12
    of_ranks = [
        {n: [((rank + n, rank + n + 5),)] for n in range(12) if n % (rank + 1) == 0}
        for rank in range(4)
    ]
    plan = plan_of(shapes, of_ranks)
    read, got = carried_out(plan, shapes, 4, 10**6)
    for rank, wanted in enumerate(of_ranks):
        for number in range(12):
            assert got[rank][number].sum() == 5 * (number in wanted)
    assert all((one.sum(0) <= 1).all() for one in read)
    ranks = {rows.ranks for n in range(12) for rows in plan.case(n).shared}
    assert all(len(some) > 1 for some in ranks)


def test_shares_follow_each_other():
    shapes = [(100,), (64,), (1,), (7, 9)]
    whole = {n: [everything(s)] for n, s in enumerate(shapes)}
    for encrypted, one_piece in itertools.product((False, True), ((), (1, 3))):
        plan = plan_of(shapes, [whole] * 3, one_piece, encrypted=encrypted)
        (block,) = plan.blocks(blocks._MOST_BYTES)
        assert block.ends[-1] == block.nbytes and list(block.ends) == sorted(block.ends)
        for rank in range(3):
            low, high = block.ends[rank - 1] if rank else 0, block.ends[rank]
            for one in block.share(rank):
                assert low <= one.position <= one.position + blocks.sized(one.ranges) <= high
