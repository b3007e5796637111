"""Modules take saved state dicts, of every format, by the names that these give their tensors."""

import json
import warnings

import pytest
import tensorizer
import torch
from conftest import assert_same
from safetensors.torch import save_file, save_model
from tensorizer import HashMismatchError, TensorDeserializer, TensorSerializer, utils


class Model(torch.nn.Module):
    """Parameters and buffers of the root, a buffer that is not persistent, and tied weights."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(3))
        self.register_buffer("steps", torch.tensor(4))
        self.register_buffer("scratch", torch.randn(2), persistent=False)
        self.norm = torch.nn.BatchNorm1d(4)
        self.a = torch.nn.Linear(4, 4, bias=False)
        self.b = torch.nn.Linear(4, 4)
        self.b.weight = self.a.weight


def make():
    torch.manual_seed(18)
    model = Model()
    model.norm.running_mean.normal_()
    model.norm.num_batches_tracked.fill_(7)
    return model


MODEL = make()
STATE = {name: tensor.clone() for name, tensor in MODEL.state_dict().items()}
TIED = ("a.weight", "b.weight")


def without(*names):
    return {name: tensor for name, tensor in STATE.items() if name not in names}


def tensors_of(module):
    return dict(module.state_dict(keep_vars=True), scratch=module.scratch)


def check(module, state=STATE):
    for name, tensor in state.items():
        assert_same(module.state_dict()[name], tensor)


@pytest.fixture(params=["safetensors", "tensors"])
def path(request, tmp_path):
    return tmp_path / f"f.{request.param}"


@pytest.fixture(params=["eager", "lazy"])
def load(request, path):
    """Save tensors, by name, and load them into a module."""

    def load(module, tensors=None, *, verify_hash=None, **options):
        if tensors is not None:
            tensorizer.save({name: tensor.clone() for name, tensor in tensors.items()}, path)
        file = TensorDeserializer(path, "cpu", lazy_load=lazy)
        return file.load_into_module(module, verify_hash=verify_hash, **options)

    lazy = request.param == "lazy"
    load.path, load.lazy = path, lazy
    return load


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.device
@pytest.mark.parametrize("strict", [False, True])
def test_one_of_two_tied_weights(load, strict):
    """The safetensors library saves modules like this: the file has one of two tied weights."""
    if load.path.suffix == ".safetensors":
        save_model(MODEL, load.path)
    else:
        tensorizer.save(without("b.weight"), load.path)
    other = Model()
    before = {name: (t, t.data_ptr()) for name, t in tensors_of(other).items()}
    scratch = other.scratch.clone()
    assert load(other, strict=strict) == len(STATE) - 1
    check(other)
    # All are filled in place: an optimizer, for instance, has references to them.
    for name, tensor in tensors_of(other).items():
        assert tensor is before[name][0]
        assert tensor.data_ptr() == before[name][1]
    assert other.a.weight is other.b.weight
    assert_same(other.scratch, scratch)
    assert set(dict(other.named_buffers())) == set(dict(MODEL.named_buffers()))
    assert other.state_dict().keys() == STATE.keys()


@pytest.mark.parametrize("missing", [None, *TIED])
@pytest.mark.parametrize("strict", [False, True])
def test_ties_of_meta_modules(load, missing, strict):
    empty = utils.no_init_or_tensor(Model)
    assert load(empty, without(missing), strict=strict) == len(STATE) - (missing is not None)
    check(empty)
    assert empty.a.weight is empty.b.weight
    assert type(empty.a.weight) is torch.nn.Parameter
    assert empty.a.weight.requires_grad
    assert len(list(empty.parameters())) == len(list(MODEL.parameters()))
    assert not empty.steps.requires_grad
    assert dict(empty.named_buffers()).keys() == dict(MODEL.named_buffers()).keys()


@pytest.mark.device
@pytest.mark.parametrize("meta", [False, True])
def test_tied_weights_that_differ_in_the_file(load, meta):
    other = utils.no_init_or_tensor(Model) if meta else Model()
    state = {**STATE, "b.weight": torch.full((4, 4), 5.0)}
    assert load(other, state) == len(STATE)
    check(other, state)
    assert other.a.weight is not other.b.weight


def test_a_folder_of_shards(tmp_path):
    shards = {"1.safetensors": ["a.weight", "scale"], "2.safetensors": [*without("a.weight")]}
    shards["2.safetensors"].remove("scale")
    for shard, names in shards.items():
        save_file({name: STATE[name] for name in names}, tmp_path / shard)
    home = {name: shard for shard, names in shards.items() for name in names}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": home}))
    other = utils.no_init_or_tensor(Model)
    with TensorDeserializer(tmp_path, "cpu", lazy_load=True) as file:
        assert file.load_into_module(other, strict=True) == len(STATE)
    check(other)
    assert other.a.weight is other.b.weight


@pytest.mark.device
def test_every_dtype_is_kept_or_cast(load):
    state = {**STATE, "scale": STATE["scale"].half()}
    other = Model()
    with pytest.warns(match=r"change to .*: scale \(from torch.float32 to torch.float16\)$"):
        assert load(other, state) == len(STATE)
    check(other, state)
    other = Model()
    file = TensorDeserializer(load.path, "cpu", dtype=torch.float64, lazy_load=load.lazy)
    with pytest.warns(match=r"change to .*[ :]scale \(from torch.float32 to") as caught:
        file.load_into_module(other)
    assert len(caught) == 1
    assert other.scale.dtype == other.a.weight.dtype == torch.float64
    assert other.a.weight is other.b.weight
    assert other.steps.dtype == torch.int64


def test_tensors_missing_in_the_file_keep_their_values(load):
    other = Model()
    bias, weight = other.b.bias.detach().clone(), other.a.weight
    with pytest.warns(UserWarning, match="stay as they are: a.weight, b.bias, b.weight;"):
        count = load(other, without("b.bias", *TIED))
    assert count == len(STATE) - 3
    assert_same(other.b.bias.detach(), bias)
    assert other.a.weight is other.b.weight is weight
    with pytest.raises(RuntimeError, match="missing in the file: a.weight, b.bias, b.weight"):
        load(Model(), strict=True)


def test_tensors_only_in_the_file_become_buffers(load):
    other = Model()
    with pytest.warns(
        UserWarning, match="Model has new tensors, which only the file had: more, no"
    ):
        count = load(other, {**STATE, "more": torch.ones(2), "norm.more": torch.ones(1)})
    assert count == len(STATE) + 2
    check(other)
    assert other.more.tolist() == [1, 1]
    assert "more" in other._buffers
    assert other.norm._buffers["more"].tolist() == [1]
    fresh = Model()
    with pytest.raises(RuntimeError, match="unknown to the module: more, norm.more"):
        load(fresh, strict=True)
    assert not hasattr(fresh, "more")


def test_a_buffer_that_is_not_persistent_may_be_in_a_file(load):
    other = Model()
    assert load(other, {**STATE, "scratch": torch.zeros(2)}, strict=True) == len(STATE) + 1
    assert other.scratch.tolist() == [0, 0]
    assert "scratch" not in other.state_dict()


@pytest.mark.parametrize(
    ("more", "error", "text"),
    [
        ({"c.weight": torch.ones(1)}, KeyError, "no submodule 'c', to which 'c.weight' belongs"),
        ({"steps.x": torch.ones(1)}, KeyError, "no submodule 'steps'"),
        ({"a": torch.ones(1)}, KeyError, "'a' of the file is no tensor of the module"),
        ({"norm.eps": torch.ones(1)}, KeyError, "'norm.eps' of the file is no tensor"),
        ({"a.weight": torch.ones(4, 5)}, RuntimeError, r"for a.weight: .*\[4, 5\].*\[4, 4\]"),
        ({"scale": torch.ones(())}, RuntimeError, r"for scale: the file holds \[\].*\[3\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
@pytest.mark.parametrize("meta", [False, True])
def test_a_file_that_does_not_fit_leaves_the_module_unchanged(load, more, error, text, meta):
    other = utils.no_init_or_tensor(Model) if meta else Model()
    before = {name: (id(tensor), tensor.clone()) for name, tensor in tensors_of(other).items()}
    with pytest.raises(error, match=text):
        load(other, {**STATE, **more})
    assert tensors_of(other).keys() == before.keys()
    for name, tensor in tensors_of(other).items():
        assert id(tensor) == before[name][0]
        assert meta or torch.equal(tensor, before[name][1])


def test_a_filter_takes_names_of_the_file(load):
    other = Model()
    scale = other.scale.detach().clone()
    seen = []

    def wanted(name):
        seen.append(name)
        return name.startswith("norm.")

    assert load(other, STATE, filter_func=wanted) == 5
    assert set(seen) == set(STATE)
    assert_same(other.scale.detach(), scale)
    assert_same(other.norm.running_mean, STATE["norm.running_mean"])
    assert load(Model(), strict=True, filter_func=wanted) == 5
    # The module need not have the submodule of a tensor that is left out.
    rest = {**STATE, "head.weight": torch.ones(1)}
    assert load(Model(), rest, filter_func=lambda name: not name.startswith("head")) == len(STATE)


@pytest.mark.parametrize("lazy", [False, True])
def test_there_are_no_hashes(tmp_path, lazy):
    path = tmp_path / "f.safetensors"
    save_file(STATE, path)
    other = Model()
    scale = other.scale.detach().clone()
    with pytest.raises(HashMismatchError, match="safetensors files hold no hashes"):
        with TensorDeserializer(path, "cpu", lazy_load=lazy, verify_hash=True) as file:
            file.load_into_module(other)
    assert_same(other.scale.detach(), scale)


def test_a_module_is_verified_against_the_file_of_a_state_dict(tmp_path):
    tensorizer.save(MODEL.state_dict(), tmp_path / "f.tensors")
    other = Model()
    del other.scratch
    file = TensorDeserializer(tmp_path / "f.tensors", "cpu", lazy_load=True)
    assert not file.verify_module(other)[0]
    assert file.load_into_module(other, verify_hash=True, strict=True) == len(STATE)
    check(other)
    file = TensorDeserializer(tmp_path / "f.tensors", "cpu")
    same, found = file.verify_module(other)
    assert same, found
    assert {name for name, _ in found} >= {".scale", "norm.weight", *TIED}
    with torch.no_grad():
        other.scale += 1
    assert [name for name, fine in file.verify_module(other)[1] if not fine] == [".scale"]


def test_files_with_few_tensors(load, tmp_path):
    other = Model()
    with pytest.warns(UserWarning, match=r"stay as they are: \.steps, a\.weight"):
        assert load(other, {"scale": torch.ones(3)}) == 1
    check(other, {"scale": torch.ones(3)})
    # A .tensors file without tensors is refused before there is a module.
    save_file({}, tmp_path / "none.safetensors")
    file = TensorDeserializer(tmp_path / "none.safetensors", "cpu")
    with pytest.warns(UserWarning, match="stay as they are"):
        assert file.load_into_module(other) == 0
    check(other, {"scale": torch.ones(3)})


def test_modules_are_mapped(tmp_path):
    save_file({"weight": torch.ones(700, 600)}, tmp_path / "f.safetensors")
    other = torch.nn.Linear(600, 700, bias=False)
    weight, address = other.weight, other.weight.data_ptr()
    TensorDeserializer(tmp_path / "f.safetensors", "cpu", mmap=True).load_into_module(other)
    assert other.weight is weight
    assert weight.data_ptr() != address
    assert weight.eq(1).all()


@pytest.mark.parametrize("kind", ["safetensors", "tensors"])
def test_a_module_of_two_names(tmp_path, kind):
    """A file needs only one of the names of a submodule that is there twice."""
    module = torch.nn.Module()
    module.a = module.b = torch.nn.Linear(2, 2)
    path = tmp_path / f"f.{kind}"
    saved = {"b.weight": torch.ones(2, 2), "b.bias": torch.ones(2)}
    if kind == "safetensors":
        save_file(saved, path)
    else:
        inner = torch.nn.Module()
        inner.b = torch.nn.Linear(2, 2)
        inner.load_state_dict(saved)
        with TensorSerializer(path) as file:
            file.write_module(inner)
    assert TensorDeserializer(path, "cpu").load_into_module(module, strict=True) == 2
    assert module.a.weight.eq(1).all()


def test_extra_state_is_passed_over(path):
    class Extra(torch.nn.Linear):
        def get_extra_state(self):
            return torch.tensor([1, 2])

        def set_extra_state(self, state):
            raise AssertionError("not by a load of tensors")

    module = Extra(2, 2)
    tensorizer.save(module.state_dict(), path)
    with pytest.warns(UserWarning, match="_extra_state is not loaded"):
        count = TensorDeserializer(path, "cpu").load_into_module(module, strict=False)
    assert count == 2
    assert not list(module.buffers())


@pytest.mark.parametrize(("name", "error"), [("", KeyError), ("norm.", KeyError), (".scale", None)])
def test_names_of_nothing_and_of_one_tensor_twice_change_nothing(tmp_path, name, error):
    saved = {**STATE, name: torch.zeros(3)}
    del saved["b.weight"]
    save_file(saved, tmp_path / "f.safetensors")
    module = make()
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    with pytest.raises(error or RuntimeError, match="name ends with|are one tensor"):
        TensorDeserializer(tmp_path / "f.safetensors", "cpu").load_into_module(module)
    after = module.state_dict()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())


def test_conjugates_that_are_tied(tmp_path):
    weight = torch.randn(3, dtype=torch.complex64)
    module = torch.nn.Module()
    module.a, module.b = torch.nn.Module(), torch.nn.Module()
    module.a.weight = module.b.weight = torch.nn.Parameter(torch.zeros_like(weight))
    torch.save({"a.weight": weight.conj(), "b.weight": weight}, tmp_path / "f.pt")
    TensorDeserializer(tmp_path / "f.pt", "cpu").load_into_module(module)
    assert torch.equal(module.a.weight, weight.conj())
    assert torch.equal(module.b.weight, weight)
    file = TensorDeserializer(tmp_path / "f.pt", "cpu", lazy_load=True)
    arrays = {name: array for _, _, name, array, _, _ in file.read_numpy_arrays()}
    assert (arrays["a.weight"] == weight.conj().resolve_conj().numpy()).all()


def test_hashes_are_asked_for_after_a_load(tmp_path):
    save_file(STATE | {"b.weight": STATE["b.weight"].clone()}, tmp_path / "f.safetensors")
    file = TensorDeserializer(tmp_path / "f.safetensors", "cpu")
    with pytest.raises(HashMismatchError, match="safetensors files hold no hashes"):
        file.load_into_module(make(), verify_hash=True)
    with pytest.raises(HashMismatchError, match="safetensors files hold no hashes"):
        list(file.read_tensors(verify_hash=True))


def test_integer_keys_of_dicts_stay_keys(tmp_path):
    state = {
        "state": {5: {"step": torch.ones(1)}, 3: {"step": torch.zeros(1)}},
        "l": [torch.ones(2)],
    }
    torch.save(state, tmp_path / "f.pt")
    tree = TensorDeserializer(tmp_path / "f.pt", "cpu").tree()
    assert list(tree["state"]) == [5, 3]
    assert tree["state"][5]["step"] == 1
    assert isinstance(tree["l"], list)
