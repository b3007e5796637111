"""Writing safetensors files: byte for byte as the library writes them."""

import io
import json
import os

import pytest
import tensorizer.safetensors
import torch
from servers import Moto
from tensorizer import TensorSerializer
from tensorizer_cli.main import main

safetensors = pytest.importorskip("safetensors.torch")
SafetensorError = pytest.importorskip("safetensors").SafetensorError

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.float16),
    *(torch.bfloat16, torch.int32, torch.uint32, torch.float32, torch.complex64, torch.float64),
    *(torch.int64, torch.uint64, torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e8m0fnu),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float4_e2m1fn_x2),
]


def make():
    torch.manual_seed(2)
    tensors = {
        f"{number % 7}.{str(dtype).removeprefix('torch.')}": torch.randint(
            0, 2 if dtype is torch.bool else 255, (3, 16), dtype=torch.uint8
        ).view(dtype)
        for number, dtype in enumerate(DTYPES)
    }
    tensors["scalar"] = torch.tensor(1.5)
    tensors["empty"] = torch.zeros(0, 4)
    tensors['odd "name" \n\t\\ ü \x7f'] = torch.arange(5)
    tensors["large"] = torch.randn(900, 1001)
    return tensors


@pytest.mark.device
@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}])
@pytest.mark.parametrize("tensors", [make(), {}, {"a": torch.ones(1)}], ids=["all", "none", "one"])
def test_files_are_those_of_the_library(tmp_path, tensors, metadata):
    safetensors.save_file(tensors, tmp_path / "theirs", metadata=metadata)
    tensorizer.save(tensors, tmp_path / "ours.safetensors", metadata=metadata)
    expected = (tmp_path / "theirs").read_bytes()
    if not tensors and metadata == {}:
        # The library cannot read the file that it writes of no tensors.
        with pytest.raises(SafetensorError):
            safetensors.load_file(tmp_path / "theirs")
        assert safetensors.load_file(tmp_path / "ours.safetensors") == {}
        return
    assert (tmp_path / "ours.safetensors").read_bytes() == expected
    file = io.BytesIO()
    file.close = lambda: None
    tensorizer.save(tensors, file, format="safetensors", metadata=metadata)
    assert file.getvalue() == expected
    assert sorted(os.listdir(tmp_path)) == ["ours.safetensors", "theirs"]


def test_metadata_are_sorted(tmp_path):
    metadata = {f"{i}": "ü\n" * i for i in (3, 1, 2)}
    path = tmp_path / "f.safetensors"
    tensorizer.save({"a": torch.ones(2)}, path, metadata=metadata)
    assert list(tensorizer.info(path).metadata) == ["1", "2", "3"]
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == metadata


