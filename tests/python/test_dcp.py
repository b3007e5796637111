"""Checkpoints of torch.distributed.checkpoint: many ranks, and other numbers of them."""

import errno
import fcntl
import os
import re
import shutil
import signal

import pytest
import tensorizer
import torch
import torch.distributed.checkpoint as dcp
from conftest import ROOT
from ranks.dcp_failures import ROWS
from tensorizer.distributed import Reader, Writer, folders
from tensorizer_cli.main import main
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_checkpoints_load_into_other_world_sizes_and_meshes(ranks, tmp_path):
    saved = ranks.run("dcp_meshes.save", 4, tmp_path)[0]
    assert saved == ["4-plain", "4-fsdp", "4-tp", "4-both"]
    saved += ranks.run("dcp_meshes.save", 1, tmp_path)[0]
    for name in ("4-both", "1-plain"):
        assert main(["cp", str(tmp_path / name), str(tmp_path / "one.tensors")]) == 0
        expected = flatten_state_dict(torch.load(tmp_path / f"{name}.pt"))[0]
        tensors = {name: one for name, one in expected.items() if isinstance(one, torch.Tensor)}
        found = tensorizer.load(tmp_path / "one.tensors")
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    for world, kinds in ((2, 5), (1, 2)):
        (found, *_) = ranks.run("dcp_meshes.load", world, tmp_path, saved)
        assert len(found) == len(saved) * kinds


def test_saves_in_the_background(ranks, tmp_path):
    assert ranks.run("dcp_meshes.overlapping", 2, tmp_path / "checkpoint") == [[0, 1, 2]] * 2


def value_of(folder, columns=1000):
    """Return the number that a checkpoint is full of."""
    target = {"rows": torch.zeros(2 * ROWS, columns), "value": 0}
    dcp.load(target, storage_reader=Reader(folder, verify_hash=True))
    assert (target["rows"] == target["value"]).all()
    return target["value"]


@pytest.mark.usefixtures("with_faults")
@pytest.mark.parametrize(("victim", "links"), [(0, True), (1, False)])
def test_a_rank_is_killed_at_every_step(ranks, tmp_path, victim, links):
    ranks.run("dcp_failures.save", 2, tmp_path / "first", 1)
    seen, left = [], set()
    for step in range(100):
        folder = tmp_path / "second"
        shutil.copytree(tmp_path / "first", folder)
        # Without links, files that are not whole yet have hidden names.
        env = {"FAULT_KILL_AT": str(step)} | ({} if links else {"FAULT_LINK": str(errno.EPERM)})
        found = ranks.start("dcp_failures.save", 2, folder, 2, by_rank={victim: env})
        seen.append(value_of(folder))
        left.update(name for name in os.listdir(folder) if name.startswith("."))
        dcp.save({"other": 1}, storage_writer=Writer(folder))
        assert len(os.listdir(folder)) == 2, os.listdir(folder)
        shutil.rmtree(folder)
        if found[victim].get("signal") != signal.SIGKILL:
            break
    assert all("result" in one for one in found)
    # Files of two ranks, and for the first that of the checkpoint, and old files that it removes.
    assert len(seen) > (10 if victim == 0 else 4)
    assert any(name.startswith(".rank-00001-") for name in left) == (not links)
    assert seen == sorted(seen)
    assert set(seen) == {1, 2}
    if victim == 1:
        assert seen == [1] * (len(seen) - 1) + [2]


def test_a_rank_is_killed_at_any_moment(ranks, tmp_path):
    columns, moments = 10_000, 8  # 4 MB each
    seconds = max(ranks.run("dcp_failures.save", 2, tmp_path / "c", 1, columns))
    value = 1
    for moment in range(moments):
        env = {moment % 2: {"KILL_AFTER": str(seconds * moment / moments)}}
        found = ranks.start("dcp_failures.save", 2, tmp_path / "c", value + 1, columns, by_rank=env)
        now = value_of(tmp_path / "c", columns)
        assert now in (value, value + 1), found
        if all("result" in one for one in found):
            assert now == value + 1
        value = now


def test_a_disk_that_is_full(ranks, tmp_path):
    ranks.run("dcp_failures.save", 3, tmp_path / "c", 1)
    before = {path.name: path.read_bytes() for path in (tmp_path / "c").iterdir()}
    for found in ranks.run("dcp_failures.full", 3, tmp_path / "c", 2):
        assert list(found) == ["2"]
        assert found["2"][:2] == ["OSError", errno.EFBIG]
        assert str(tmp_path / "c" / "rank-00002-") in found["2"][2]
    now = {path.name: path.read_bytes() for path in (tmp_path / "c").iterdir()}
    assert {name: now.pop(name) for name in before} == before
    # The others had written theirs; nothing is half there, and the next save makes room first.
    assert sorted(name[:10] for name in now) == ["rank-00000", "rank-00001"]
    ranks.run("dcp_failures.save", 3, tmp_path / "c", 3)
    assert len(os.listdir(tmp_path / "c")) == 4
    left = ranks.run("dcp_failures.retried", 2, tmp_path / "d")
    assert left == [[1, 3]] * 2


