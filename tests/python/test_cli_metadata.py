"""The command with metadata: listed, compared, copied; and copies that are read again."""

import json
import os
import subprocess

import pytest
import tensorizer
import torch
from processes import COMMAND, run_python
from servers import Redis
from tensorizer_cli.main import main

TENSORS = {
    "big": torch.randn(300, 1000),
    "half": torch.randn(4, 5).to(torch.bfloat16),
    "empty": torch.empty(0, 7),
    "scalar": torch.tensor(5),
}
METADATA = {"format": "pt", "by": "ü\x1b[31m"}
KEY = bytes(range(32))


def run(*arguments):
    return main([str(argument) for argument in arguments])


def read(path):
    return dict(tensorizer.info(path).metadata)


@pytest.fixture
def folder(tmp_path):
    for name in ("f.tensors", "f.safetensors"):
        tensorizer.save(TENSORS, tmp_path / name, metadata=METADATA)
    tensorizer.save(TENSORS, tmp_path / "plain.tensors")
    (tmp_path / "shards").mkdir()
    shards = tmp_path / "shards/model.safetensors"
    tensorizer.save(TENSORS, shards, max_shard_size=1_000_000, metadata=METADATA)
    (tmp_path / "key").write_bytes(KEY)
    (tmp_path / "other").write_bytes(KEY[::-1])
    return tmp_path


def test_ls(folder, capsys):
    long = folder / "long.tensors"
    tensorizer.save({"a": torch.ones(1)}, long, metadata={"k" * 300: "v" * 300})
    assert run("ls", folder / "f.tensors") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3:-1] == ["metadata  format = pt", r"metadata  by = ü\x1b[31m"]
    assert run("ls", long) == 0
    line = capsys.readouterr().out.splitlines()[-2]
    texts = " = ".join(f"{letter * 200}... (300 characters)" for letter in "kv")
    assert line == f"metadata  {texts}"
    assert run("ls", "--json", folder / "f.tensors") == 0
    assert json.loads(capsys.readouterr().out)["metadata"] == METADATA


def test_diff(folder, capsys):
    other = folder / "g.tensors"
    assert run("diff", folder / "f.tensors", folder / "f.safetensors") == 0
    # The total size in an index is no difference.
    assert run("diff", folder / "f.tensors", folder / "shards") == 0
    tensorizer.save(TENSORS, other, metadata={"format": "tf", "more": ""})
    capsys.readouterr()
    assert run("diff", folder / "f.tensors", other) == 1
    assert capsys.readouterr().out.splitlines() == [
        "metadata 'format': 'pt' and 'tf'",
        f"only in {folder / 'f.tensors'}: metadata 'by'",
        f"only in {other}: metadata 'more'",
        "3 differences",
    ]
    assert run("diff", "--json", folder / "f.tensors", other) == 1
    found = json.loads(capsys.readouterr().out)["differences"]
    assert found[0] == {"name": "format", "difference": "metadata", "file": "pt", "other": "tf"}
    assert found[2] == {"name": "more", "difference": "metadata", "file": None, "other": ""}


@pytest.mark.parametrize("source", ["f.tensors", "f.safetensors", "shards"])
@pytest.mark.parametrize("target", ["new.tensors", "new.safetensors"])
def test_copies_keep_them(folder, capsys, source, target):
    assert run("cp", "--verify", folder / source, folder / target) == 0
    assert read(folder / target) == METADATA
    assert "has the same tensors and metadata" in capsys.readouterr().err
    arguments = ("cp", "--verify", "--drop-metadata", folder / source, folder / target)
    assert run(*arguments) == 0
    assert read(folder / target) == {}
    tensorizer.save(TENSORS, folder / "plain.safetensors")
    expected = folder / target.replace("new", "plain")
    # Tensors of a safetensors file are in another order.
    if source == "f.tensors" or target == "new.safetensors":
        assert (folder / target).read_bytes() == expected.read_bytes()


