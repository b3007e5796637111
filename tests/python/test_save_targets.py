"""The file that a save writes: open files, empty files, folders that change, the order of saves."""

import logging
import os
import re
import tempfile
from pathlib import Path

import pytest
import tensorizer
import torch
import torch.distributed.checkpoint as dcp
from processes import start_python
from tensorizer.distributed import Reader, Writer
from tensorizer.streams import targets
from torch.distributed.checkpoint.planner import SavePlan

NEW = {"new": torch.arange(5)}


def serialize(path):
    with tensorizer.TensorSerializer(path) as serializer:
        serializer.write_state_dict(NEW)


WAYS = {
    "save": lambda path: tensorizer.save(NEW, path),
    "safetensors": lambda path: tensorizer.save(NEW, path, format="safetensors"),
    "save_async": lambda path: tensorizer.save_async(NEW, path).result(),
    "TensorSerializer": serialize,
    "operator": lambda path: torch.ops.tensorizer.save(path, NEW),
}
every_way = pytest.mark.parametrize("save", WAYS.values(), ids=WAYS)


def holds(path, value=None):
    loaded = tensorizer.load(path, "cpu")
    assert loaded["new"].tolist() == (NEW["new"].tolist() if value is None else value)


def failing():
    """Return tensors of which the last cannot be saved, which is found when it is written."""
    return {"new": torch.ones(100_000), "wrong": torch.eye(3).to_sparse()}


@every_way
@pytest.mark.parametrize("name", ["/proc/self/fd/{}", "/dev/fd/{}"])
def test_the_path_of_an_open_file_is_that_file(save, name, tmp_path):
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        file.write(b"old" * 100_000)
        file.flush()
        save(name.format(file.fileno()))
        file.seek(0)
        (tmp_path / "copy").write_bytes(file.read())
    holds(tmp_path / "copy")
    assert os.listdir(tmp_path) == ["copy"]


def test_standard_output_in_a_file(tmp_path):
    code = "import tensorizer, torch\ntensorizer.save({'new': torch.arange(5)}, '/dev/stdout')"
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        with start_python(code, stdout=file) as process:
            assert process.wait(60) == 0
        holds(file)


def test_pipes_are_refused():
    reading, writing = os.pipe()
    try:
        with pytest.raises(ValueError, match=r"expected a seekable file, found a pipe.*/dev/fd/"):
            tensorizer.save(NEW, f"/dev/fd/{writing}")
    finally:
        os.close(reading)
        os.close(writing)


def test_two_saves_into_one_open_file_at_once_are_refused(tmp_path):
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        path = f"/dev/fd/{file.fileno()}"
        with tensorizer.TensorSerializer(path) as serializer:
            with pytest.raises(ValueError, match="another save of this process is writing"):
                tensorizer.save(NEW, path)
            serializer.write_state_dict(NEW)
        holds(file)


@every_way
def test_an_empty_file_is_written_in_place(save, tmp_path):
    with tempfile.NamedTemporaryFile(dir=tmp_path) as file:
        save(file.name)
        holds(file)


@pytest.mark.parametrize("suffix", ["", ".safetensors"])
def test_an_empty_file_is_empty_again_after_a_failed_save(suffix, tmp_path):
    path = tmp_path / f"f{suffix}"
    path.touch()
    with pytest.raises(NotImplementedError):
        tensorizer.save(failing(), path)
    assert path.stat().st_size == 0


def test_two_saves_of_one_empty_file_do_not_disturb_each_other(tmp_path):
    path = tmp_path / "f"
    path.touch()
    serializer = tensorizer.TensorSerializer(path)
    serializer.write_tensor(0, "new", 0, torch.ones(3))
    tensorizer.save(NEW, path)  # the other one is not disturbed, and neither is this
    holds(path)
    serializer.close()
    holds(path)


@pytest.mark.parametrize("change", [os.unlink, lambda path: os.replace(path, f"{path}.moved")])
def test_an_empty_file_that_vanishes_meanwhile(change, tmp_path):
    path = tmp_path / "f"
    path.touch()
    with tensorizer.TensorSerializer(path) as serializer:
        serializer.write_state_dict(NEW)
        change(path)
    holds(path)


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("flip", ["link", "rename"])
def test_a_save_stays_in_its_folder(flip, exists, tmp_path):
    first, second, path = tmp_path / "1", tmp_path / "2", tmp_path / "latest"
    first.mkdir()
    second.mkdir()
    path.symlink_to("1")
    if exists:
        tensorizer.save({"old": torch.ones(1)}, path / "f")
    with tensorizer.TensorSerializer(path / "f" if flip == "link" else first / "f") as serializer:
        serializer.write_state_dict(NEW)
        if flip == "link":
            (tmp_path / "next").symlink_to("2")
            os.replace(tmp_path / "next", path)
        else:
            first = first.rename(tmp_path / "3")
            (tmp_path / "1").mkdir()
    holds(first / "f")
    assert os.listdir(second) == []


