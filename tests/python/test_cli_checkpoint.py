"""The command on checkpoints of torch.distributed.checkpoint."""

import json
import warnings

import pytest
import tensorizer
import torch
from tensorizer_cli.main import main
from torch.distributed import checkpoint as dcp

STATE = {
    "model": {"w": torch.randn(300, 100), "half": torch.randn(4, 5).to(torch.bfloat16)},
    "step": 7,
}
NAMES = {"model.w", "model.half"}


def run(*arguments):
    return main([str(argument) for argument in arguments])


def save(folder, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = tensorizer.distributed.Writer(folder, **options)
        dcp.save(STATE, storage_writer=writer, no_dist=True)
    return folder


@pytest.mark.parametrize("target", ["new.tensors", "new.safetensors"])
def test_a_checkpoint_becomes_one_file(tmp_path, capsys, target):
    folder = save(tmp_path / "checkpoint")
    assert run("cp", folder, tmp_path / target, "--verify") == 0
    said = capsys.readouterr().err
    assert "left out, as no tensors: 1 object (step)" in said
    assert "verified" in said
    loaded = tensorizer.load(tmp_path / target)
    assert set(loaded) == NAMES
    assert torch.equal(loaded["model.w"], STATE["model"]["w"])
    assert torch.equal(loaded["model.half"], STATE["model"]["half"])
    assert run("diff", tmp_path / target, folder) == 0


def test_a_difference_is_found(tmp_path, capsys):
    folder = save(tmp_path / "checkpoint")
    other = {"model.w": STATE["model"]["w"] + 1, "model.half": STATE["model"]["half"]}
    tensorizer.save(other, tmp_path / "other.tensors")
    assert run("diff", "--json", folder, tmp_path / "other.tensors") == 1
    (found,) = json.loads(capsys.readouterr().out)["differences"]
    assert (found["name"], found["difference"]) == ("model.w", "data")


def test_an_encrypted_checkpoint_needs_its_key(tmp_path, capsys):
    key = tensorizer.EncryptionParams.random()
    folder = save(tmp_path / "checkpoint", encryption=key)
    assert run("cp", folder, tmp_path / "new.tensors") == 2
    assert "encrypted" in capsys.readouterr().err
    (tmp_path / "key").write_bytes(key.key)
    assert run("cp", "--key-file", tmp_path / "key", folder, tmp_path / "new.tensors") == 0
    assert torch.equal(tensorizer.load(tmp_path / "new.tensors")["model.w"], STATE["model"]["w"])


def test_a_checkpoint_that_is_damaged_is_refused(tmp_path, capsys):
    folder = save(tmp_path / "checkpoint")
    (folder / "checkpoint.json").write_text("{}")
    assert run("cp", folder, tmp_path / "new.tensors") == 2
    assert "checkpoint.json is no checkpoint, or damaged" in capsys.readouterr().err
    assert not (tmp_path / "new.tensors").exists()
