"""Checkpoints of torch's own writer, and of safetensors files, and conversions both ways."""

import dataclasses
import io
import json
import os
import pickle
import re
import shutil
import tempfile
from pathlib import Path, PosixPath

import pytest
import tensorizer
import torch
import torch.distributed.checkpoint as dcp
from tensorizer.distributed import Reader, Writer, layout, load_state
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan


def state():
    torch.manual_seed(4)
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(6)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": {f"{n}": one for n, one in optimizer.state_dict()["state"].items()},
        "random": torch.get_rng_state(),
        "half": torch.arange(5).to(torch.bfloat16),
        "step": 7,
        "seen": [1, "two"],
    }


def same(found, expected):
    if isinstance(expected, torch.Tensor):
        return found.dtype is expected.dtype and torch.equal(found, expected)
    if isinstance(expected, dict):
        return {*found} == {*expected} and all(same(found[k], expected[k]) for k in expected)
    return found == expected


def blank(tree):
    if isinstance(tree, torch.Tensor):
        return torch.zeros_like(tree)
    return {key: blank(value) for key, value in tree.items()} if isinstance(tree, dict) else None


@pytest.fixture
def folder(tmp_path):
    """A checkpoint that torch has saved."""
    dcp.save(state(), storage_writer=FileSystemWriter(tmp_path / "torchs"), no_dist=True)
    return tmp_path / "torchs"


def test_a_folder_of_torch_is_loaded(folder):
    for given in (folder, str(folder), folder.as_uri()):
        found = blank(state())
        dcp.load(found, storage_reader=Reader(given), no_dist=True)
        assert same(found, state())
    found = blank(state())
    dcp.load(found, storage_reader=Reader(folder, weights_only=False), no_dist=True)
    assert same(found, state())


def test_one_reader_for_folders_of_both(folder, tmp_path):
    dcp.save(state() | {"step": 8}, storage_writer=Writer(tmp_path / "ours"), no_dist=True)
    reader = Reader()
    for place, step in ((folder, 7), (tmp_path / "ours", 8), (folder, 7)):
        found = blank(state())
        dcp.load(found, checkpoint_id=place, storage_reader=reader, no_dist=True)
        assert same(found, state() | {"step": step})


def test_ranks_that_find_folders_of_both_load_nothing(folder, tmp_path):
    dcp.save(state(), storage_writer=Writer(tmp_path / "ours"), no_dist=True)
    plans = []
    for place in (folder, tmp_path / "ours"):
        reader = Reader(place)
        reader.set_up_storage_reader(reader.read_metadata(), True)
        plans.append(reader.prepare_local_plan(LoadPlan([])))
    with pytest.raises(RuntimeError, match="ranks 0 and 1 have found different checkpoints"):
        reader.prepare_global_plan(plans)


def test_a_folder_of_safetensors_files_is_loaded(tmp_path):
    pytest.importorskip("safetensors")
    tensors = state()["model"]
    tensorizer.save(tensors, tmp_path / "model.safetensors", max_shard_size=20)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    found = blank(tensors)
    dcp.load(found, storage_reader=Reader(tmp_path), no_dist=True)
    assert same(found, tensors)


