"""A file that replaces another is its like, or says why it cannot replace it."""

import errno
import os
import re
import shutil
import stat
import struct
import sys
import tempfile
from pathlib import Path

import pytest
import tensorizer
import torch
from conftest import OWN_MOUNTS, assert_same
from processes import run_python

NEW = {"new": torch.arange(5)}
ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def holds(path):
    loaded = tensorizer.load(path, verify_hash=True)
    assert list(loaded) == ["new"]
    assert_same(loaded["new"], NEW["new"])


def owner(path):
    found = path.stat()
    return found.st_uid, found.st_gid, oct(stat.S_IMODE(found.st_mode))


def acl(user, group, other, *, named, mask):
    """Return an access control list that says something about the user 1234."""
    nobody = 0xFFFFFFFF
    entries = [(1, user, nobody), (2, named, 1234), (4, group, nobody)]
    entries += [(0x10, mask, nobody), (0x20, other, nobody)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def set_attribute(path, name, value):
    try:
        os.setxattr(path, name, value)
    except OSError as error:
        pytest.skip(f"{path} cannot have {name}: {error}")


@pytest.fixture
def shared():
    """Return a folder that every user can reach."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


SAVE_AS = """
import os, sys, tempfile, tensorizer, torch
path, *groups = sys.argv[1:]
tensors = {"new": torch.arange(5)}
with tempfile.TemporaryDirectory() as folder:
    tensorizer.save(tensors, os.path.join(folder, "f"))  # everything is imported
os.setgroups([int(group) for group in groups])
os.setgid(65534)
os.setuid(65534)
try:
    tensorizer.save(tensors, path)
except PermissionError as error:
    print(error.errno, error.filename, error)
    with tensorizer.TensorSerializer(open(path, "wb+")) as serializer:
        serializer.write_state_dict(tensors)
"""


def save_as_nobody(path, *groups):
    done = run_python(SAVE_AS, path, *groups)
    assert done.returncode == 0, done.stderr
    holds(path)
    return done.stdout


@as_root
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o4755])
def test_owner_group_and_permissions_stay(mode, tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"old")
    os.chown(path, 1234, 2345)
    path.chmod(mode)
    tensorizer.save(NEW, path)
    holds(path)
    assert owner(path) == (1234, 2345, oct(mode))


def test_attributes_and_access_control_lists_stay(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"old")
    listed = acl(6, 4, 0, named=6, mask=6)
    set_attribute(path, "user.note", b"mine")
    set_attribute(path, "user.empty", b"")
    set_attribute(path, ACCESS, listed)
    tensorizer.save(NEW, path)
    holds(path)
    assert os.getxattr(path, "user.note") == b"mine"
    assert os.getxattr(path, "user.empty") == b""
    assert os.getxattr(path, ACCESS) == listed


def test_the_list_of_a_folder_is_for_new_files(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"old")
    path.chmod(0o640)
    set_attribute(tmp_path, DEFAULT, acl(7, 7, 7, named=7, mask=7))
    tensorizer.save(NEW, path)
    assert ACCESS not in os.listxattr(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    tensorizer.save(NEW, tmp_path / "g")
    assert ACCESS in os.listxattr(tmp_path / "g")


@as_root
@pytest.mark.parametrize(
    ("mode", "becomes"),
    [(0o666, 0o666), (0o646, 0o644), (0o606, 0o600), (0o6666, 0o666), (0o626, 0o622)],
    ids=oct,
)
def test_replacing_a_file_without_the_right_to_chown_grants_no_access(mode, becomes, shared):
    shared.chmod(0o777)
    path = shared / "f"
    path.write_bytes(b"old")
    path.chmod(mode)
    assert save_as_nobody(path) == ""
    assert owner(path) == (65534, 65534, oct(becomes))


@as_root
def test_a_group_of_the_saver_stays(shared):
    shared.chmod(0o777)
    path = shared / "f"
    path.write_bytes(b"old")
    os.chown(path, 0, 2345)
    path.chmod(0o660)
    assert save_as_nobody(path, 2345) == ""
    assert owner(path) == (65534, 2345, oct(0o660))


@as_root
def test_the_acl_of_another_group_grants_no_access_after_a_replace(shared):
    shared.chmod(0o777)
    path = shared / "f"
    path.write_bytes(b"old")
    set_attribute(path, ACCESS, acl(6, 6, 6, named=0, mask=6))
    os.chown(path, 0, 2345)
    path.chmod(0o646)
    listed = os.getxattr(path, ACCESS)
    assert save_as_nobody(path) == ""
    assert owner(path) == (65534, 65534, oct(0o644))
    # The mask is what holds back the group and those with an entry.
    assert os.getxattr(path, ACCESS)[:28] == listed[:28]


def test_a_hard_link_keeps_the_old_bytes(tmp_path):
    path, other = tmp_path / "f", tmp_path / "g"
    path.write_bytes(b"old")
    other.hardlink_to(path)
    tensorizer.save(NEW, path)
    holds(path)
    assert other.read_bytes() == b"old"


@as_root
@pytest.mark.parametrize("mode", [0o755, 0o1777], ids=["not writable", "sticky"])
def test_a_file_that_cannot_be_replaced(mode, shared):
    path = shared / "f"
    path.write_bytes(b"old")
    path.chmod(0o666)
    shared.chmod(mode)
    told = save_as_nobody(path)
    code = 13 if mode == 0o755 else 1
    assert told.startswith(f"{code} {path} [Errno {code}] `{path}` may be written, but not"), told
    assert f"in its folder `{shared}`" in told
    assert 'open(path, "wb+")' in told
    assert owner(path) == (0, 0, oct(0o666))
    assert os.listdir(shared) == ["f"]


@as_root
def test_a_new_file_in_an_unwritable_folder(shared):
    done = run_python(SAVE_AS, shared / "f")
    assert f"PermissionError: [Errno 13] Permission denied: '{shared}/f'" in done.stderr


@pytest.mark.parametrize("error", [errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS])
def test_a_refused_chmod_keeps_the_mode_that_there_is(with_faults, error, tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"old")
    path.chmod(0o640)
    code = "import sys, tensorizer, torch\ntensorizer.save({'new': torch.arange(5)}, sys.argv[1])"
    done = run_python(code, path, env=with_faults(CHMOD=error))
    assert done.returncode == 0, done.stderr
    holds(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_save_goes_on_when_the_old_file_vanishes(tmp_path):
    """Another process removes the file and makes it again, at any moment."""
    path = tmp_path / "f"
    child = os.fork()
    if child == 0:
        while True:
            path.write_bytes(b"old")
            path.unlink()
    try:
        for _ in range(40):
            tensorizer.save(NEW, path)
            torch.ops.tensorizer.save(str(path), NEW)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


@as_root
@pytest.mark.skipif(sys.platform != "linux", reason="mounts a file")
def test_a_mounted_file_is_noticed_before_anything_is_written(tmp_path):
    path, file = tmp_path / "f", tmp_path / "file"
    path.write_bytes(b"")
    file.write_bytes(b"old")
    code = """
import tensorizer
mount("--bind", sys.argv[1], sys.argv[2])
tensorizer.TensorSerializer(sys.argv[2])
"""
    done = run_python(OWN_MOUNTS + code, file, path)
    if "PermissionError" not in done.stderr and re.search("unshare|mount:", done.stderr):
        pytest.skip(f"nothing can be mounted here: {done.stderr}")
    assert f"PermissionError: [Errno 16] `{path}` may be written, but not" in done.stderr
    assert file.read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["f", "file"]


@as_root
@pytest.mark.skipif(sys.platform != "linux", reason="mounts a folder")
def test_a_writable_file_in_a_folder_mounted_read_only(tmp_path):
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    file.write_bytes(b"old")
    (folder / "f").write_bytes(b"")
    code = """
import tensorizer, torch
folder, file = sys.argv[1:]
mount("--bind", folder, folder)
mount("-o", "remount,bind,ro", folder)
mount("--bind", file, f"{folder}/f")
tensorizer.save({"a": torch.ones(1)}, f"{folder}/f")
"""
    done = run_python(OWN_MOUNTS + code, folder, file)
    if "PermissionError" not in done.stderr and re.search("unshare|mount:", done.stderr):
        pytest.skip(f"nothing can be mounted here: {done.stderr}")
    assert f"PermissionError: [Errno 30] `{folder}/f` may be written, but not" in done.stderr
    assert file.read_bytes() == b"old"
