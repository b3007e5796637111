"""A save that is killed before its file is published leaves no files behind."""

import contextlib
import errno
import fcntl
import os
import stat
import subprocess
import time

import pytest
import tensorizer
import torch
from conftest import assert_same
from processes import run_python, start_python

NEW = {"new": torch.arange(5)}
#: No file system makes files without names.
NAMED = {"TMPFILE": errno.EOPNOTSUPP}


@pytest.fixture
def run(with_faults):
    """Run code with arguments and faults; return what became of the process."""
    return lambda code, *args, **faults: run_python(code, *args, env=with_faults(**faults))


@pytest.fixture
def unnamed(tmp_path):
    """Skip where the file system has no files without names."""
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_RDWR))
    except OSError as error:
        pytest.skip(f"{tmp_path} has no files without names: {error}")


def holds(path, tensors=NEW):
    loaded = tensorizer.load(path, verify_hash=True)
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        assert_same(loaded[name], tensor)


def hidden(folder):
    return [name for name in os.listdir(folder) if name.startswith(".")]


SAVE = """
import sys, tensorizer, torch
tensorizer.save({"new": torch.arange(5)}, sys.argv[1])
"""
STREAM = """
import sys, tensorizer, torch
from tensorizer.stream_io import open_stream
with tensorizer.TensorSerializer(open_stream(sys.argv[1], "wb+")) as serializer:
    serializer.write_state_dict({"new": torch.arange(5)})
"""
FORGET = """
import sys, tensorizer, torch
serializer = tensorizer.TensorSerializer(sys.argv[1])
serializer.write_state_dict({"new": torch.arange(5)})
"""


@pytest.mark.parametrize("code", [SAVE, STREAM], ids=["path", "stream"])
@pytest.mark.parametrize("before", ["fsync", "linkat"])
def test_a_killed_saver_leaves_nothing(unnamed, run, code, before, tmp_path):
    done = run(code, tmp_path / "f", KILL_BEFORE=before)
    assert done.returncode == -9, done.stderr
    assert os.listdir(tmp_path) == []


def test_killed_between_its_two_names(unnamed, run, tmp_path):
    """Over a file that exists, the new one has a hidden name for a moment."""
    path = tmp_path / "f"
    tensorizer.save({"old": torch.ones(2)}, path)
    for _ in range(2):  # the second saver removes what the first has left
        done = run(SAVE, path, KILL_BEFORE="rename")
        assert done.returncode == -9, done.stderr
        holds(path, {"old": torch.ones(2)})
        assert len(hidden(tmp_path)) == 1
    done = run(SAVE, path, KILL_AFTER="linkat")
    assert done.returncode == -9, done.stderr
    tensorizer.save(NEW, path)
    holds(path)
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.parametrize("before", ["flock", "fsync", "rename"])
def test_a_hidden_name_goes_with_the_next_save(run, before, tmp_path):
    path = tmp_path / "f"
    for _ in range(2):
        done = run(SAVE, path, **NAMED, KILL_BEFORE=before)
        assert done.returncode == -9, done.stderr
        assert len(hidden(tmp_path)) == 1
    done = run(SAVE, path, **NAMED)
    assert done.returncode == 0, done.stderr
    holds(path)
    assert os.listdir(tmp_path) == ["f"]


def test_a_hidden_name_stays_where_locks_do_not_work(run, tmp_path):
    path = tmp_path / "f"
    unlockable = {**NAMED, "FLOCK": errno.ENOLCK}
    assert run(SAVE, path, **unlockable, KILL_BEFORE="fsync").returncode == -9
    (unlocked,) = hidden(tmp_path)
    assert run(SAVE, path, **NAMED, KILL_BEFORE="fsync").returncode == -9
    both = sorted(hidden(tmp_path))
    assert len(both) == 2
    # A saver that cannot lock files cannot tell whether they are in use.
    done = run(SAVE, path, **unlockable)
    assert done.returncode == 0, done.stderr
    assert sorted(hidden(tmp_path)) == both
    # A saver that can keeps the file that was never locked, which may be in use.
    tensorizer.save(NEW, path)
    assert hidden(tmp_path) == [unlocked]
    holds(path)


LIVING = """
import os, sys, tensorizer, torch
serializer = tensorizer.TensorSerializer(sys.argv[1])
serializer.write_state_dict({"new": torch.arange(5)})
if "fork" in sys.argv:
    if os.fork():
        os._exit(0)
print("ready", flush=True)
sys.stdin.read()
if "fork" in sys.argv:
    os._exit(0)
serializer.close()
"""


@pytest.fixture
def living(with_faults):
    """Start a saver that waits with a hidden name until its input is closed."""

    @contextlib.contextmanager
    def start(*args):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with start_python(LIVING, *args, env=with_faults(**NAMED), **pipes) as process:
            assert process.stdout.readline() == b"ready\n"
            yield process

    return start


def test_a_living_saver_keeps_its_hidden_name(living, run, tmp_path):
    path = tmp_path / "f"
    with living(path) as process:
        (name,) = hidden(tmp_path)
        tensorizer.save({"other": torch.ones(2)}, path)
        done = run(SAVE, path, **NAMED)
        assert done.returncode == 0, done.stderr
        assert hidden(tmp_path) == [name]
        tensorizer.save({"other": torch.ones(2)}, path)
        process.communicate()
        assert process.returncode == 0
    holds(path)
    assert os.listdir(tmp_path) == ["f"]


def test_a_child_of_a_dead_saver_keeps_its_hidden_name(living, tmp_path):
    path = tmp_path / "f"
    with living(path, "fork") as process:
        assert process.wait(60) == 0
        tensorizer.save(NEW, path)
        assert len(hidden(tmp_path)) == 1
        process.stdin.close()
        # The child has ended when its output has.
        assert process.stdout.read() == b""
    tensorizer.save(NEW, path)
    assert os.listdir(tmp_path) == ["f"]