def test_parts_of_tensors_in_safetensors_files_are_loaded(tmp_path):
    """torch's HuggingFaceStorageWriter saves them so, one file for each rank."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    whole = torch.arange(12.0).reshape(4, 3)
    for number in range(2):
        rows = {"a": {"saved_offsets": [2 * number, 0]}, "b": {"saved_offsets": [3 * number]}}
        parts = {"a": whole[2 * number : 2 * number + 2], "b": torch.full((3,), float(number))}
        path = tmp_path / f"shard-{number + 1:05}-model-00001-of-00001.safetensors"
        save_file(parts, path, metadata={"DCP_SHARDING_INFO": json.dumps(rows)})
    for found in (load_state(tmp_path), {"a": torch.zeros(4, 3), "b": torch.zeros(6)}):
        dcp.load(found, storage_reader=Reader(tmp_path), no_dist=True)
        assert same(found, {"a": whole, "b": torch.tensor([0.0, 0, 0, 1, 1, 1])})


def test_conversions_keep_objects(folder, tmp_path):
    whole = load_state(folder)
    assert same(whole, state())
    dcp.save(whole, storage_writer=Writer(tmp_path / "ours"), no_dist=True)
    ours = load_state(tmp_path / "ours", verify_hash=True)
    assert same(ours, state())
    torch.save(ours, tmp_path / "state.pt")
    assert same(torch.load(tmp_path / "state.pt"), state())
    # And back to torch's own.
    dcp.save(ours, storage_writer=FileSystemWriter(tmp_path / "again"), no_dist=True)
    found = blank(state())
    dcp.load(found, storage_reader=FileSystemReader(tmp_path / "again"), no_dist=True)
    assert same(found, state())


class Odd:
    """A class that no restricted unpickler knows."""

    def __reduce__(self):
        return os.system, ("exit 3",)


def failure(call):
    with pytest.raises(CheckpointException) as caught:
        call()
    return caught.value.failures[0][0]


class Attribute:
    """Pickled as an attribute of a class."""

    def __init__(self, name):
        self.name = name

    def __reduce__(self):
        return getattr, (metadata.TensorProperties, self.name)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (Odd(), "system, which could run code.*weights_only=False"),
        (Attribute("__init__"), "it reads the attribute '__init__' of type"),
    ],
)
def test_metadata_that_would_run_code_is_refused(data, said, folder):
    with open(folder / ".metadata", "rb") as file:
        found = pickle.load(file)
    found.planner_data = data
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    error = failure(lambda: load_state(folder))
    assert isinstance(error, pickle.UnpicklingError)
    assert re.search(said, str(error))


def test_metadata_that_name_members_of_enumerations_are_read(folder, monkeypatch):
    """The first releases of Python 3.11 pickle them so, as that of Debian 12."""
    path, encoding = folder / ".metadata", metadata._MEM_FORMAT_ENCODING
    found = pickle.loads(path.read_bytes())
    by_name = lambda self, protocol: (getattr, (type(self), self.name))  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(encoding, "__reduce_ex__", by_name)
        path.write_bytes(pickle.dumps(found))
    assert b"getattr" in path.read_bytes()
    loaded = blank(state())
    dcp.load(loaded, storage_reader=Reader(folder), no_dist=True)
    assert same(loaded["model"], state()["model"])


def test_objects_that_would_run_code_are_refused(tmp_path):
    dcp.save({"odd": Odd()}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    error = failure(lambda: load_state(tmp_path))
    assert isinstance(error, pickle.UnpicklingError) and f"'odd' of {tmp_path}" in str(error)


def set_place(folder, **changes):
    """Change where torch's metadata has its first item."""
    with open(folder / ".metadata", "rb") as file:
        found = pickle.load(file)
    first = next(iter(found.storage_data))
    found.storage_data[first] = dataclasses.replace(found.storage_data[first], **changes)
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    return found.storage_data[first].relative_path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offset": 1 << 62, "length": 1 << 62}, f"an item of {1 << 62} bytes from {1 << 62} in "),
        ({"length": 1 << 20}, f"an item of {1 << 20} bytes from "),
        ({"offset": -1}, "found -1 and "),
        ({"length": 1.5}, " and 1.5"),
        ({"relative_path": "a\0"}, "expected the name of a file beside it, found "),
    ],
)
def test_places_outside_of_a_file_are_refused(folder, changes, message):
    name = set_place(folder, **changes)
    error = failure(lambda: load_state(folder))
    assert isinstance(error, tensorizer.FormatError)
    assert (
        message in str(error)
        and repr(name)[1:-1] in str(error)
        and str(folder / ".metadata") in str(error)
    )


