"""Checkpoints in several files of safetensors, by their index, their folder or their address."""

import json
import os
import shutil
import signal

import pytest
import tensorizer
import torch
from conftest import assert_same
from packing import filled, pack_tensors
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from servers import Nginx
from tensorizer import HashMismatchError, TensorDeserializer
from tensorizer_cli.main import main

ops = torch.ops.tensorizer

INDEX = "model.safetensors.index.json"
SHARDS = [f"model-{number:05}-of-00004.safetensors" for number in range(1, 5)]


def make():
    torch.manual_seed(4)
    tensors = {f"layers.{i}.weight": torch.randn(i * 9 % 71 + 1, 40) for i in range(60)}
    tensors["large"] = torch.randn(600, 1000)
    tensors["half"] = torch.randn(300, 7).to(torch.bfloat16)
    tensors["scalar"] = torch.tensor(5)
    tensors["empty"] = torch.empty(0, 3)
    return tensors


TENSORS = make()


def write_shards(folder, names=SHARDS, tensors=TENSORS, metadata=None):
    """Deal tensors out to shards, with an index whose order is another one."""
    folder.mkdir(exist_ok=True, parents=True)
    home = {name: names[number % len(names)] for number, name in enumerate(tensors)}
    for shard in names:
        (folder / shard).parent.mkdir(exist_ok=True, parents=True)
        own = {name: tensors[name] for name in tensors if home[name] == shard}
        save_file(own, folder / shard, metadata={"format": "pt"})
    write_index(folder, dict(reversed(home.items())), metadata)
    return folder / INDEX


def write_index(folder, weight_map, metadata=None):
    total = {"total_size": sum(tensor.nbytes for tensor in TENSORS.values())}
    index = {"metadata": total if metadata is None else metadata, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def order(folder, names=SHARDS):
    """Return the names of tensors, file by file, each in the order of its data."""
    found = []
    for shard in sorted(names):
        with safe_open(folder / shard, "pt") as file:
            found += file.offset_keys()
    return found


def check(loaded, expected=TENSORS):
    assert set(loaded) == set(expected)
    for name, tensor in expected.items():
        assert_same(loaded[name].detach(), tensor)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_shards(folder)
    return folder


# Ways to open


@pytest.mark.device
@pytest.mark.parametrize("what", ["index", "folder", "folder/", "file address", "bytes"])
def test_by_path(folder, what):
    source = {
        "index": folder / INDEX,
        "folder": folder,
        "folder/": f"{folder}/",
        "file address": folder.as_uri(),
        "bytes": os.fsencode(folder),
    }[what]
    for options in ({}, {"mmap": True}, {"num_readers": 1}, {"num_readers": 9}):
        loaded = tensorizer.load(source, "cpu", **options)
        check(loaded)
        assert [n for n in loaded if n != "empty"] == [n for n in order(folder) if n != "empty"]
    check(dict(TensorDeserializer(source, "cpu").items()))
    with TensorDeserializer(source, "cpu", lazy_load=True) as lazy:
        for name in ("scalar", "layers.7.weight", "large", "layers.0.weight", "half"):
            assert_same(lazy[name].detach(), TENSORS[name])
        read = {name: tensor for _, _, name, tensor in lazy.read_tensors()}
        check(read)
        assert list(read) == list(lazy.keys())
        assert lazy.total_tensor_bytes == sum(tensor.nbytes for tensor in TENSORS.values())


@pytest.mark.parametrize("what", ["index", "folder"])
def test_by_the_operators(folder, what):
    source = str(folder / INDEX if what == "index" else folder)
    assert set(ops.names(source)) == set(TENSORS)
    check(ops.load(source))
    wanted = ["large", "half", "layers.5.weight", "empty", "layers.6.weight"]
    for name, tensor in zip(wanted, ops.load(source, wanted), strict=True):
        assert_same(tensor, TENSORS[name])
    out = [torch.zeros_like(TENSORS[name]) for name in wanted]
    ops.load_(source, wanted, out)
    for name, tensor in zip(wanted, out, strict=True):
        assert_same(tensor, TENSORS[name])


@pytest.mark.device
def test_some_tensors_only(folder):
    wanted = ["scalar", "layers.3.weight", "large"]
    chosen = tensorizer.load(folder, "cpu", names=wanted)
    assert list(chosen) == wanted
    check(chosen, {name: TENSORS[name] for name in wanted})
    filtered = TensorDeserializer(folder, "cpu", filter_func=lambda name: name.endswith("1.weight"))
    assert set(filtered) == {name for name in TENSORS if name.endswith("1.weight")}
    # Shards of which nothing is asked for need not be whole.
    with pytest.raises(KeyError, match="nothing"):
        tensorizer.load(folder, "cpu", names=["nothing"])


@pytest.fixture(scope="module")
def nginx(tmp_path_factory, folder):
    server = Nginx(tmp_path_factory.mktemp("nginx"))
    shutil.copytree(folder, server.root / "models/one")
    (server.root / "models/single").mkdir()
    save_file(TENSORS, server.root / "models/single/model.safetensors")
    write_shards(server.root / "models/below", [f"parts/{shard}" for shard in SHARDS])
    (server.root / "models/nothing").mkdir()
    yield server
    server.stop()


PLACES = [f"models/one/{INDEX}", "models/one/", "models/one", f"models/below/{INDEX}",
          "models/below/", "models/single/", "models/single"]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "no ranges"])
