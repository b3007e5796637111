"""The command ``tensorizer``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis
import tensorizer
import torch
from conftest import assert_same
from servers import Moto, Redis
from tensorizer import DecryptionParams, TensorSerializer
from tensorizer_cli.main import main

TENSORS = {
    "big": torch.randn(300, 1000),
    "half": torch.randn(4, 5).to(torch.bfloat16),
    "meta": torch.zeros(3, 2, device="meta"),
    "empty": torch.empty(0, 7),
    "scalar": torch.tensor(5),
}
KEY = bytes(range(32))


@pytest.fixture
def path(tmp_path):
    path = str(tmp_path / "f.tensors")
    tensorizer.save(TENSORS, path)
    return path


def run(*arguments):
    return main([str(argument) for argument in arguments])


def test_ls(path, capsys):
    assert run("ls", path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "dtype", "shape", "bytes", "type"]
    assert lines[1].split() == ["big", "float32", "[300,", "1000]", "1,200,000", "state_dict"]
    assert lines[-1] == "5 tensors, 1.2 MB, data version 4"
    assert run("ls", "--json", path) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(TENSORS)
    assert rows[1]["dtype"] == "bfloat16"
    assert rows[1]["shape"] == [4, 5]
    assert rows[1]["offset"] % 64 == 0


def test_cp_keeps_everything(tmp_path, path, capsys):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    original = str(tmp_path / "m.tensors")
    with TensorSerializer(original) as serializer:
        serializer.write_module(module)
    copied = str(tmp_path / "copy.tensors")
    for source in (original, path):
        assert run("cp", source, copied) == 0
        assert (tmp_path / "copy.tensors").read_bytes() == Path(source).read_bytes()
        assert run("diff", source, copied) == 0
        assert "the same" in capsys.readouterr().out
    assert run("cp", "--alignment", 1, path, copied) == 0
    assert os.path.getsize(copied) < os.path.getsize(path)
    assert run("diff", path, copied) == 0


def test_diff(tmp_path, path, capsys):
    other = str(tmp_path / "g.tensors")
    changed = TENSORS["big"].clone()
    changed[7, 7] = 0
    tensors = {
        "big": changed,
        "half": TENSORS["half"].float(),
        "meta": torch.zeros(3, 2),
        "x": changed,
    }
    tensorizer.save(tensors, other)
    assert run("diff", path, other) == 1
    out = capsys.readouterr().out
    assert "big: 4 of 1,200,000 bytes differ" in out or "big: 3 of" in out
    assert "half: bfloat16 [4, 5] and float32 [4, 5]" in out
    assert "meta: only one has data" in out
    assert f"only in {path}: scalar" in out
    assert f"only in {other}: x" in out


def test_verify(path, capsys):
    assert run("verify", path) == 0
    assert "5 of 5" in capsys.readouterr().out
    with open(path, "r+b") as file:
        file.seek(-100_000, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-100_000, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    assert run("verify", path) == 1
    out = capsys.readouterr().out
    assert "'big' failed" in out
    assert "4 of 5" in out


def test_encryption(tmp_path, path, capsys, monkeypatch):
    (tmp_path / "key").write_bytes(KEY)
    monkeypatch.setenv("HEX_KEY", KEY.hex())
    monkeypatch.setenv("WORDS", "some words")
    sealed, again, plain = (str(tmp_path / name) for name in ("sealed", "again", "plain"))
    assert run("encrypt", "--key-file", tmp_path / "key", "--manifest", path, sealed) == 0
    assert run("ls", sealed) == 0
    assert "encrypted" in capsys.readouterr().out
    params = DecryptionParams.from_key(KEY, require_manifest=True)
    assert_same(tensorizer.load(sealed, "cpu", encryption=params)["big"], TENSORS["big"])
    assert run("verify", "--key-env", "HEX_KEY", "--require-manifest", sealed) == 0
    assert run("rekey", "--key-env", "HEX_KEY", "--new-passphrase-env", "WORDS", sealed, again) == 0
    assert run("decrypt", "--passphrase-env", "WORDS", again, plain) == 0
    assert run("diff", path, plain) == 0
    with open(path, "rb") as one, open(plain, "rb") as other:
        assert one.read() == other.read()
    capsys.readouterr()
    for wrong, text in (
        (("decrypt", "--key-env", "HEX_KEY", again, plain), "decryption failed"),
        (("decrypt", "--require-manifest", "--passphrase-env", "WORDS", again, plain), "manifest"),
        (("decrypt", again, plain), "missing"),
        (("encrypt", path, sealed), "missing"),
        (("cp", again, plain), "decryption was not requested"),
        (("encrypt", "--key-env", "NOTHING", path, sealed), "NOTHING is not set"),
        (("encrypt", "--key-env", "WORDS", path, sealed), "32 bytes or 64"),
        (("encrypt", "--key-env", "WORDS", "--prompt", path, sealed), "only one of"),
    ):
        assert run(*wrong) == 2, wrong
        error = capsys.readouterr().err
        assert text in error
        assert "some words" not in error
    # What failed left the target as it was.
    assert run("diff", path, plain) == 0


def test_addresses(tmp_path, path, no_settings_of_the_machine, monkeypatch):
    moto, server = Moto(), Redis(tmp_path)
    try:
        moto.client().create_bucket(Bucket="bucket")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{moto.host}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        assert run("cp", path, "s3://bucket/f.tensors") == 0
        assert run("cp", "s3://bucket/f.tensors", f"{server.address}/model?db=2") == 0
        assert run("diff", path, f"{server.address}/model?db=2") == 0
        with redis.Redis(port=server.port, db=2) as client:
            assert client.exists("model:header:0")
    finally:
        moto.stop()
        server.stop()


def test_the_command_itself(path, tmp_path):
    def command(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "tensorizer", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )

    done = command("ls", path)
    assert done.returncode == 0, done.stderr
    assert "big" in done.stdout
    done = command("ls", str(tmp_path / "missing"))
    assert done.returncode == 2
    assert "missing" in done.stderr
    assert "Traceback" not in done.stderr
    done = command("--help")
    for name in ("ls", "verify", "cp", "diff", "encrypt", "decrypt", "rekey"):
        assert name in done.stdout
