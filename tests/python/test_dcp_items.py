"""Contents of checkpoints of torch.distributed.checkpoint, saved and loaded by one process."""

import collections
import dataclasses
import io
import json
import os
import shutil
from pathlib import Path

import pytest
import tensorizer
import torch
import torch.distributed.checkpoint as dcp
from conftest import assert_same
from dcp_planners import AnyBytes, Halves, fails, load, of_every_dtype, save
from tensorizer import FormatError
from tensorizer.distributed import Reader, Writer, layout
from tensorizer.distributed.layout import sealed
from tensorizer.distributed.whole_tensors import WholeTensors
from torch.distributed.checkpoint import default_planner

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def read_json(folder):
    content = json.loads((folder / "checkpoint.json").read_bytes())
    del content["sha256"]
    return content


def test_dtypes_and_shapes(tmp_path):
    state = of_every_dtype()
    save(state, tmp_path / "c")
    target = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in state.items()}
    given = dict(target)
    load(target, tmp_path / "c", verify_hash=True)
    for name, tensor in state.items():
        assert target[name] is given[name]
        assert_same(target[name], tensor)
    with WholeTensors(tmp_path / "c", verify_hash=True) as whole:
        for name, tensor in zip(whole.names, whole.load(whole.names), strict=True):
            assert_same(tensor, state[name])


def test_targets_of_another_dtype_and_stride(tmp_path):
    save({"a": torch.arange(12.0).reshape(3, 4)}, tmp_path / "c")
    between = torch.zeros(3, 8)
    for target in (
        torch.zeros(3, 4, dtype=torch.bfloat16),
        torch.zeros(4, 3).t(),
        between[:, ::2],
        torch.nn.Parameter(torch.zeros(3, 4)),
    ):
        found = load({"a": target}, tmp_path / "c")["a"]
        assert found is target
        assert torch.equal(found.detach().float(), torch.arange(12.0).reshape(3, 4))
    assert not between[:, 1::2].any()


@pytest.mark.parametrize("verify", [False, True])
def test_conjugated_and_negated_targets_are_filled(tmp_path, verify):
    state = {
        "conj": torch.arange(6) * (1 + 2j),
        "neg": torch.arange(6.0),
        "both": torch.ones(4) * 3j,
    }

    def targets():
        return {
            "conj": torch.zeros(6, dtype=torch.complex64).conj(),
            "neg": torch._neg_view(torch.zeros(6)),
            "both": torch._neg_view(torch.zeros(4, dtype=torch.complex64).conj()),
        }

    save(state, tmp_path / "ours")
    dcp.save(state, checkpoint_id=tmp_path / "theirs")
    mine, theirs = targets(), targets()
    load(mine, tmp_path / "ours", verify_hash=verify)
    dcp.load(theirs, checkpoint_id=tmp_path / "theirs")
    for name, tensor in state.items():
        assert torch.equal(mine[name], tensor)
        assert torch.equal(theirs[name], tensor)


def test_targets_that_share_memory(tmp_path):
    tied = torch.arange(100.0)
    state = {"a": tied, "b": tied, "view": tied[50:], "apart": torch.ones(3)}
    save(state, tmp_path / "c")
    target = torch.zeros(100)
    others = {"b": target, "view": target[50:], "apart": torch.zeros(3)}
    for verify in (False, True):
        target.zero_()
        load({"a": target} | others, tmp_path / "c", verify_hash=verify)
        assert torch.equal(target, tied)
        assert others["apart"].all()


def test_targets_that_are_copied_to_in_pieces(tmp_path, monkeypatch):
    from tensorizer.distributed import reader

    monkeypatch.setattr(reader, "_BATCH_BYTES", 100)
    state = {str(number): torch.full((5, 7), float(number)) for number in range(6)}
    save(state, tmp_path / "c")
    target = load({name: torch.zeros(7, 5).t() for name in state}, tmp_path / "c")
    assert all(torch.equal(target[name], state[name]) for name in state)


def test_values_that_are_not_tensors_are_restored(tmp_path):
    state = {
        "step": 7,
        "lr": 0.1,
        "text": "a\n\u2028ü",
        "none": None,
        "bytes": b"\0\1",
        "nested": {"list": [1, {"deep": torch.ones(2)}, [torch.zeros(1), 2]], "tuple": (1, "x")},
        "ordered": collections.OrderedDict(a=1),
        "empty": {},
    }
    save(state, tmp_path / "c")
    empty = {
        "step": 0,
        "lr": 0.0,
        "text": "",
        "none": 1,
        "bytes": b"",
        "nested": {"list": [0, {"deep": torch.zeros(2)}, [torch.ones(1), 0]], "tuple": ()},
        "ordered": collections.OrderedDict(a=0),
        "empty": {},
    }
    load(empty, tmp_path / "c")
    assert torch.equal(empty["nested"]["list"][1].pop("deep"), torch.ones(2))
    assert torch.equal(empty["nested"]["list"][2].pop(0), torch.zeros(1))
    del state["nested"]["list"][1]["deep"], state["nested"]["list"][2][0]
    assert empty == state


