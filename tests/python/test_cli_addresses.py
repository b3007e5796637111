"""The command ``tensorizer`` between addresses."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys

import pytest
import redis
import tensorizer
import torch
from conftest import ROOT
from processes import COMMAND, start_python
from safetensors.torch import save_file
from servers import Redis
from tensorizer import DecryptionParams
from tensorizer.stream_io import open_stream
from tensorizer_cli.main import main

TENSORS = {"big": torch.randn(300, 1000), "empty": torch.empty(0, 7), "scalar": torch.tensor(5)}
KEY = bytes(range(32))


def run(*arguments):
    return main([str(argument) for argument in arguments])


@pytest.fixture
def path(tmp_path):
    path = str(tmp_path / "f.tensors")
    tensorizer.save(TENSORS, path)
    return path


@pytest.fixture
def key(tmp_path):
    (tmp_path / "key").write_bytes(KEY)
    return ("--key-file", tmp_path / "key")


@pytest.fixture
def server(tmp_path):
    server = Redis(tmp_path)
    yield server
    server.stop()


@pytest.mark.usefixtures("s3")
def test_addresses(server, path):
    assert run("cp", path, "s3://bucket/f.tensors") == 0
    assert run("cp", "s3://bucket/f.tensors", f"{server.address}/model?db=2") == 0
    assert run("diff", path, f"{server.address}/model?db=2") == 0
    with redis.Redis(port=server.port, db=2) as client:
        assert client.exists("model:header:0")


def write_shards(tensors, folder):
    """Write one file of safetensors for each tensor, and their index."""
    folder.mkdir()
    shards = {name: f"{number}.safetensors" for number, name in enumerate(tensors)}
    for name, shard in shards.items():
        save_file({name: tensors[name]}, folder / shard)
    index = json.dumps({"weight_map": shards})
    (folder / "model.safetensors.index.json").write_text(index)


@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize(
    "document", ["README.md", "docs/reference/command.md", "docs/how-to/encryption.md"]
)
def test_the_commands_of_the_documents(document, server, path, tmp_path, monkeypatch):
    text = (ROOT / document).read_text().replace("redis://cache.example", server.address)
    lines = re.findall(r"^    tensorizer (.+)$", text, re.MULTILINE)
    assert len(lines) >= 5
    for name, value in {"key": KEY, "new": bytes(32)}.items():
        if f"keygen {name} " not in text:
            (tmp_path / name).write_bytes(value)
    write_shards(TENSORS, tmp_path / "folder-of-shards")
    os.rename(path, tmp_path / "model.tensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODEL_KEY", bytes(32).hex())
    monkeypatch.setenv("WORDS", "some words-hu5hw0rd")
    with open_stream("s3://bucket/llama/config.json", "wb") as stream:
        stream.write(b'{"model_type": "llama"}')
    for line in lines:
        try:
            assert main(shlex.split(line, comments=True)) == 0, line
        except SystemExit as ended:
            assert ended.code == 0, line


def test_keys_of_copies_to_redis(server, path, key, tmp_path, capsys):
    sealed, there = tmp_path / "sealed", f"{server.address}/a/model"
    assert run("encrypt", *key, path, sealed) == 0
    capsys.readouterr()
    assert run("cp", sealed, there) == 2
    assert "is encrypted" in capsys.readouterr().err
    # With the key it is copied as plain data, as to any other target.
    assert run("cp", *key, sealed, there) == 0
    assert capsys.readouterr().err.startswith("copied: 3 tensors, 1.2 MB in ")
    assert run("diff", path, there) == 0
    with redis.Redis(port=server.port) as client:
        assert client.exists("a/model:header:0")
    for name, target in (("encrypt", "sealed"), ("decrypt", "plain")):
        source = {"encrypt": path, "decrypt": sealed}[name]
        assert run(name, *key, source, f"{server.address}/{target}") == 0
    params = DecryptionParams.from_key(KEY)
    loaded = tensorizer.load(f"{server.address}/sealed", "cpu", encryption=params)
    assert torch.equal(loaded["big"], TENSORS["big"])
    assert run("diff", path, f"{server.address}/plain") == 0
    assert run("cp", "--alignment", 1, path, f"{server.address}/tight") == 0
    assert run("diff", path, f"{server.address}/tight") == 0


def test_redis_that_is_not_there(path, capsys):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        assert run("cp", path, f"redis://me:hidden-hu5hw0rd@127.0.0.1:{port}/model") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tensorizer: error: redis://me:***@127.0.0.1:{port}/model: ")
    assert run("cp", path, f"redis://127.0.0.1:{port}") == 2
    assert "expected a prefix" in capsys.readouterr().err


def test_redis_without_its_client(path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "redis", None)
    assert run("cp", path, "redis://127.0.0.1/model") == 2
    assert capsys.readouterr().err == (
        "tensorizer: error: copies to redis:// need the Redis client: pip install 'redis>=5.3'\n"
    )


def test_the_password_of_an_address_is_not_shown(server, path, capsys):
    with redis.Redis(port=server.port) as client:
        client.acl_setuser(
            "me", enabled=True, passwords=["+hidden-hu5hw0rd"], keys=["*"], commands=["+@all"]
        )
    address = server.address.replace("redis://", "redis://me:hidden-hu5hw0rd@") + "/model"
    assert run("cp", path, address) == 0
    assert run("cp", "--json", path, address) == 0
    assert (
        run("ls", "--json", address) == run("info", address) == run("info", "--json", address) == 0
    )
    tensorizer.save({"other": torch.ones(3)}, path)
    assert run("diff", path, address) == 1
    assert run("diff", "--json", path, address) == 1
    assert run("ls", f"{address}?unknown=1") == 2
    assert run("cp", path, f"{address}?db=x") == 2
    said = "".join(capsys.readouterr())
    assert "me:***@" in said
    assert "hidden" not in said


@pytest.mark.parametrize("name", ["ls", "diff"])
def test_a_reader_that_has_seen_enough(name, path, tmp_path):
    """A reader that closes its end of the pipe does not change the exit status."""
    other, many = tmp_path / "g.tensors", {str(i): torch.tensor(i) for i in range(5000)}
    tensorizer.save(many, other)
    arguments = {"ls": [other], "diff": [path, other]}[name]
    read, write = os.pipe()
    os.close(read)
    with start_python(
        COMMAND, name, *arguments, stdout=write, stderr=subprocess.PIPE, finalize=True
    ) as process:
        os.close(write)
        assert process.stderr.read() == b""
    assert process.returncode == {"ls": 0, "diff": 1}[name]
