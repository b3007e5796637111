"""The command on checkpoints of torch.distributed.checkpoint."""

import json
import os
import re
import resource
import warnings

import pytest
import tensorizer
import torch
from tensorizer.distributed.layout import sealed
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
    assert "left out (not tensors): 1 object (step)" in said
    assert "verified" in said
    loaded = tensorizer.load(tmp_path / target)
    assert set(loaded) == NAMES
    assert torch.equal(loaded["model.w"], STATE["model"]["w"])
    assert torch.equal(loaded["model.half"], STATE["model"]["half"])
    assert run("diff", tmp_path / target, folder) == 0


def test_a_folder_by_its_address(tmp_path):
    folder = save(tmp_path / "check point")
    address = folder.as_uri().replace("file://", "file://LOCALHOST")
    assert run("cp", address, tmp_path / "one.tensors") == 0
    assert run("diff", tmp_path / "one.tensors", address + "/") == 0


def test_a_folder_of_a_bucket_needs_no_slash(moto, tmp_path, monkeypatch):
    for name, value in moto.settings().items():
        monkeypatch.setenv(name, value)
    save("s3://bucket/steps/check")
    for address in ("s3://bucket/steps/check", "s3://bucket/steps/check/"):
        assert run("cp", address, tmp_path / "one.tensors") == 0
        assert run("diff", tmp_path / "one.tensors", address) == 0


def test_more_files_than_may_be_open(tmp_path):
    # Each of many ranks has a row of one tensor; two ranks have a further tensor each.
    ranks, folder = 300, tmp_path / "checkpoint"
    chunks = [[[rank, 0], [1, 4], rank, "w"] for rank in range(ranks)]
    items = {"w": {"dtype": "float32", "size": [ranks, 4], "chunks": chunks}}
    for rank in (ranks - 1, 0):
        chunk = [[[0, 0], [1, 4], rank, "w"]]
        items[f"again {rank}"] = {"dtype": "float32", "size": [1, 4], "chunks": chunk}
    files = [f"{rank}.tensors" for rank in range(ranks)]
    content = {"format": "tensorizer.distributed", "version": 1, "dcp_version": None}
    content |= {"files": files, "items": items, "planner": None}
    for rank, file in enumerate(files):
        tensorizer.save({"w": torch.full((1, 4), float(rank))}, folder / file)
    (folder / "checkpoint.json").write_bytes(sealed(content))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    now = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (now + ranks - 10, before[1]))
    try:
        assert run("cp", "--verify", folder, tmp_path / "one.tensors") == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    loaded = tensorizer.load(tmp_path / "one.tensors")
    assert torch.equal(loaded["w"], torch.arange(ranks).float()[:, None].expand(ranks, 4))
    assert loaded[f"again {ranks - 1}"].unique().tolist() == [ranks - 1]
    assert not loaded["again 0"].any()


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
    assert "checkpoint.json is not a checkpoint, or is damaged" in capsys.readouterr().err
    assert not (tmp_path / "new.tensors").exists()


def test_the_tensors_of_a_checkpoint_are_listed(tmp_path, capsys):
    folder = save(tmp_path / "checkpoint")
    assert run("ls", folder) == 0
    said = capsys.readouterr().out
    assert "model.w     float32   [300, 100]" in said
    assert "2 tensors, 120.0 KB, checkpoint" in said and "step is no tensor" in said
    assert run("ls", "--json", folder) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["objects"] == ["step"] and found["format"] == "checkpoint"
    assert {row["name"]: row["shape"] for row in found["tensors"]} == {
        "model.w": [300, 100],
        "model.half": [4, 5],
    }
    assert [path.endswith(".tensors") for path in found["files"]] == [True]


def test_the_bytes_of_a_checkpoint_are_verified(tmp_path, capsys):
    folder = save(tmp_path / "checkpoint")
    assert run("verify", folder) == 0
    assert "2 of 2 tensors are as they were written" in capsys.readouterr().out
    (path,) = folder.glob("*.tensors")
    whole = path.read_bytes()
    at = whole.index(STATE["model"]["w"].numpy().tobytes()[:64])
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert run("verify", folder) == 1
    said = capsys.readouterr().out
    assert "model.w" in said and "1 of 2 tensors is as it was written" in said
    # An object, which is no tensor.
    file = tensorizer.TensorDeserializer(path, device="cpu", lazy_load=True)
    (step,) = [name for name in file if "step" in str(name)]
    data = file[step].numpy().tobytes()
    file.close()
    at = whole.index(data)
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert run("verify", folder) == 1
    said = capsys.readouterr().out
    assert "step" in said and "2 of 2 tensors are as they were written" in said


def test_an_encrypted_checkpoint_is_listed_without_its_key_and_verified_with_it(tmp_path, capsys):
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    params = tensorizer.EncryptionParams(bytes(range(32)))
    folder = save(tmp_path / "checkpoint", encryption=params)
    assert run("ls", folder) == 0
    assert "2 tensors, 120.0 KB, checkpoint, encrypted" in capsys.readouterr().out
    assert run("verify", "--key-file", key, folder) == 0
    key.write_bytes(bytes(32))
    assert run("verify", "--key-file", key, folder) == 2
    assert "the key does not fit" in capsys.readouterr().err


def test_a_checkpoint_is_described(tmp_path, capsys):
    folder = save(tmp_path / "checkpoint")
    assert main(["info", "--json", str(folder)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["tensors"], found["objects"]) == ("checkpoint", 2, ["step"])
    assert found["hashes"] == {"CRC32": 1, "SHA256": 1, "looked_at": 1}
    assert sum(file["tensors"] for file in found["files"]) == 2
    assert all(file["bytes"] > 0 for file in found["files"])
    assert main(["info", str(folder)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"holds +2 tensors, 30,020 parameters", said)
    assert re.search(r"objects +step\n", said)


def test_a_checkpoint_is_loaded_and_reported(tmp_path, capsys):
    folder = save(tmp_path / "checkpoint")
    for more in ([], ["--verify"]):
        assert main(["load", "--json", *more, str(folder)]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["format"], found["tensors"], found["bytes"]) == ("checkpoint", 2, 120_040)
    file = next(folder.glob("*.tensors"))
    data = bytearray(file.read_bytes())
    data[data.index(STATE["model"]["w"].numpy().tobytes()[:64]) + 5] ^= 1
    file.write_bytes(data)
    assert main(["load", "--verify-hash", str(folder)]) == 2
    assert "failed CRC32 verification" in capsys.readouterr().err
    assert main(["load", "--mmap", str(folder)]) == 2
    assert "is a checkpoint: --mmap is for other files" in capsys.readouterr().err


def test_python_says_what_loads_a_checkpoint(tmp_path):
    folder = save(tmp_path / "checkpoint")
    for load in (tensorizer.load, tensorizer.TensorDeserializer, torch.ops.tensorizer.load):
        with pytest.raises(
            (OSError, RuntimeError),
            match=r"load it with tensorizer.distributed.load_state\(folder\)",
        ):
            load(str(folder))
