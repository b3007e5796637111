"""A module keeps its objects, memory and attributes when weights are loaded into it."""

import contextlib
import io
import warnings

import pytest
import tensorizer
import torch
from conftest import assert_same
from tensorizer import TensorDeserializer, TensorSerializer, utils
from tensorizer.modules import state
from tensorizer.modules.strides import elements_spanned


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


def transposed(device=None):
    """Return a module as vLLM has them after it has processed FP8 weights."""
    module = torch.nn.Module()
    weight = torch.arange(32.0, device=device).reshape(8, 4).to(torch.float8_e4m3fn)
    module.weight = torch.nn.Parameter(weight.t(), requires_grad=False)
    return module


def channels_last(device=None):
    torch.manual_seed(1)
    return torch.nn.Conv2d(8, 16, 3, device=device).to(memory_format=torch.channels_last)


def with_gaps(device=None):
    module = torch.nn.Module()
    weight = torch.arange(40.0, device=device).reshape(4, 10)[:, 1:8]
    module.weight = torch.nn.Parameter(weight)
    return module


@pytest.mark.parametrize("make", [transposed, channels_last, with_gaps])
@pytest.mark.parametrize("options", [{}, {"lazy_load": True}, {"mmap": True}])
@pytest.mark.parametrize("ending", ["tensors", "safetensors"])
def test_strides_of_the_module_stay(tmp_path, make, options, ending):
    source = make()
    path = tmp_path / f"f.{ending}"
    tensorizer.save({name: t.contiguous() for name, t in source.state_dict().items()}, path)
    for device in ("cpu", "meta"):
        target = make(device)
        strides, before = target.weight.stride(), target.weight
        assert not target.weight.is_contiguous()
        if device == "cpu":
            target.weight.untyped_storage().fill_(0)
        with TensorDeserializer(path, "cpu", **options) as file:
            file.load_into_module(target, strict=True)
        assert target.weight.stride() == strides
        assert_same(target.weight.detach(), source.weight.detach())
        if device == "cpu":
            assert target.weight is before


def test_memory_with_gaps_is_filled_and_its_gaps_stay(tmp_path):
    tensorizer.save({"weight": torch.ones(4, 7)}, tmp_path / "f")
    module, whole = torch.nn.Module(), torch.zeros(4, 10)
    module.weight = torch.nn.Parameter(whole[:, 1:8])
    TensorDeserializer(tmp_path / "f", "cpu").load_into_module(module)
    assert whole.tolist() == [[0.0] + [1.0] * 7 + [0.0] * 2] * 4


def test_elements_that_share_memory_get_memory_of_their_own(tmp_path):
    tensorizer.save({"weight": torch.arange(12.0).view(3, 4)}, tmp_path / "f")
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.zeros(4).expand(3, 4))
    TensorDeserializer(tmp_path / "f", "cpu").load_into_module(module)
    assert module.weight.tolist() == torch.arange(12.0).view(3, 4).tolist()


@pytest.mark.parametrize(
    ("shape", "strides", "spanned"),
    [
        ((), (), 1),
        ((2, 3), (3, 1), 6),
        ((3, 2), (1, 3), 6),
        ((3, 2), (1, 4), 7),
        ((1, 4), (0, 1), 4),
        ((3, 4), (0, 1), None),
        ((3, 3), (1, 1), None),
        ((2, 2), (3, 2), 6),
        ((2, 2), (2, 2), None),
    ],
)
def test_elements_spanned(shape, strides, spanned):
    tensor = torch.zeros(20).as_strided(shape, strides)
    assert elements_spanned(tensor) == spanned


@pytest.mark.parametrize("lazy", [False, True])
def test_dtypes_that_change_are_named_once(saved, lazy):
    model, path = saved
    other = linear().bfloat16()
    text = (
        r"^the dtypes of Linear change to those of the file, or to dtype=: \.weight \(from "
        r"torch.bfloat16 to torch.float32\), \.bias \(from torch.bfloat16 to torch.float32\)$"
    )
    with pytest.warns(UserWarning, match=text) as caught:
        TensorDeserializer(path, "cpu", lazy_load=lazy).load_into_module(other)
    assert (len(caught), other.weight.dtype) == (1, torch.float32)
    other = linear().bfloat16()
    TensorDeserializer(path, "cpu", dtype="bfloat16", lazy_load=lazy).load_into_module(other)
    assert_same(other.weight.detach(), model.weight.detach().bfloat16())


@pytest.mark.parametrize("lazy", [False, True])
def test_files_of_vllm_keep_dtypes_that_the_module_has(tmp_path, lazy):
    """vLLM passes the dtype of the model, of which some parameters have another."""
    source = torch.nn.Linear(3, 3, dtype=torch.bfloat16)
    source.A = torch.nn.Parameter(torch.tensor([1 / 3]))
    source.register_buffer("scale", torch.tensor(1 / 7))
    source.register_buffer("rounded", torch.tensor(1 / 9))
    source.vllm_tensorized_marker = torch.nn.Parameter(torch.tensor((1,), device="meta"), False)
    with TensorSerializer(tmp_path / "f") as serializer:
        serializer.write_module(source)

    def read():
        stream = io.BytesIO((tmp_path / "f").read_bytes())
        return TensorDeserializer(stream, "cpu", dtype=torch.bfloat16, lazy_load=lazy)

    target = torch.nn.Linear(3, 3, dtype=torch.bfloat16)
    target.A = torch.nn.Parameter(torch.zeros(1))
    target.register_buffer("scale", torch.zeros(()))
    target.register_buffer("rounded", torch.zeros((), dtype=torch.bfloat16))
    file = read()
    # Also if it was requested before.
    assert file[".A"].dtype == torch.bfloat16
    file.load_into_module(target)
    for name in ("weight", "bias", "A", "scale"):
        assert_same(getattr(target, name).detach(), getattr(source, name).detach())
    assert_same(target.rounded, source.rounded.bfloat16())
    for tensor in (read()[".scale"], dict(read())[".A"], next(iter(read().read_tensors()))[3]):
        assert tensor.dtype == torch.bfloat16


def with_table(device, table_device=None):
    with torch.device(device):
        model = linear()
    table = torch.zeros(2, device=table_device or device)
    model.register_buffer("table", table, persistent=False)
    return model


@pytest.mark.parametrize("lazy", [False, True])
def test_buffers_that_stay_without_data_are_named(saved, lazy):
    _, path = saved

    def load(model, **options):
        TensorDeserializer(path, "cpu", lazy_load=lazy).load_into_module(model, **options)

    load(with_table("cpu"), strict=True)
    load(with_table("meta", "cpu"), strict=True)
    text = "on the meta device, and not in the file: .table"
    with pytest.warns(UserWarning, match=f"^Linear has buffers that are {text}; compute them"):
        load(with_table("meta"))
    model = with_table("meta")
    with pytest.raises(RuntimeError, match=f"\n\t{text}$"):
        load(model, strict=True)
    assert model.weight.is_meta
