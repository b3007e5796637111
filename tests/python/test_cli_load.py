"""``tensorizer load``: what holds a load back, where that is certain."""

import json
import re
import time

import pytest
import tensorizer
import torch
from conftest import ROOT
from scripted import Scripted
from tensorizer import EncryptionParams, stats
from tensorizer._native import time_first_touch
from tensorizer_cli import advice as advices
from tensorizer_cli.arguments import COMMANDS
from tensorizer_cli.load import _stages
from tensorizer_cli.main import main

MIB = 1 << 20
#: Arguments of the advice beside the figures.
OPTIONS = {"chosen", "mapped", "bypasses_cache", "huge_pages"}
TENSORS = {f"t{n}": torch.full((MIB,), n, dtype=torch.uint8) for n in range(8)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("load")
    tensorizer.save(TENSORS, folder / "f")
    tensorizer.save(TENSORS, folder / "enc", encryption=EncryptionParams(bytes(32)))
    (folder / "key").write_bytes(bytes(32))
    torch.save(TENSORS, folder / "f.pt")
    tensorizer.save(TENSORS, folder / "f.safetensors")
    return folder


def loaded(capsys, *arguments):
    """Return what the command says of a load."""
    assert main(["load", "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


class Slow(Scripted):
    """Serves a file, 64 KiB in 25 ms on each connection."""

    def __init__(self, data):
        self.data = data
        super().__init__()
        self.url = f"http://127.0.0.1:{self.port}/f"

    def answer(self, handler):
        first, last = handler.headers["Range"].removeprefix("bytes=").split("-")
        body = self.data[int(first) : int(last) + 1]
        handler.send_response(206)
        handler.send_header("Content-Length", str(len(body)))
        end = int(first) + len(body) - 1
        handler.send_header("Content-Range", f"bytes {first}-{end}/{len(self.data)}")
        handler.end_headers()
        # The first answer is not what is to be seen.
        for at in range(0, len(body), 1 << 16):
            handler.wfile.write(body[at : at + (1 << 16)])
            time.sleep(0.025 if int(first) else 0)


def test_a_slow_server_is_the_limit(folder, capsys):
    with Slow((folder / "f").read_bytes()) as server:
        found = loaded(capsys, server.url)
        assert (found["limit"], found["source"]) == ("network", "network")
        assert found["shares"]["read"] > 0.5
        assert found["path"].startswith("ranges over ")
        assert found["connections"] <= found["connections_at_most"] <= 32
        assert f"{found['connections']} connections of " in found["advice"]
        one = loaded(capsys, "--num-readers", 1, server.url)
        assert (one["connections"], one["limit"]) == (1, "network")
        assert "more may help: without --num-readers" in one["advice"]


@pytest.mark.parametrize("name", ["f", "f.pt", "f.safetensors"])
def test_a_file(folder, capsys, name):
    found = loaded(capsys, folder / name)
    assert found["bytes"] == 8 * MIB and found["tensors"] == 8
    assert found["format"] == {"f": "tensors", "f.pt": "torch"}.get(name, "safetensors")
    assert found["path"].startswith("a local file, ")
    assert found["shares"]["read"] > 0 and found["shares"]["open"] > 0
    assert found["shares"]["decrypt"] == found["shares"]["hash"] == 0
    assert sum(found["shares"].values()) == pytest.approx(1, abs=0.01)
    assert sum(found["stages"].values()) == pytest.approx(found["seconds"], rel=0.01)
    assert found["limit"] in {*found["stages"], "disk", "page cache"} - {"read"}


def test_hashes_have_a_share(folder, capsys):
    found = loaded(capsys, "--verify-hash", folder / "f")
    assert found["shares"]["hash"] > 0


def test_decryption_has_a_share(folder, capsys):
    found = loaded(capsys, "--key-file", folder / "key", folder / "enc")
    assert found["encrypted"] and found["shares"]["decrypt"] > 0
    assert main(["load", str(folder / "enc")]) == 2
    assert "encrypted" in capsys.readouterr().err


def test_a_mapping(folder, capsys):
    found = loaded(capsys, "--mmap", folder / "f")
    assert "mapped" in found["path"]
    assert found["shares"]["first touch"] == 0


def test_the_text_report_has_a_line_for_each_stage(folder, capsys):
    assert main(["load", "--verify-hash", str(folder / "f")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("8 tensors, 8.4 MB in ") and " GB/s, to " in lines[0]
    names = [line.split("  ")[0].strip() for line in lines]
    stages = ["open", "plan", "read", "first touch", "decrypt", "hash", "memory", "copy"]
    assert names[1:] == ["path", *stages, "limit"]


def test_first_touch_is_measured_and_its_page_faults_are_counted(folder, capsys):
    found = loaded(capsys, folder / "f")
    assert found["page_faults"] > 0
    assert main(["load", str(folder / "f")]) == 0
    assert re.search(r"new memory from the system: [\d,]+ page faults", capsys.readouterr().out)
    assert found["shares"]["first touch"] > 0


def test_first_touch_is_a_part_of_reading_that_is_timed():
    call = {"stages": {"read": 1.0, "first touch": 0.75, "copy": 0.5}}
    found = _stages([call, call])
    assert (found["first touch"], found["read"], found["copy"]) == (1.5, 0.5, 1.0)


def test_first_touch_is_timed_only_where_it_is_asked_for(folder):
    try:
        for timed in (False, True):
            time_first_touch(timed)
            before = stats()["call"] if stats() else 0
            tensorizer.load(folder / "f", "cpu", num_readers=2)
            [call] = stats(since=before)
            assert (call["stages"]["first touch"] > 0) == timed
            assert call["stages"]["first touch"] <= call["stages"]["read"]
    finally:
        time_first_touch(False)


def test_settings_that_are_on_are_not_advised():
    first = {"read": 1.0, "first touch": 2.0}
    assert "huge pages" not in advice(stages=first)
    assert "huge pages" in advice(stages=first, huge_pages=False)
    assert "--mmap" in advice(source="page cache")
    assert "--mmap" not in advice(source="page cache", mapped=True)


def test_advice_for_a_disk_depends_on_the_page_cache():
    assert "its next load comes from memory" in advice(source="disk")
    assert "TENSORIZER_DIRECT_IO=0" in advice(source="disk", bypasses_cache=True)


def test_stats_hold_the_stages_and_threads_of_a_call(folder):
    before = stats()["call"] if stats() else 0
    tensorizer.load(folder / "f", num_readers=2)
    [call] = stats(since=before)
    assert call["stages"]["plan"] > 0 and call["most_threads"] == call["threads"] == 2


def advice(*, stages=None, **more):
    """Return what is advised after a load over a network."""
    options = {name: more.pop(name) for name in OPTIONS & more.keys()}
    return advices.advice(figures(stages, **more), read_seconds=8.0, **options)


def figures(stages=None, **more):
    """Return what a load over a network took."""
    usual = {"bytes": 10**9, "seconds": 10.0, "stages": stages or {"open": 0.1, "read": 1.0},
             "source": "network", "connections": 8, "connections_at_most": 32}  # fmt: skip
    return {**usual, **more}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "8 connections of 125.0 MB/s each; more would not help"),
        ({"connections": 32}, "this is the most that is chosen automatically"),
        ({"connections_at_most": 1, "connections": 1}, "allows no more than one"),
        ({"chosen": True}, "more may help: without --num-readers"),
        ({"seconds": 0.2}, "too short to find out"),
    ],
)
def test_advice_on_connections(more, said):
    assert said in advice(**more)


@pytest.mark.parametrize(
    "stage", ["open", "plan", "first touch", "decrypt", "hash", "memory", "copy"]
)
def test_there_is_advice_for_each_limit(stage):
    stages = {"read": 1.0, stage: 2.0}
    assert advices.limit(figures(stages)) == stage
    assert advice(stages=stages)
    for source in ("disk", "page cache"):
        assert advice(source=source)


def test_the_table_of_json_has_what_is_printed(folder, tmp_path, capsys):
    """Every command, and every member of its object."""
    page = (ROOT / "docs/reference/command.md").read_text()
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (.+) \|$", page, re.MULTILINE)
    told = {name: set(re.findall(r"`([^`]+)`", row))
            for names, row in rows for name in re.findall(r"\w+", names)}  # fmt: skip
    (tmp_path / "cache").mkdir(0o700)
    key, other = ["--key-file", folder / "key"], tmp_path / "other"
    other.write_bytes(bytes(range(32)))
    asked = {
        "ls": [folder / "f"],
        "info": [folder / "f"],
        "load": [folder / "f"],
        "verify": [folder / "f"],
        "diff": [folder / "f", folder / "enc", "--other-key-file", folder / "key"],
        "cp": ["--verify", folder / "f", tmp_path / "copy"],
        "encrypt": [*key, folder / "f", tmp_path / "encrypted"],
        "decrypt": [*key, folder / "enc", tmp_path / "plain"],
        "rekey": [*key, "--new-key-file", other, folder / "enc", tmp_path / "anew"],
        "cache": ["ls", "--folder", tmp_path / "cache"],
        "keygen": [tmp_path / "new-key"],
    }
    assert set(told) == set(asked) == set(COMMANDS) - {"completion"}
    for command, arguments in asked.items():
        assert main([command, "--json", *map(str, arguments)]) == 0, command
        assert json.loads(capsys.readouterr().out).keys() <= told[command], command
