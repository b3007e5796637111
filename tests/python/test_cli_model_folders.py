"""``tensorizer cp`` of the folders of models: what they have beside their weights, and all."""

import json

import pytest
import tensorizer
import torch
from tensorizer_cli.main import main

FILES = {
    "config.json": json.dumps({"model_type": "x", "auto_map": {"AutoConfig": "own.Config"}}),
    "tokenizer.json": "{}",
    "tokenizer_config.json": "{}",
    "vocab.json": "{}",
    "generation_config.json": '{"do_sample": true}',
    "own.py": "from .beside import a",
    "beside.py": "a = 1",
}


@pytest.fixture
def model(nginx):
    folder = nginx.root / "llama"
    folder.mkdir(exist_ok=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for name in ("model.tensors", "model-00001-of-00002.safetensors", "README.md"):
        (folder / name).write_bytes(bytes(100))
    return folder


def content(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["folder", "file", "address", "address of weights"])
def test_small_files_are_copied_into_a_folder(nginx, model, tmp_path, kind, capsys):
    source = f"{nginx.http}/llama" if kind.startswith("address") else str(model)
    source += "" if kind in ("folder", "address") else "/model.tensors"
    target = tmp_path / "new/llama"
    assert main(["cp", "--no-weights", source, str(target)]) == 0
    assert content(target) == FILES
    assert "copied: 7 files" in capsys.readouterr().err
    # Again, over them.
    (target / "config.json").write_text("old")
    assert main(["cp", "--no-weights", "--json", source, f"{target}/"]) == 0
    assert content(target) == FILES
    report = json.loads(capsys.readouterr().out)
    assert report["files"] == sorted(FILES)
    assert report["bytes"] == sum(map(len, FILES.values()))
    assert not any(line for line in nginx.requests() if "00001" in line)


def test_from_a_bucket_to_a_folder_and_to_a_bucket(moto, model, tmp_path, monkeypatch):
    for name, value in moto.settings().items():
        monkeypatch.setenv(name, value)
    client = moto.client()
    for path in model.iterdir():
        client.put_object(Bucket="bucket", Key=f"llama/{path.name}", Body=path.read_bytes())
    assert main(["cp", "--no-weights", "s3://bucket/llama", str(tmp_path / "llama")]) == 0
    assert content(tmp_path / "llama") == FILES
    assert main(["cp", "--no-weights", "s3://bucket/llama/", "s3://bucket/copy"]) == 0
    found = client.list_objects_v2(Bucket="bucket", Prefix="copy/")["Contents"]
    assert {one["Key"].removeprefix("copy/") for one in found} == FILES.keys()


def test_a_whole_model_is_copied(moto, model, tmp_path, monkeypatch, capsys):
    """To a folder with the same files, of which the weights are ``model.tensors``."""
    for name, value in moto.settings().items():
        monkeypatch.setenv(name, value)
    tensors = {"a": torch.arange(3.0)}
    (model / "model.tensors").unlink()
    tensorizer.save(tensors, model / "model.safetensors")
    assert main(["cp", str(model), "s3://bucket/whole", "--verify"]) == 0
    assert "also copied: beside.py, config.json" in capsys.readouterr().err
    for source, target in (("s3://bucket/whole/", "new"), (str(model), "other/")):
        assert main(["cp", "--json", source, str(tmp_path / target)]) == 0
        assert json.loads(capsys.readouterr().out)["files"] == sorted(FILES)
        loaded = tensorizer.load(tmp_path / target / "model.tensors", "cpu")
        assert torch.equal(loaded["a"], tensors["a"])
        (tmp_path / target / "model.tensors").unlink()
        assert content(tmp_path / target) == FILES


def test_only_what_may_be_a_folder_is_asked_for_a_configuration(nginx, tmp_path, capsys):
    tensorizer.save({"a": torch.ones(1)}, nginx.root / "plain")
    assert main(["cp", f"{nginx.http}/plain", str(tmp_path / "copy")]) == 0
    assert not [line for line in nginx.requests() if "plain/config.json" in line]
    for address in ("s3://", "http://"):
        assert main(["cp", address, str(tmp_path / "none")]) == 2
        assert "config.json" not in capsys.readouterr().err


def test_a_file_is_copied_to_a_file(model, tmp_path):
    """Of a folder that names no file, and to a target that does."""
    tensorizer.save({"a": torch.ones(1)}, model / "model.safetensors")
    (model / "model.tensors").unlink()
    assert main(["cp", str(model), str(tmp_path / "one.tensors")]) == 0
    assert main(["cp", str(model / "model.safetensors"), str(tmp_path / "two")]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"one.tensors", "two"}


def test_mistakes(model, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for arguments, said in [
        ((str(tmp_path / "empty"), str(tmp_path / "x")), "no config.json at"),
        ((str(tmp_path / "none"), str(tmp_path / "x")), "No such file or directory"),
        ((str(model), "-"), "expected a folder to copy to, found '-'"),
        ((str(model), str(tmp_path / "x"), "--verify"), "--no-weights and --verify exclude"),
        (
            (str(model), str(tmp_path / "x"), "--max-shard-size", "5GiB"),
            "--no-weights and --max-shard-size exclude each other",
        ),
        (
            (str(model), str(tmp_path / "x"), "--sha256", "0" * 64),
            "--no-weights and --sha256 exclude each other",
        ),
    ]:
        assert main(["cp", "--no-weights", *arguments]) == 2
        assert said in capsys.readouterr().err
        assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["adapter_config.json", "model_index.json"])
def test_other_folders_are_not_copied_as_a_file(tmp_path, capsys, name):
    (tmp_path / name).write_text("{}")
    assert main(["cp", str(tmp_path), str(tmp_path / "x")]) == 2
    assert f"({name}), which cp does not copy as a whole" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
