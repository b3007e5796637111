"""Tensors without data: refused by all that save, unless the caller means it."""

import json
import math
import sys
import types
import warnings

import pytest
import tensorizer
import torch
import torch.distributed.checkpoint as dcp
from conftest import files
from tensorizer import TensorSerializer, TensorType
from tensorizer.distributed import Reader, Writer
from tensorizer.tensors import without_data
from tensorizer.torch_compat import tensorizer_loading, tensorizer_saving
from tensorizer_cli.main import main
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

ops = torch.ops.tensorizer


def placeholder(*shape):
    """A parameter as ZeRO-3 of DeepSpeed leaves it outside of GatheredParameters."""
    parameter = nn.Parameter(torch.empty(0))
    parameter.ds_id, parameter.ds_status = 0, "NOT_AVAILABLE"
    parameter.ds_shape, parameter.ds_numel = torch.Size(shape), math.prod(shape)
    parameter.ds_tensor = torch.ones(math.prod(shape))
    return parameter


MISSING = {
    "uninitialised parameter": (nn.UninitializedParameter, "uninitialised.*run the lazy module"),
    "uninitialised buffer": (nn.UninitializedBuffer, "uninitialised.*run the lazy module"),
    "placeholder": (lambda: placeholder(4, 4), r"ZeRO-3.*deepspeed\.zero\.GatheredParameters"),
}
META = "on the meta device, and without data: materialize them"


def with_serializer(write):
    def save(tensors, path):
        with TensorSerializer(path) as serializer:
            write(serializer, tensors)

    return save


def one_by_one(serializer, tensors):
    for name, tensor in tensors.items():
        serializer.write_tensor(0, name, TensorType.PARAM, tensor)


def module_of(tensors):
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor) if type(tensor) in (
            torch.Tensor,
            nn.UninitializedBuffer,
        ) else module.register_parameter(name, tensor)
    return module


def checkpoint(tensors, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tensors, storage_writer=Writer(path))


OLD = {
    "write_tensor": with_serializer(one_by_one),
    "write_module": with_serializer(lambda file, tensors: file.write_module(module_of(tensors))),
    "write_state_dict": with_serializer(TensorSerializer.write_state_dict),
}
NEW = {
    "save": tensorizer.save,
    "save_async": lambda tensors, path: tensorizer.save_async(tensors, path).result(60),
    "safetensors": lambda tensors, path: tensorizer.save(tensors, path, format="safetensors"),
    "shards": lambda tensors, path: tensorizer.save(
        tensors, f"{path}.safetensors", max_shard_size=1
    ),
    "dict operator": lambda tensors, path: ops.save(str(path), tensors),
    "list operator": lambda tensors, path: ops.save(
        str(path), list(tensors), list(tensors.values())
    ),
    "DCP": checkpoint,
}


DOORS = OLD | NEW


def names_in(folder):
    """Return the files in a folder and below, without hidden ones."""
    return sorted(path.name for path in folder.rglob("[!.]*") if path.is_file())


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", MISSING)
def test_what_has_no_data_is_refused_by_name(kind, door, tmp_path):
    make, text = MISSING[kind]
    tensors = {"real": torch.ones(2), "missing": make(), "empty": torch.empty(0)}
    expected = dcp.api.CheckpointException if door == "DCP" else (ValueError, RuntimeError)
    text = f"(?s)missing.*{text}"
    if kind.startswith("uninitialised") and door in ("DCP", "list operator"):
        text = "uninitialized parameter"  # torch's own refusal comes first
    with pytest.raises(expected, match=text):
        DOORS[door](tensors, tmp_path / "f")
    assert names_in(tmp_path) == []
    del tensors["missing"]
    DOORS[door](tensors, tmp_path / "f")


@pytest.mark.parametrize("door", NEW)
def test_tensors_of_the_meta_device_are_refused_by_name(door, tmp_path):
    tensors = {f"meta{n}": torch.empty(2, 3, device="meta") for n in range(2)}
    tensors = {"real": torch.ones(2)} | tensors
    expected = dcp.api.CheckpointException if door == "DCP" else (ValueError, RuntimeError)
    with pytest.raises(expected, match="(?s)on the meta device, and without data") as caught:
        DOORS[door](tensors, tmp_path / "f")
    text = str(caught.value)
    assert "meta0" in text and "meta1" in text and "materialize them" in text
    assert names_in(tmp_path) == []


def zeros_of(path):
    """Check that a file records ``meta`` without data; return its tensors, loaded."""
    loaded = tensorizer.load(path, "cpu", verify_hash=True)
    assert list(loaded) == ["real", "meta"]
    assert loaded["meta"].shape == (2, 3) and not loaded["meta"].any() and loaded["real"].all()


def test_they_are_recorded_for_callers_that_mean_it(tmp_path):
    tensors = {"real": torch.ones(2), "meta": torch.empty(2, 3, device="meta")}
    tensorizer.save(tensors, tmp_path / "f", allow_meta=True)
    zeros_of(tmp_path / "f")
    tensorizer.save_async(tensors, tmp_path / "g", allow_meta=True).result(60)
    assert (tmp_path / "g").read_bytes() == (tmp_path / "f").read_bytes()
    for save in (tensorizer.save, tensorizer.save_async):
        with pytest.raises(ValueError, match="safetensors files cannot record"):
            save(tensors, tmp_path / "f.safetensors", allow_meta=True)
        with pytest.raises(ValueError, match="uninitialised"):
            save({"a": nn.UninitializedParameter()}, tmp_path / "h", allow_meta=True)