def test_hidden_names_of_other_machines_and_other_files(tmp_path):
    """Locks of another machine are not seen on every mount: recent files may be in use."""
    path = tmp_path / "f"
    elsewhere = "0000000a-0000000b"
    old = [f".f.tensorizer-{elsewhere}.tmp", ".f.tensorizer-0000000a-0000000c.tmp"]
    kept = [
        ".f.tensorizer-0000000a-0000000d.tmp",
        f".g.tensorizer-{elsewhere}.tmp",
        f".f.tensorizer-{elsewhere}.unlocked",
        ".f.tensorizer-+000000a-0000000b.tmp",
        ".f.tensorizer-a-b.tmp",
        ".f.tmp",
    ]
    for name in old + kept:
        (tmp_path / name).write_bytes(b"")
    (tmp_path / ".f.tensorizer-0000000a-0000000e.tmp").symlink_to("g")
    (tmp_path / "g").write_bytes(b"")
    (tmp_path / ".f.tensorizer-0000000a-0000000f.tmp").mkdir()
    os.mkfifo(tmp_path / ".f.tensorizer-0000000a-00000010.tmp")
    before = time.time() - 25 * 3600
    for name in os.listdir(tmp_path):
        if name != kept[0]:
            os.utime(tmp_path / name, (before, before))
    with open(tmp_path / old[1], "rb") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        everything = set(os.listdir(tmp_path))
        tensorizer.save(NEW, path)
        assert set(os.listdir(tmp_path)) == everything - {old[0]} | {"f"}
    tensorizer.save(NEW, path)
    assert set(os.listdir(tmp_path)) == everything - set(old) | {"f"}


def plain_mode(folder):
    """Return the mode of a file that is simply opened."""
    (folder / "plain").touch()
    mode = stat.S_IMODE((folder / "plain").stat().st_mode)
    (folder / "plain").unlink()
    return mode


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize(
    "variables",
    [
        {"LINK": errno.ENOENT},
        {"LINK": errno.EXDEV, "SPARES_PROBES": 1},
        {"TMPFILE": errno.EISDIR},
        {**NAMED, "FLOCK": errno.EOPNOTSUPP},
    ],
    ids=["no links", "links fail late", "no such files", "no locks"],
)
def test_file_systems_that_can_do_less(run, variables, exists, tmp_path):
    path = tmp_path / "f"
    if exists:
        tensorizer.save({"old": torch.ones(2)}, path)
        path.chmod(0o640)
    done = run(SAVE, path, **variables)
    assert done.returncode == 0, done.stderr
    holds(path)
    assert stat.S_IMODE(path.stat().st_mode) == (0o640 if exists else plain_mode(tmp_path))
    done = run(FORGET, path, **variables)
    assert "f.unclosed" in done.stderr
    holds(tmp_path / "f.unclosed")
    assert sorted(os.listdir(tmp_path)) == ["f", "f.unclosed"]


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_new_files_obey_the_umask(mask, tmp_path):
    before = os.umask(mask)
    try:
        tensorizer.save(NEW, tmp_path / "f")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o666 & ~mask


def test_a_published_file_is_not_locked(tmp_path):
    path = tmp_path / "f"
    for _ in range(2):
        serializer = tensorizer.TensorSerializer(path)
        serializer.write_state_dict(NEW)
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        try:
            serializer.close()
            with open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)
    assert os.listdir(tmp_path) == ["f"]


KILLS = """
import os, random, sys, time, tensorizer, torch
folder, same = sys.argv[1], sys.argv[2] == "same"
tensors = {str(i): torch.ones(1 << 14) for i in range(16)}
tensorizer.save(tensors, os.path.join(folder, "f"))
random.seed(5)
for kill in range(50):
    child = os.fork()
    if child == 0:
        number = 0
        while True:
            number += 1
            name = "f" if same else f"{kill}.{number}"
            tensorizer.save(tensors, os.path.join(folder, name))
    time.sleep(random.uniform(0, 0.01))
    os.kill(child, 9)
    os.waitpid(child, 0)
"""


@pytest.mark.parametrize("names", ["same", "new"])
def test_fifty_kills(unnamed, run, names, tmp_path):
    done = run(KILLS, tmp_path, names)
    assert done.returncode == 0, done.stderr
    if names == "new":
        assert hidden(tmp_path) == []
    assert len(hidden(tmp_path)) <= 1
    for name in os.listdir(tmp_path):
        if not name.startswith("."):
            assert len(tensorizer.load(tmp_path / name, verify_hash=True)) == 16
    tensorizer.save(NEW, tmp_path / "f")
    assert hidden(tmp_path) == []


RACE = """
import os, sys, tensorizer, torch
children = []
for number in range(4):
    children.append(os.fork())
    if children[-1] == 0:
        try:
            for _ in range(50):
                tensorizer.save({"a": torch.full((1000,), number)}, sys.argv[1])
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
        os._exit(0)
print([os.waitpid(child, 0)[1] for child in children])
"""


@pytest.mark.parametrize("variables", [{}, NAMED], ids=["unnamed", "named"])
def test_savers_of_one_name_do_not_disturb_each_other(run, variables, tmp_path):
    done = run(RACE, tmp_path / "f", **variables)
    assert done.stdout.strip() == "[0, 0, 0, 0]", done.stderr + done.stdout
    assert len(set(tensorizer.load(tmp_path / "f", verify_hash=True)["a"].tolist())) == 1
    assert os.listdir(tmp_path) == ["f"]
