"""Subclasses of tensors are kept whole or refused; nothing is saved as something else."""

import pytest
import tensorizer
import torch
from tensorizer import TensorDeserializer, TensorSerializer
from tensorizer.torch_compat import tensorizer_loading, tensorizer_saving
from torch.utils.flop_counter import FlopCounterMode

ops = torch.ops.tensorizer


class Halves(torch.Tensor):
    """Made of two tensors, whose sum it is. Like torchao's classes, but answers any operator."""

    @staticmethod
    def __new__(cls, left, right):
        return torch.Tensor._make_wrapper_subclass(cls, left.shape, dtype=left.dtype)

    def __init__(self, left, right):
        self.left, self.right = left, right

    def __tensor_flatten__(self):
        return ["left", "right"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["left"], inner["right"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(func(args[0].left), func(args[0].right))
        # Computes with the sum, and not with the two tensors.
        plain = torch.utils._pytree.tree_map_only(Halves, lambda t: t.left + t.right, args)
        return func(*plain, **(kwargs or {}))


class Described(torch.nn.Parameter):
    """A parameter with plain bytes and attributes, as vLLM has them."""

    def __new__(cls, data, *args, **kwargs):
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data, loader=None, **attributes):
        self._weight_loader = loader
        self.__dict__.update(attributes)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Scales:
    """An object that a library may keep in an attribute."""

    def __init__(self):
        self.absmax = torch.ones(3)


class Scaled(torch.nn.Linear):
    """A module that keeps beside its weight what the weight needs, as bitsandbytes' does."""

    def __init__(self):
        super().__init__(2, 2, bias=False)
        self.weight = Described(torch.ones(2, 2))
        self.scales = torch.ones(2)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scales"] = self.scales


def module_of(parameter):
    module = torch.nn.Module()
    module.weight = parameter
    return module


def as_parameter(tensor):
    is_one = isinstance(tensor, torch.nn.Parameter)
    return tensor if is_one else torch.nn.Parameter(tensor, requires_grad=False)


def write_module(tensor, path):
    with TensorSerializer(path) as serializer:
        serializer.write_module(module_of(as_parameter(tensor)))


def write_tensor(tensor, path):
    with TensorSerializer(path) as serializer:
        serializer.write_tensor(0, "weight", tensorizer.TensorType.PARAM, tensor)


def write_state_dict(tensor, path):
    with TensorSerializer(path) as serializer:
        serializer.write_state_dict({"weight": tensor})


def save_compiled(tensor, path):
    name = str(path)

    @torch.compile(backend="eager", fullgraph=True)
    def save(tensor):
        ops.save(name, ["weight"], [tensor])
        return torch.ones(1)

    save(tensor)


def save_in_inference_mode(tensor, path):
    with torch.inference_mode():
        ops.save(str(path), ["weight"], [Halves(torch.ones(2), torch.ones(2))])


def save_while_somebody_counts(tensor, path):
    with FlopCounterMode(display=False):
        ops.save(str(path), ["weight"], [tensor])


WAYS = [
    write_module,
    write_tensor,
    write_state_dict,
    lambda tensor, path: tensorizer.save({"weight": tensor}, path),
    lambda tensor, path: tensorizer.save({"deep": [tensor]}, path),
    lambda tensor, path: tensorizer.save_async({"weight": tensor}, path),
]
OPERATORS = [
    lambda tensor, path: ops.save(str(path), {"weight": tensor}),
    lambda tensor, path: ops.save(str(path), ["weight"], [tensor]),
    lambda tensor, path: ops.save.list(str(path), ["weight"], [tensor]),
    save_compiled,
    save_in_inference_mode,
    save_while_somebody_counts,
]


@pytest.mark.parametrize("way", WAYS)
def test_saving_a_subclass_that_wraps_other_tensors_is_refused(way, tmp_path):
    tensor = Halves(torch.ones(2), torch.ones(2))
    with pytest.raises(NotImplementedError, match=r"is a Halves, which is made of other .*left, r"):
        way(tensor, tmp_path / "model.tensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("way", OPERATORS)
def test_operators_refuse_wrapper_subclasses(way, tmp_path):
    tensor = Halves(torch.ones(2), torch.ones(2))
    with pytest.raises(RuntimeError, match="`weight`: tensor subclasses that implement __torch_d"):
        way(tensor, tmp_path / "model.tensors")
    assert not list(tmp_path.iterdir())


def test_loads_into_wrapper_subclasses_are_refused(tmp_path):
    path = str(tmp_path / "model.tensors")
    tensorizer.save({"weight": torch.zeros(2)}, path)
    tensor = Halves(torch.ones(2), torch.ones(2))
    for load in (ops.load.into, ops.load_.default):
        with pytest.raises(RuntimeError, match="`weight`: tensor subclasses that implement"):
            load(path, ["weight"], [tensor])
    assert torch.equal(tensor.left, torch.ones(2))
    with TensorSerializer(path) as serializer:
        serializer.write_module(module_of(torch.nn.Parameter(torch.zeros(2))))
    module = module_of(as_parameter(tensor))
    with TensorDeserializer(path, "cpu") as file:
        with pytest.raises(NotImplementedError, match=r"'\.weight' is a Halves, which is more"):
            file.load_into_module(module)


def test_checkpoints_keep_wrapper_subclasses(tmp_path):
    path = tmp_path / "model.pt"
    tensor = Halves(torch.arange(4.0), torch.ones(4))
    with tensorizer_saving():
        torch.save({"weight": tensor}, path)
    # As in torch itself, classes that are not registered must be allowed by the caller.
    with tensorizer_loading(), pytest.raises(Exception, match="add_safe_globals"):
        torch.load(path)
    with tensorizer_loading(), torch.serialization.safe_globals([Halves]):
        loaded = torch.load(path)["weight"]
    assert type(loaded) is Halves
    assert torch.equal(loaded.left, tensor.left)
    assert torch.equal(loaded.right, tensor.right)


def test_parameters_with_attributes_are_saved_as_their_bytes(tmp_path):
    """Loaders, numbers, views of the parameter itself, and modules, are what vLLM keeps there."""
    parameter = Described(torch.arange(4.0), print, output_dim=0, tp_size=2)
    parameter.weight_of = torch.nn.Linear(2, 2)
    parameter.loaded = parameter.data[:2]
    parameter.freed = torch.empty(0)
    parameter.main_grad = torch.ones(4)
    parameter.planned = torch.empty(9, device="meta")
    for way in WAYS:
        done = way(parameter, tmp_path / "model.tensors")
        if done is not None:
            done.result()
        (loaded,) = tensorizer.load(tmp_path / "model.tensors").values()
        assert torch.equal(loaded, torch.arange(4.0))
    ops.save(str(tmp_path / "ops"), {"weight": parameter})
    write_module(torch.zeros(4), tmp_path / "model.tensors")
    with TensorDeserializer(tmp_path / "model.tensors", "cpu") as file:
        file.load_into_module(module_of(parameter))
    assert parameter.tolist() == [0, 0, 0, 0]
    assert parameter.tp_size == 2


@pytest.mark.parametrize(
    ("attribute", "named"),
    [
        (Scales(), r"scales\.absmax"),
        (torch.ones(3), "scales"),
        ({"up": torch.ones(3)}, r"scales\['up'\]"),
        ([torch.ones(3)], r"scales\[0\]"),
    ],
)
def test_parameters_that_need_other_tensors_are_refused(attribute, named, tmp_path):
    parameter = Described(torch.ones(2), scales=attribute)
    for way in WAYS:
        with pytest.raises(NotImplementedError, match=f"is a Described that needs .*{named}\\)"):
            way(parameter, tmp_path / "model.tensors")
    assert not list(tmp_path.iterdir())


def test_modules_that_keep_what_a_parameter_needs_are_refused(tmp_path):
    path = tmp_path / "model.tensors"
    module = torch.nn.Sequential(Scaled())
    with pytest.raises(NotImplementedError, match=r"'0\.weight' is a Described of a Scaled, "):
        with TensorSerializer(path) as serializer:
            serializer.write_module(module)
    assert not path.exists()
    tensorizer.save(module.state_dict(), path)
    assert set(tensorizer.load(path)) == {"0.weight", "0.scales"}
    with TensorSerializer(path) as serializer:
        serializer.write_module(torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False)))
    with TensorDeserializer(path, "cpu") as file:
        with pytest.raises(NotImplementedError, match=r"'0\.weight' is a Described, which is more"):
            file.load_into_module(module)