def test_by_address(nginx, place, ranges, no_settings_of_the_machine):
    address = f"{nginx.http}{'' if ranges else '/whole'}/{place}"
    check(tensorizer.load(address, "cpu"))
    check(dict(TensorDeserializer(address, "cpu").items()))
    check(ops.load(address))
    assert_same(ops.load(address, ["large"])[0], TENSORS["large"])


def test_the_query_of_an_index_is_sent_with_each_shard(nginx, no_settings_of_the_machine):
    before = len(nginx.requests())
    check(tensorizer.load(f"{nginx.http}/models/one/{INDEX}?token=x", "cpu"))
    asked = nginx.requests()[before:]
    assert all("?token=x HTTP" in line for line in asked), asked
    assert all(any(shard in line for line in asked) for shard in SHARDS)


def test_fields_of_the_request_go_along(nginx, no_settings_of_the_machine):
    from tensorizer.stream_io import CURLStreamFile

    stream = CURLStreamFile(
        f"{nginx.http}/token/models/one/{INDEX}", headers={"X-Token": "secret-hu5hw0rd"}
    )
    check(dict(TensorDeserializer(stream, "cpu").items()))


def test_a_password_goes_along(nginx, no_settings_of_the_machine):
    host = nginx.http.removeprefix("http://")
    check(tensorizer.load(f"http://user:word-hu5hw0rd@{host}/auth/models/one/{INDEX}", "cpu"))


@pytest.mark.parametrize("place", ["models/nothing", "models/nothing/", "elsewhere", "elsewhere/"])
def test_addresses_without_a_model_are_errors(nginx, place, no_settings_of_the_machine):
    with pytest.raises(OSError, match=place):
        tensorizer.load(f"{nginx.http}/{place}", "cpu")


@pytest.fixture
def bucket(s3, folder):
    client = s3.client()
    for path in folder.iterdir():
        client.upload_file(str(path), "bucket", f"models/one/{path.name}")
    return s3


@pytest.mark.parametrize("place", [f"models/one/{INDEX}", "models/one/", "models/one"])
def test_by_the_address_of_a_bucket(bucket, place):
    check(tensorizer.load(f"s3://bucket/{place}", "cpu"))
    check(dict(TensorDeserializer(f"s3://bucket/{place}", "cpu").items()))
    check(ops.load(f"s3://bucket/{place}"))


def test_a_bucket_without_a_model_raises_file_not_found(bucket):
    for place in ("nothing", "nothing/"):
        with pytest.raises(FileNotFoundError, match=f"s3://bucket/{place}"):
            tensorizer.load(f"s3://bucket/{place}", "cpu")


def test_an_index_that_is_open_already(folder):
    with open(folder / INDEX, "rb") as file:
        with pytest.raises(
            NotImplementedError, match=r"is an index of shards.*pass the path or address"
        ):
            tensorizer.load(file, "cpu")
    with open(folder / INDEX, "rb") as file:
        with pytest.raises(
            NotImplementedError, match=r"is an index of shards.*pass the path or address"
        ):
            tensorizer.load(file.fileno(), "cpu")


# Folders


