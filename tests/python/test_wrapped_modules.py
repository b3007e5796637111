"""Loading into modules that wrap others, as DistributedDataParallel does, and scripted ones."""

import io
import warnings

import pytest
import tensorizer
import tensorizer.safetensors
import torch
import torch.distributed as dist
from conftest import assert_same
from tensorizer import TensorDeserializer, TensorSerializer
from tensorizer.modules import messages
from tensorizer.modules.wrappers import unwrap
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DataParallel, DistributedDataParallel

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")


class Model(torch.nn.Module):
    """With tensors of its own, and a submodule that is called as wrappers call theirs."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.scale = torch.nn.Parameter(torch.randn(3))
        self.register_buffer("shift", torch.randn(3))
        self.fc = torch.nn.Linear(2, 3)
        self.module = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))

    def forward(self, x):
        return self.module(self.fc(x) * self.scale + self.shift)


class Inner(Model):
    """All tensors are in a submodule that is called as wrappers call theirs."""

    def __init__(self, seed=0):
        torch.nn.Module.__init__(self)
        self.module = Model(seed)

    def forward(self, x):
        return self.module(x)


def compiled(module):
    return torch.compile(module, backend="eager")


def in_part(module):
    part = module if type(module) is Model else module.module
    part.fc = compiled(part.fc)
    part.module[-1] = compiled(checkpoint_wrapper(part.module[-1]))
    return module


WRAPPERS = {
    "none": lambda module: module,
    "ddp": DistributedDataParallel,
    "dp": DataParallel,
    "compiled": compiled,
    "ddp of compiled": lambda module: DistributedDataParallel(compiled(module)),
    "compiled of ddp": lambda module: compiled(DistributedDataParallel(module)),
    "parts": in_part,
    "ddp of parts": lambda module: DistributedDataParallel(in_part(module)),
}


@pytest.fixture(scope="module", autouse=True)
def group():
    """The group of one rank that DistributedDataParallel needs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def write_module(module, path):
    with TensorSerializer(path) as serializer:
        serializer.write_module(module)


#: Ways to save a module, with the names that each gives.
SAVES = {
    "write_module": write_module,
    "state_dict": lambda module, path: tensorizer.save(module.state_dict(), path),
    "torch.save": lambda module, path: torch.save(module.state_dict(), path),
    "get_state_dict": lambda module, path: tensorizer.save(get_model_state_dict(module), path),
}


def tensors_of(module):
    """Return the tensors of a module in the order of its own, without the names of wrappers."""
    return [*module.parameters(), *module.buffers()]


@pytest.mark.parametrize("saved", WRAPPERS)
@pytest.mark.parametrize("kind", [Model, Inner])
def test_files_of_any_wrapper_load_into_any(tmp_path, saved, kind):
    source = WRAPPERS[saved](kind(seed=1))
    for name, save in SAVES.items():
        save(source, tmp_path / name)
    for number, wrap in enumerate(WRAPPERS.values()):
        for turn, name in enumerate(SAVES):
            target, lazy = wrap(kind(seed=2)), (number + turn) % 2 == 1
            before = {id(tensor) for tensor in tensors_of(target)}
            with TensorDeserializer(tmp_path / name, "cpu", lazy_load=lazy) as file:
                assert file.load_into_module(target, strict=True) == 11
            assert {id(tensor) for tensor in tensors_of(target)} == before
            for new, old in zip(tensors_of(target), tensors_of(source), strict=True):
                assert_same(new.detach(), old.detach())


@pytest.mark.parametrize("wrap", ["ddp", "compiled", "compiled of ddp", "parts"])
def test_mismatches_of_file_and_wrapped_module_warn_or_raise(tmp_path, wrap):
    write_module(Model(), tmp_path / "f")

    def model(change):
        module = Model()
        change(module)
        return WRAPPERS[wrap](module)

    module = model(lambda m: delattr(m, "shift"))
    with (
        pytest.warns(UserWarning, match=r"only the file had: \.shift"),
        TensorDeserializer(tmp_path / "f", "cpu") as file,
    ):
        file.load_into_module(module)
    assert_same(unwrap(module).shift, Model().shift)
    module = model(lambda m: setattr(m, "fc", torch.nn.Linear(2, 4)))
    with (
        pytest.raises(RuntimeError, match=r"size mismatch for fc.weight: .*\[3, 2\].*\[4, 2\]"),
        TensorDeserializer(tmp_path / "f", "cpu") as file,
    ):
        file.load_into_module(module)
    module = model(lambda m: m.register_parameter("more", torch.nn.Parameter(torch.ones(1))))
    with (
        pytest.raises(RuntimeError, match=r"missing in the file: \S*\.more$"),
        TensorDeserializer(tmp_path / "f", "cpu") as file,
    ):
        file.load_into_module(module, strict=True)
    module = model(lambda m: setattr(m, "module", m.module[:1]))
    with (
        pytest.raises(KeyError, match=r"no submodule 'module.1', to which 'module.1.weight' bel"),
        TensorDeserializer(tmp_path / "f", "cpu") as file,
    ):
        file.load_into_module(module)


