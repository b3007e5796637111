"""``tensorizer info``: what a file is, what it holds and where it lies."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys

import pytest
import tensorizer
import torch
from native import open_reader
from processes import COMMAND, run_python
from servers import Redis
from tensorizer import EncryptionParams, TensorSerializer
from tensorizer_cli.main import main

STYLE = re.compile(r"\x1b\[\d+m")


@pytest.fixture
def folder(tmp_path):
    """Return a folder with the same model in each format."""
    state = model().state_dict()
    with TensorSerializer(tmp_path / "f.tensors") as serializer:
        serializer.write_module(model())
    tensorizer.save(state, tmp_path / "f.safetensors", metadata={"format": "pt"})
    torch.save(state, tmp_path / "f.pt")
    (tmp_path / "shards").mkdir()
    tensorizer.save(state, tmp_path / "shards/model.safetensors", max_shard_size=5000)
    return tmp_path


def model():
    torch.manual_seed(0)
    layers = [
        torch.nn.ModuleDict({"proj": torch.nn.Linear(16, 16), "norm": torch.nn.BatchNorm1d(16)})
        for _ in range(3)
    ]
    made = torch.nn.ModuleDict({"embed": torch.nn.Embedding(50, 16)})
    made["layers"] = torch.nn.ModuleList([*layers, torch.nn.Linear(16, 4).bfloat16()])
    return made


#: A layer of three: weights and biases; and all of them, the embedding and the last one.
LAYER, BUFFERS = 16 * 16 + 16 + 32, 3 * (16 + 16 + 1)
PARAMETERS = 3 * LAYER + 50 * 16 + 16 * 4 + 4
NBYTES = 4 * (3 * LAYER + 50 * 16 + 3 * 32) + 3 * 8 + 2 * (16 * 4 + 4)


def run(*arguments):
    return main([str(argument) for argument in arguments])


def shown(capsys, *arguments):
    """Return the facts that the command shows by title, and the tables by the first word."""
    assert run("info", *arguments) == 0
    facts, *tables = capsys.readouterr().out.rstrip("\n").split("\n\n")
    found, title = {}, None
    for line in facts.splitlines()[1:]:
        title = line[2:14].strip() or title
        found.setdefault(title, []).append(line[14:])
    return found, {table.split()[0]: table.splitlines()[1:] for table in tables}


def as_json(capsys, *arguments):
    capsys.readouterr()
    assert run("info", "--json", *arguments) == 0
    return json.loads(capsys.readouterr().out)


def test_a_file_of_ours(folder, capsys):
    path = folder / "f.tensors"
    facts, tables = shown(capsys, path)
    assert facts == {
        "format": ["tensors, data version 2"],
        "holds": [f"24 tensors, {PARAMETERS:,} parameters, 7.4 KB"],
        "dtypes": [
            "float32   97.8%     7.2 KB  19 tensors",
            "bfloat16   1.8%  136 bytes   2 tensors",
            "int64      0.3%   24 bytes   3 tensors",
        ],
        "encryption": ["none"],
        "hashes": ["CRC32 and SHA256, of 24 tensors with data"],
        "alignment": ["data begin at multiples of 64 bytes"],
        "metadata": ["none"],
        "read from": [f"a file of this machine, {path.stat().st_size / 1000:.1f} KB"],
    }
    # Layers that hold the same are one line.
    assert [line.split() for line in tables["modules"]] == [
        ["embed", "1", "800", "3.2", "KB"],
        ["layers", "23", "980", "4.2", "KB"],
        ["0-2", "7", "304", "1.4", "KB", "each", "of", "3"],
        ["proj", "2", "272", "1.1", "KB"],
        ["norm", "5", "32", "264", "bytes"],
        ["3", "2", "68", "136", "bytes"],
    ]
    assert [line.split()[0] for line in tables["largest"][:2]] == [
        "embed.weight",
        "layers.0.proj.weight",
    ]
    found = as_json(capsys, path)
    numbers = {"tensors": 24, "parameters": PARAMETERS, "bytes": NBYTES}
    assert {name: found[name] for name in numbers} == numbers
    assert found["bytes"] == tensorizer.info(path).nbytes
    assert sum(of["bytes"] for of in found["dtypes"].values()) == NBYTES
    assert found["hashes"] == {"CRC32": 24, "SHA256": 24, "looked_at": 24}
    assert (found["alignment"], found["metadata"], found["encrypted"]) == (64, {}, False)
    paths = [".".join(of["path"]) for of in found["modules"]]
    assert paths[:5] == ["embed", "layers", "layers.0", "layers.0.proj", "layers.0.norm"]
    assert {of["tensors"] for of in found["modules"] if of["path"][:-1] == ["layers"]} == {7, 2}
    [place] = found["files"]
    assert (place["file"], place["bytes"]) == (str(path), path.stat().st_size)
    assert place["tensors"] == 24


@pytest.mark.parametrize("name", ["f.safetensors", "shards", "f.pt"])
def test_other_formats(folder, capsys, name):
    facts, tables = shown(capsys, folder / name)
    assert facts["format"] == ["torch" if name == "f.pt" else "safetensors"]
    assert facts["hashes"] == ["none: the format has no place for them"]
    # No format but ours says what is a buffer.
    assert facts["holds"] == [f"24 tensors, {PARAMETERS + BUFFERS:,} parameters, 7.4 KB"]
    assert "0-2" in [line.split()[0] for line in tables["modules"]]
    found = as_json(capsys, folder / name)
    assert (found["version"], found["hashes"], found["bytes"]) == (None, None, NBYTES)
    assert found["metadata"].get("format") == ("pt" if name == "f.safetensors" else None)
    if name == "shards":
        paths = sorted(folder.glob("shards/*.safetensors"))
        assert len(paths) > 1
        assert [line.split()[0] for line in tables["files"]] == [str(path) for path in paths]
        assert [place["bytes"] for place in found["files"]] == [p.stat().st_size for p in paths]
        assert sum(place["tensors"] for place in found["files"]) == 24
        together = sum(path.stat().st_size for path in paths)
        assert facts["read from"] == [f"{len(paths)} files, {together / 1000:.1f} KB"]


def test_depth_and_largest_limit_the_rows_shown(folder, capsys):
    path = folder / "f.tensors"
    _, tables = shown(capsys, path, "--depth", 1, "--largest", 2)
    assert [line.split()[0] for line in tables["modules"]] == ["embed", "layers"]
    assert len(tables["largest"]) == 2
    _, tables = shown(capsys, path, "--depth", 0, "--largest", 0)
    assert tables == {}
    many = {f"{number}.{'ab'[number % 2]}.weight": torch.ones(1) for number in range(70)}
    tensorizer.save(many, folder / "many.tensors")
    _, tables = shown(capsys, folder / "many.tensors")
    assert len(tables["modules"]) == 61
    assert tables["modules"][-1] == "... and 80 more"
    for wrong in ("-1", "101", "x", ""):
        with pytest.raises(SystemExit):
            run("info", path, "--depth", wrong)
        assert "a whole number from 0 to 100" in capsys.readouterr().err


def test_numbers_in_the_order_of_names(folder, capsys):
    path = folder / "sorted.safetensors"
    names = sorted(f"layers.{number}.weight" for number in range(12))
    tensorizer.save({name: torch.ones(2) for name in names}, path)
    _, tables = shown(capsys, path)
    assert [line.split()[:2] for line in tables["modules"]] == [["layers", "12"], ["0-11", "1"]]


def test_names_in_structures(folder, capsys):
    path = folder / "nested.tensors"
    tensorizer.save({"a": [torch.ones(3), {"x.y": torch.ones(2)}], "b": torch.ones(1)}, path)
    found = as_json(capsys, path)
    assert [of["path"] for of in found["modules"]] == [["a"], ["a", "1"], ["a", "1", "x"]]
    assert found["largest"][1]["name"] == ["a", 1, "x.y"]


def test_hashes_and_places_as_they_are(folder, capsys):
    path = folder / "g.tensors"
    tensorizer.save({"a": torch.ones(3), "b": torch.ones(5)}, path, hashes="crc32")
    assert shown(capsys, path)[0]["hashes"] == ["CRC32, of 2 tensors with data"]
    tensorizer.save(
        {"a": torch.ones(3), "none": torch.empty(3, device="meta")},
        path,
        alignment=1,
        allow_meta=True,
    )
    facts, _ = shown(capsys, path)
    assert facts["hashes"] == ["CRC32 and SHA256, of 1 tensor with data"]
    [(_, start)] = [tensor for tensor in offsets(path) if tensor[0] == "a"]
    assert as_json(capsys, path)["alignment"] == start & -start
    tensorizer.save({"none": torch.empty(3, device="meta")}, path, allow_meta=True)
    facts, tables = shown(capsys, path)
    assert (facts["alignment"], facts["holds"]) == (
        ["no data"],
        ["1 tensor, 3 parameters, 0 bytes"],
    )
    assert tables["largest"][0].endswith(" -")


def offsets(path):
    reader = open_reader(str(path))
    return [(reader.name(n), start) for n, (_, start) in enumerate(reader.offsets())]


def test_encrypted_without_a_key(folder, capsys):
    path = folder / "sealed.tensors"
    encryption = EncryptionParams(bytes(32), manifest=True)
    tensorizer.save({"a.b": torch.ones(3)}, path, encryption=encryption)
    facts, _ = shown(capsys, path)
    assert facts["encryption"] == ["XSalsa20-Poly1305: its data need a key"]
    assert facts["holds"] == ["1 tensor, 3 parameters, 12 bytes"]
    assert as_json(capsys, path)["encrypted"] is True


def test_damaged_metadata(folder, capsys):
    path = folder / "damaged.tensors"
    tensorizer.save({"a": torch.ones(3)}, path, metadata={"format": "pt"})
    data = bytearray(path.read_bytes())
    data[data.index(b"format") + 2] ^= 1
    path.write_bytes(data)
    facts, _ = shown(capsys, path)
    assert facts["metadata"][0].startswith("the metadata are damaged")
    assert as_json(capsys, path)["metadata"] is None


def test_a_pipe(folder):
    with open(folder / "f.tensors", "rb") as file:
        cat = subprocess.Popen(["cat"], stdin=file, stdout=subprocess.PIPE)
        done = run_python(COMMAND, "info", "/dev/stdin", stdin=cat.stdout)
        cat.stdout.close()
        cat.wait()
    assert (done.returncode, done.stderr) == (0, "")
    assert "hashes      unknown: the file can only be read once" in done.stdout
    assert "  read from   a pipe\n" in done.stdout


@pytest.mark.parametrize("name", ["f.tensors", "f.safetensors", "f.pt", "shards"])
def test_a_server_and_the_cache(folder, nginx, capsys, monkeypatch, name):
    subprocess.run(["cp", "-r", folder / name, nginx.root], check=True)
    uri = f"{nginx.http}/{name}"
    found = as_json(capsys, uri)
    assert all(place["etag"] and place["modified"] for place in found["files"])
    assert {place["cached"] for place in found["files"]} == {None}
    cache = folder / "cache"
    monkeypatch.setenv("TENSORIZER_CACHE", str(cache))
    begun = as_json(capsys, uri)
    # The index is read past the cache, unless it is most of a file.
    assert all(place["cached"] in (0, place["bytes"]) for place in begun["files"])
    tensorizer.load(uri, "cpu")
    facts, tables = shown(capsys, uri)
    if name == "shards":
        assert all(line.endswith("100% in the cache") for line in tables["files"])
    else:
        head, said, cached = facts["read from"]
        assert head.startswith(f"{uri}, ")
        assert re.fullmatch(r'ETag "[\w-]+", changed \w+, .+ GMT', said)
        assert cached == "100% in the cache"
    ours = as_json(capsys, folder / name)
    for same in ("tensors", "parameters", "bytes", "dtypes", "alignment", "metadata", "modules"):
        assert begun[same] == ours[same]
    assert [place["bytes"] for place in begun["files"]] == [p["bytes"] for p in ours["files"]]


def test_a_server_is_not_asked_for_each_hash(folder, nginx, capsys):
    large = {f"{number}": torch.full((1 << 18,), number) for number in range(8)}
    tensorizer.save(large, nginx.root / "large.tensors")
    before = len(nginx.requests())
    facts, _ = shown(capsys, f"{nginx.http}/large.tensors")
    assert facts["hashes"] == ["CRC32 and SHA256, as the largest tensor says"]
    assert len(nginx.requests()) - before <= 2


def test_other_servers(folder, s3, tmp_path, capsys):
    path = folder / "f.tensors"
    redis = Redis(tmp_path)
    try:
        for target in ("s3://bucket/f.tensors", f"{redis.address}/model"):
            assert run("cp", "-q", path, target) == 0
            found, ours = as_json(capsys, target), as_json(capsys, path)
            for same in ("format", "tensors", "parameters", "dtypes", "modules", "largest"):
                assert found[same] == ours[same]
            [place] = found["files"]
            assert (place["file"], place["local"]) == (target, False)
            assert (place["etag"] is None) == target.startswith("redis")
    finally:
        redis.stop()


def on_a_terminal(path, monkeypatch, **variables):
    """Return what the command writes to a terminal."""
    ours, theirs = pty.openpty()
    with monkeypatch.context() as patch, open(theirs, "w") as terminal:
        patch.setattr(sys, "stdout", terminal)
        patch.delenv("NO_COLOR", raising=False)
        for name, value in {"TERM": "xterm", **variables}.items():
            patch.setenv(name, value)
        assert run("info", path) == 0
    written = b""
    # The end of what was written is an error.
    with contextlib.suppress(OSError):
        while part := os.read(ours, 1 << 16):
            written += part
    os.close(ours)
    return written.decode().replace("\r\n", "\n")


def test_styles_on_a_terminal_only(folder, capsys, monkeypatch):
    path = folder / "f\x1b[31m.tensors"
    (folder / "f.tensors").rename(path)
    assert run("info", path) == 0
    plain = capsys.readouterr().out
    assert "\x1b" not in plain
    styled = on_a_terminal(path, monkeypatch)
    assert {found[0] for found in STYLE.finditer(styled)} == {"\x1b[1m", "\x1b[2m", "\x1b[0m"}
    assert STYLE.sub("", styled) == plain
    assert on_a_terminal(path, monkeypatch, NO_COLOR="1") == plain
    assert on_a_terminal(path, monkeypatch, TERM="dumb") == plain
