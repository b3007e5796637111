"""Tensors whose storage is smaller than they need are refused by name, in every call."""

import pytest
import tensorizer
import torch
import torch.distributed.checkpoint as dcp
from conftest import files
from tensorizer.distributed import Reader, Writer

ops = torch.ops.tensorizer
SHORT = r"`?'?weight`?'?.*its storage has \d+ bytes, expected at least"


def freed():
    """A parameter as FSDP leaves it where it is not gathered."""
    tensor = torch.ones(4, 3)
    tensor.untyped_storage().resize_(0)
    return tensor


def cut():
    tensor = torch.ones(4, 3)
    tensor.untyped_storage().resize_(8)
    return tensor


def freed_strided():
    """A strided tensor, which torch would have to copy first."""
    tensor = torch.ones(3, 4).t()
    tensor.untyped_storage().resize_(0)
    return tensor


def conjugated():
    tensor = torch.ones(4, 3, dtype=torch.complex64).conj()
    tensor.untyped_storage().resize_(8)
    return tensor


def beyond():
    """A view that begins where the storage ends."""
    tensor = torch.ones(100)
    view = tensor[88:].view(4, 3)
    tensor.untyped_storage().resize_(88 * 4)
    return view


KINDS = [freed, cut, freed_strided, conjugated, beyond]


@pytest.fixture
def path(tmp_path):
    tensorizer.save({"weight": torch.ones(4, 3)}, tmp_path / "f.tensors")
    return tmp_path / "f.tensors"


def by_serializer(path, tensor):
    with tensorizer.TensorSerializer(path) as serializer:
        serializer.write_tensor(0, "weight", tensorizer.TensorType.PARAM, tensor)


def by_module(path, tensor):
    module = torch.nn.Linear(3, 4, bias=False)
    module.weight = torch.nn.Parameter(tensor.detach(), requires_grad=False)
    with tensorizer.TensorSerializer(path) as serializer:
        serializer.write_module(module)


SAVES = {
    "save": lambda path, tensor: tensorizer.save({"weight": tensor}, path),
    "save_async": lambda path, tensor: tensorizer.save_async({"weight": tensor}, path).result(),
    "safetensors": lambda path, tensor: tensorizer.save(
        {"weight": tensor}, path.with_suffix(".safetensors")
    ),
    "operator": lambda path, tensor: ops.save(str(path), {"weight": tensor}),
    "list": lambda path, tensor: ops.save(str(path), ["weight"], [tensor]),
    "serializer": by_serializer,
    "module": by_module,
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_a_save_is_refused_and_the_old_file_stays(save, kind, path):
    before = files(path.parent)
    with pytest.raises((NotImplementedError, RuntimeError, ValueError), match=SHORT):
        save(path, kind())
    assert files(path.parent) == before


#: Overloads by name: to tell which one is meant, torch itself prints the tensors, and crashes.
LOADS = {
    "operator": lambda path, out: ops.load.into(str(path), ["weight"], [out]),
    "one": lambda path, out: ops.load.into_one(str(path), "weight", out),
    "out=": lambda path, out: tensorizer.load(path, out={"weight": out}),
}


@pytest.mark.parametrize("kind", [freed, cut, beyond], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_a_load_into_a_short_storage_is_refused(load, kind, path):
    with pytest.raises((NotImplementedError, RuntimeError, ValueError), match=SHORT):
        load(path, kind())


def test_a_load_into_a_strided_one_is_refused(tmp_path):
    tensorizer.save({"weight": torch.ones(4, 3)}, tmp_path / "f")
    with pytest.raises(RuntimeError, match=SHORT):
        ops.load.into(str(tmp_path / "f"), ["weight"], [freed_strided()])


def test_a_load_into_a_module_is_refused(tmp_path):
    module = torch.nn.Linear(3, 4, bias=False)
    with tensorizer.TensorSerializer(tmp_path / "f") as serializer:
        serializer.write_module(module)
    module.weight.untyped_storage().resize_(0)
    with tensorizer.TensorDeserializer(tmp_path / "f", "cpu") as file:
        with pytest.raises((NotImplementedError, ValueError), match="its storage has 0 bytes"):
            file.load_into_module(module)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints(tmp_path):
    with pytest.raises(dcp.api.CheckpointException, match=SHORT):
        dcp.save({"weight": freed()}, storage_writer=Writer(tmp_path / "c"))
    dcp.save({"weight": torch.ones(4, 3)}, storage_writer=Writer(tmp_path / "c"))
    with pytest.raises(dcp.api.CheckpointException, match="its storage has 0 bytes"):
        dcp.load({"weight": freed()}, storage_reader=Reader(tmp_path / "c"))


def test_a_tensor_without_elements_needs_no_storage(tmp_path):
    tensor = torch.empty(0, 3)
    tensor.untyped_storage().resize_(0)
    tensorizer.save({"weight": tensor}, tmp_path / "f")
    assert tensorizer.load(tmp_path / "f")["weight"].shape == (0, 3)
