"""A module keeps its objects, memory and attributes when weights are loaded into it."""

import contextlib
import warnings

import pytest
import torch
from conftest import assert_same
from tensorizer import TensorDeserializer, TensorSerializer, utils
from tensorizer.modules import state


class Weight(torch.nn.Parameter):
    """A parameter like those of vLLM: a subclass with attributes that the loader needs."""

    def __new__(cls, data, **attributes):
        return torch.Tensor._make_subclass(cls, data, True)

    def __init__(self, data, **attributes):
        self.__dict__.update(attributes)


def linear(size=4, bias=True):
    module = torch.nn.Linear(size, size, bias=bias)
    module.weight = Weight(module.weight.detach(), weight_loader="mine")
    module.register_buffer("steps", torch.tensor(3))
    return module


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model, path = linear(), tmp_path / "f"
    with TensorSerializer(path) as serializer:
        serializer.write_module(model)
    return model, path


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("lazy", [False, True])
def test_objects_and_memory_stay(saved, lazy):
    model, path = saved
    other = linear()
    other.bias.requires_grad_(False)
    before = {name: tensor for _, name, _, _, tensor in state.walk(other)}
    addresses = {name: tensor.data_ptr() for name, tensor in before.items()}
    optimizer = torch.optim.SGD([other.weight], 0.5)
    assert TensorDeserializer(path, "cpu", lazy_load=lazy).load_into_module(other) == 3
    for _, name, _, _, tensor in state.walk(other):
        assert tensor is before[name]
        assert tensor.data_ptr() == addresses[name]
    assert_same(other.weight.detach(), model.weight.detach())
    assert_same(other.steps, model.steps)
    assert type(other.weight) is Weight
    assert other.weight.weight_loader == "mine"
    assert not other.bias.requires_grad
    # The optimizer still moves the module's own weights.
    other.weight.sum().backward()
    optimizer.step()
    assert_same(other.weight.detach(), model.weight.detach() - 0.5)


@pytest.mark.parametrize("options", [{"dtype": torch.bfloat16}, {"mmap": True}])
def test_memory_that_does_not_fit_is_replaced(tmp_path, options):
    model, other = linear(600), linear(600)
    with TensorSerializer(tmp_path / "f") as serializer:
        serializer.write_module(model)
    weight, address = other.weight, other.weight.data_ptr()
    file = TensorDeserializer(tmp_path / "f", "cpu", **options)
    text = r"to dtype=: .weight \(from torch.float32 to torch.bfloat16\), .bias \(from"
    with pytest.warns(match=text) if "dtype" in options else contextlib.nullcontext():
        file.load_into_module(other)
    assert other.weight is weight
    assert type(weight) is Weight
    assert weight.data_ptr() != address
    assert_same(weight.detach(), model.weight.detach().to(options.get("dtype", torch.float32)))


def test_meta_tensors_become_objects_of_their_class(saved):
    model, path = saved
    with utils.no_init_or_tensor():
        empty = torch.nn.Linear(4, 4)
    empty.weight = Weight(empty.weight.detach(), weight_loader="mine")
    empty.bias.requires_grad_(False)
    empty.bias.note = "kept"
    empty.register_buffer("steps", torch.empty((), dtype=torch.int64, device="meta"))
    assert TensorDeserializer(path, "cpu").load_into_module(empty) == 3
    assert type(empty.weight) is Weight
    assert empty.weight.weight_loader == "mine"
    assert empty.weight.requires_grad
    assert empty.bias.note == "kept"
    assert not empty.bias.requires_grad
    assert_same(empty.weight.detach(), model.weight.detach())
    assert_same(empty.steps, model.steps)


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
def test_shapes_must_fit(saved, meta, lazy):
    _, path = saved
    other = linear(5)
    if meta:
        other = other.to("meta")
    bias = other.bias
    text = r"Linear does not fit the file:\n\tsize mismatch for \.weight: .*\[4, 4\].*\[5, 5\]"
    with pytest.raises(RuntimeError, match=text):
        TensorDeserializer(path, "cpu", lazy_load=lazy).load_into_module(other)
    assert other.bias is bias
    assert list(other.weight.shape) == [5, 5]