@pytest.mark.device
def test_tensors_of_any_order_in_memory(tmp_path):
    tensors = {
        "t": torch.arange(12).reshape(3, 4).t(),
        "step": torch.arange(20)[::3],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "conj": torch.tensor([1 + 2j]).to(torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    path = tmp_path / "f.safetensors"
    tensorizer.save(tensors, path)
    loaded = safetensors.load_file(path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("tensors", "options", "error", "text"),
    [
        ([torch.ones(1)], {}, TypeError, "tensors by name"),
        ({"a": {"b": torch.ones(1)}}, {}, TypeError, "no nested structures: found dict at 'a'"),
        ({("a", 0): torch.ones(1)}, {}, ValueError, "cannot hold nested"),
        ({"a": torch.ones(1)}, {"metadata": {"a": 1}}, TypeError, "metadata must be a dict"),
        ({"a": torch.ones(1)}, {"format": "zip"}, ValueError, "format must be"),
        ({"a": torch.ones(1)}, {"hashes": "crc32"}, ValueError, "neither encryption nor hashes"),
        ({"a": torch.ones(1)}, {"alignment": 4096}, ValueError, "alignment=4096"),
        ({"a": torch.ones(1)}, {"max_shard_size": 0}, ValueError, "must be positive"),
        ({"a": torch.ones(1)}, {"max_shard_size": "5 parsecs"}, ValueError, "expected bytes as in"),
        ({"__metadata__": torch.ones(1)}, {}, ValueError, "cannot be named"),
        ({"a": torch.ones(1, dtype=torch.complex128)}, {}, ValueError, "has no torch.complex128"),
        ({"a": torch.ones(1, device="meta")}, {}, ValueError, "'a' is on the meta device"),
        ({"a": torch.ones(2, 2).to_sparse()}, {}, NotImplementedError, "a"),
    ],
)
def test_refused_saves_leave_the_old_file(tmp_path, tensors, options, error, text):
    path = tmp_path / "f.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(error, match=text):
        tensorizer.save(tensors, path, **options)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f.safetensors"]


def module_with(tensor):
    module = torch.nn.Module()
    module.register_buffer("a", tensor)
    return module


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", ["f.tensors", "f.safetensors"])
@pytest.mark.parametrize(
    "save",
    [
        lambda tensor, path: tensorizer.save({"a": tensor}, path),
        lambda tensor, path: tensorizer.save({"a": tensor, "b": tensor}, path),
        lambda tensor, path: tensorizer.save_async({"a": tensor}, path),
        # The old class writes no safetensors files.
        lambda tensor, path: TensorSerializer(path.with_suffix(".tensors")).write_module(
            module_with(tensor)
        ),
    ],
    ids=["save", "shared", "async", "module"],
)
def test_nested_tensors_are_refused(tmp_path, save, name):
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
        with pytest.raises(NotImplementedError, match="'.?a' is a (nested tensor|NestedTensor)"):
            save(nested, tmp_path / name)
        assert os.listdir(tmp_path) == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_in_the_place_of_the_library(tmp_path):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    two, path = {"a": nested, "b": nested}, tmp_path / "f.safetensors"
    for save in (
        lambda: tensorizer.save(two, path, max_shard_size=8),
        lambda: tensorizer.safetensors.save_file(two, path),
        lambda: tensorizer.safetensors.save(two),
        lambda: tensorizer.safetensors.save_model(module_with(nested), path),
    ):
        with pytest.raises(NotImplementedError, match="'a' is a nested tensor"):
            save()
    assert os.listdir(tmp_path) == []


def test_tensors_that_share_memory_are_refused(tmp_path):
    base = torch.arange(10)
    for tensors in [
        {"a": base, "b": base},
        {"a": base, "b": base[2:4]},
        {"a": base[:5], "b": base[4:]},
        {"a": base[::2], "b": base[1::2]},
    ]:
        with pytest.raises(ValueError, match=r"'[ab]' and '[ab]' share memory"):
            tensorizer.save(tensors, tmp_path / "f.safetensors")
    # Neighbours share a storage, and no byte.
    tensorizer.save({"a": base[:5], "b": base[5:]}, tmp_path / "f.safetensors")
    assert torch.equal(tensorizer.load(tmp_path / "f.safetensors", "cpu")["b"], base[5:])


def test_shards_are_for_safetensors(tmp_path):
    with pytest.raises(ValueError, match="is for safetensors files"):
        tensorizer.save({"a": torch.ones(1)}, tmp_path / "f.tensors", max_shard_size=5)
    tensorizer.save({"a": torch.ones(1)}, tmp_path / "f.safetensors", format="tensors")
    assert tensorizer.info(tmp_path / "f.safetensors").format == "tensors"


@pytest.mark.device
def test_in_the_background(tmp_path):
    tensors, path = make(), tmp_path / "f.safetensors"
    tensorizer.save(tensors, tmp_path / "expected.safetensors", metadata={"format": "pt"})
    future = tensorizer.save_async(tensors, path, metadata={"format": "pt"})
    tensors["large"].zero_()
    future.result(60)
    assert future.saved_bytes == future.total_bytes
    assert path.read_bytes() == (tmp_path / "expected.safetensors").read_bytes()
    tensorizer.save_async({"a": torch.ones(1)}, path, format="tensors").result(60)
    assert tensorizer.info(path).format == "tensors"
    base = torch.arange(10)
    for wrong, options, error, text in [
        ({"a": base, "b": base[2:]}, {}, ValueError, "share memory"),
        ({"a": [base]}, {}, TypeError, "no nested structures"),
        ({"a": base}, {"hashes": "crc32"}, ValueError, "neither encryption nor hashes"),
        ({"a": base}, {"format": "zip"}, ValueError, "format must be"),
        ({"a": base}, {"metadata": {"a": 1}}, TypeError, "metadata must be a dict"),
    ]:
        with pytest.raises(error, match=text):
            tensorizer.save_async(wrong, path, **options)
    with pytest.raises(ValueError, match="meta device"):
        tensorizer.save_async({"a": torch.ones(1, device="meta")}, path)
    assert tensorizer.info(path).format == "tensors"
    assert sorted(os.listdir(tmp_path)) == ["expected.safetensors", "f.safetensors"]


def test_shards(tmp_path):
    tensors = {f"t{i}": torch.full((1000,), float(i)) for i in range(10)}
    path = tmp_path / "model.safetensors"
    tensorizer.save(tensors, path, max_shard_size="12KB", metadata={"format": "pt"})
    names = [f"model-{i:05}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    assert sorted(os.listdir(tmp_path)) == [*names, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"format": "pt", "total_size": 40_000}
    assert index["weight_map"] == {f"t{i}": names[i // 3] for i in range(10)}
    assert list(safetensors.load_file(tmp_path / names[1])) == ["t3", "t4", "t5"]
    loaded = tensorizer.load(tmp_path, "cpu")
    assert list(loaded) == list(tensors)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(FileExistsError, match="index.json exists"):
        tensorizer.save(tensors, path, max_shard_size=12_000)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(FileExistsError, match="00001-of-00004.safetensors exists"):
        tensorizer.save(tensors, path, max_shard_size=12_000)
    with pytest.raises(TypeError, match="shards need a path"):
        tensorizer.save(tensors, io.BytesIO(), format="safetensors", max_shard_size=12_000)
    with pytest.raises(ValueError, match=r"ends with \.safetensors"):
        tensorizer.save(tensors, tmp_path / "f", format="safetensors", max_shard_size=12_000)


def test_few_bytes_are_one_file_whatever_is_allowed(tmp_path):
    path = tmp_path / "model.safetensors"
    tensorizer.save({"a": torch.ones(4)}, path, max_shard_size="5GB")
    assert os.listdir(tmp_path) == ["model.safetensors"]
    tensors = {"a": torch.ones(4), "b": torch.ones(4)}
    with pytest.raises(FileExistsError, match="model.safetensors exists"):
        tensorizer.save(tensors, path, max_shard_size=16)


def test_to_s3(monkeypatch):
    server = Moto()
    try:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-hu5hw0rd")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{server.host}")
        server.client().create_bucket(Bucket="bucket")
        tensors = {f"t{i}": torch.full((300_000,), float(i)) for i in range(10)}
        tensorizer.save(tensors, "s3://bucket/one.safetensors")
        tensorizer.save(tensors, "s3://bucket/m/model.safetensors", max_shard_size=4_000_000)
        for address in ("s3://bucket/one.safetensors", "s3://bucket/m"):
            loaded = tensorizer.load(address, "cpu")
            assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
        with pytest.raises(FileExistsError, match="index.json exists"):
            tensorizer.save(tensors, "s3://bucket/m/model.safetensors", max_shard_size=4_000_000)
    finally:
        server.stop()


OTHER_NAMES = [
    "m.pt",
    "m.PTH",
    "m.bin",
    "m.ckpt",
    "m.safetensor",
    "m.gguf",
    "m.NPZ",
    "m.h5",
    "m.onnx",
]


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_names_of_other_formats_are_refused_unless_the_format_is_named(tmp_path, name, capsys):
    path, tensors = tmp_path / name, {"a": torch.ones(3)}
    said = rf"{name} would be a \.tensors file, but .* is the ending of another format"
    for call in (tensorizer.save, tensorizer.save_async):
        with pytest.raises(ValueError, match=said):
            call(tensors, path)
    if name.lower() not in ("m.pt", "m.pth", "m.bin"):  # which tensorizer 2 writes, too
        with pytest.raises(ValueError, match=said):
            TensorSerializer(path)
        with pytest.raises(RuntimeError, match=said):
            torch.ops.tensorizer.save(str(path), tensors)
    with pytest.raises(ValueError, match=f"s3://bucket/{name} would be"):
        tensorizer.save(tensors, f"s3://bucket/{name}?versionId=1")
    tensorizer.save(tensors, tmp_path / "m.tensors")
    assert main(["cp", str(tmp_path / "m.tensors"), str(path)]) != 0
    assert "end it with .tensors" in capsys.readouterr().err
    assert not path.exists()
    for format in ("tensors", "safetensors"):
        tensorizer.save(tensors, path, format=format)
        assert tensorizer.info(path).format == format


@pytest.mark.parametrize("name", ["m.SAFETENSORS", "m.SafeTensors"])
def test_the_ending_is_that_of_safetensors_in_any_case(tmp_path, name):
    path, tensors = tmp_path / name, {"a": torch.ones(3), "b": torch.ones(3)}
    for call in (tensorizer.save, lambda *args: tensorizer.save_async(*args).result()):
        call(tensors, path)
        assert tensorizer.info(path).format == "safetensors"
        path.unlink()
    tensorizer.save(tensors, tmp_path / "m.tensors")
    assert main(["cp", str(tmp_path / "m.tensors"), str(path)]) == 0
    assert tensorizer.info(path).format == "safetensors"
    (tmp_path / "folder").mkdir()
    assert main(["cp", str(path), str(tmp_path / "folder")]) == 0
    assert tensorizer.info(tmp_path / "folder" / name).format == "safetensors"
    tensorizer.save(tensors, tmp_path / f"s{name}", max_shard_size=12)
    index = tmp_path / f"s{name[:-12]}.safetensors.index.json"
    assert len(tensorizer.load(index, "cpu")) == 2


def test_the_old_classes_and_the_operators_do_not_write_that_name(tmp_path):
    path = tmp_path / "m.SafeTensors"
    for file in (path, str(path), bytes(path)):
        with pytest.raises(ValueError, match=r"ending of another format.*tensorizer\.save"):
            TensorSerializer(file)
    with pytest.raises(RuntimeError, match="ending of another format"):
        torch.ops.tensorizer.save(str(path), {"a": torch.ones(3)})
    assert not path.exists()
    with TensorSerializer(tmp_path / "m.pt") as file:  # as in tensorizer 2
        file.write_state_dict({"a": torch.ones(3)})
    torch.ops.tensorizer.save(str(tmp_path / "m.bin"), {"a": torch.ones(3)})