NAMES = [
    "a", "a@1,2", "a.b", "a/b", "../a", "", " ", "\x1e[1]", "ü\n\t\"\\", "\U0001f600", "a" * 300,
    "0",
]  # fmt: skip


def test_names(tmp_path):
    state = {name: torch.full((2,), float(number)) for number, name in enumerate(NAMES)}
    flat = default_planner.DefaultSavePlanner(flatten_state_dict=False)
    save(state, tmp_path / "c", planner=flat)
    target = {name: torch.zeros(2) for name in NAMES}
    planner = default_planner.DefaultLoadPlanner(flatten_state_dict=False)
    load(target, tmp_path / "c", planner=planner)
    assert all(torch.equal(target[name], state[name]) for name in NAMES)


def test_chunks_and_bytes_of_a_planner(tmp_path):
    # The second is called as the second half of the first would be.
    state = {"a": torch.arange(10.0).reshape(5, 2), "a@2,0": torch.ones(4, 1), "nothing": 0}
    planner = Halves(flatten_state_dict=False)
    planner.data = {"version": 3, "extra": [1, (2, "x")]}
    save(state, tmp_path / "c", planner=planner)
    assert len(read_json(tmp_path / "c")["items"]["a"]["grid"]) == 2
    target = {"a": torch.zeros(5, 2), "a@2,0": torch.zeros(4, 1), "nothing": 1}
    reader = Reader(tmp_path / "c", weights_only=False)
    planner = AnyBytes(flatten_state_dict=False)
    dcp.load(target, storage_reader=reader, planner=planner)
    assert torch.equal(target["a"], state["a"])
    assert torch.equal(target["a@2,0"], state["a@2,0"])
    assert target["nothing"] == b""
    assert planner.metadata.planner_data == {"version": 3, "extra": [1, (2, "x")]}
    with fails(FormatError, "'nothing' of .*/c cannot be read as an object of torch"):
        load({"nothing": 1}, tmp_path / "c", planner=AnyBytes(flatten_state_dict=False))
    with WholeTensors(tmp_path / "c") as whole:
        assert whole.objects == ["nothing"]
        assert torch.equal(next(whole.load(["a"])), state["a"])


class Twice(AnyBytes):
    """Loads what is called "a" and "o" a second time."""

    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
        super().set_up_planner(state_dict, metadata, is_coordinator)
        wanted = metadata.state_dict_metadata
        self.metadata = dataclasses.replace(
            metadata,
            state_dict_metadata=wanted | {f"{name}2": one for name, one in wanted.items()},
        )

    def create_local_plan(self):
        plan = super().create_local_plan()
        items = []
        for item in plan.items:
            name = item.storage_index.fqn.removesuffix("2")
            index = dataclasses.replace(item.storage_index, fqn=name)
            items.append(dataclasses.replace(item, storage_index=index))
        return dataclasses.replace(plan, items=items)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_stored_tensor_for_two(tmp_path, dtype):
    save({"a": torch.arange(50.0), "o": 3}, tmp_path / "c")
    target = {"a": torch.zeros(50, dtype=dtype), "a2": torch.zeros(50), "o": 0, "o2": 0}
    planner = Twice(flatten_state_dict=False)
    load(target, tmp_path / "c", planner=planner, verify_hash=True)
    for name in ("a", "a2"):
        assert torch.equal(target[name].float(), torch.arange(50.0))
    assert target["o"] == target["o2"] != 0


