"""The command on files of other formats: listed, compared, converted."""

import json
import os

import pytest
import tensorizer
import torch
from processes import run_python
from tensorizer_cli.main import main

safetensors = pytest.importorskip("safetensors.torch")

TENSORS = {
    "big": torch.randn(300, 1000),
    "half": torch.randn(4, 5).to(torch.bfloat16),
    "empty": torch.empty(0, 7),
    "scalar": torch.tensor(5),
}


def run(*arguments):
    return main([str(argument) for argument in arguments])


@pytest.fixture
def folder(tmp_path):
    tensorizer.save(TENSORS, tmp_path / "f.tensors")
    safetensors.save_file(TENSORS, tmp_path / "f.safetensors", metadata={"format": "pt"})
    torch.save(TENSORS, tmp_path / "f.pt")
    (tmp_path / "shards").mkdir()
    tensorizer.save(TENSORS, tmp_path / "shards/model.safetensors", max_shard_size=1_000_000)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "said"),
    [("f.safetensors", "safetensors"), ("shards", "safetensors, 2 files"), ("f.pt", "torch")],
)
def test_ls(folder, capsys, name, said):
    assert run("ls", folder / name) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(TENSORS) + 2 + (name != "f.pt")
    assert lines[-1] == f"4 tensors, 1.2 MB, {said}"
    assert run("ls", "--json", folder / name) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == said.split(",")[0]
    assert len(found["files"]) == (2 if name == "shards" else 1)
    assert {row["name"] for row in found["tensors"]} == set(TENSORS)


@pytest.mark.parametrize("source", ["f.tensors", "f.safetensors", "shards", "f.pt"])
@pytest.mark.parametrize("target", ["new.tensors", "new.safetensors"])
def test_formats_are_converted(folder, capsys, source, target):
    assert run("cp", folder / source, folder / target) == 0
    assert "4 tensors" in capsys.readouterr().err
    info = tensorizer.info(folder / target)
    assert info.format == target.rpartition(".")[2]
    assert info.metadata == ({"format": "pt"} if source == "f.safetensors" else {})
    if (source, target) == ("f.safetensors", "new.safetensors"):
        assert (folder / target).read_bytes() == (folder / source).read_bytes()
    assert run("diff", folder / source, folder / target) == 0
    assert run("diff", folder / target, folder / "f.tensors") == len(info.metadata)
    if target == "new.tensors":
        assert run("verify", folder / target) == 0


@pytest.mark.parametrize("name", ["f.safetensors", "shards", "f.pt"])
def test_verify_says_that_there_are_no_hashes(folder, capsys, name):
    assert run("verify", folder / name) not in (0, None)
    assert "files hold no hashes" in capsys.readouterr().err


def test_copies_that_safetensors_cannot_hold_are_refused(folder, capsys):
    nested = folder / "nested.tensors"
    tensorizer.save({"a": [torch.ones(1)]}, nested)
    target = folder / "new.safetensors"
    for arguments, said in [
        (("cp", nested, target), "cannot hold nested"),
        (("cp", "--alignment", "64", folder / "f.tensors", target), "neither encrypted nor"),
    ]:
        assert run(*arguments) not in (0, None)
        assert said in capsys.readouterr().err
        assert not target.exists()


def test_a_file_without_tensors_is_not_copied_to_one_that_must_have_some(folder, capsys):
    safetensors.save_file({}, folder / "none.safetensors")
    assert run("cp", folder / "none.safetensors", folder / "new.tensors") not in (0, None)
    assert "holds no tensors" in capsys.readouterr().err
    assert "new.tensors" not in os.listdir(folder)
    assert run("cp", folder / "none.safetensors", folder / "new.safetensors") == 0
    assert tensorizer.info(folder / "new.safetensors").tensors == {}


def test_tensors_that_are_not_in_row_major_order_are_compared(tmp_path):
    weight = torch.arange(1.0, 13.0).reshape(3, 4)
    torch.save({"q": weight[:, 1], "s": weight[:, ::2], "t": weight.t()}, tmp_path / "q.pt")
    assert main(["diff", str(tmp_path / "q.pt"), str(tmp_path / "q.pt")]) == 0
    assert main(["cp", "--verify", str(tmp_path / "q.pt"), str(tmp_path / "o.tensors")]) == 0
    assert main(["load", "--mmap", str(tmp_path / "q.pt")]) == 0


@pytest.mark.parametrize("shape", [(1 << 23,), (1, 1 << 10, 1 << 13), (1 << 22, 2)])
def test_a_large_tensor_is_compared_in_pieces(tmp_path, shape):
    """Of 32 MB, two batches would need 64 MB."""
    tensor = torch.arange(1 << 23, dtype=torch.int32).reshape(shape)
    tensorizer.save({"a": tensor}, tmp_path / "f.safetensors")
    other = tensor.flatten().clone()
    other[[5, 1 << 22]] += 1
    tensorizer.save({"a": other.reshape(shape)}, tmp_path / "g.tensors", hashes="crc32")
    del tensor, other
    code = """
import sys
from tensorizer_cli import file
from tensorizer_cli.main import main
file._BATCH_BYTES = 8 << 20
taken, load = [], file.OpenFile.load
def watched(self, numbers, *args, **options):
    found = [*load(self, numbers, *args, **options)]
    taken.append(sum(tensor.nbytes for _, tensor, _ in found))
    return found
file.OpenFile.load = watched
status = main(["diff", *sys.argv[1:]])
print(status, max(taken) <= 2 << 20, len(taken))
"""
    done = run_python(code, tmp_path / "f.safetensors", tmp_path / "g.tensors")
    assert "a: 2 of 33,554,432 bytes differ" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1] == "1 True 32"
