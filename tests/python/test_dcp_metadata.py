"""The size of checkpoint.json for many ranks, what of it is decoded, and its limits."""

import json
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_planners import Halves, fails, load, save
from dcp_plans import content_of, names_of, plans_of, saved, write_item
from tensorizer import FormatError
from tensorizer.distributed import Reader, Writer, chunks, items, layout, save_plan
from tensorizer.distributed.layout import sealed
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.planner import SavePlan

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def length_of(ranks, tensors):
    return len(layout.encoded(*saved(plans_of(ranks, tensors))))


def test_another_rank_costs_the_same_for_any_number_of_tensors():
    few, many = length_of(32, 10), length_of(32, 200)
    # The name of a file and a number in one order, and not something for each tensor.
    assert length_of(64, 10) - few <= 32 * 50
    assert length_of(64, 200) - many <= 32 * 50 + 200 * 2
    # A tensor has its names, and what is said once of it.
    assert many - few <= 190 * 220


def test_orders_of_their_own_cost_one_number_for_each_chunk():
    plans = plans_of(100, 50)
    metadata, places = saved(plans)
    even = len(layout.encoded(metadata, places))
    # Replicas are saved by one rank or another, as torch's planner balances them.
    for index in places:
        at = (index.offset[0] // 8 * 7 + names_of(50).index(index.fqn)) % 100
        places[index] = items.ItemLocation(save_plan.file_of(at, "0" * 16), places[index].name)
    assert len(layout.encoded(metadata, places)) - even <= 50 * 100 * 3


#: The shape of a tensor, the offsets and sizes of its chunks, and whether they make a grid.
CUTS = [
    ((8, 6), [((0, 0), (4, 6)), ((4, 0), (4, 6))], True),
    ((7, 6), [((0, 0), (4, 6)), ((4, 0), (3, 6))], True),
    ((7, 6), [((4, 0), (3, 6)), ((0, 0), (4, 6))], True),
    ((3, 2), [((at, 0), (1, 2)) for at in range(3)] + [((3, 0), (0, 2))], True),
    ((4, 4), [((row, col), (2, 2)) for col in (0, 2) for row in (2, 0)], True),
    ((10,), [((0,), (3,)), ((3,), (2,)), ((5,), (3,)), ((8,), (2,))], True),
    ((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 2)), ((2, 2), (2, 2))], False),
    ((4, 4), [((0, 0), (4, 4))], False),
    ((0, 4), [((0, 0), (0, 4))], False),
    ((), [((), ())], False),
]


@pytest.mark.parametrize(("size", "boxes", "is_grid"), CUTS)
@pytest.mark.parametrize("taken", [False, True])
def test_chunks_and_places_come_back(size, boxes, is_grid, taken):
    plans = [SavePlan([write_item("a", size, *box)]) for box in boxes]
    metadata, places = saved(plans)
    if taken:
        # The name of a part, where something else in the file has it.
        places = {
            index: items.ItemLocation(place.file, f"{place.name}@")
            for index, place in places.items()
        }
    found = items.encoded(metadata.state_dict_metadata, places)
    assert ("grid" in found["items"]["a"]) == (is_grid and not taken)
    content = content_of(json.loads(json.dumps(found)))
    item = content["a"]
    assert item.size == size
    assert item.properties.dtype == torch.float32
    assert sorted((c.offsets, c.sizes) for c in item.chunks) == sorted(boxes)
    for at, chunk in enumerate(item.chunks):
        for hint in (at, at + 1, None):
            index = dcp.metadata.MetadataIndex("a", chunk.offsets, hint)
            place = content.location(index)
            assert (place.file, place.name) == (places[index].file, places[index].name)
            assert (place.dtype, place.shape) == (torch.float32, chunk.sizes)
    for missing in [[99] * len(size)] if size else []:
        with pytest.raises(KeyError):
            content.location(dcp.metadata.MetadataIndex("a", missing))


def test_only_what_is_wanted_is_decoded(tmp_path, monkeypatch):
    state = {f"t{number}": torch.full((4,), float(number)) for number in range(30)}
    save(state, tmp_path / "c", planner=Halves(flatten_state_dict=False))
    asked, make = [], items.Items.decoded
    monkeypatch.setattr(
        items.Items, "decoded", lambda self, name: (asked.append(name), make(self, name))[1]
    )
    planner = default_planner.DefaultLoadPlanner(flatten_state_dict=False)
    target = load({"t7": torch.zeros(4), "t9": torch.zeros(4)}, tmp_path / "c", planner=planner)
    assert torch.equal(target["t7"], state["t7"])
    assert torch.equal(target["t9"], state["t9"])
    assert asked == ["t7", "t9"]


def test_tensors_that_are_cut_alike_share_their_chunks(monkeypatch):
    made, make = [], chunks.of_grid
    monkeypatch.setattr(chunks, "of_grid", lambda *cut: (made.append(cut), make(*cut))[1])
    metadata, places = saved(plans_of(16, 40))
    content = content_of(items.encoded(metadata.state_dict_metadata, places))
    for name in names_of(40):
        assert content[name].chunks == metadata.state_dict_metadata[name].chunks
    assert len(made) == 1


# Limits


def test_the_bound_is_no_less_than_what_is_written():
    for plans in (
        plans_of(5, 7),
        [SavePlan([write_item("é\n" * 40, (4,), (at,), (1,))]) for at in range(4)],
        [SavePlan([write_item("a", (1 << 62,), (0,), (1 << 62,))])],
        [SavePlan([])],
        # No grid
        [
            SavePlan([write_item("a", (9, 9), *box)])
            for box in (((0, 0), (9, 4)), ((0, 4), (1, 5)), ((1, 4), (8, 5)))
        ],
    ):
        assert save_plan._upper_bound_bytes(plans) >= len(layout.encoded(*saved(plans)))


