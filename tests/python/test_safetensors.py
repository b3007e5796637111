"""Files of safetensors load as its own library loads them."""

import json

import pytest
import tensorizer
import torch
from conftest import assert_same
from packing import (
    BEYOND_TORCH,
    FILES,
    check,
    feeding,
    filled,
    info,
    pack,
    pack_tensors,
    stored_name,
    write,
)
from safetensors.torch import load_file, save_file
from tensorizer import HashMismatchError, TensorDeserializer, TensorType
from tensorizer_cli.main import main

ops = torch.ops.tensorizer


@pytest.fixture(scope="module", params=FILES)
def path(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "model.safetensors"
    write(request.param, path)
    return path


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    path = tmp_path_factory.mktemp("mixed") / "model.safetensors"
    write("dtypes", path)
    return path


# Files that load, by every call


@pytest.mark.parametrize("options", [{}, {"mmap": True}, {"num_readers": 3}], ids=str)
def test_every_file_by_every_call(path, options):
    check(tensorizer.load(path, "cpu", **options), path)
    names = list(load_file(path))
    chosen = names[::2][::-1]
    # As a string, one that begins with U+001E is a path in its stored form.
    asked = [(name,) if name.startswith("\x1e") else name for name in chosen]
    by_name = tensorizer.load(path, "cpu", names=asked, **options)
    assert list(by_name) == asked
    for name, tensor in zip(chosen, by_name.values(), strict=True):
        assert_same(tensor, load_file(path)[name])
    check(dict(TensorDeserializer(path, "cpu", **options).items()), path)
    with TensorDeserializer(path, "cpu", lazy_load=True, **options) as lazy:
        assert set(lazy.keys()) == set(names)
        for name in reversed(names):
            assert_same(lazy[name].detach(), load_file(path)[name])
        assert lazy.total_tensor_bytes == sum(tensor.nbytes for tensor in lazy.values())
    with TensorDeserializer(path, "cpu", lazy_load=True, **options) as lazy:
        read = list(lazy.read_tensors())
        check({name: tensor for _, _, name, tensor in read}, path)
        assert {(module, kind) for module, kind, _, _ in read} <= {(0, TensorType.STATE_DICT)}
    filtered = TensorDeserializer(path, "cpu", filter_func=lambda name: name in chosen, **options)
    assert set(filtered) == set(chosen)
    everything = TensorDeserializer(path, "cpu", **options).tree(default={})
    assert set(everything) == set(names)


def test_every_file_by_the_operators(path):
    tensors = load_file(path)
    stored = {name: stored_name(name) for name in tensors}
    loaded = ops.load(str(path))
    assert set(loaded) == set(stored.values()) == set(ops.names(str(path)))
    for name, tensor in tensors.items():
        assert_same(loaded[stored[name]], tensor)
    some = list(tensors)[::2]
    for name, tensor in zip(some, ops.load(str(path), [stored[n] for n in some]), strict=True):
        assert_same(tensor, tensors[name])
    out = [torch.empty_like(tensors[name]) for name in some]
    ops.load_(str(path), [stored[n] for n in some], out)
    for name, tensor in zip(some, out, strict=True):
        assert_same(tensor, tensors[name])


@torch.jit.script
def scripted(uri: str):
    return torch.ops.tensorizer.load(uri)


@torch.jit.script
def scripted_names(uri: str, names: list[str]):
    return torch.ops.tensorizer.load(uri, names)


def test_torchscript(mixed):
    expected = load_file(mixed)
    for _ in range(2):
        loaded = scripted(str(mixed))
        assert set(loaded) == set(expected)
        one, two = scripted_names(str(mixed), ["F64.matrix", "F4.matrix"])
    assert_same(loaded["BF16.matrix"], expected["BF16.matrix"])
    assert_same(one, expected["F64.matrix"])
    assert_same(two, expected["F4.matrix"])


def test_compiled(tmp_path, without_graphs_of_others):
    save_file({"a": torch.arange(6.0), "b": torch.ones(2)}, tmp_path / "m.safetensors")
    uri = str(tmp_path / "m.safetensors")

    @torch.compile(backend="eager", fullgraph=True)
    def double(x):
        return x * torch.ops.tensorizer.load(uri)["a"]

    assert torch.equal(double(torch.full((6,), 2.0)), torch.arange(6.0) * 2)


def test_dtype_is_cast(mixed):
    expected = load_file(mixed)
    # torch casts no float4.
    chosen = [name for name in expected if not name.startswith("F4")]
    eager = TensorDeserializer(
        mixed, "cpu", dtype=torch.float64, filter_func=lambda name: name in chosen
    )
    for loaded in (tensorizer.load(mixed, "cpu", dtype=torch.float64, names=chosen), eager):
        assert loaded["F32.matrix"].dtype == torch.float64
        assert torch.equal(loaded["F32.matrix"].detach(), expected["F32.matrix"].double())
        assert loaded["I16.matrix"].dtype == torch.int16


def test_modules_are_loaded(tmp_path):
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20))
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    other = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20))
    with TensorDeserializer(tmp_path / "m.safetensors", "cpu") as file:
        assert file.load_into_module(other) == len(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert_same(other.state_dict()[name], tensor)


def test_numpy_arrays(tmp_path):
    save_file({"a": torch.arange(6.0), "b": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "m")
    with TensorDeserializer(tmp_path / "m", "cpu", lazy_load=True) as file:
        arrays = {name: (array, opaque, dtype) for _, _, name, array, opaque, dtype in
                  file.read_numpy_arrays(allow_raw_data=True)}  # fmt: skip
    assert arrays["a"][0].tolist() == [0, 1, 2, 3, 4, 5]
    assert arrays["b"][1:] == (True, "torch.bfloat16")


def test_a_meta_device(mixed):
    loaded = ops.load(str(mixed), device="meta")
    for name, tensor in load_file(mixed).items():
        assert loaded[name].is_meta
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)


def test_mapped_tensors_are_private(tmp_path):
    save_file({"a": torch.zeros(600_000), "b": torch.ones(3)}, tmp_path / "m.safetensors")
    before = (tmp_path / "m.safetensors").read_bytes()
    loaded = tensorizer.load(tmp_path / "m.safetensors", "cpu", mmap=True)
    loaded["a"].fill_(3)
    loaded["b"].fill_(3)
    assert (tmp_path / "m.safetensors").read_bytes() == before


@pytest.mark.parametrize("shift", range(0, 17))
def test_large_tensors_at_every_offset(tmp_path, shift):
    """A tensor that is not aligned in the file is copied, even with mmap."""
    data = torch.arange(300_000, dtype=torch.int64).view(torch.uint8).numpy().tobytes()
    header = {
        "a": info("U8", [shift], 0, shift),
        "b": info("I64", [300_000], shift, shift + 2_400_000),
    }
    path = tmp_path / "m.safetensors"
    path.write_bytes(pack(header, bytes(shift) + data, length=200))
    for options in ({}, {"mmap": True}):
        tensor = tensorizer.load(path, "cpu", **options)["b"]
        assert tensor.data_ptr() % 8 == 0
        assert torch.equal(tensor, torch.arange(300_000))


# Lengths of headers that begin with the bytes of something else


@pytest.mark.parametrize("length", [123, 0x0A7B, 0x7B20, 0x7B0A, 0x7B2020], ids=hex)
def test_lengths_that_begin_like_an_index(length, tmp_path):
    """Lengths whose bytes are `{`, or white space before it: the library does write 31,520."""
    path = tmp_path / "m.safetensors"
    path.write_bytes(pack({"a": info()}, b"1234", length=length))
    check(tensorizer.load(path, "cpu"), path)
    assert ops.names(str(path)) == ["a"]
    if length < 1 << 16:
        with feeding(path.read_bytes()) as number:
            check(tensorizer.load(number, "cpu"), path)
    index = {"weight_map": {"a": path.name}}
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps(index))
    check(tensorizer.load(tmp_path / "m.safetensors.index.json", "cpu"), path)