def test_shards_stay_in_one_folder(tmp_path):
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
    (tmp_path / "latest").symlink_to("1")
    tensors = {f"t{i}": torch.full((1000,), float(i)) for i in range(10)}

    def flip(done, total):
        if not (tmp_path / "next").is_symlink() and os.readlink(tmp_path / "latest") == "1":
            (tmp_path / "next").symlink_to("2")
            os.replace(tmp_path / "next", tmp_path / "latest")

    path = tmp_path / "latest/model.safetensors"
    tensorizer.save(tensors, path, max_shard_size="12KB", progress=flip)
    assert os.readlink(tmp_path / "latest") == "2"
    assert os.listdir(tmp_path / "2") == []
    assert list(tensorizer.load(tmp_path / "1", "cpu")) == list(tensors)
    with pytest.raises(FileExistsError, match=rf"^{tmp_path}/1/model.*index.json exists"):
        tensorizer.save(tensors, tmp_path / "1/model.safetensors", max_shard_size="12KB")


class FlipsTheLink(Writer):
    """Has the link lead to another folder before ``checkpoint.json`` is written."""

    def finish(self, **arguments):
        folder = Path(self.checkpoint_id).parent
        (folder / "next").symlink_to("2")
        (folder / "next").replace(self.checkpoint_id)
        super().finish(**arguments)


def test_a_distributed_checkpoint_stays_in_one_folder(tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    (tmp_path / "latest").symlink_to("1")
    dcp.save(dict(NEW), storage_writer=FlipsTheLink(tmp_path / "latest"), no_dist=True)
    assert os.listdir(tmp_path / "2") == []
    loaded = {"new": torch.zeros(5, dtype=torch.int64)}
    dcp.load(loaded, storage_reader=Reader(tmp_path / "1"), no_dist=True)
    assert torch.equal(loaded["new"], NEW["new"])


@pytest.mark.parametrize(
    ("names", "differs"),
    [
        (["a", "a"], False),
        (["a", Path("./a").absolute()], False),
        (["a", None], False),
        (["s3://b/a", "s3://b/a"], False),
        (["a", "a", b"b"], True),
        (["s3://b/a", "s3://b/c"], True),
        (["a", "s3://b/a"], True),
    ],
)
def test_ranks_name_one_target(names, differs):
    found = [targets.spellings(name) for name in names]
    if not differs:
        targets.refuse_different(found)
        return
    with pytest.raises(ValueError, match=rf"rank {len(names) - 1} .* names the target .* rank 0"):
        targets.refuse_different(found)


def test_ranks_with_different_folders_of_a_checkpoint_are_refused(tmp_path):
    writers = [Writer(tmp_path / name) for name in "12"]
    plans = [writer.prepare_local_plan(SavePlan([])) for writer in writers]
    with pytest.raises(ValueError, match="rank 1 of this collective save names the target"):
        writers[0].prepare_global_plan(plans)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("other", ["f", "link", "folder/../f"])
def test_the_save_that_was_called_last_stays(other, tmp_path, caplog):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("f")
    serializer = tensorizer.TensorSerializer(tmp_path / "f")
    serializer.write_state_dict({"new": torch.zeros(2)})
    assert not tensorizer.save_async(NEW, tmp_path / other).overtaken
    tensorizer.save(NEW, tmp_path / other)
    with caplog.at_level(logging.WARNING, "tensorizer"):
        serializer.close()
    assert "began later is complete, so this one was dropped" in caplog.text
    holds(tmp_path / "f")


def test_a_save_that_ends_first_is_there_until_the_later_one_ends(tmp_path):
    first = tensorizer.TensorSerializer(tmp_path / "f")
    first.write_state_dict({"new": torch.zeros(2)})
    second = tensorizer.TensorSerializer(tmp_path / "f")
    second.write_state_dict(NEW)
    first.close()
    holds(tmp_path / "f", [0, 0])
    second.close()
    holds(tmp_path / "f")


def test_a_future_says_that_it_was_overtaken(tmp_path):
    futures = [
        tensorizer.save_async({"new": torch.full((size,), number)}, tmp_path / "f")
        for number, size in enumerate((3_000_000, 1))
    ]
    assert [future.result(60) for future in futures] == [None, None]
    assert not futures[1].overtaken
    holds(tmp_path / "f", [1])


def test_the_order_of_saves_to_a_server(s3):
    s3.client().create_bucket(Bucket="order")
    first = tensorizer.TensorSerializer("s3://order/f.tensors")
    first.write_state_dict({"new": torch.zeros(2)})
    tensorizer.save(NEW, "s3://order/f.tensors")
    first.close()
    holds("s3://order/f.tensors")


def test_a_small_file_is_small(tmp_path):
    for save in (tensorizer.save, lambda *one: tensorizer.save_async(*one).result(60)):
        save({"a": torch.arange(9.0)}, tmp_path / "small.tensors")
        assert (tmp_path / "small.tensors").stat().st_size < 500
        assert tensorizer.load(tmp_path / "small.tensors", verify_hash=True)["a"][8] == 8


def test_files_for_writing_alone_are_refused_with_the_mode(tmp_path):
    for buffering in (-1, 0):
        with (
            open(tmp_path / "f", "wb", buffering=buffering) as file,
            pytest.raises(ValueError, match=re.escape('as of open(path, "wb+")')),
        ):
            tensorizer.save({"a": torch.ones(2)}, file)
