"""Folders of models as transformers, diffusers and PEFT write them, local and of servers."""

import contextlib
import json
import os

import pytest
import tensorizer
import torch
from hub import Hub
from safetensors.torch import save
from servers import Nginx
from tensorizer.safetensors import safe_open

#: Names in the order in which they are looked for.
IN_ORDER = [
    "model.safetensors",
    "model.safetensors.index.json",
    "model.tensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "adapter_model.safetensors",
    "diffusion_pytorch_model.bin",
    "diffusion_pytorch_model.bin.index.json",
    "adapter_model.bin",
    "model.fp16.safetensors",
    "model.safetensors.index.fp16.json",
    "diffusion_pytorch_model.fp16.safetensors",
    "diffusion_pytorch_model.safetensors.index.fp16.json",
    "diffusion_pytorch_model.fp16.safetensors.index.json",
    "diffusion_pytorch_model.safetensors.fp16.index.json",
    "pytorch_model.fp16.bin",
    "pytorch_model.bin.index.fp16.json",
    "diffusion_pytorch_model.fp16.bin",
    "diffusion_pytorch_model.bin.index.fp16.json",
]


def saved(tensors, ending, tmp_path):
    if ending == "tensors":
        tensorizer.save(tensors, tmp_path / "f.tensors")
        return (tmp_path / "f.tensors").read_bytes()
    if ending != "bin":
        return save(tensors)
    torch.save(tensors, tmp_path / "f.bin")
    return (tmp_path / "f.bin").read_bytes()


def files_of(name, tmp_path):
    """Return files whose only tensors are named after a file, which is an index of two shards."""
    ending = next(e for e in ("bin", "safetensors", "tensors") if f".{e}" in name)
    if not name.endswith(".json"):
        return {name: saved({name: torch.ones(3)}, ending, tmp_path)}
    shards = {f"{name}.{number}": f"shard-{number}-of-{name}.{ending}" for number in (1, 2)}
    files = {
        shard: saved({tensor: torch.ones(3)}, ending, tmp_path) for tensor, shard in shards.items()
    }
    return files | {name: json.dumps({"metadata": {}, "weight_map": shards}).encode()}


@pytest.fixture(scope="module")
def nginx(tmp_path_factory):
    server = Nginx(tmp_path_factory.mktemp("nginx"))
    yield server
    server.stop()


@pytest.fixture
def serve(tmp_path, nginx, s3, monkeypatch, no_settings_of_the_machine):
    """Return a context manager that gives the address of a folder with files."""

    @contextlib.contextmanager
    def serve(where, files):
        if where == "hf":
            for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING"))]:
                monkeypatch.delenv(name)
            monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
            with Hub() as hub:
                monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
                hub.repo("org/repo", files)
                yield "hf://org/repo"
            return
        if where == "s3":
            for name, data in files.items():
                s3.client().put_object(Bucket="bucket", Key=f"{tmp_path.name}/{name}", Body=data)
            yield f"s3://bucket/{tmp_path.name}"
            return
        folder = (nginx.root if where == "http" else tmp_path) / tmp_path.name
        folder.mkdir()
        for name, data in files.items():
            (folder / name).write_bytes(data)
        yield f"{nginx.http}/{folder.name}/" if where == "http" else str(folder)

    return serve


def tensors_of(name):
    return [f"{name}.1", f"{name}.2"] if name.endswith(".json") else [name]


@pytest.mark.parametrize("name", IN_ORDER)
@pytest.mark.parametrize("where", ["local", "http", "s3", "hf"])
def test_each_name_is_found(where, name, tmp_path, serve):
    files = files_of(name, tmp_path) | {"config.json": b"{}"}
    with serve(where, files) as address:
        assert sorted(tensorizer.load(address, "cpu")) == tensors_of(name)


@pytest.mark.parametrize("where", ["local", "http"])
def test_of_several_the_first_is_opened(where, tmp_path, nginx, serve):
    files = {}
    for name in reversed(IN_ORDER):
        files |= files_of(name, tmp_path)
    with serve(where, files) as address:
        for name in IN_ORDER:
            assert sorted(tensorizer.load(address, "cpu")) == tensors_of(name)
            if ".safetensors" in name:
                with safe_open(address, "pt") as file:
                    assert file.keys() == tensors_of(name)
            folder = tmp_path if where == "local" else nginx.root
            (folder / tmp_path.name / name).unlink()


def test_a_name_costs_a_request_for_each_before_it(tmp_path, nginx, serve):
    files = files_of("adapter_model.safetensors", tmp_path)
    with serve("http", files) as address:
        before = len(nginx.requests())
        tensorizer.load(address, "cpu")
        requests = nginx.requests()[before:]
    assert [" 404 " in request for request in requests] == [True] * 7 + [False]


@pytest.mark.parametrize("where", ["local", "http", "s3", "hf"])
def test_a_folder_without_any_is_an_error_that_names_them(where, serve):
    files = {"config.json": b"{}"}
    with serve(where, files) as address:
        with pytest.raises(OSError) as raised:
            tensorizer.load(address.rstrip("/") + "/", "cpu")
    for name in ("model.safetensors", "diffusion_pytorch_model.safetensors", "adapter_model"):
        assert name in str(raised.value)


@pytest.mark.parametrize(
    "name",
    ["unet.bf16.safetensors", "model.safetensors.index.bf16.json", "x.safetensors.ema.index.json"],
)
def test_the_only_other_variant_of_a_local_folder_is_opened(name, tmp_path, serve):
    files = files_of(name, tmp_path)
    with serve("local", files) as address:
        assert sorted(tensorizer.load(address, "cpu")) == tensors_of(name)
        (tmp_path / tmp_path.name / name.replace("bf16", "int8").replace("ema", "x")).write_bytes(
            files[name]
        )
        with pytest.raises(IsADirectoryError, match="name one of them"):
            tensorizer.load(address, "cpu")


def test_the_only_tensors_file_of_a_local_folder_is_opened(tmp_path):
    one, other = tmp_path / "one.tensors", tmp_path / "other.tensors"
    tensorizer.save({"a": torch.ones(3)}, one)
    (tmp_path / ".hidden.tensors").write_bytes(one.read_bytes())
    assert list(tensorizer.load(tmp_path, "cpu")) == ["a"]
    other.write_bytes(one.read_bytes())
    with pytest.raises(IsADirectoryError, match="`one.tensors`, `other.tensors`.* name one of"):
        tensorizer.load(tmp_path, "cpu")
    other.unlink()
    (tmp_path / "checkpoint.json").write_text("{}")
    with pytest.raises(IsADirectoryError, match="tensorizer.distributed"):
        tensorizer.load(tmp_path, "cpu")