# The libraries themselves, where they are installed.


def test_torchao(tmp_path):
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    state = model.state_dict()
    for way in WAYS:
        with pytest.raises(NotImplementedError, match=r"is a Int8Tensor, which .*qdata, scale"):
            way(state["0.weight"], tmp_path / "model.tensors")
    for way in OPERATORS[:3]:
        with pytest.raises(RuntimeError, match="`weight`: tensor subclasses that implement"):
            way(state["0.weight"], tmp_path / "model.tensors")
    assert not list(tmp_path.iterdir())
    with tensorizer_saving():
        torch.save(state, tmp_path / "model.pt")
    with tensorizer_loading():
        loaded = torch.load(tmp_path / "model.pt")
    again = torch.nn.Sequential(torch.nn.Linear(64, 64))
    again.load_state_dict(loaded, assign=True)
    assert type(again[0].weight) is type(model[0].weight)
    values = torch.randn(2, 64)
    assert torch.equal(again(values), model(values))


@pytest.mark.filterwarnings("ignore")
def test_bitsandbytes(tmp_path):
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    four = bnb.nn.Linear4bit(64, 64).to("cpu")
    eight = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False).to("cpu")
    values = torch.randn(2, 64)
    for module, kind in ((four, "Params4bit"), (eight, "Int8Params"), (eight, "Int8Params")):
        with pytest.raises(NotImplementedError, match=rf"'\.weight' is a {kind} "):
            with TensorSerializer(tmp_path / "model.tensors") as serializer:
                serializer.write_module(module)
        module(values)  # what Int8Params carries goes to the module
    model = torch.nn.Sequential(four, eight)
    state = model.state_dict()
    tensorizer.save(state, tmp_path / "model.tensors")
    loaded = tensorizer.load(tmp_path / "model.tensors")
    assert list(loaded) == list(state)
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    with tensorizer_saving():
        torch.save(model, tmp_path / "model.pt")
    with tensorizer_loading():
        again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(again(values), model(values))


class Renaming(torch.nn.Linear):
    """A module whose state dict has other names for what it has."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "w"] = self.weight if keep_vars else self.weight.detach()
        destination[prefix + "first_row"] = self.weight.detach()[:1]


class Failing(torch.nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        raise RuntimeError("not before it is ready")


@pytest.mark.parametrize("kind", [Renaming, Failing])
def test_other_state_dicts_are_no_reason(kind, tmp_path):
    module = kind(2, 2, bias=False)
    module.weight = Described(torch.ones(2, 2))
    with TensorSerializer(tmp_path / "f") as serializer:
        serializer.write_module(module)
    with TensorDeserializer(tmp_path / "f", "cpu") as file:
        assert file.load_into_module(module) == 1