class Holes(Halves):
    """Forgets half of each tensor."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        plan.items[:] = plan.items[::2]
        return plan

    def create_global_plan(self, all_plans):
        plans, metadata = default_planner.create_default_global_save_plan(all_plans)
        return plans, metadata


def test_incomplete_chunks_are_refused_and_the_old_checkpoint_stays(tmp_path):
    save({"a": torch.ones(4, 2)}, tmp_path / "c")
    with fails(ValueError, "'a' have 4 elements together"):
        save({"a": torch.zeros(4, 2)}, tmp_path / "c", planner=Holes(flatten_state_dict=False))
    assert load({"a": torch.zeros(4, 2)}, tmp_path / "c")["a"].all()


def test_more_items_than_can_be_read(tmp_path, monkeypatch):
    save({"a": torch.ones(4)}, tmp_path / "c")
    monkeypatch.setattr(layout, "MOST_BYTES", 1000)
    with fails(ValueError, "checkpoint.json would have [0-9]+ bytes .* at most 1000 bytes"):
        save({f"{number}": torch.zeros(1) for number in range(100)}, tmp_path / "c")
    assert load({"a": torch.zeros(4)}, tmp_path / "c")["a"].all()
    (tmp_path / "c/checkpoint.json").write_bytes(b" " * 2000)
    with fails(FormatError, "checkpoint.json is longer than 1000 bytes"):
        load({"a": torch.zeros(4)}, tmp_path / "c")


def test_parts_of_a_checkpoint(tmp_path):
    save({"a": torch.ones(3), "b": {"c": torch.ones(2), "d": 5}}, tmp_path / "c")
    assert load({"b": {"d": 0}}, tmp_path / "c") == {"b": {"d": 5}}
    with pytest.raises(dcp.api.CheckpointException, match="Missing key in checkpoint"):
        load({"a": torch.zeros(3), "new": 1}, tmp_path / "c")
    planner = default_planner.DefaultLoadPlanner(allow_partial_load=True)
    target = load({"a": torch.zeros(3), "new": 1}, tmp_path / "c", planner=planner)
    assert target["new"] == 1
    assert target["a"].all()
    with pytest.raises(dcp.api.CheckpointException, match="[Ss]ize"):
        load({"a": torch.zeros(4)}, tmp_path / "c")


def test_a_checkpoint_loads_without_a_template(tmp_path):
    state = {"model": {"w": torch.ones(2, 3)}, "step": 3, "list": [torch.zeros(1), "x"]}
    save(state, tmp_path / "c")
    found = {}
    default_planner_ = default_planner._EmptyStateDictLoadPlanner()
    dcp.state_dict_loader._load_state_dict(
        found, storage_reader=Reader(tmp_path / "c"), planner=default_planner_, no_dist=True
    )
    assert found["step"] == 3
    assert found["list"][1] == "x"
    assert torch.equal(found["model"]["w"], state["model"]["w"])


class Counter:
    """Something with a state of its own."""

    def __init__(self, value):
        self.value = torch.full((3,), float(value))

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"].clone()


def test_objects_with_a_state(tmp_path):
    save({"counter": Counter(3), "model": torch.nn.Linear(2, 2)}, tmp_path / "c")
    target = {"counter": Counter(0), "model": torch.nn.Linear(2, 2)}
    load(target, tmp_path / "c")
    assert torch.equal(target["counter"].value, torch.full((3,), 3.0))


def test_checkpoint_id(tmp_path):
    writer, reader = Writer(), Reader()
    for number in range(3):
        folder = tmp_path / f"step-{number}"
        state = {"a": torch.full((2,), float(number))}
        dcp.save(state, checkpoint_id=folder, storage_writer=writer)
    for number in (2, 0):
        target = {"a": torch.zeros(2)}
        dcp.load(target, checkpoint_id=str(tmp_path / f"step-{number}"), storage_reader=reader)
        assert torch.equal(target["a"], torch.full((2,), float(number)))
    errors = (ValueError, dcp.api.CheckpointException)
    with pytest.raises(errors, match=r"expected Writer\(uri\) or checkpoint_id="):
        dcp.save({"a": torch.zeros(2)}, storage_writer=Writer())
    with pytest.raises(errors, match=r"expected Reader\(uri\) or checkpoint_id="):
        dcp.load({"a": torch.zeros(2)}, storage_reader=Reader())


@pytest.mark.parametrize("path", ["{}/a/b", "file://{}/a/b", "{}/a/b/"])
def test_folders(tmp_path, path):
    for turn in range(2):
        save({"a": torch.full((2,), float(turn))}, path.format(tmp_path))
        assert len(os.listdir(tmp_path / "a/b")) == 2
        target = load({"a": torch.zeros(2)}, path.format(tmp_path))
        assert torch.equal(target["a"], torch.full((2,), float(turn)))
    assert os.listdir(tmp_path) == ["a"]


def test_a_folder_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save({"a": torch.ones(2)}, "c")
    assert load({"a": torch.zeros(2)}, "c")["a"].all()


def test_a_reader_sees_a_later_checkpoint(tmp_path):
    save({"a": torch.ones(1)}, tmp_path / "c")
    reader = Reader(tmp_path / "c")
    for value in range(3):
        target = {"a": torch.zeros(value + 1)}
        dcp.load(target, storage_reader=reader)
        assert target["a"].all()
        save({"a": torch.full((value + 2,), 1.0)}, tmp_path / "c")
    shutil.rmtree(tmp_path / "c")
    for planner in (None, default_planner._EmptyStateDictLoadPlanner()):
        with fails(FileNotFoundError):
            dcp.state_dict_loader._load_state_dict(
                {}, storage_reader=reader, planner=planner, no_dist=True
            )


class SavesMeanwhile(default_planner.DefaultSavePlanner):
    """Lets another save end before it writes."""

    def finish_plan(self, new_plan):
        save({"a": torch.ones(2)}, self.folder)
        return super().finish_plan(new_plan)


def test_overwrite(tmp_path):
    planner = SavesMeanwhile()
    planner.folder = tmp_path / "b"
    with fails(FileExistsError, "there is a checkpoint at"):
        save({"a": torch.zeros(2)}, tmp_path / "b", overwrite=False, planner=planner)
    assert load({"a": torch.zeros(2)}, tmp_path / "b")["a"].all()
    save({"a": torch.ones(2)}, tmp_path / "c", overwrite=False)
    before = os.listdir(tmp_path / "c")
    with fails(FileExistsError, "there is a checkpoint at"):
        save({"a": torch.zeros(2)}, tmp_path / "c", overwrite=False)
    assert os.listdir(tmp_path / "c") == before
    assert load({"a": torch.zeros(2)}, tmp_path / "c")["a"].all()


def test_an_empty_state_is_saved_and_loaded(tmp_path):
    save({}, tmp_path / "c")
    assert os.listdir(tmp_path / "c") == ["checkpoint.json"]
    assert load({}, tmp_path / "c") == {}
    with fails(FileNotFoundError, "there is no checkpoint at .*/d: expected checkpoint.json"):
        load({}, tmp_path / "d")


def test_files_of_saves_that_were_killed(tmp_path):
    left = tmp_path / "c" / f"rank-00003-{'0' * 16}.tensors"
    others = {tmp_path / "c" / name for name in ("rank-00003-x.tensors", "mine.tensors")}
    (tmp_path / "c").mkdir()
    for path in (left, *others):
        path.write_bytes(b"x")
    kept = Writer(tmp_path / "c")
    dcp.save({"a": torch.ones(2)}, storage_writer=kept)
    assert not left.exists()
    # As long as a save goes on, by this process or by another, nothing is known to be left over.
    kept.set_up_storage_writer(True, rank=0)
    kept.prepare_global_plan([])
    left.write_bytes(b"x")
    save({"a": torch.ones(2)}, tmp_path / "c")
    assert left.exists()
    kept.reset()
    save({"a": torch.ones(2)}, tmp_path / "c")
    assert not left.exists()
    assert all(path.exists() for path in others)


def test_cached_save_plans_are_supported(tmp_path):
    folder = tmp_path / "c"
    for turn in range(4):
        planner = default_planner.DefaultSavePlanner(enable_plan_caching=True)
        save({"a": torch.full((4,), float(turn)), "step": turn}, folder, planner=planner)
        target = load({"a": torch.zeros(4), "step": 0}, folder)
        assert target["step"] == turn
        assert torch.equal(target["a"], torch.full((4,), float(turn)))
        assert len(os.listdir(folder)) == 2


def test_the_files_of_a_checkpoint_are_closed(tmp_path):
    save({"a": torch.ones(2)}, tmp_path / "c")

    def is_open():
        links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return any(
            link.name.startswith("rank-") and link.parent == tmp_path / "c" for link in links
        )

    with WholeTensors(tmp_path / "c") as whole:
        assert is_open()
        assert next(whole.load(["a"])).all()
    assert not is_open()


def test_a_checkpoint_that_was_moved(tmp_path):
    save({"a": torch.ones(2)}, tmp_path / "c")
    shutil.move(tmp_path / "c", tmp_path / "d")
    assert load({"a": torch.zeros(2)}, tmp_path / "d")["a"].all()


def test_the_json_is_what_the_documents_say(tmp_path):
    save({"a": torch.ones(2, 3), "step": 1}, tmp_path / "c")
    content = read_json(tmp_path / "c")
    (file,) = content["files"]
    assert content == {
        "format": "tensorizer.distributed",
        "version": 1,
        "dcp_version": dcp.filesystem.CURRENT_DCP_VERSION,
        "files": [file],
        "items": {
            "a": {"dtype": "float32", "size": [2, 3], "chunks": [[[0, 0], [2, 3], 0, "a"]]},
            "step": {"object": [0, "step"]},
        },
        "planner": {"paths": {"a": ["a"], "step": ["step"]}},
    }
    assert sealed(content) == (tmp_path / "c/checkpoint.json").read_bytes()
    with tensorizer.TensorDeserializer(tmp_path / "c" / file, device="cpu") as loaded:
        assert torch.load(io.BytesIO(loaded["step"].numpy().tobytes())) == 1
