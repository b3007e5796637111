"""The plugin for checkpoints in a trainer of Lightning itself."""

import os

import pytest
import tensorizer
import torch
from lightning import pytorch as lightning
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from tensorizer.lightning import TensorizerCheckpointIO


class Model(BoringModel):
    """The model of Lightning's own tests, with an optimizer that has a state."""

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)

    def on_train_epoch_end(self):
        self.log("done", float(self.current_epoch))


def trainer(folder, epochs, plugin, **options):
    keep = ModelCheckpoint(folder / "kept", monitor="done", mode="max", **options)
    return lightning.Trainer(
        default_root_dir=folder, max_epochs=epochs, limit_train_batches=2, limit_val_batches=1,
        plugins=[plugin], callbacks=[keep], accelerator="cpu", logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def names(folder):
    return sorted(os.listdir(folder / "kept"))


def test_training_resumes_from_its_checkpoint(tmp_path):
    whole = trainer(tmp_path / "whole", 4, TensorizerCheckpointIO(), save_top_k=-1)
    whole.fit(Model())
    assert len(names(tmp_path / "whole")) == 8
    (second,) = (tmp_path / "whole/kept").glob("epoch=1*.ckpt")
    assert tensorizer.load(f"{second}.tensors", "cpu")
    saved = TensorizerCheckpointIO().load_checkpoint(second)
    # A checkpoint of the last step: there is nothing left to train.
    model, resumed = Model(), trainer(tmp_path / "same", 2, TensorizerCheckpointIO())
    resumed.fit(model, ckpt_path=str(second))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved["state_dict"][name])
    (moments,) = saved["optimizer_states"]
    (state,) = (one.state_dict() for one in resumed.optimizers)
    for number, values in moments["state"].items():
        assert all(torch.equal(state["state"][number][key], one) for key, one in values.items())
    resumed = trainer(tmp_path / "on", 4, TensorizerCheckpointIO())
    resumed.fit(Model(), ckpt_path=str(second))
    assert resumed.global_step == whole.global_step == 8


@pytest.mark.parametrize("last", [None, True, "link"])
def test_only_the_best_checkpoint_is_kept(tmp_path, last):
    one = trainer(tmp_path, 4, TensorizerCheckpointIO(), save_top_k=1, save_last=last)
    one.fit(Model())
    kept = [name for name in names(tmp_path) if not name.startswith("last")]
    assert len(kept) == 2 and kept[1] == f"{kept[0]}.tensors"
    lasts = {None: [], True: ["last.ckpt", "last.ckpt.tensors"], "link": ["last.ckpt"]}[last]
    assert [name for name in names(tmp_path) if name.startswith("last")] == lasts
    if last:
        other = trainer(tmp_path / "on", 5, TensorizerCheckpointIO())
        other.fit(Model(), ckpt_path=str(tmp_path / "kept/last.ckpt"))
        assert other.global_step == one.global_step + 2


def test_checkpoints_saved_in_the_background_have_both_halves(tmp_path):
    """Lightning removes a replaced one at once, whether it was saved or not: it may be left."""
    one = trainer(tmp_path, 2, AsyncCheckpointIO(TensorizerCheckpointIO()), save_top_k=1)
    one.fit(Model())
    found = names(tmp_path)
    kept = [name for name in found if name.endswith(".ckpt")]
    assert "epoch=1-step=4.ckpt" in kept
    assert found == sorted([*kept, *(f"{name}.tensors" for name in kept)])


def test_fabric_saves_and_loads_state(tmp_path):
    fabric = Fabric(accelerator="cpu", plugins=[TensorizerCheckpointIO()])
    model = torch.nn.Linear(4, 2)
    fabric.save(tmp_path / "state.ckpt", {"model": model, "step": 5})
    assert sorted(os.listdir(tmp_path)) == ["state.ckpt", "state.ckpt.tensors"]
    other = {"model": torch.nn.Linear(4, 2), "step": 0}
    fabric.load(tmp_path / "state.ckpt", other)
    assert other["step"] == 5 and torch.equal(other["model"].weight, model.weight)