# Errors


@pytest.mark.parametrize("dtype", BEYOND_TORCH)
def test_dtypes_that_torch_has_not(dtype, tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    path.write_bytes(
        pack_tensors(
            {"a": filled("F32", [2]), "six": filled(dtype, [3, 4]), "z": filled("I16", [3])}
        )
    )
    said = f"tensor `six`.*{dtype}"
    assert set(ops.names(str(path))) == {"a", "six", "z"}
    for call in (
        lambda: tensorizer.load(path, "cpu"),
        lambda: tensorizer.load(path, "cpu", mmap=True),
        lambda: tensorizer.load(path, "cpu", names=["six"]),
        lambda: TensorDeserializer(path, "cpu"),
    ):
        with pytest.raises(NotImplementedError, match=said):
            call()
    for call in (
        lambda: ops.load(str(path)),
        lambda: ops.load(str(path), ["z", "six"]),
        lambda: ops.load(str(path), device="meta"),
    ):
        with pytest.raises(RuntimeError, match=said):
            call()
    with pytest.raises(RuntimeError, match="tensor `six`"):
        ops.load_(str(path), ["six"], [torch.zeros(9, dtype=torch.uint8)])
    assert list(tensorizer.load(path, "cpu", names=["z", "a"])["z"]) == [1792, 5390, 8988]
    with TensorDeserializer(path, "cpu", lazy_load=True) as lazy:
        assert set(lazy) == {"a", "six", "z"}
        assert lazy["a"].shape == (2,)
        with pytest.raises(NotImplementedError, match=said):
            lazy["six"]
        with pytest.raises(NotImplementedError, match=said):
            lazy.tree()
        assert lazy["z"].shape == (3,)


@pytest.mark.device
@pytest.mark.parametrize("verify", [True, "crc32"])
def test_there_are_no_hashes(verify, mixed):
    said = "model.safetensors.*safetensors files hold no hashes"
    asked = {"verify_hash": verify}
    lazy = TensorDeserializer(mixed, "cpu", lazy_load=True)
    for call in (
        lambda: tensorizer.load(mixed, "cpu", **asked),
        lambda: TensorDeserializer(mixed, "cpu", **asked),
        lambda: TensorDeserializer(mixed, "cpu", lazy_load=True, **asked)["F32.matrix"],
        lambda: list(lazy.read_tensors(**asked)),
        lambda: tensorizer.load(mixed, "cpu", names=["F32.matrix"], **asked),
    ):  # fmt: skip
        with pytest.raises(HashMismatchError, match=said):
            call()


def test_the_operators_find_no_hashes_either(mixed):
    with pytest.raises(RuntimeError, match="safetensors files hold no hashes"):
        ops.load(str(mixed), ["F32.matrix"], [torch.zeros(5, 3)], verify=True)


def test_nothing_is_decrypted(mixed):
    key = tensorizer.DecryptionParams.from_key(bytes(32))
    with pytest.raises((ValueError, tensorizer.CryptographyError), match="not encrypted"):
        tensorizer.load(mixed, "cpu", encryption=key)


def test_names_that_are_not_there(mixed):
    with pytest.raises(KeyError, match="nothing"):
        tensorizer.load(mixed, "cpu", names=["nothing"])
    with pytest.raises(RuntimeError, match="Tensor not found: `nothing`"):
        ops.load(str(mixed), ["nothing"])


# The command


def run(*arguments):
    return main([str(argument) for argument in arguments])


def test_the_command(tmp_path, capsys):
    source, copy = tmp_path / "m.safetensors", tmp_path / "m.tensors"
    save_file({"a": torch.arange(6.0), "half": torch.ones(2, 3, dtype=torch.bfloat16)}, source)
    assert run("ls", source) == 0
    listed = capsys.readouterr().out
    assert [line.split()[:2] for line in listed.splitlines()[1:3]] == [
        ["a", "float32"],
        ["half", "bfloat16"],
    ]
    assert "2 tensors" in listed
    assert "None" not in listed
    assert run("cp", source, copy) == 0
    check(tensorizer.load(copy, "cpu", verify_hash=True), source)
    assert run("diff", source, copy) == 0
    assert run("diff", copy, source) == 0
    capsys.readouterr()
    assert run("verify", source) != 0
    said = capsys.readouterr()
    assert "safetensors files hold no hashes" in said.out + said.err


def test_the_command_on_every_file(path, tmp_path, capsys):
    assert run("ls", path) == 0
    count = len(load_file(path))
    assert f"\n{count} tensor" in capsys.readouterr().out
    if count:
        assert run("cp", path, tmp_path / "copy") == 0
        assert run("diff", path, tmp_path / "copy") == 0