def test_a_fifo_instead_of_a_data_file_is_not_waited_for(folder):
    name = set_place(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    error = failure(lambda: load_state(folder))
    assert isinstance(
        error, tensorizer.FormatError
    ) and f"{folder / name}: expected a regular file" in str(error)


def test_a_missing_data_file_is_named(folder):
    name = set_place(folder)
    (folder / name).unlink()
    error = failure(lambda: load_state(folder))
    assert isinstance(error, FileNotFoundError) and name in str(error)


def test_metadata_changes_no_class(folder, tmp_path):
    """BUILD sets attributes of whatever a pickle names, classes and functions too."""
    build = [
        b"cpathlib\nPosixPath\n(N}(V_odd\nK\x01ut" + b"b0",
        b"ctorch.distributed.checkpoint.metadata\nStorageMeta\n(N}(V_odd\nK\x01ut" + b"b0",
        b"ctorch.serialization\n_get_layout\n(N}(V_odd\nK\x01ut" + b"b0",
    ]
    whole = (folder / ".metadata").read_bytes()
    start = 2 + 9  # the protocol, and the length of a frame
    assert whole[:1] == b"\x80" and whole[2:3] == b"\x95"
    (folder / ".metadata").write_bytes(whole[:2] + b"".join(build) + whole[start:])
    assert same(load_state(folder), state())
    for one in (PosixPath, metadata.StorageMeta, torch.serialization._get_layout):
        assert not hasattr(one, "_odd")


def test_metadata_are_read_into_torchs_own_classes(folder):
    reader = Reader(folder)
    found, expected = reader.read_metadata(), FileSystemReader(folder).read_metadata()
    assert type(found) is metadata.Metadata
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data
    assert found.planner_data == expected.planner_data
    assert {type(one) for one in found.storage_data} == {metadata.MetadataIndex}


@pytest.mark.parametrize("name", ["../torchs/__0_0.distcp", "/etc/hostname", ".."])
def test_files_outside_of_the_folder_are_refused(folder, name):
    with open(folder / ".metadata", "rb") as file:
        found = pickle.load(file)
    for place in found.storage_data.values():
        place.relative_path = name
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    error = failure(lambda: load_state(folder))
    assert isinstance(error, tensorizer.FormatError)
    assert "expected the name of a file beside it" in str(error)


@pytest.mark.parametrize("data", [b"", b"no pickle", pickle.dumps({"a": 1})])
def test_damaged_metadata(folder, data):
    (folder / ".metadata").write_bytes(data)
    error = failure(lambda: load_state(folder))
    assert isinstance(error, (tensorizer.FormatError, pickle.UnpicklingError))
    assert ".metadata" in str(error)


def test_metadata_that_has_no_end(folder, monkeypatch):
    monkeypatch.setattr(layout, "MOST_BYTES", 100)
    error = failure(lambda: load_state(folder))
    assert isinstance(error, tensorizer.FormatError) and "expected at most 100 bytes" in str(error)
    (folder / ".metadata").unlink()
    os.mkfifo(folder / ".metadata")
    assert isinstance(failure(lambda: load_state(folder)), FileNotFoundError)


def test_verifying_a_torch_folder_and_loading_an_empty_one_are_refused(folder, tmp_path):
    error = failure(lambda: load_state(folder, verify_hash=True))
    assert "was not saved by Writer: it has neither hashes" in str(error)
    (tmp_path / "empty").mkdir()
    error = failure(lambda: load_state(tmp_path / "empty"))
    assert isinstance(error, FileNotFoundError) and "checkpoint.json" in str(error)


# Folders at an address


@pytest.fixture
def served(nginx):
    """A folder of a server."""
    return Path(tempfile.mkdtemp(dir=nginx.root))


@pytest.fixture
def at(nginx, served, folder):
    """The address of a checkpoint that torch has saved."""
    served.chmod(0o755)
    shutil.copytree(folder, served / "torchs")
    return f"{nginx.http}/{served.name}/torchs"


def test_a_folder_of_torch_at_an_address_is_loaded(at):
    found = blank(state())
    dcp.load(found, storage_reader=Reader(at), no_dist=True)
    assert same(found, state())
    assert same(load_state(f"{at}/"), state())
    assert same(load_state(at, weights_only=False), state())


def test_a_folder_of_torch_in_s3_is_loaded(s3, folder):
    for path in folder.iterdir():
        s3.client().upload_file(str(path), "bucket", f"torchs/{path.name}")
    assert same(load_state("s3://bucket/torchs"), state())
    for address in ("s3://bucket/torchs", "s3://bucket/torchs/"):
        with pytest.raises(FileNotFoundError, match=r"tensorizer.distributed.load_state\(folder\)"):
            tensorizer.load(address)


def test_an_item_at_an_address_is_one_request(nginx, at, served):
    load_state(at)
    items = pickle.loads((served / "torchs/.metadata").read_bytes()).storage_data
    asked = [line for line in nginx.requests() if served.name in line and ".distcp" in line]
    # One more opens the file.
    assert 0 < len(asked) <= len(items) + 1


def test_metadata_at_an_address_that_would_run_code_is_refused(at, served):
    (served / "torchs/.metadata").write_bytes(pickle.dumps(Odd()))
    error = failure(lambda: load_state(at))
    assert isinstance(error, pickle.UnpicklingError) and "could run code" in str(error)


@pytest.mark.parametrize("changes", [{"offset": 1 << 40}, {"length": 1 << 62}])
def test_places_outside_of_a_file_at_an_address_are_refused(at, served, changes):
    set_place(served / "torchs", **changes)
    error = failure(lambda: load_state(at))
    assert isinstance(error, tensorizer.FormatError)
    assert re.search(r"__0_0.distcp has \d+ bytes: expected an item of", str(error))


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_folder_of_safetensors_files_at_an_address_is_loaded(nginx, served, name):
    tensors = {"a.b": torch.arange(12.0).reshape(3, 4), "half": torch.ones(5, dtype=torch.half)}
    served.chmod(0o755)
    if name.endswith(".json"):
        tensorizer.save(tensors, served / "model.safetensors", max_shard_size=40)
        assert (served / name).is_file()
    else:
        tensorizer.save(tensors, served / name)
    address = f"{nginx.http}/{served.name}"
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(found, storage_reader=Reader(address), no_dist=True)
    assert same(found, tensors)
    assert same(load_state(address), tensors)


def test_an_address_without_a_checkpoint_is_named(nginx, s3):
    for address in (f"{nginx.http}/nothing", "s3://bucket/nothing"):
        error = failure(lambda: load_state(address))  # noqa: B023
        assert isinstance(error, FileNotFoundError) and f"no checkpoint at {address}" in str(error)


class ExchangingPlanner(dcp.DefaultLoadPlanner):
    """Exchanges the folder of a checkpoint after its metadata was read."""

    def __init__(self, exchange):
        super().__init__()
        self._exchange = exchange

    def create_local_plan(self):
        self._exchange()
        return super().create_local_plan()


@pytest.mark.parametrize("kind", ["torch", "safetensors", "ours"])
def test_a_folder_that_is_exchanged_during_a_load(tmp_path, kind):
    """A link that changes is followed once. Another folder under the same name is an error."""

    def saved(version):
        made = {"a": torch.full((5,), float(version)), "b": torch.full((5,), float(version))}
        folder = tmp_path / f"v{version}"
        if kind == "safetensors":
            folder.mkdir()
            tensorizer.save(made, folder / "model.safetensors")
        else:
            writer = (FileSystemWriter if kind == "torch" else Writer)(folder)
            dcp.save(made, storage_writer=writer, no_dist=True)

    def flip():
        (tmp_path / "next").symlink_to("v2")
        (tmp_path / "next").replace(tmp_path / "current")

    def exchange():
        (tmp_path / "v1").rename(tmp_path / "old")
        (tmp_path / "v2").rename(tmp_path / "v1")

    def load(name, change):
        found = {"a": torch.zeros(5), "b": torch.zeros(5)}
        reader, planner = Reader(tmp_path / name), ExchangingPlanner(change)
        dcp.load(found, storage_reader=reader, planner=planner, no_dist=True)
        return {tensor[0].item() for tensor in found.values()}

    saved(1)
    saved(2)
    (tmp_path / "current").symlink_to("v1")
    if kind == "ours":
        # The names of its files are new in each save.
        with pytest.raises(CheckpointException, match="No such file"):
            load("current", flip)
    else:
        assert load("current", flip) == {1.0}
        with pytest.raises(CheckpointException, match="was replaced while the checkpoint was"):
            load("v1", exchange)


def test_parts_in_safetensors_files_are_no_model(tmp_path):
    for number in (1, 2):
        name = f"shard-{number:05}-model-00001-of-00001.safetensors"
        tensorizer.save({"a": torch.ones(2)}, tmp_path / name)
    with pytest.raises(IsADirectoryError, match="a checkpoint of torch.distributed.checkpoint"):
        tensorizer.load(tmp_path)


def test_metadata_of_each_rank_are_read(folder, tmp_path):
    """With use_collectives=False, torch names them after the ranks."""
    (folder / ".metadata").rename(folder / "__0.metadata")
    found = blank(state())
    for trusted in (True, False):
        found = blank(state())
        dcp.load(found, storage_reader=Reader(folder, weights_only=not trusted), no_dist=True)
        assert same(found["model"], state()["model"])
    (folder / "__0.metadata").rename(folder / "__1.metadata")
    with pytest.raises(CheckpointException, match="there is no checkpoint at"):
        dcp.load(found, storage_reader=Reader(folder), no_dist=True)


def test_metadata_of_torch_before_2_3_are_read(folder):
    """They name another class for the properties of tensors."""
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

    path = folder / ".metadata"
    found = pickle.loads(path.read_bytes())
    for item in found.state_dict_metadata.values():
        if isinstance(item, metadata.TensorStorageMetadata):
            item.properties = TensorProperties(dtype=item.properties.dtype)
    path.write_bytes(pickle.dumps(found))
    loaded = blank(state())
    dcp.load(loaded, storage_reader=Reader(folder), no_dist=True)
    assert same(loaded["model"], state()["model"])


def test_objects_of_bytes_are_kept(tmp_path):
    objects = {"none": b"", "some": b"\0x", "file": io.BytesIO(b""), "other": io.BytesIO(b"abc")}
    dcp.save(objects, storage_writer=Writer(tmp_path), no_dist=True)
    found = load_state(tmp_path)
    contents = {
        name: bytes(getattr(one, "getbuffer", lambda one=one: one)()) for name, one in found.items()
    }
    assert contents == {"none": b"", "some": b"\0x", "file": b"", "other": b"abc"}