def test_keys_of_ranks(ranks, tmp_path):
    for found in ranks.run("dcp_failures.keys", 2, tmp_path / "c"):
        assert [(rank, name) for rank, (name, _, _) in found.items()] == [
            ("1", "CryptographyError")
        ]


@pytest.mark.parametrize(
    ("what", "name", "match"),
    [
        ("nothing", "FileNotFoundError", "there is no checkpoint at {elsewhere}"),
        (
            "damaged",
            "FormatError",
            "{elsewhere}/checkpoint.json is not a checkpoint, or is damaged",
        ),
        ("another", "RuntimeError", "have found different checkpoints at "),
    ],
)
def test_a_rank_with_another_checkpoint_fails_the_load(ranks, tmp_path, what, name, match):
    folder, elsewhere = tmp_path / "c", tmp_path / "elsewhere"
    ranks.run("dcp_failures.save", 2, folder, 5)
    if what != "nothing":
        # This checkpoint has the same files with other bytes.
        ranks.run("dcp_failures.save", 2, elsewhere, 6)
    if what == "damaged":
        (elsewhere / "checkpoint.json").write_bytes(b"{}")
    found = ranks.run("dcp_failures.one_elsewhere", 2, folder, elsewhere)
    assert found[0] == found[1]
    failures, value = found[0]
    assert value == 5
    for at, failed in enumerate(failures):
        # The coordinator finds that checkpoints differ; a rank with an error of its own reports it.
        ((rank, (kind, _, text)),) = failed.items()
        assert (rank, kind) == ("0" if what == "another" else str(at // 3), name)
        assert match.format(elsewhere=elsewhere) in text


def test_a_flipped_byte(ranks, tmp_path):
    ranks.run("dcp_failures.save", 2, tmp_path / "c", 5)
    (path,) = (tmp_path / "c").glob("rank-00001-*")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    for found in ranks.run("dcp_failures.verify", 2, tmp_path / "c", 5):
        ((rank, (name, _, text)),) = found.items()
        assert (rank, name) == ("1", "HashMismatchError")
        assert "rows@100,0" in text


def test_s3(ranks, s3):
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL_S3")
    env = {name: os.environ[name] for name in names}
    assert ranks.run("dcp_failures.s3", 2, "s3://bucket/ranks/c", 4, env=env) == [True] * 2
    assert value_of("s3://bucket/ranks/c") == 4
    for found in ranks.run("dcp_failures.broken_upload", 2, "s3://bucket/ranks/c", 5, env=env):
        assert found == {"1": ["ValueError", None, "no more"]}
    assert value_of("s3://bucket/ranks/c") == 4
    # Uploads of other tests to this bucket are not counted.
    found = {"Bucket": "bucket", "Prefix": "ranks/c/"}
    assert "Uploads" not in s3.client().list_multipart_uploads(**found)
    # The first checkpoint stays, and the object that rank 0 has uploaded in the failed save.
    keys = [one["Key"] for one in s3.client().list_objects_v2(**found)["Contents"]]
    ours = sorted(key.removeprefix("ranks/c/")[:10] for key in keys)
    assert ours == ["checkpoint", "rank-00000", "rank-00000", "rank-00001"]


def test_the_examples_of_the_document(ranks, run_script, tmp_path):
    text = (ROOT / "docs/how-to/distributed.md").read_text()
    first, second = re.findall(r'```python title="train.py"\n(.+?)```', text, re.DOTALL)
    (tmp_path / "train.py").write_text(first)
    run_script(tmp_path / "train.py")
    assert len(os.listdir(tmp_path / "checkpoints/latest")) == 3
    imports = "\n".join(line for line in first.splitlines() if "import " in line)
    end = "assert weights['model']['0.weight'].any()"
    ranks.run("dcp_meshes.execute", 1, f"{imports}\n{second}\n{end}", tmp_path)


# Each rank has torch start an interpreter: two of them save as the ranks themselves do.
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.long)])
def test_saves_by_other_processes(ranks, tmp_path, world):
    assert ranks.run("dcp_failures.in_a_process", world, tmp_path / "c", 6) == [6] * world


def test_a_folder_that_is_locked_for_long(tmp_path, monkeypatch):
    """A process that was stopped while it removed files ends the save of another, with its name."""
    monkeypatch.setattr(folders, "_LOCK_TIMEOUT", 0.05)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(BlockingIOError, match=f"held the lock .* '{tmp_path}'"):
        folders.FolderLock(str(tmp_path))
    os.close(descriptor)
    dcp.save({"a": torch.ones(2)}, storage_writer=Writer(tmp_path), no_dist=True)
