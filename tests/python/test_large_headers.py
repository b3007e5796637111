"""Files of many tensors and with large metadata, compared with the library safetensors."""

import json
import os

import pytest
import tensorizer
import tensorizer.safetensors as ours
import torch
import torch.distributed.checkpoint as dcp
from safetensors_library import theirs
from scripted import FaultServer
from tensorizer.distributed import Reader, Writer
from tensorizer_cli.main import main

ops = torch.ops.tensorizer

#: Ten MiB in one value, and in many.
LARGE = {
    "one value": {"notes": "ü" * (5 << 20)},
    "one key": {"n" * (10 << 20): "value"},
    "many": {f"key {number}": f"{number:01000}" for number in range(10_400)},
}
FEW = {"weight": torch.arange(12.0).view(3, 4), "bias": torch.ones(3, dtype=torch.bfloat16)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the folder of a file of each kind and each metadata."""
    folder = tmp_path_factory.mktemp("metadata")
    for name, metadata in LARGE.items():
        assert sum(len((key + value).encode()) for key, value in metadata.items()) > 10e6
        tensorizer.save(FEW, folder / f"{name}.tensors", metadata=metadata)
        tensorizer.save(FEW, folder / f"{name}.safetensors", metadata=metadata)
        theirs.save_file(FEW, folder / f"{name}.theirs.safetensors", metadata)
    return folder


class TestMetadata:
    @pytest.fixture(params=LARGE)
    def name(self, request):
        return request.param

    @pytest.mark.parametrize("end", ["tensors", "safetensors", "theirs.safetensors"])
    def test_large_metadata_are_read_back(self, saved, name, end):
        path, wanted = saved / f"{name}.{end}", LARGE[name]
        assert dict(tensorizer.info(path).metadata) == wanted
        assert_equal(tensorizer.load(path, "cpu"), FEW)
        with FaultServer(path.read_bytes()) as server:
            assert dict(tensorizer.info(server.url).metadata) == wanted
            assert_equal(tensorizer.load(server.url, "cpu"), FEW)
        if end != "tensors":
            for library in (theirs, ours):
                with library.safe_open(path, "pt") as file:
                    assert file.metadata() == wanted
                    assert torch.equal(file.get_tensor("weight"), FEW["weight"])

    def test_both_libraries_write_the_same_bytes(self, saved):
        """With one key: the library writes several keys in a random order."""
        for name in ("one value", "one key"):
            mine = (saved / f"{name}.safetensors").read_bytes()
            assert mine == (saved / f"{name}.theirs.safetensors").read_bytes()

    @pytest.mark.parametrize("end", ["tensors", "safetensors"])
    def test_the_command_shows_and_copies_it(self, saved, name, end, tmp_path, capsys):
        path = str(saved / f"{name}.{end}")
        assert main(["info", path]) == 0
        # People are shown the beginning of each.
        assert max(map(len, capsys.readouterr().out.splitlines())) < 600
        assert main(["info", "--json", path]) == 0
        assert json.loads(capsys.readouterr().out)["metadata"] == LARGE[name]
        copy = tmp_path / "copy.safetensors"
        for source, target in ((path, copy), (str(copy), tmp_path / "back.tensors")):
            assert main(["cp", source, str(target)]) == 0
            assert dict(tensorizer.info(target).metadata) == LARGE[name]
        with theirs.safe_open(copy, "pt") as file:
            assert file.metadata() == LARGE[name]


def assert_equal(found, wanted):
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(found[name].detach(), tensor), name


class Many:
    """Tensors of two numbers each, and how to see at once that all are right."""

    def __init__(self, count):
        self.count = count
        self.rows = torch.arange(2 * count, dtype=torch.int32).view(count, 2)
        self.names = [f"layers.{number}.weight" for number in range(count)]

    def made(self):
        return dict(zip(self.names, map(torch.Tensor.clone, self.rows), strict=True))

    def check(self, found, names=None):
        """Compare tensors by name; their order too, where names are given."""
        found = dict(found)
        assert len(found) == self.count
        if names is not None:
            assert list(found) == names
        values = torch.stack([found[name].detach() for name in self.names])
        assert torch.equal(values, self.rows)

    def module(self):
        """Return a module with parameters of these names."""
        root = torch.nn.Module()
        root.layers = torch.nn.Module()
        for number in range(self.count):
            layer = torch.nn.Module()
            weight = torch.zeros(2, dtype=torch.int32)
            layer.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))
            root.layers.add_module(str(number), layer)
        return root


@pytest.fixture(scope="module")
def many():
    """The model; `make test-long` has one of 200,000 tensors."""
    return Many(int(os.environ.get("TENSORS_OF_TESTS", "2000")))


@pytest.fixture(scope="module")
def written(many, tmp_path_factory):
    """Return the folder of a file of each format, of which theirs wrote one."""
    folder, tensors = tmp_path_factory.mktemp("many"), many.made()
    tensorizer.save(tensors, folder / "f.tensors")
    theirs.save_file(tensors, folder / "f.safetensors")
    return folder


def by_single_calls(tensors, path):
    with tensorizer.TensorSerializer(path) as file:
        for number, (name, tensor) in enumerate(tensors.items()):
            # The format has 16 bits for the number of a module.
            file.write_tensor(number % 65_536, name, tensorizer.TensorType.PARAM, tensor)


def by_state_dict(tensors, path):
    with tensorizer.TensorSerializer(path) as file:
        file.write_state_dict(tensors)


SAVES = {
    "save": tensorizer.save,
    "save_async": lambda tensors, path: tensorizer.save_async(tensors, path).result(),
    "safetensors": lambda tensors, path: tensorizer.save(tensors, path, format="safetensors"),
    "save_file": ours.save_file,
    "write_tensor": by_single_calls,
    "write_state_dict": by_state_dict,
    "operator": lambda tensors, path: ops.save(str(path), tensors),
    "list": lambda tensors, path: ops.save(str(path), list(tensors), list(tensors.values())),
}


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_saves_of_many_tensors(many, save, tmp_path):
    path = tmp_path / "f"
    save(many.made(), path)
    many.check(tensorizer.load(path, "cpu"))
    if save in (SAVES["safetensors"], SAVES["save_file"]):
        many.check(theirs.load_file(path))
        theirs.save_file(many.made(), tmp_path / "theirs")
        assert path.read_bytes() == (tmp_path / "theirs").read_bytes()
    else:
        many.check(tensorizer.load(path, "cpu", verify_hash=True), many.names)


def test_shards_of_many_tensors(many, tmp_path):
    size = many.rows.nbytes // 4
    tensorizer.save(many.made(), tmp_path / "f.safetensors", max_shard_size=size)
    many.check(tensorizer.load(tmp_path, "cpu"))
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) in (4, 5)
    many.check({name: one for shard in shards for name, one in theirs.load_file(shard).items()})


def deserialized(path, **options):
    with tensorizer.TensorDeserializer(path, "cpu", **options) as file:
        return {name: file[name] for name in file}


def in_order(path):
    with tensorizer.TensorDeserializer(path, "cpu", lazy_load=True) as file:
        return {name: tensor for _, _, name, tensor in file.read_tensors()}


def one_by_one(path):
    with ours.safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping


def into(path):
    names = ops.names(str(path))
    out = [torch.zeros(2, dtype=torch.int32) for _ in names]
    ops.load(str(path), names, out)
    return dict(zip(names, out, strict=True))


def by_list(path):
    names = ops.names(str(path))
    return dict(zip(names, ops.load(str(path), names), strict=True))


def backwards(path):
    names = list(tensorizer.info(path).tensors)[::-1]
    found = tensorizer.load(path, "cpu", names=names)
    assert list(found) == names
    return found


def sliced(path):
    halves = []
    for part in (slice(1), slice(1, 2)):
        slices = dict.fromkeys(tensorizer.info(path).tensors, (part,))
        halves.append(tensorizer.load(path, "cpu", slices=slices))
    return {name: torch.cat([half[name] for half in halves]) for name in halves[0]}


LOADS = {
    "load": lambda path: tensorizer.load(path, "cpu"),
    "mapped": lambda path: tensorizer.load(path, "cpu", mmap=True),
    "names": backwards,
    "slices": sliced,
    "iterate": lambda path: tensorizer.iterate(path, "cpu"),
    "deserializer": deserialized,
    "lazy": lambda path: deserialized(path, lazy_load=True),
    "read_tensors": in_order,
    "operator": lambda path: ops.load(str(path)),
    "list": by_list,
    "into": into,
}
OF_SAFETENSORS = {"load_file": ours.load_file, "safe_open": one_by_one}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("file", ["f.tensors", "f.safetensors"])
def test_loads_of_many_tensors(many, written, load, file):
    many.check(load(written / file))


@pytest.mark.parametrize("load", OF_SAFETENSORS.values(), ids=OF_SAFETENSORS)
def test_loads_of_many_tensors_from_safetensors(many, written, load):
    many.check(load(written / "f.safetensors"))


def test_many_tensors_into_a_module(many, written):
    for file in ("f.tensors", "f.safetensors"):
        module = many.module()
        with tensorizer.TensorDeserializer(written / file, "cpu") as opened:
            assert opened.load_into_module(module) == many.count
        many.check(module.state_dict())


def test_many_tensors_by_the_command(many, written, tmp_path, capsys):
    for file in ("f.tensors", "f.safetensors"):
        found = tensorizer.info(written / file).tensors
        assert sorted(found) == sorted(many.names)
        assert {(one.shape, one.dtype) for one in found.values()} == {((2,), "int32")}
        assert main(["info", "--json", str(written / file)]) == 0
        assert json.loads(capsys.readouterr().out)["tensors"] == many.count
        copy = tmp_path / f"from-{file}.safetensors"
        assert main(["cp", str(written / file), str(copy)]) == 0
        many.check(theirs.load_file(copy))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_many_tensors_in_a_distributed_checkpoint(many, tmp_path):
    dcp.save(many.made(), storage_writer=Writer(tmp_path / "c"))
    found = {name: torch.zeros(2, dtype=torch.int32) for name in many.names}
    dcp.load(found, storage_reader=Reader(tmp_path / "c"))
    many.check(found)
