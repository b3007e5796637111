"""Files that saves make have the modes and groups that torch gives them there.

In folders whose group goes to what is made in them, and under masks from none to all.
"""

import errno
import json
import os

import pytest
from processes import run_python

#: A group that no process here is in, and a user without rights.
GROUP, NOBODY = 54321, 65534
MASKS = [0, 0o022, 0o027, 0o077, 0o777]

#: Saves in every way under each mask, in folders of their own; prints how each ended.
CODE = """
import errno, json, os, sys, warnings
from pathlib import Path
import safetensors.torch, tensorizer, torch
import torch.distributed.checkpoint as dcp
from tensorizer.distributed import Writer
from tensorizer.stream_io import open_stream
from tensorizer.torch_compat import tensorizer_saving
from tensorizer_cli.main import main

warnings.simplefilter("ignore")
base, group, user, source = Path(sys.argv[1]), *map(int, sys.argv[2:4]), sys.argv[4]
tensors = {"a": torch.arange(10), "b": torch.ones(3, 4)}
ops = torch.ops.tensorizer

def by_serializer(path):
    with tensorizer.TensorSerializer(path) as file:
        file.write_state_dict(tensors)
def by_stream(path):
    with open_stream(path, "wb") as stream:
        stream.write(b"bytes")
def pair(path):
    with tensorizer_saving():
        torch.save(tensors, path)
def copy(path):
    if main(["cp", source, str(path)]):
        raise PermissionError(errno.EACCES, "the command failed")
def cache(folder):
    for _ in range(2):
        assert len(tensorizer.load(sys.argv[5], cache_dir=folder)) == 2
def checkpoint(folder):
    dcp.save(tensors, storage_writer=Writer(folder), no_dist=True)
def torch_checkpoint(folder):
    dcp.save(tensors, checkpoint_id=folder, no_dist=True)
def their_folder(path):
    path.parent.mkdir(parents=True)
    torch.save(tensors, path)

CALLS = {
    "torch.save": ("f", lambda path: torch.save(tensors, path)),
    "save_file": ("f", lambda path: safetensors.torch.save_file(tensors, path)),
    "save": ("f", lambda path: tensorizer.save(tensors, path)),
    "safetensors": ("f", lambda path: tensorizer.save(tensors, path, format="safetensors")),
    "ours.save_file": ("f", lambda path: tensorizer.safetensors.save_file(tensors, path)),
    "shards": ("f.safetensors", lambda path: tensorizer.save(tensors, path, max_shard_size=50)),
    "save_async": ("f", lambda path: tensorizer.save_async(tensors, path).result()),
    "serializer": ("f", by_serializer),
    "operator": ("f", lambda path: ops.save(str(path), tensors)),
    "stream": ("f", by_stream),
    "pair": ("f", pair),
    "cp": ("f", copy),
    "cp to safetensors": ("f.safetensors", copy),
    "torch.save in new folders": ("new/deep/f", their_folder),
    "save in new folders": ("new/deep/f", lambda path: tensorizer.save(tensors, path)),
    "cp in new folders": ("new/deep/f", copy),
    "torch's checkpoint": ("new/c", torch_checkpoint),
    "checkpoint": ("new/c", checkpoint),
    "cache": ("cache", cache),
}
def made(folder, name):
    folder = folder / name
    folder.mkdir()
    os.chown(folder, user or os.getuid(), group)
    # After the change of its owner, which clears the bit.
    folder.chmod(0o2775)
    return folder
def error_of(call, path):
    try:
        call(path)
    except BaseException as error:
        while getattr(error, "failures", None):
            error = next(iter(error.failures.values()))[0]
        return getattr(error, "errno", None) or repr(error)

masks = [int(mask) for mask in sys.argv[6:]]
for mask in masks:
    (base / oct(mask)).mkdir()
places = {mask: {name: made(base / oct(mask), name) for name in CALLS} for mask in masks}
if user:
    # What is imported late may lie where this user may not look.
    (base / "before").mkdir()
    for name, (file, call) in CALLS.items():
        call(made(base / "before", name) / file)
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
ended = {}
for mask in masks:
    os.umask(mask)
    ended[oct(mask)] = {
        name: error_of(call, places[mask][name] / file) for name, (file, call) in CALLS.items()
    }
print(json.dumps(ended))
"""


def found(folder):
    """Return the modes and groups of the files and folders below one."""
    return {
        (path.is_dir(), oct(path.stat().st_mode & 0o7777), path.stat().st_gid)
        for path in folder.rglob("*")
    }


def open_to_all(folder):
    """Let every user into a folder of the tests: pytest makes the outer ones for its own."""
    folder.chmod(0o755)
    for above in folder.parents:
        if "pytest-of-" in str(above):
            above.chmod(0o755)


@pytest.fixture
def run(tmp_path, nginx):
    """Save in every way; return how each ended."""
    open_to_all(tmp_path)
    source = nginx.root / "f"
    made = run_python("import sys, tensorizer, torch\n"
                      "tensorizer.save({'a': torch.ones(2), 'b': torch.ones(3)}, sys.argv[1])",
                      source)  # fmt: skip
    assert made.returncode == 0, made.stderr
    source.chmod(0o644)
    open_to_all(source.parent)

    def run(masks, group, user=0, **variables):
        done = run_python(
            CODE, tmp_path, group, user, source, f"{nginx.http}/f", *masks,
            env=os.environ | {f"FAULT_{name}": str(value) for name, value in variables.items()},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


#: Our calls, by the call of torch whose modes they must give. The library safetensors is no
#: measure: its files are always their user's alone.
PAIRS = {
    "torch.save": [
        *("save", "safetensors", "ours.save_file", "shards", "save_async"),
        *("serializer", "operator", "stream", "pair", "cp", "cp to safetensors"),
    ],
    "torch.save in new folders": ["save in new folders", "cp in new folders"],
    "torch's checkpoint": ["checkpoint"],
}


def assert_alike(folder, ended, caches=True):
    for theirs, calls in PAIRS.items():
        for name in calls:
            assert ended[name] == ended[theirs], name
            assert found(folder / name) == found(folder / theirs), name
    assert (ended["cache"] is None) == caches


@pytest.fixture
def group():
    """A group other than that of the process, if it may give one away."""
    return GROUP if os.geteuid() == 0 else os.getegid()


@pytest.mark.usefixtures("with_faults")
@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_masks_and_groups_of_folders(run, group, links, tmp_path):
    # Only root writes to a folder without rights.
    masks = MASKS[: None if os.geteuid() == 0 else -1] if links else MASKS[1:3]
    ended = run(masks, group, **({} if links else {"LINK": errno.EPERM}))
    for mask in masks:
        folder = tmp_path / oct(mask)
        assert set(ended[oct(mask)].values()) == {None}
        assert_alike(folder, ended[oct(mask)])
        file, new = (False, oct(0o666 & ~mask), group), (True, oct(0o2000 | 0o777 & ~mask), group)
        assert found(folder / "save") == {file}
        assert found(folder / "save in new folders") == {file, new}
        # No other user may use the files of a cache, whatever the mask.
        for _, mode, _ in found(folder / "cache"):
            assert int(mode, 8) & 0o077 == 0, mode


def test_masks_of_a_user_without_rights(run, tmp_path):
    """It is not in the group of the folder. With the last mask it may not read its own files."""
    if os.geteuid():
        pytest.skip("only root becomes another user")
    masks = [0o027, 0o077, 0o777]
    ended = run(masks, GROUP, NOBODY)
    for mask in masks:
        assert_alike(tmp_path / oct(mask), ended[oct(mask)], caches=mask != 0o777)