@pytest.mark.parametrize("door", OLD)
def test_the_old_classes_warn_of_them_by_name(door, tmp_path):
    tensors = {"real": torch.ones(2), "meta": torch.empty(2, 3, device="meta")}
    with pytest.warns(
        UserWarning, match="meta' is on the meta device, .*zeros; materialize"
    ) as caught:
        OLD[door](tensors, tmp_path / "f")
    assert [one.filename for one in caught] == [__file__]
    found = tensorizer.load(tmp_path / "f", "cpu").values()
    assert sorted(bool(tensor.any()) for tensor in found) == [False, True]


@pytest.mark.parametrize("door", OLD)
def test_the_marker_of_vllm_is_no_reason_to_warn(door, tmp_path):
    marker = nn.Parameter(torch.tensor((1,), device="meta"), requires_grad=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OLD[door]({"vllm_tensorized_marker": marker, "a": torch.ones(1)}, tmp_path / "f")


def test_reasons_and_names():
    tensors = {
        "real": torch.ones(2),
        "none": torch.empty(0, 3),
        "meta": torch.empty(2, device="meta"),
        "lazy": nn.UninitializedParameter(),
        "part": placeholder(2, 2),
        "gathered": placeholder(),
    }
    tensors["gathered"].data = torch.ones(())
    found = without_data.without_data(tensors, tensors.values())
    assert list(found.values()) == [["meta"], ["lazy"], ["part"]]
    names = [f"m{n}" for n in range(1000)]
    with pytest.raises(ValueError, match="'m0', 'm1', .* and 980 more are on the meta device"):
        without_data.refuse(names, [tensors["meta"]] * 1000)


@pytest.mark.parametrize("door", DOORS)
def test_a_state_dict_of_placeholders_is_refused(door, tmp_path, monkeypatch):
    """A state dict has other tensors than the module, without the attributes of DeepSpeed."""
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    module = module_of({"weight": placeholder(3, 3), "bias": nn.Parameter(torch.empty(0))})
    state = module.state_dict()
    assert not hasattr(state["weight"], "ds_shape")
    expected = dcp.api.CheckpointException if door == "DCP" else (ValueError, RuntimeError)
    with pytest.raises(expected, match="(?s)weight' is emptied by DeepSpeed's ZeRO-3"):
        DOORS[door](state, tmp_path / "f")
    DOORS[door]({"bias": state["bias"]}, tmp_path / "f")


def test_a_module_of_placeholders_is_not_filled(tmp_path):
    tensorizer.save({"weight": torch.ones(3, 3)}, tmp_path / "f")
    with tensorizer.TensorDeserializer(tmp_path / "f", "cpu") as file:
        with pytest.raises(RuntimeError, match=r"weight: .*ZeRO-3: load inside deepspeed\.zero"):
            file.load_into_module(module_of({"weight": placeholder(3, 3)}))


def test_torch_save_keeps_storages_without_data(tmp_path):
    state = {"real": torch.ones(2), "meta": torch.empty(2, 3, device="meta")}
    with tensorizer_saving():
        torch.save(state, tmp_path / "f.pt")
    with tensorizer_loading():
        found = torch.load(tmp_path / "f.pt")
    assert found["meta"].is_meta and found["meta"].shape == (2, 3) and found["real"].all()


# The command


@pytest.fixture
def key(tmp_path):
    (tmp_path / "key").write_bytes(bytes(range(32)))
    return tmp_path / "key"


def test_copies_keep_the_record_and_name_it(tmp_path, key, capsys):
    tensors = {"real": torch.ones(2), "meta": torch.empty(2, 3, device="meta")}
    tensorizer.save(tensors, tmp_path / "f", allow_meta=True)
    for command, source, target, *options in (
        ("cp", "f", "copy"),
        ("encrypt", "f", "sealed", "--key-file", key),
        ("rekey", "sealed", "again", "--key-file", key, "--new-key-file", key),
        ("decrypt", "again", "plain", "--key-file", key),
    ):
        arguments = [command, tmp_path / source, tmp_path / target, "--verify", *options]
        assert main([*map(str, arguments)]) == 0
        assert "meta has no data" in capsys.readouterr().err
        assert main([*map(str, arguments), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["without_data"] == ["meta"]
    zeros_of(tmp_path / "plain")
    assert main(["diff", str(tmp_path / "f"), str(tmp_path / "plain")]) == 0
    assert main(["cp", str(tmp_path / "f"), str(tmp_path / "f.safetensors")]) == 2
    assert f"'meta' is {META}" in capsys.readouterr().err
    assert not (tmp_path / "f.safetensors").exists()


def test_verify_names_them(tmp_path, capsys):
    tensors = {"real": torch.ones(2), "meta": torch.empty(2, 3, device="meta")}
    tensorizer.save(tensors, tmp_path / "f", allow_meta=True)
    assert main(["verify", str(tmp_path / "f")]) == 0
    assert "meta has no data: a load gives zeros" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "f"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["without_data"] == ["meta"]


# The operators


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
        with pytest.raises(dcp.api.CheckpointException, match=r"'model\.weight' is on"):
            dcp.save(state, storage_writer=writer)
        assert not [name for name in files(tmp_path / "c") if not name.startswith(".")]
    dcp.save({"weight": torch.ones(2)}, storage_writer=writer)
    with pytest.raises(dcp.api.CheckpointException, match="'weight' is on the meta"):
        dcp.save({"weight": torch.empty(2, device="meta")}, storage_writer=Writer(tmp_path / "c"))
    found = {"weight": torch.zeros(2)}
    dcp.load(found, storage_reader=Reader(tmp_path / "c"))
    assert found["weight"].all()