def test_encryption_does_not_disclose_them(folder, capsys):
    sealed, again = folder / "sealed.tensors", folder / "again.tensors"
    keys = ("--key-file", folder / "key")
    rekeys = (*keys, "--new-key-file", folder / "other")
    plain = (*keys, folder / "f.tensors", sealed)
    assert run("encrypt", *plain) == 2
    error = capsys.readouterr().err
    assert "has metadata, which are not encrypted in an encrypted file" in error
    assert "--clear-metadata copies them unencrypted, --drop-metadata leaves them out" in error
    assert run("rekey", "--new-key-file", folder / "other", folder / "f.tensors", again) == 2
    assert not sealed.exists() and not again.exists()
    with pytest.raises(SystemExit):
        run("encrypt", "--drop-metadata", "--clear-metadata", *plain)
    with pytest.raises(SystemExit):
        run("decrypt", "--clear-metadata", *plain)
    # Metadata of an index only count bytes, which is no secret.
    tensorizer.save(TENSORS, folder / "other-shards/m.safetensors", max_shard_size=1_000_000)
    index = folder / "other-shards/m.safetensors.index.json"
    assert run("encrypt", "--verify", *keys, index, sealed) == 0
    assert run("encrypt", "--verify", "--drop-metadata", *plain) == 0
    assert read(sealed) == {}
    assert run("encrypt", "--verify", "--manifest", "--clear-metadata", *plain) == 0
    assert read(sealed) == METADATA
    # Metadata in the clear stay in the clear.
    assert run("rekey", "--verify", "--manifest", *rekeys, sealed, again) == 0
    assert read(again) == METADATA
    assert run("rekey", "--verify", "--drop-metadata", *rekeys, sealed, again) == 0
    assert read(again) == {}
    for name in ("plain.tensors", "plain.safetensors"):
        decrypt = ("decrypt", "--verify", *keys, "--require-manifest", sealed, folder / name)
        assert run(*decrypt) == 0
        assert read(folder / name) == METADATA


def test_a_derived_key_is_verified_too(folder, monkeypatch):
    monkeypatch.setenv("WORDS", "some words-hu5hw0rd")
    arguments = ("--manifest", "--passphrase-env", "WORDS", folder / "plain.tensors")
    assert run("encrypt", "--verify", *arguments, folder / "sealed.tensors") == 0


def test_to_redis(folder):
    server = Redis(folder)
    try:
        for number, (arguments, expected) in enumerate(
            (
                ((folder / "f.tensors",), METADATA),
                (("--alignment", "4096", folder / "f.tensors"), METADATA),
                ((folder / "f.safetensors",), METADATA),
                (("--drop-metadata", folder / "f.tensors"), {}),
            )
        ):
            target = f"{server.address}/model{number}"
            assert run("cp", "--verify", *arguments, target) == 0
            assert read(target) == expected
    finally:
        server.stop()


def test_to_s3(folder, s3):
    for name in ("f.tensors", "f.safetensors"):
        assert run("cp", "--verify", folder / "f.tensors", f"s3://bucket/{name}") == 0
        assert read(f"s3://bucket/{name}") == METADATA


def test_verifying_a_copy_of_a_pipe_is_refused(folder, capsys):
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(
        ["cat", folder / "f.tensors"], stdout=pipe.open("r+b", buffering=0)
    ) as cat:
        assert run("cp", "--verify", pipe, folder / "new.tensors") == 2
        cat.kill()
    assert "twice, but it can only be read once, front to back" in capsys.readouterr().err
    assert not (folder / "new.tensors").exists()


@pytest.fixture
def flipping(with_faults):
    """Run the command with a byte that is written wrong; return status and both outputs."""

    def run(at, *arguments):
        done = run_python(COMMAND, *arguments, env=with_faults(FLIP_AT=at))
        return done.returncode, done.stdout, done.stderr

    return run