def test_names_that_are_written_are_those_of_the_module(tmp_path):
    """As releases before have written them."""
    for wrap in WRAPPERS.values():
        module = wrap(Model())
        write_module(module, tmp_path / "f")
        names = [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]
        own = [name if "." in name else f".{name}" for name in names]
        assert sorted(tensorizer.load(tmp_path / "f")) == sorted(own)


@pytest.mark.parametrize("wrap", ["ddp", "compiled", "ddp of parts"])
def test_verify_module(tmp_path, wrap):
    module = WRAPPERS[wrap](Model())
    write_module(Model(), tmp_path / "f")
    with TensorDeserializer(tmp_path / "f", "cpu", lazy_load=True) as file:
        good, results = file.verify_module(module)
        assert good
        assert [name for name, _ in results] == list(file)
        with torch.no_grad():
            module.get_parameter(dict(module.named_parameters()).popitem()[0]).add_(1)
        good, results = file.verify_module(module)
        assert not good
        assert sum(not ok for _, ok in results) == 1


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, 2))])
def test_scripted_modules_are_filled_in_place(tmp_path, make, lazy):
    source = Model(seed=1).eval()
    expected = source(torch.ones(2, 2))
    for name, save in SAVES.items():
        if name != "get_state_dict":
            save(source, tmp_path / name)
            save(make(source), tmp_path / f"{name}, scripted")
    for path in tmp_path.iterdir():
        for options in ({}, {"mmap": True}):
            target = make(Model(seed=2).eval())
            before = [id(tensor) for tensor in tensors_of(target)]
            with TensorDeserializer(path, "cpu", lazy_load=lazy, **options) as file:
                assert file.load_into_module(target, strict=True) == 11
            assert [id(tensor) for tensor in tensors_of(target)] == before
            assert_same(target(torch.ones(2, 2)).detach(), expected.detach())
    other = DistributedDataParallel(torch.jit.script(Model(seed=3)))
    write_module(source, tmp_path / "f")
    with TensorDeserializer(tmp_path / "f", "cpu", lazy_load=lazy) as file:
        assert file.load_into_module(other) == 11
    assert_same(other.module.fc.weight.detach(), source.fc.weight.detach())


def test_scripted_modules_get_no_new_tensors(tmp_path):
    write_module(Model(seed=1), tmp_path / "f")
    frozen = torch.jit.freeze(torch.jit.script(Model().eval()))
    less = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(2, 3, bias=False)))
    write_module(torch.nn.Sequential(torch.nn.Linear(2, 3)), tmp_path / "more")
    before = less.state_dict()["0.weight"].clone()
    text = "a scripted module gets no new tensors, and a frozen one has none; load before torch.jit"
    for module, path in ((frozen, "f"), (less, "more")):
        with (
            pytest.raises(KeyError, match=text),
            TensorDeserializer(tmp_path / path, "cpu") as file,
        ):
            file.load_into_module(module)
    assert_same(less.state_dict()["0.weight"], before)


@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_modules_that_accelerate_has_offloaded_are_refused(tmp_path, kind):
    accelerate = pytest.importorskip("accelerate")
    ours = tensorizer.safetensors
    tensorizer.save(Model(3).state_dict(), tmp_path / "f.safetensors")
    path = tmp_path / "f.safetensors"
    model = torch.nn.Sequential(Model())

    def offload(folder):
        where = {"offload_dir": tmp_path / folder} if kind == "disk" else {}
        cpu = torch.device("cpu")
        getattr(accelerate, f"{kind}_offload")(model, execution_device=cpu, **where)

    offload("before")
    loads = [
        lambda: TensorDeserializer(path, "cpu").load_into_module(model[0]),
        lambda: TensorDeserializer(path, "cpu", lazy_load=True).load_into_module(model[0]),
        lambda: ours.torch.load_model(model[0], path),
        lambda: messages.deserialize_model(model[0], io.BytesIO()),
    ]
    saves = [
        lambda: TensorSerializer(tmp_path / "saved").write_module(model),
        lambda: ours.torch.save_model(model, tmp_path / "saved"),
        lambda: messages.serialize_model(model, io.BytesIO()),
        lambda: TensorDeserializer(path, "cpu", lazy_load=True).verify_module(model[0]),
    ]
    call = r"call accelerate\.hooks\.remove_hook_from_submodules\(module\) before this, "
    for load in loads:
        with pytest.raises(RuntimeError, match=rf"offloaded the weights of .*: {call}and offload"):
            load()
    for save in saves:
        with pytest.raises(
            RuntimeError, match=rf"offloaded the weights of '0.*: {call}|this Model"
        ):
            save()
    # As the message says.
    accelerate.hooks.remove_hook_from_submodules(model)
    TensorDeserializer(path, "cpu").load_into_module(model[0])
    offload("after")
    with torch.no_grad():
        assert torch.equal(model.eval()(torch.ones(1, 2)), Model(3).eval()(torch.ones(1, 2)))