def test_a_folder_opens_by_model_file_then_index_then_only_file(tmp_path):
    folder = tmp_path / "f"
    folder.mkdir()
    with pytest.raises(IsADirectoryError, match="holds none of model.safetensors"):
        tensorizer.load(folder, "cpu")
    (folder / "config.json").write_text("{}")
    save_file({"a": torch.ones(1)}, folder / "other.safetensors")
    assert list(tensorizer.load(folder, "cpu")) == ["a"]
    save_file({"b": torch.ones(1)}, folder / "another.safetensors")
    with pytest.raises(IsADirectoryError, match="name one of them") as several:
        tensorizer.load(folder, "cpu")
    assert "`other.safetensors`" in str(several.value)
    assert "`another.safetensors`" in str(several.value)
    write_shards(folder, ["x-1.safetensors", "x-2.safetensors"])
    check(tensorizer.load(folder, "cpu"))
    save_file({"c": torch.ones(1)}, folder / "model.safetensors")
    assert list(tensorizer.load(folder, "cpu")) == ["c"]


def test_an_index_of_another_name(tmp_path):
    write_shards(tmp_path, ["diffusion-1.safetensors", "diffusion-2.safetensors"])
    (tmp_path / INDEX).rename(tmp_path / "diffusion.fp16.safetensors.index.json")
    check(tensorizer.load(tmp_path, "cpu"))
    check(tensorizer.load(tmp_path / "diffusion.fp16.safetensors.index.json", "cpu"))


def test_shards_in_folders_below(tmp_path):
    names = ["b/x.safetensors", "a/deep/er/x.safetensors", "a.safetensors", "ümlaut/mit leer.st"]
    write_shards(tmp_path, names)
    loaded = tensorizer.load(tmp_path, "cpu")
    check(loaded)
    with_data = [name for name in loaded if name != "empty"]
    assert with_data == [name for name in order(tmp_path, names) if name != "empty"]