def test_names_that_only_the_file_has(saved):
    model, path = saved
    other = linear(bias=False)
    with pytest.warns(UserWarning, match=r"only the file had: \.bias"):
        assert TensorDeserializer(path, "cpu").load_into_module(other) == 3
    assert_same(other.bias.detach(), model.bias.detach())


def test_the_marker_of_vllm_comes_without_a_warning(tmp_path):
    model = linear()
    marker = torch.nn.Parameter(torch.tensor((1,), device="meta"), requires_grad=False)
    model.register_parameter("vllm_tensorized_marker", marker)
    with TensorSerializer(tmp_path / "f") as serializer:
        serializer.write_module(model)
    other = linear()
    assert TensorDeserializer(tmp_path / "f", "cpu").load_into_module(other) == 4
    del other.vllm_tensorized_marker


def test_strict(saved):
    _, path = saved

    def load(module):
        return TensorDeserializer(path, "cpu").load_into_module(module, strict=True)

    module = linear()
    module.register_buffer("scratch", torch.ones(1), persistent=False)
    assert load(module) == 3
    with pytest.raises(RuntimeError, match=r"unknown to the module: \.bias"):
        load(linear(bias=False))
    module.register_parameter("more", torch.nn.Parameter(torch.ones(1)))
    with pytest.raises(RuntimeError, match=r"missing in the file: \.more"):
        load(module)


def test_parameters_that_share_memory_and_differ_in_the_file(tmp_path):
    model = torch.nn.Module()
    model.a, model.b = (torch.nn.Parameter(torch.full((6,), n)) for n in (1.0, 2.0))
    with TensorSerializer(tmp_path / "f") as serializer:
        serializer.write_module(model)
    flat = torch.zeros(6)
    other = torch.nn.Module()
    other.a, other.b = torch.nn.Parameter(flat), torch.nn.Parameter(flat)
    for lazy in (False, True):
        TensorDeserializer(tmp_path / "f", "cpu", lazy_load=lazy).load_into_module(other)
        assert other.a.tolist() == [1.0] * 6
        assert other.b.tolist() == [2.0] * 6


@pytest.mark.parametrize("lazy", [False, True])
def test_lazy_modules(tmp_path, lazy):
    model = torch.nn.Linear(3, 2)
    with TensorSerializer(tmp_path / "f") as serializer:
        serializer.write_module(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = torch.nn.LazyLinear(2)
    TensorDeserializer(tmp_path / "f", "cpu", lazy_load=lazy).load_into_module(other)
    assert_same(other(torch.ones(1, 3)).detach(), model(torch.ones(1, 3)).detach())


@pytest.mark.parametrize("lazy", [False, True])
def test_tied_scalars_and_inference_tensors(tmp_path, lazy):
    def make():
        module = torch.nn.Module()
        module.a, module.b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        module.a.scale = module.b.scale = torch.nn.Parameter(torch.randn(()))
        return module

    model = make()
    with TensorSerializer(tmp_path / "f") as serializer:
        serializer.write_module(model)
    with torch.inference_mode():
        frozen = make()
    for other in (make(), frozen):
        TensorDeserializer(tmp_path / "f", "cpu", lazy_load=lazy).load_into_module(other)
        assert other.a.scale is other.b.scale
        assert_same(other.a.scale.detach(), model.a.scale.detach())
        assert_same(other.b.weight.detach(), model.b.weight.detach())


def test_an_attribute_that_is_no_tensor(saved):
    _, path = saved
    other = linear()
    del other.bias
    other.bias = None
    before = other.weight.detach().clone()
    with pytest.raises(KeyError, match="another attribute"):
        TensorDeserializer(path, "cpu").load_into_module(other)
    assert_same(other.weight.detach(), before)


def test_strict_with_a_filter(saved):
    _, path = saved
    file = TensorDeserializer(path, "cpu")
    assert file.load_into_module(linear(), lambda name: "bias" in name, strict=True) == 1
