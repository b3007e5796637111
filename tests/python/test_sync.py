"""A folder that cannot be synced destroys nothing."""

import errno
import os

import pytest
import tensorizer
import torch
import torch.distributed.checkpoint as dcp
from dcp_planners import fails
from processes import run_python
from tensorizer.distributed import Reader
from tensorizer.torch_compat import tensorizer_loading


@pytest.fixture
def failing(with_faults):
    """Return an environment in which a sync of a folder fails after so many others."""
    return lambda code, after=0: with_faults(SYNC=code, SYNC_AFTER=after)


SAVE = """
import sys, tensorizer, torch
try:
    tensorizer.save({"new": torch.arange(5)}, sys.argv[1])
except OSError as error:
    print(error)
"""


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EACCES])
def test_folders_that_are_not_synced_are_no_failure(failing, code, tmp_path):
    done = run_python(SAVE, tmp_path / "f", env=failing(code))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert tensorizer.load(tmp_path / "f", verify_hash=True)["new"].tolist() == [0, 1, 2, 3, 4]


def test_a_failing_disk_is_told_and_the_file_is_there(failing, tmp_path):
    tensorizer.save({"old": torch.ones(1)}, tmp_path / "f")
    done = run_python(SAVE, tmp_path / "f", env=failing(errno.EIO))
    assert done.returncode == 0, done.stderr
    assert f"`{tmp_path}/f` is complete and has its name, but its folder" in done.stdout
    assert "Input/output error" in done.stdout
    assert tensorizer.load(tmp_path / "f", verify_hash=True)["new"].tolist() == [0, 1, 2, 3, 4]
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.parametrize("after", range(3))
def test_new_folders_are_synced_before_anything_is_in_them(failing, after, tmp_path):
    path = tmp_path / "new/deep/f"
    done = run_python(SAVE, path, env=failing(errno.EIO, after))
    assert done.returncode == 0, done.stderr
    assert "Input/output error" in done.stdout
    assert str(path) in done.stdout
    # The third sync is that of the file's own folder.
    assert ("is complete" in done.stdout) == path.exists() == (after == 2)


PAIR = """
import sys, torch
from tensorizer.torch_compat import tensorizer_saving
with tensorizer_saving():
    try:
        torch.save({"weight": torch.full((1000,), float(sys.argv[2]))}, sys.argv[1])
    except OSError as error:
        print("failed:", error)
"""


@pytest.mark.parametrize(
    ("after", "holds"), [(0, 1.0), (1, 1.0), (2, 2.0)], ids=["old storages", "storages", "pickle"]
)
def test_one_version_of_a_pair_is_whole(failing, after, holds, tmp_path):
    """The sync behind the hidden name of the old storages fails, or one behind a rename."""
    path = tmp_path / "state.pt"
    done = run_python(PAIR, path, 1)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    done = run_python(PAIR, path, 2, env=failing(errno.EIO, after))
    assert done.stdout.startswith("failed:"), done.stderr
    with tensorizer_loading():
        assert torch.load(path)["weight"].tolist() == [holds] * 1000
    assert sorted(os.listdir(tmp_path)) == ["state.pt", "state.pt.tensors"]


#: Has a later sync fail each time, in processes of their own.
CHECKPOINTS = """
import ctypes, os, sys, torch, torch.distributed.checkpoint as dcp
from tensorizer.distributed import Writer
for after in range(5):
    child = os.fork()
    if child == 0:
        os.environ["FAULT_SYNC_AFTER"] = str(after)
        ctypes.CDLL(None).read_faults()
        try:
            writer = Writer(f"{sys.argv[1]}/{after}/a")
            dcp.save({"new": torch.ones(5)}, storage_writer=writer)
        except dcp.api.CheckpointException as error:
            ((found, _),) = error.failures.values()
            assert isinstance(found, OSError), found
            os._exit(found.errno)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_in_new_folders(failing, tmp_path):
    state = {"new": torch.zeros(5)}
    done = run_python(CHECKPOINTS, tmp_path, env=failing(errno.EIO))
    # Four syncs: of both folders, of the rank's file, and of checkpoint.json.
    assert [int(line) for line in done.stdout.split()] == [errno.EIO] * 4 + [0], done.stderr
    for after in range(5):
        folder = tmp_path / str(after) / "a"
        # A folder is synced before there is anything in it.
        assert (after < 2) == (not any(folder.iterdir()))
        if after < 3:
            with fails(FileNotFoundError):
                dcp.load(state, storage_reader=Reader(folder))
        else:
            dcp.load(state, storage_reader=Reader(folder))
            assert state["new"].all()
