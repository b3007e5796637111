"""Tensors of the meta device, which have no data: written as zeros, refused by checkpoints."""

import pytest
import tensorizer
import torch
import torch.distributed.checkpoint as dcp
from conftest import files
from tensorizer.distributed import Reader, Writer
from torch._subclasses.fake_tensor import FakeTensorMode

ops = torch.ops.tensorizer


@pytest.mark.parametrize("order", [("real", "meta"), ("meta", "real"), ("meta",)], ids="-".join)
def test_the_list_form_of_save_writes_them(order, tmp_path):
    tensors = {"real": torch.arange(5.0), "meta": torch.empty(2, 3, device="meta")}
    path = str(tmp_path / "f")
    ops.save(path, list(order), [tensors[name] for name in order])
    loaded = tensorizer.load(path, "cpu", verify_hash=True)
    assert list(loaded) == list(order)
    assert loaded["meta"].shape == (2, 3) and not loaded["meta"].any()
    if "real" in order:
        assert torch.equal(loaded["real"], tensors["real"])


def test_the_list_form_is_the_dict_form(tmp_path):
    tensors = {"a": torch.empty(2, device="meta"), "b": torch.ones(3)}
    ops.save(str(tmp_path / "dict"), tensors)
    ops.save(str(tmp_path / "list"), list(tensors), list(tensors.values()))
    assert (tmp_path / "dict").read_bytes() == (tmp_path / "list").read_bytes()


def test_a_key_without_data_is_refused(tmp_path):
    path, key = str(tmp_path / "f"), torch.empty(32, dtype=torch.uint8, device="meta")
    ops.save(path, {"a": torch.ones(3)})
    before = files(tmp_path)
    out = torch.zeros(3)
    for call in (
        lambda: ops.save(path, {"a": torch.ones(3)}, key=key),
        lambda: ops.save(path, ["a"], [torch.ones(3)], key=key),
        lambda: ops.load(path, key=key),
        lambda: ops.load(path, ["a"], key=key),
        lambda: ops.load.checked(path, ["a"], ["float32[3]"], key=key),
        lambda: ops.load(path, ["a"], [out], key=key),
        lambda: ops.load(path, "a", out, key=key),
        lambda: ops.load_(path, ["a"], [out], key=key),
    ):
        with pytest.raises((ValueError, RuntimeError), match="the key is on the meta"):
            call()
    assert files(tmp_path) == before
    assert not out.any()


def test_a_load_into_meta_tensors_is_refused(tmp_path):
    path, out = str(tmp_path / "f"), torch.zeros(3, device="meta")
    ops.save(path, {"a": torch.ones(3)})
    begun = ops._begin(path)
    for call in (
        lambda: ops.load(path, ["a"], [out]),
        lambda: ops.load(path, "a", out),
        lambda: ops.load_(path, ["a"], [out]),
        lambda: ops._load_into(path, ["a"], [out], begun),
    ):
        with pytest.raises(RuntimeError, match="expected a strided tensor with data"):
            call()


def test_fake_tensors_write_nothing(tmp_path):
    """Fake tensors of the meta device write nothing either."""
    with FakeTensorMode():
        for device in ("cpu", "meta"):
            tensor = torch.empty(3, device=device)
            ops.save(str(tmp_path / "f"), ["a"], [tensor])
            ops.save(str(tmp_path / "f"), {"a": tensor})
    assert not (tmp_path / "f").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_refuses_them_by_name(tmp_path):
    writer = Writer(tmp_path / "c")
    for state in (
        {"model": {"weight": torch.empty(2, device="meta"), "bias": torch.ones(2)}},
        {"model": {"bias": torch.ones(2), "weight": torch.empty(2, device="meta")}},
    ):
        with pytest.raises(dcp.api.CheckpointException, match=r"'model\.weight' is a tensor of"):
            dcp.save(state, storage_writer=writer)
        assert not [name for name in files(tmp_path / "c") if not name.startswith(".")]
    dcp.save({"weight": torch.ones(2)}, storage_writer=writer)
    with pytest.raises(dcp.api.CheckpointException, match="'weight' is a tensor of the meta"):
        dcp.save({"weight": torch.empty(2, device="meta")}, storage_writer=Writer(tmp_path / "c"))
    found = {"weight": torch.zeros(2)}
    dcp.load(found, storage_reader=Reader(tmp_path / "c"))
    assert found["weight"].all()