def test_verifying_a_copy_finds_wrongly_written_bytes(folder, flipping, capsys):
    arguments = ("cp", folder / "f.tensors", folder / "new.tensors")
    assert run("ls", "--json", folder / "f.tensors") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["tensors"]}
    at = rows["big"]["offset"] + 70_000
    assert flipping(at, *arguments)[0] == 0
    status, out, err = flipping(at, *arguments, "--verify")
    assert (status, out.count("\n")) == (1, 1)
    assert out.startswith("big: Tensor 'big' failed")
    assert "1 difference between" in err
    status, out, _ = flipping(at, *arguments, "--verify", "--json")
    found = json.loads(out)
    assert (status, found["verified"]) == (1, False)
    (found,) = found["differences"]
    assert (found["name"], found["difference"]) == ("big", "damage")
    # A format without hashes.
    target = folder / "new.safetensors"
    status, out, _ = flipping(70_000, "cp", folder / "f.tensors", target, "--verify")
    assert (status, out) == (1, "big: 1 of 1,200,000 bytes differs\n")
    # In the metadata, and in a name.
    data = (folder / "f.tensors").read_bytes()
    for at, text in (
        (data.index(b"format") + 2, "the metadata are damaged"),
        (data.index(b"half"), f"only in {folder / 'f.tensors'}: half"),
    ):
        status, out, _ = flipping(at, *arguments, "--verify")
        assert status == 1
        assert text in out
    # In the header of a tensor, which its hash covers, and in what is encrypted.
    at = rows["half"]["offset"] - 1
    status, out, _ = flipping(at, *arguments, "--verify")
    assert (status, out.startswith("half: ")) == (1, True), out
    arguments = ("encrypt", "--key-file", folder / "key", folder / "plain.tensors")
    at = os.path.getsize(folder / "plain.tensors") - 100_000
    status, out, _ = flipping(at, *arguments, folder / "new", "--verify")
    assert (status, out.startswith("big: Tensor decryption failed")) == (1, True), out


def test_programs_are_told_what_was_verified(folder, capsys):
    assert run("cp", "--json", "--verify", folder / "f.tensors", folder / "new.tensors") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["verified"], found["differences"]) == (True, [])
    assert run("cp", "--json", folder / "f.tensors", folder / "new.tensors") == 0
    assert "verified" not in json.loads(capsys.readouterr().out)


@pytest.fixture
def damaged(folder):
    """Return a file whose metadata are damaged."""
    path = folder / "damaged.tensors"
    data = (folder / "f.tensors").read_bytes()
    path.write_bytes(data.replace(b"format", b"farmat"))
    return path


def test_damaged_metadata_are_found(folder, damaged, capsys):
    assert run("ls", damaged) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("metadata  the metadata are damaged: expected CRC-32")
    assert run("ls", "--json", damaged) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["metadata"], len(found["tensors"])) == (None, len(TENSORS))
    assert run("verify", folder / "f.tensors") == 0
    capsys.readouterr()
    assert run("verify", "--json", damaged) == 1
    [found] = json.loads(capsys.readouterr().out)["damaged"]
    assert found["name"] is None
    assert "the metadata are damaged" in found["message"]
    assert run("verify", damaged) == 1
    assert "4 of 4 tensors are as they were written" in capsys.readouterr().out


def test_damaged_metadata_are_left_out_only_if_that_is_said(folder, damaged, capsys):
    new, other = folder / "new.tensors", folder / "new.safetensors"
    for arguments in (
        ("diff", damaged, folder / "f.tensors"),
        ("cp", damaged, new),
        ("cp", damaged, other),
    ):
        assert run(*arguments) == 2
        assert "the metadata are damaged" in capsys.readouterr().err
    assert not new.exists() and not other.exists()
    assert run("cp", "--verify", "--drop-metadata", damaged, new) == 0
    assert new.read_bytes() == (folder / "plain.tensors").read_bytes()
