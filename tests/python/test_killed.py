"""Saves over a saved object that are killed: at every moment one object is whole."""

import errno
import gzip
import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from conftest import GOLDEN
from pairs import load, save
from processes import run_python
from tensorizer.torch_compat import PairMismatchError

NAMES = ["state.pt", "state.pt.tensors"]


#: Copies a folder once for every step of a save, and has the save killed there.
KILL_AT_EVERY_STEP = """
import ctypes, os, shutil, signal, sys, torch
from tensorizer.torch_compat import tensorizer_saving
source, folder, value = sys.argv[1:]
step = 0
while True:
    shutil.copytree(source, f"{folder}/{step}")
    child = os.fork()
    if child == 0:
        os.chdir(f"{folder}/{step}")
        os.environ["FAULT_KILL_AT"] = str(step)
        ctypes.CDLL(None).read_faults()
        with tensorizer_saving():
            torch.save({"weight": torch.full((1000,), float(value))}, "state.pt")
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        break
    assert status == signal.SIGKILL, status
    step += 1
print(step)
"""


def kill_everywhere(source, folder, value, env):
    """Return folders in which a save was killed, each a step later, and at last one that was not.

    Args:
        source: The folder as it was before.
        folder: The folder in which they are made.
        value: The value that is saved.
        env: The environment of the process.

    """
    folder.mkdir()
    done = run_python(KILL_AT_EVERY_STEP, source, folder, value, env=env)
    assert done.returncode == 0, done.stderr
    steps = int(done.stdout)
    assert steps >= 5, done.stderr
    return [folder / str(step) for step in range(steps + 1)]


def value_in(folder):
    """Return the value that loads from a folder, and the texts of the warnings, at most one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        loaded = load(folder / "state.pt", {"device": "cpu"}, weights_only=True)
    texts = [str(one.message) for one in caught if one.category is RuntimeWarning]
    assert len(texts) <= 1
    hidden = [name for name in os.listdir(folder) if any(name in text for text in texts)]
    assert [name for name in hidden if name not in NAMES] or not texts
    if isinstance(loaded, dict) and list(loaded) == ["weight"]:
        (number,) = set(loaded["weight"].tolist())
        assert loaded["weight"].shape == (1000,)
        return number, texts
    return repr(loaded), texts


def check(folders, before, after):
    """Check the folders; return copies, made before the next save, of those whose load warned."""
    warned, seen = [], []
    for folder in folders:
        found, texts = value_in(folder)
        assert found in (before, after), folder
        seen.append(found)
        if texts:
            warned.append(Path(shutil.copytree(folder, f"{folder}.warned")))
        save({"weight": torch.full((1000,), 7.0)}, folder / "state.pt")
        assert value_in(folder) == (7.0, [])
        assert sorted(os.listdir(folder)) == NAMES
    assert seen == sorted(seen, key=lambda value: value == after)
    assert seen[0] == before
    assert seen[-1] == after
    return warned


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_a_save_over_a_pair(with_faults, tmp_path, links):
    env = with_faults() if links else with_faults(LINK=errno.EPERM)
    (tmp_path / "first").mkdir()
    save({"weight": torch.full((1000,), 1.0)}, tmp_path / "first/state.pt")
    folders = kill_everywhere(tmp_path / "first", tmp_path / "second", 2, env)
    warned = check(folders, 1.0, 2.0)
    assert warned
    # The next one is killed too: after the first of those moments, and after the last.
    for number, folder in enumerate({warned[0], warned[-1]} if links else warned[-1:]):
        folders = kill_everywhere(folder, tmp_path / f"third{number}", 3, env)
        assert check(folders, 1.0, 3.0)


def test_a_save_over_a_pair_of_the_old_package(with_faults, tmp_path):
    """Its files have no pair id: the hidden storage file is used for its own pickle only."""
    (tmp_path / "first").mkdir()
    pickled = (GOLDEN / "tc_storages.pt").read_bytes()
    (tmp_path / "first/state.pt").write_bytes(pickled)
    storages = gzip.decompress((GOLDEN / "tc_storages.pt.tensors.gz").read_bytes())
    (tmp_path / "first/state.pt.tensors").write_bytes(storages)
    before, _ = value_in(tmp_path / "first")
    folders = kill_everywhere(tmp_path / "first", tmp_path / "second", 2, with_faults())
    for folder in check(folders, before, 2.0):
        (folder / "state.pt").write_bytes(pickled)
        with pytest.raises(PairMismatchError, match="older release"):
            load(folder / "state.pt")


def folder_that_needs_hidden_file(with_faults, tmp_path):
    """Return a folder whose pickle has the value 1 and needs a hidden file."""
    (tmp_path / "first").mkdir()
    save({"weight": torch.full((1000,), 1.0)}, tmp_path / "first/state.pt")
    folders = kill_everywhere(tmp_path / "first", tmp_path / "second", 2, with_faults())
    return next(folder for folder in folders if value_in(folder)[1])


def test_a_hidden_half_of_another_pair_is_not_used(with_faults, tmp_path):
    folder = folder_that_needs_hidden_file(with_faults, tmp_path)
    (hidden,) = folder.glob(".*.before")
    save({"weight": torch.full((1000,), 9.0)}, tmp_path / "other.pt")
    os.replace(tmp_path / "other.pt.tensors", hidden)
    with pytest.raises(PairMismatchError, match=r"expected pair .*, found"):
        load(folder / "state.pt")


def test_a_failed_save_keeps_the_only_half(with_faults, tmp_path):
    class Fails:
        def __reduce__(self):
            raise ArithmeticError("cannot be pickled")

    folder = folder_that_needs_hidden_file(with_faults, tmp_path)
    before = sorted(os.listdir(folder))
    with pytest.raises(ArithmeticError):
        save({"a": torch.ones(3), "b": Fails()}, folder / "state.pt")
    assert sorted(os.listdir(folder)) == before
    assert value_in(folder)[0] == 1.0


def test_a_hidden_half_stays_while_another_pickle_needs_it(with_faults, tmp_path):
    folder = folder_that_needs_hidden_file(with_faults, tmp_path)
    (hidden,) = folder.glob(".*.before")
    # Two pickles with the same file of storages.
    save({"weight": torch.full((1000,), 5.0)}, folder / "b.pt", file_obj=str(folder / NAMES[1]))
    assert hidden.exists()
    assert value_in(folder)[0] == 1.0
    save({"weight": torch.full((1000,), 6.0)}, folder / "state.pt")
    assert sorted(os.listdir(folder)) == ["b.pt", *NAMES]


def test_an_object_without_storages_cleans_up_too(with_faults, tmp_path):
    folder = folder_that_needs_hidden_file(with_faults, tmp_path)
    save({"plain": 1}, folder / "state.pt")
    assert load(folder / "state.pt") == {"plain": 1}
    assert sorted(os.listdir(folder)) == NAMES