def test_links_as_hugging_face_has_them(tmp_path):
    """In a snapshot, index and shards are links to what is named by its hash."""
    index = write_shards(tmp_path / "made")
    blobs, snapshot = tmp_path / "hub/blobs", tmp_path / "hub/snapshots/0123abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(index.parent.iterdir())):
        path.rename(blobs / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    assert (snapshot / INDEX).is_symlink()
    for source in (snapshot, snapshot / INDEX):
        check(tensorizer.load(source, "cpu"))
        check(tensorizer.load(source, "cpu", mmap=True))
        check(ops.load(str(source)))
    (tmp_path / "main").symlink_to(snapshot)
    check(tensorizer.load(tmp_path / "main", "cpu"))


def test_relative_paths(folder, monkeypatch):
    monkeypatch.chdir(folder)
    check(tensorizer.load(INDEX, "cpu"))
    check(tensorizer.load(".", "cpu"))
    check(ops.load(f"./{INDEX}"))


# Contents of shards


def test_one_shard(tmp_path):
    check(tensorizer.load(write_shards(tmp_path, ["only.safetensors"]), "cpu"))


def test_a_tensor_in_two_shards(tmp_path):
    """The index says which of them counts; neither need be the first."""
    for shard, values in (("1.safetensors", 1), ("2.safetensors", 2)):
        save_file(
            {"both": torch.full((4,), values), f"own.{values}": torch.ones(1)}, tmp_path / shard
        )
    for counts, shard in ((1, "1.safetensors"), (2, "2.safetensors")):
        write_index(tmp_path, {"both": shard, "own.1": "1.safetensors", "own.2": "2.safetensors"})
        loaded = tensorizer.load(tmp_path, "cpu")
        assert set(loaded) == {"both", "own.1", "own.2"}
        assert loaded["both"].tolist() == [counts] * 4


@pytest.mark.parametrize("name", ["", "\x1e", '\x1e["a"]', "\x1e[0]", "a\nb", "🙂"])
def test_names_that_need_care_in_two_shards(tmp_path, name):
    for values, shard in ((1, "1.safetensors"), (2, "2.safetensors")):
        data = pack_tensors({name: filled("U8", [3], values), f"own.{values}": filled("U8", [1])})
        (tmp_path / shard).write_bytes(data)
    for values, shard in ((1, "1.safetensors"), (2, "2.safetensors")):
        write_index(tmp_path, {name: shard, "own.1": "1.safetensors", "own.2": "2.safetensors"})
        loaded = tensorizer.load(tmp_path, "cpu")
        assert_same(loaded[name], load_file(tmp_path / f"{values}.safetensors")[name])


def test_a_tensor_that_the_index_does_not_name(tmp_path):
    save_file({"a": torch.ones(1), "more": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "2.safetensors")
    write_index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    loaded = tensorizer.load(tmp_path, "cpu")
    assert {name: tensor.numel() for name, tensor in loaded.items()} == {"a": 1, "more": 2, "b": 3}


@pytest.mark.parametrize(
    "metadata", [{}, {"total_size": 1.5e300, "nested": {"a": [None]}, "a": None}]
)
def test_metadata_of_every_kind(tmp_path, metadata):
    check(tensorizer.load(write_shards(tmp_path, metadata=metadata), "cpu"))


def test_an_index_without_metadata(tmp_path):
    index = write_shards(tmp_path)
    found = json.loads(index.read_text())
    for text in (
        json.dumps({"weight_map": found["weight_map"]}),
        json.dumps(found | {"metadata": None}),
        " \r\n\t" + json.dumps({"more": [1], **found}, separators=(",", ":")),
    ):
        index.write_text(text)
        check(tensorizer.load(index, "cpu"))


def test_shards_of_many_dtypes_and_alignments(tmp_path):
    dtypes = ("U8", "F64", "BF16", "C64")
    tensors = {f"t{i}": filled(dtype, [3]) for i, dtype in enumerate(dtypes)}
    for number in range(5):
        own = {f"{number}.{name}": tensor for name, tensor in tensors.items()}
        (tmp_path / f"{number}.safetensors").write_bytes(pack_tensors(own, length=300 + number))
    write_index(tmp_path, {f"{i}.t{j}": f"{i}.safetensors" for i in range(5) for j in range(4)})
    expected = {}
    for number in range(5):
        expected |= load_file(tmp_path / f"{number}.safetensors")
    for options in ({}, {"mmap": True}):
        loaded = tensorizer.load(tmp_path, "cpu", **options)
        check(loaded, expected)
        assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in loaded.values())


def test_more_shards_than_are_opened_at_once(tmp_path):
    names = [f"{number:03}.safetensors" for number in range(50)]
    check(tensorizer.load(write_shards(tmp_path, names), "cpu"))


def test_there_are_no_hashes(folder):
    said = r"index\.json.*safetensors files hold no hashes"
    with pytest.raises(HashMismatchError, match=said):
        tensorizer.load(folder, "cpu", verify_hash=True)
    with pytest.raises(HashMismatchError, match=said):
        TensorDeserializer(folder, "cpu", verify_hash=True)


# The command


def run(*arguments):
    return main([str(argument) for argument in arguments])


@pytest.mark.parametrize("what", ["index", "folder"])
def test_the_command(folder, tmp_path, capsys, what):
    source = folder / INDEX if what == "index" else folder
    assert run("ls", source) == 0
    assert "\n64 tensors" in capsys.readouterr().out
    assert run("cp", source, tmp_path / "copy.tensors") == 0
    check(tensorizer.load(tmp_path / "copy.tensors", "cpu", verify_hash=True))
    assert run("diff", source, tmp_path / "copy.tensors") == 0
    assert run("diff", tmp_path / "copy.tensors", source) == 0
    capsys.readouterr()
    assert run("verify", source) != 0
    said = capsys.readouterr()
    assert "safetensors files hold no hashes" in said.out + said.err


def test_the_command_and_an_address(nginx, tmp_path, capsys, no_settings_of_the_machine):
    assert run("ls", f"{nginx.http}/models/one/") == 0
    assert "\n64 tensors" in capsys.readouterr().out
    assert run("cp", f"{nginx.http}/models/one/{INDEX}", tmp_path / "copy.tensors") == 0
    check(tensorizer.load(tmp_path / "copy.tensors", "cpu", verify_hash=True))


def test_a_lazy_checkpoint_stays_where_it_was_after_a_change_of_folder(tmp_path, monkeypatch):
    for folder, value in (("one", 0.0), ("two", 100.0)):
        (tmp_path / folder / "model").mkdir(parents=True)
        tensors = {f"t{number}": torch.full((256,), value + number) for number in range(4)}
        path = tmp_path / folder / "model/model.safetensors"
        tensorizer.save(tensors, path, max_shard_size=1024)
    monkeypatch.chdir(tmp_path / "one")
    with TensorDeserializer("model", "cpu", lazy_load=True) as file:
        assert file["t0"][0] == 0
        monkeypatch.chdir(tmp_path / "two")
        assert [file[f"t{number}"][0].item() for number in range(4)] == [0, 1, 2, 3]


# Folders that are exchanged


def two_versions(top):
    """Make a link ``current`` to a checkpoint, and another one with the same names and shapes."""
    for version in (1, 2):
        tensors = {f"t{number}": torch.full((1000,), float(version)) for number in range(4)}
        tensorizer.save(tensors, top / f"v{version}/model.safetensors", max_shard_size=5000)
    (top / "current").symlink_to("v1")


def flip(top, to="v2"):
    (top / "next").symlink_to(to)
    (top / "next").replace(top / "current")


def exchange(top):
    (top / "v1").rename(top / "old")
    (top / "v2").rename(top / "v1")


def copy_anew(top):
    shutil.rmtree(top / "v1")
    shutil.copytree(top / "v2", top / "v1")


def lazily(path):
    with TensorDeserializer(path, "cpu", lazy_load=True) as file:
        yield file["t0"][0].item()
        yield {file[f"t{number}"][0].item() for number in range(1, 4)}


def by_the_stand_in(path):
    index = path / INDEX
    with tensorizer.safetensors.safe_open(index, "pt") as file:
        yield file.get_tensor("t0")[0].item()
        yield {file.get_tensor(f"t{number}")[0].item() for number in range(1, 4)}


def by_all_shards(path):
    with TensorDeserializer(path, "cpu", lazy_load=True) as file:
        yield file["t0"][0].item()
        yield {tensor[0].item() for tensor in file.values()}


@pytest.mark.parametrize("way", [lazily, by_the_stand_in, by_all_shards])
def test_a_link_that_changes_leads_to_the_folder_of_the_index(tmp_path, way):
    two_versions(tmp_path)
    found = way(tmp_path / "current")
    assert next(found) == 1
    flip(tmp_path)
    assert next(found) == {1.0}


@pytest.mark.parametrize("change", [exchange, copy_anew])
@pytest.mark.parametrize("way", [lazily, by_all_shards])
def test_a_shard_of_an_exchanged_folder_is_an_error(tmp_path, way, change):
    two_versions(tmp_path)
    found = way(tmp_path / "v1")
    assert next(found) == 1
    change(tmp_path)
    said = r"v1/model-0000\d-of-00004.safetensors`: it is another file than the one that was found"
    with pytest.raises(OSError, match=said):
        next(found)


def test_the_stand_in_has_all_shards_open(tmp_path):
    two_versions(tmp_path)
    found = by_the_stand_in(tmp_path / "v1")
    assert next(found) == 1
    exchange(tmp_path)
    assert next(found) == {1.0}


def test_a_link_that_changes_during_loads_mixes_no_versions(tmp_path):
    two_versions(tmp_path)
    pid = os.fork()
    if pid == 0:
        while True:
            flip(tmp_path, "v2")
            flip(tmp_path, "v1")
    try:
        for _ in range(60):
            for found in (
                tensorizer.load(tmp_path / "current", "cpu"),
                dict(tensorizer.iterate(tmp_path / "current", "cpu")),
                ops.load(str(tmp_path / "current" / INDEX)),
            ):
                assert len({tensor[0].item() for tensor in found.values()}) == 1
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_shards_of_a_server_keep_their_etag(nginx, tmp_path):
    two_versions(tmp_path)
    folder = nginx.root / "exchanged"
    shutil.copytree(tmp_path / "v1", folder)
    with TensorDeserializer(f"{nginx.http}/exchanged/", "cpu", lazy_load=True) as file:
        assert file["t0"][0] == 1
        (shard,) = folder.glob("model-00001-*")
        shutil.copy(tmp_path / "v2" / shard.name, shard)
        os.utime(shard, (1, 1))
        with pytest.raises(OSError, match=f"{shard.name}`: it is another file .* the ETag"):
            file.keys()
