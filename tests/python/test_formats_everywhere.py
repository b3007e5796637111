"""Files of other formats through everything that takes a file of ours."""

import io
import json

import pytest
import redis
import tensorizer
import torch
from conftest import TENSORS, assert_same
from safetensors.torch import save_file
from servers import Redis
from tensorizer import TensorDeserializer
from tensorizer_cli.main import main

ops = torch.ops.tensorizer

INDEX = "model.safetensors.index.json"


def write_file(folder, tensors=TENSORS):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "f.safetensors", metadata={"format": "pt"})
    return str(folder / "f.safetensors")


def write_shards(folder, tensors=TENSORS):
    """Deal tensors out to two files; return the folder."""
    folder.mkdir(exist_ok=True)
    shards = ["model-1.safetensors", "model-2.safetensors"]
    home = {name: shards[at % 2] for at, name in enumerate(tensors)}
    for shard in shards:
        own = {name: tensors[name] for name in tensors if home[name] == shard}
        save_file(own, folder / shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": home}))
    return str(folder)


WRITE = {
    "file": write_file,
    "folder": write_shards,
    "index": lambda *args: f"{write_shards(*args)}/{INDEX}",
}


@pytest.fixture(params=WRITE)
def uri(request, tmp_path):
    return WRITE[request.param](tmp_path / "f")


# The operators: every overload that loads


def everything(uri: str, x: torch.Tensor):
    loaded = ops.load(uri)
    (half,) = ops.load(uri, ["half"], num_readers=2)
    (bias,) = ops.load.checked(uri, ["bias"], ["int64[5]"])
    flat = torch.zeros(1203)
    ops.load(uri, ["weight"], [flat[3:].view(40, 30)])
    one = torch.zeros(5, dtype=torch.int64)
    ops.load(uri, "bias", one)
    out = torch.zeros(0, 2)
    ops.load_(uri, ["empty"], [out])
    return x + len(ops.names(uri)), loaded["weight"] * 2, half, bias, flat, one, out


def expected(x, tensors=TENSORS):
    weight = tensors["weight"]
    flat = torch.cat([torch.zeros(3), weight.flatten()])
    same = tensors["half"], tensors["bias"], flat, tensors["bias"], tensors["empty"]
    return x + len(tensors), weight * 2, *same


def check(found, wanted):
    for left, right in zip(found, wanted, strict=True):
        assert_same(left, right)


X = torch.ones(4)


def test_eager(uri):
    check(everything(uri, X), expected(X))


def scripted(uri: str, x: torch.Tensor):
    loaded = torch.ops.tensorizer.load(uri)
    half = torch.ops.tensorizer.load(uri, ["half"], num_readers=2)[0]
    bias = torch.ops.tensorizer.load(uri, ["bias"], ["int64[5]"])[0]
    flat = torch.zeros(1203)
    torch.ops.tensorizer.load_(uri, ["weight"], [flat[3:].view(40, 30)])
    one = torch.zeros(5, dtype=torch.int64)
    torch.ops.tensorizer.load(uri, "bias", one)
    out = torch.zeros(0, 2)
    torch.ops.tensorizer.load_(uri, ["empty"], [out])
    count = len(torch.ops.tensorizer.names(uri))
    return x + count, loaded["weight"] * 2, half, bias, flat, one, out


class Scripted(torch.nn.Module):
    def __init__(self, uri: str):
        super().__init__()
        self.uri = uri
        self.run = torch.jit.script(scripted)

    def forward(self, x: torch.Tensor):
        return self.run(self.uri, x)


def test_torchscript(uri):
    module = torch.jit.script(Scripted(uri))
    saved = io.BytesIO()
    torch.jit.save(module, saved)
    saved.seek(0)
    for form in (module, torch.jit.load(saved)):
        for _ in range(3):  # profiled, optimised, optimised again
            check(form(X), expected(X))


def test_compiled(uri, without_graphs_of_others):
    compiled = torch.compile(everything, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        check(compiled(uri, X), expected(X))


class Module(torch.nn.Module):
    def __init__(self, uri):
        super().__init__()
        self.uri = uri

    def forward(self, x):
        return everything(self.uri, x)


def changed(tensors):
    return {**tensors, "weight": torch.full((40, 30), 2.0)}


def test_exported(uri, tmp_path, without_graphs_of_others):
    program = torch.export.export(Module(uri), (X,))
    assert not program.constants, "the data of the file were frozen into the program"
    torch.export.save(program, tmp_path / "program.pt2")
    for form in (program, torch.export.load(tmp_path / "program.pt2")):
        check(form.module()(X), expected(X))


def test_a_graph_reads_the_file_when_it_runs(tmp_path, without_graphs_of_others):
    uri = write_file(tmp_path)
    compiled = torch.compile(everything, backend="aot_eager", fullgraph=True)
    check(compiled(uri, X), expected(X))
    other = changed(TENSORS)
    write_file(tmp_path, other)
    check(compiled(uri, X), expected(X, other))
    # The same names in another format.
    tensorizer.save(TENSORS, uri)
    check(compiled(uri, X), expected(X))
    write_file(tmp_path, {**TENSORS, "weight": torch.zeros(60, 30)})
    with pytest.raises(RuntimeError, match=r"tensor `weight`: expected float32\[40,30\]"):
        compiled(uri, X)


# Errors of operators


@torch.jit.script
def verified(uri: str):
    return torch.ops.tensorizer.load(uri, verify=True)


def test_no_operator_verifies_what_has_no_hashes(uri, without_graphs_of_others):
    said = "cannot be verified: safetensors files hold no hashes"
    one = torch.full((5,), 9)

    def listed(x):
        return x + ops.load(uri, ["bias"], verify=True)[0].sum()

    for call in (
        lambda: ops.load(uri, verify=True),
        lambda: ops.load(uri, ["bias"], verify=True),
        lambda: ops.load(uri, "bias", one, verify=True),
        lambda: ops.load(uri, ["bias"], [one], verify=True),
        lambda: ops.load_(uri, ["bias"], [one], verify=True),
        lambda: verified(uri),
        lambda: torch.compile(listed, backend="aot_eager", fullgraph=True)(X),
    ):
        with pytest.raises(RuntimeError, match=said):
            call()
    assert one.eq(9).all()


def test_no_operator_decrypts_what_is_not_encrypted(uri):
    with pytest.raises(RuntimeError, match="is not encrypted"):
        ops.load(uri, key=torch.zeros(32, dtype=torch.uint8))


def test_in_place_nothing_is_touched_where_one_does_not_fit(uri):
    good = torch.full((5,), 9)
    for names, second, text in (
        (["bias", "weight"], torch.zeros(3, 3), r"`weight`.*float32 \[40, 30\].*\[3, 3\]"),
        (["bias", "weight"], torch.zeros(40, 30).int(), "`weight`.*float32.*int32"),
        (["bias", "nothing"], torch.zeros(3), "Tensor not found: `nothing`"),
        (["bias", "bias"], torch.zeros(5).long(), "`bias` is asked for twice"),
    ):
        with pytest.raises(RuntimeError, match=text):
            ops.load_(uri, names, [good, second])
        assert good.eq(9).all()


def of_torch_save(folder):
    torch.save(TENSORS, folder / "f")
    return "a checkpoint of torch.save, whose pickle only the Python"


def of_older_torch(folder):
    torch.save(TENSORS, folder / "f", _use_new_zipfile_serialization=False)
    return "a checkpoint of torch.save, whose pickle only the Python"


def of_torchscript(folder):
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(folder / "f"))
    return "torch.save|TorchScript"


def in_shards(folder):
    torch.save(TENSORS, folder / "1.bin")
    index = {"weight_map": dict.fromkeys(TENSORS, "1.bin")}
    (folder / "f").write_text(json.dumps(index))
    return "1.bin` looks like a checkpoint of torch.save, whose pickle only the Python"


def in_a_folder(folder):
    (folder / "f").mkdir()
    torch.save(TENSORS, folder / "f/pytorch_model.bin")
    return "a checkpoint of torch.save, whose pickle only the Python"


WRITTEN_BY = [of_torch_save, of_older_torch, of_torchscript, in_shards, in_a_folder]


@pytest.mark.parametrize("write", WRITTEN_BY, ids=lambda write: write.__name__)
def test_operators_read_no_pickles(write, tmp_path, without_graphs_of_others):
    said, uri, one = write(tmp_path), str(tmp_path / "f"), torch.full((5,), 9)
    load_scripted = torch.jit.script(Scripted(uri))
    for call in (
        lambda: ops.load(uri),
        lambda: ops.load(uri, ["bias"]),
        lambda: ops.names(uri),
        lambda: ops.load(uri, "bias", one),
        lambda: ops.load_(uri, ["bias"], [one]),
        lambda: load_scripted(X),
        lambda: torch.compile(everything, backend="aot_eager", fullgraph=True)(uri, X),
        lambda: torch.export.export(Module(uri), (X,)),
    ):
        with pytest.raises(Exception, match=f"(?s){said}") as raised:
            call()
        assert isinstance(raised.value, RuntimeError)
    assert one.eq(9).all()


# out= of tensorizer.load


def zeros():
    return {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}


@pytest.mark.device
def test_out(uri):
    out = zeros()
    before = {name: tensor.data_ptr() for name, tensor in out.items()}
    loaded = tensorizer.load(uri, out=out)
    assert set(loaded) == set(out)
    for name, tensor in loaded.items():
        assert tensor is out[name]
        assert tensor.data_ptr() == before[name]
        assert_same(tensor, TENSORS[name])
    # Some of them, by the names of out or of names.
    for options in ({}, {"names": ["half"]}, {"filter_func": lambda name: name == "half"}):
        out = zeros() if options else {"half": torch.zeros(3, dtype=torch.bfloat16)}
        assert list(tensorizer.load(uri, out=out, **options)) == ["half"]
        assert_same(out["half"], TENSORS["half"])
        assert not any(tensor.any() for name, tensor in out.items() if name != "half")
    parameter = torch.nn.Parameter(torch.zeros(40, 30))
    assert tensorizer.load(uri, out={"weight": parameter})["weight"] is parameter
    assert_same(parameter.detach(), TENSORS["weight"])
    assert tensorizer.load(uri, out={}) == {}


def test_out_is_refused_as_a_whole(uri):
    good = torch.full((5,), 9)
    flat = torch.zeros(1210)
    for other, options, error, text in (
        ({"weight": torch.zeros(3, 3)}, {}, ValueError, r"`weight`.*\[40, 30\].*\[3, 3\]"),
        ({"weight": torch.zeros(40, 30).half()}, {}, ValueError, "`weight`.*float32.*float16"),
        ({"weight": torch.zeros(30, 40).t()}, {}, ValueError, "`weight`"),
        ({"weight": torch.zeros(40, 30, device="meta")}, {}, ValueError, "`weight`"),
        ({"nothing": torch.zeros(1)}, {}, KeyError, "nothing"),
        ({}, {"names": ["bias", "half"]}, KeyError, "no tensor to load 'half' into"),
        ({}, {"dtype": torch.float16}, ValueError, "dtype= makes new tensors"),
        ({}, {"verify_hash": True}, tensorizer.HashMismatchError, "hold no hashes"),
        ({}, {"verify_hash": "crc32"}, tensorizer.HashMismatchError, "hold no hashes"),
    ):
        with pytest.raises(error, match=text):
            tensorizer.load(uri, out={"bias": good, **other}, **options)
        assert good.eq(9).all()
    overlapping = {"weight": flat[:1200].view(40, 30), "half": flat.view(torch.bfloat16)[2398:2401]}
    with pytest.raises(ValueError, match="overlap in memory"):
        tensorizer.load(uri, out=overlapping)
    assert not flat.any()


# Redis


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Redis(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def client(server):
    with redis.Redis(port=server.port) as client:
        client.flushall()
        yield client


@pytest.mark.parametrize("lazy", [True, False])
def test_redis_takes_files_of_ours_only(uri, lazy, client):
    with TensorDeserializer(uri, "cpu", lazy_load=lazy) as file:
        with pytest.raises(NotImplementedError, match="is a safetensors file: expected a .tensors"):
            file.to_redis(client, "m")
    assert client.keys() == []


def test_the_command_copies_to_redis(uri, server, client, capsys):
    address = f"{server.address}/m"
    assert main(["cp", uri, address]) == 0
    assert f"copied: {len(TENSORS)} tensors" in capsys.readouterr().err
    loaded = tensorizer.load(address, "cpu", verify_hash=True)
    assert set(loaded) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert_same(loaded[name], tensor)
    assert main(["diff", uri, address]) == 0