@pytest.mark.parametrize("limit", ["bytes", "chunks"])
def test_too_much_is_refused_before_a_file_is_written(tmp_path, monkeypatch, limit):
    if limit == "bytes":
        monkeypatch.setattr(layout, "MOST_BYTES", 500)
        match = "cannot be saved: checkpoint.json would have [0-9]+ bytes .* at most 500 .* nothing"
    else:
        monkeypatch.setattr(items, "MOST_CHUNKS", 9)
        match = "cannot be saved: expected at most 9 chunks of tensors, found 10; nothing was"
    with fails(ValueError, match):
        save({str(number): torch.zeros(1) for number in range(10)}, tmp_path / "c")
    assert not os.path.exists(tmp_path / "c")


def test_grids_are_not_refused_for_what_their_chunks_would_take(monkeypatch):
    plans = plans_of(64, 20)
    length = len(layout.encoded(*saved(plans)))
    assert save_plan._upper_bound_bytes(plans) > 10 * length
    monkeypatch.setattr(layout, "MOST_BYTES", length + 100)
    save_plan.check(plans, "folder")
    monkeypatch.setattr(layout, "MOST_BYTES", length - 100)
    with pytest.raises(ValueError, match=f"64 ranks at folder .* at most {length - 100} bytes"):
        save_plan.check(plans, "folder")


def test_plans_that_a_planner_has_kept_are_no_error():
    # Only those that changed are passed on, which are no whole tensors.
    plans = plans_of(4, 3)
    plans[1:3] = [SavePlan([], usable=False)] * 2
    save_plan.check(plans, "folder")
    assert Writer("folder").checkpoint_id == "folder"


# Grids that are damaged


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("grid", 5, "expected the cuts"),
        ("grid", [], "expected the cuts"),
        ("grid", [2, 2], "expected the cuts"),
        ("grid", [0], "expected cuts of 4, found 0"),
        ("grid", [-1], "expected cuts of 4"),
        ("grid", [True], "expected cuts of 4"),
        ("grid", [1.0], "expected cuts of 4"),
        ("grid", [1 << 63], "expected cuts of 4"),
        ("grid", [1], "2 files for a grid of 4"),
        ("grid", [4], "2 files for a grid of 1"),
        ("grid", [[]], "expected cuts of 4"),
        ("grid", [[1, 2]], "expected cuts of 4"),
        ("grid", [[0, 4]], "expected cuts of 4"),
        ("grid", [[0, 0]], "that ascend"),
        ("grid", [[0, "2"]], "expected cuts of 4"),
        ("grid", [[0, 3]], "of shape"),
        ("size", [0], "expected the cuts"),
        ("size", [(1 << 63) - 1], "2 files for a grid of"),
        ("size", [4, 4], "expected the cuts"),
        ("order", 1, "IndexError"),
        ("order", -1, "expected one of 1 orders"),
        ("order", True, "expected one of 1 orders"),
        ("order", "0", "expected one of 1 orders"),
        ("chunks", [[[0], [4], 0, "a"]], "overlap its grid"),
        ("chunks", 3, "."),
        ("orders", [[0, 1]], "expected one of 1 files"),
        ("orders", [[0, -1]], "expected one of 1 files"),
        ("orders", [[0, False]], "expected one of 1 files"),
        ("orders", [[0]], "1 files for a grid of 2"),
        ("orders", ["00"], "expected a list of files"),
        ("orders", [5], "."),
        ("orders", None, "."),
    ],
)
def test_a_damaged_grid_is_refused(tmp_path, name, value, match):
    planner = Halves(flatten_state_dict=False)
    save({"a": torch.arange(4.0)}, tmp_path / "c", planner=planner)
    content = json.loads((tmp_path / "c/checkpoint.json").read_bytes())
    del content["sha256"]
    assert (content["version"], content["orders"]) == (2, [[0, 0]])
    assert content["items"]["a"] == {"dtype": "float32", "size": [4], "grid": [2], "order": 0}
    (content if name == "orders" else content["items"]["a"])[name] = value
    (tmp_path / "c/checkpoint.json").write_bytes(sealed(content))
    planner = default_planner.DefaultLoadPlanner(flatten_state_dict=False)
    with fails(FormatError, f"(?s)(?=.*{match})(?=.*{tmp_path / 'c'})"):
        load({"a": torch.zeros(4)}, tmp_path / "c", planner=planner)


def test_more_chunks_than_are_read_are_refused(monkeypatch):
    metadata, places = saved(plans_of(8, 8))
    found = items.encoded(metadata.state_dict_metadata, places)
    monkeypatch.setattr(items, "MOST_CHUNKS", 63)
    with pytest.raises(ValueError, match="expected at most 63 chunks of tensors, found 64"):
        content_of(found)


def test_tensors_without_grids_have_the_first_version(tmp_path):
    save({"a": torch.ones(3), "step": 3}, tmp_path / "c")
    content = json.loads((tmp_path / "c/checkpoint.json").read_bytes())
    assert content["version"] == 1
    assert "orders" not in content


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Writer("x", hashes="sha"), "hashes must be 'all' or 'crc32'"),
        (lambda: Writer("x", encryption=b"key"), "encryption must be EncryptionParams"),
        (lambda: Writer("hf://a/b"), "can only be opened for reading"),
        (lambda: Writer().reset("https://host/b"), "can only be opened for reading"),
        (lambda: Reader("x", verify_hash="sha"), "verify_hash must be a bool or 'crc32'"),
        (lambda: Reader("x", num_readers=0), "num_readers must be at least 1"),
        (lambda: Reader("x", encryption="key"), "encryption must be DecryptionParams"),
    ],
)
def test_options_are_checked_where_they_are_given(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()
