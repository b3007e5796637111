"""Checkpoints in two halves as a plugin of Lightning, by a stub of its interface.

Lightning itself is not among the packages that the tests install: tests/frameworks needs it.
"""

import abc
import os
import sys
import threading
from types import ModuleType

import pytest
import tensorizer
import torch
from tensorizer.checkpoints.save_lock import SaveLock
from tensorizer.lightning import TensorizerCheckpointIO

NAME = "lightning.fabric.plugins.io.checkpoint_io"


@pytest.fixture
def state():
    torch.manual_seed(2)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    return {
        "epoch": 3,
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
    }


def assert_same(found, state):
    assert found["epoch"] == state["epoch"]
    for name, tensor in state["state_dict"].items():
        assert torch.equal(found["state_dict"][name], tensor)
    (mine,), (saved,) = found["optimizer_states"], state["optimizer_states"]
    for number, values in saved["state"].items():
        assert all(torch.equal(mine["state"][number][name], one) for name, one in values.items())


@pytest.mark.parametrize("arguments", [{"saving": {"hashs": 1}}, {"loading": {"num_readers": 0}}])
def test_arguments_are_checked_where_they_are_given(arguments):
    with pytest.raises((TypeError, ValueError), match="'hashes'|num_readers must be at least 1"):
        TensorizerCheckpointIO(**arguments)


def test_both_halves_are_saved_loaded_and_removed(tmp_path, state):
    plugin, path = TensorizerCheckpointIO(), tmp_path / "new/folder/epoch=3.ckpt"
    plugin.save_checkpoint(state, path)
    assert sorted(os.listdir(path.parent)) == ["epoch=3.ckpt", "epoch=3.ckpt.tensors"]
    weights = state["state_dict"]["weight"]
    stored = tensorizer.load(f"{path}.tensors", "cpu")
    assert any(torch.equal(one.view(torch.float32), weights.flatten()) for one in stored.values())
    for given in (path, str(path), path.as_uri()):
        assert_same(plugin.load_checkpoint(given, weights_only=True), state)
    plugin.save_checkpoint(state | {"epoch": 4}, path)
    assert plugin.load_checkpoint(path)["epoch"] == 4
    plugin.remove_checkpoint(path)
    assert os.listdir(path.parent) == []
    # As Lightning's own does.
    plugin.remove_checkpoint(path)
    plugin.teardown()


def test_a_save_that_fails_leaves_the_earlier_checkpoint(tmp_path, state):
    plugin, path = TensorizerCheckpointIO(), tmp_path / "last.ckpt"
    plugin.save_checkpoint(state, path)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(AttributeError, match="lambda"):
        plugin.save_checkpoint(state | {"odd": lambda: None}, path)
    assert sorted(os.listdir(tmp_path)) == before
    assert_same(plugin.load_checkpoint(path), state)


def test_links_and_folders(tmp_path, state):
    """Lightning links ``last.ckpt`` to the newest one if it is asked to."""
    plugin, path, link = TensorizerCheckpointIO(), tmp_path / "a/epoch.ckpt", tmp_path / "last.ckpt"
    plugin.save_checkpoint(state, path)
    link.symlink_to(path)
    assert_same(plugin.load_checkpoint(link), state)
    plugin.remove_checkpoint(link)
    assert not link.is_symlink()
    assert_same(plugin.load_checkpoint(path), state)
    plugin.remove_checkpoint(path.parent)
    assert os.listdir(tmp_path) == []


def test_checkpoints_of_torch_save_load(tmp_path, state):
    torch.save(state, tmp_path / "old.ckpt")
    assert_same(TensorizerCheckpointIO().load_checkpoint(tmp_path / "old.ckpt"), state)


def test_options_of_the_blocks(tmp_path, state):
    key = bytes(range(32))
    plugin = TensorizerCheckpointIO(
        saving={"encryption": tensorizer.EncryptionParams(key)},
        loading={"encryption": tensorizer.DecryptionParams.from_key(key)},
    )
    plugin.save_checkpoint(state, tmp_path / "secret.ckpt")
    assert_same(plugin.load_checkpoint(tmp_path / "secret.ckpt"), state)
    with pytest.raises(tensorizer.CryptographyError):
        TensorizerCheckpointIO().load_checkpoint(tmp_path / "secret.ckpt")


def test_storage_options_missing_files_and_addresses_are_refused(tmp_path, state):
    plugin = TensorizerCheckpointIO()
    with pytest.raises(TypeError, match="takes no storage_options"):
        plugin.save_checkpoint(state, tmp_path / "x.ckpt", {"a": 1})
    with pytest.raises(FileNotFoundError, match=r"Checkpoint file not found: .*none\.ckpt"):
        plugin.load_checkpoint(tmp_path / "none.ckpt")
    for call in (plugin.load_checkpoint, plugin.remove_checkpoint):
        with pytest.raises(ValueError, match="s3://bucket/x.ckpt: expected the path of a local"):
            call("s3://bucket/x.ckpt")
    plugin.save_checkpoint(state, tmp_path / "x.ckpt")
    (tmp_path / "x.ckpt.tensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"x\.ckpt\.tensors"):
        plugin.load_checkpoint(tmp_path / "x.ckpt")


def test_the_plugin_is_an_instance_of_lightnings_interface(monkeypatch):
    module = ModuleType(NAME)

    class CheckpointIO(abc.ABC):
        @abc.abstractmethod
        def save_checkpoint(self, checkpoint, path): ...

    module.CheckpointIO = CheckpointIO
    assert not isinstance(TensorizerCheckpointIO(), CheckpointIO)
    monkeypatch.setitem(sys.modules, NAME, module)
    assert isinstance(TensorizerCheckpointIO(), CheckpointIO)


def test_a_checkpoint_that_is_being_saved_is_removed_with_both_halves(tmp_path, state):
    plugin, path = TensorizerCheckpointIO(), tmp_path / "epoch.ckpt"
    plugin.save_checkpoint(state, path)
    halves = sorted(os.listdir(tmp_path))
    removing = threading.Thread(target=plugin.remove_checkpoint, args=(path,))
    # As a save holds it while it puts one half there, and then the other.
    with SaveLock(path.with_name("epoch.ckpt.tensors")):
        removing.start()
        removing.join(0.3)
        assert [name for name in sorted(os.listdir(tmp_path)) if name[0] != "."] == halves
    removing.join(60)
    assert not removing.is_alive() and os.listdir(tmp_path) == []
