"""``load_into_module``, ``verify_module``, ``tensorizer.utils``."""

import asyncio
import contextvars
import threading

import pytest
import tensorizer
import torch
from conftest import assert_same
from tensorizer import TensorDeserializer, TensorSerializer, TensorType, utils

pytestmark = pytest.mark.device


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(20, 4)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
        self.head = torch.nn.Linear(4, 20, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("scratch", torch.randn(3), persistent=False)
        self.scale = torch.nn.Parameter(torch.randn(2))

    def forward(self, x):
        return self.head(self.layers(self.embed(x))) * self.scale[0]


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model = Model()
    path = tmp_path / "model.tensors"
    with TensorSerializer(path) as serializer:
        serializer.write_module(model)
    return model, path


def test_load_into_an_uninitialised_module(saved):
    model, path = saved
    with utils.no_init_or_tensor():
        empty = Model()
    assert empty.embed.weight.is_meta
    deserializer = TensorDeserializer(path, "cpu", lazy_load=True)
    assert deserializer.load_into_module(empty) == 9
    x = torch.arange(20)
    assert torch.equal(model(x), empty(x))
    assert list(empty.state_dict()) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert_same(empty.state_dict()[name], tensor)


def test_buffers_stay_buffers_and_ties_stay_tied(saved):
    model, path = saved
    other = Model()
    TensorDeserializer(path, "cpu").load_into_module(other)
    assert other.head.weight is other.embed.weight
    assert type(other.steps) is torch.Tensor
    assert "scratch" in other._non_persistent_buffers_set
    assert set(dict(other.named_parameters())) == set(dict(model.named_parameters()))
    assert_same(other.scratch, model.scratch)
    assert other.scale.requires_grad


def test_tied_in_the_module_but_not_in_the_file(saved):
    model, path = saved
    model.head.weight = torch.nn.Parameter(model.embed.weight.detach() + 1)
    with TensorSerializer(path) as serializer:
        serializer.write_module(model)
    other = Model()
    TensorDeserializer(path, "cpu").load_into_module(other)
    assert_same(other.head.weight.detach(), model.head.weight.detach())
    assert_same(other.embed.weight.detach(), model.embed.weight.detach())


def test_a_filter_and_tensors_that_the_file_lacks(saved):
    _, path = saved
    other = Model()
    kept = other.scale
    loaded = TensorDeserializer(path, "cpu").load_into_module(
        other, filter_func=lambda name: name.startswith("layers.")
    )
    assert loaded == 4
    assert other.scale is kept
    other.extra = torch.nn.Linear(1, 1)
    assert TensorDeserializer(path, "cpu").load_into_module(other) == 9


def test_wrong_modules_are_refused_before_anything_changes(saved, tmp_path):
    _, path = saved
    small = Model()
    before = small.embed.weight
    del small.layers
    with pytest.raises(KeyError, match=r"no submodule 'layers.0'"):
        TensorDeserializer(path, "cpu").load_into_module(small)
    assert small.embed.weight is before
    state = tmp_path / "state"
    tensorizer.save({"embed": {"weight": torch.ones(20, 4)}}, state)
    with pytest.raises(NotImplementedError, match="nested structure"):
        TensorDeserializer(state, "cpu").load_into_module(Model())
    with TensorSerializer(state) as serializer:
        serializer.write_tensor(0, "nodot", TensorType.PARAM, torch.ones(1))
    with pytest.raises(ValueError, match="names no module"):
        TensorDeserializer(state, "cpu").load_into_module(Model())


def test_a_parameter_in_the_file_that_is_a_buffer_in_the_module(tmp_path):
    with TensorSerializer(tmp_path / "f") as serializer:
        serializer.write_tensor(0, ".x", TensorType.PARAM, torch.ones(2))
        serializer.write_tensor(0, ".y", TensorType.BUFFER, torch.zeros(2))
    module = torch.nn.Module()
    module.register_buffer("x", torch.zeros(2))
    module.register_parameter("y", torch.nn.Parameter(torch.ones(2)))
    TensorDeserializer(tmp_path / "f", "cpu").load_into_module(module)
    assert isinstance(module.x, torch.nn.Parameter)
    assert "y" in module._buffers
    module = torch.nn.Module()
    module.x = "an ordinary attribute"
    with pytest.raises(KeyError, match="x"):
        TensorDeserializer(tmp_path / "f", "cpu").load_into_module(module)


@pytest.mark.host
@pytest.mark.filterwarnings("ignore")
def test_fused_experts_point_to_from_pretrained(tmp_path):
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**small))
    model.save_pretrained(tmp_path)
    with TensorDeserializer(tmp_path / "model.safetensors", "cpu") as file:
        with pytest.raises(KeyError, match=r"experts.*tensorizer\.transformers\.from_pretrained"):
            file.load_into_module(model)
        with pytest.raises(KeyError) as raised:
            file.load_into_module(Model())
        assert "from_pretrained" not in str(raised.value)


def test_dtype_and_verify(saved):
    model, path = saved
    other = Model()
    file = TensorDeserializer(path, "cpu", dtype=torch.bfloat16, lazy_load=True)
    file.load_into_module(other, verify_hash=True)
    assert_same(other.scale.detach(), model.scale.detach().bfloat16())
    assert_same(other.steps, model.steps)


@pytest.mark.parametrize("lazy", [False, True])
def test_verify_module(saved, lazy):
    model, path = saved
    with TensorDeserializer(path, "cpu", lazy_load=lazy) as file:
        names = list(file)
        ok, results = file.verify_module(model)
        assert ok
        assert results == [(name, True) for name in names]
        with torch.no_grad():
            model.scale[0] += 1
        model.steps = model.steps.int()
        model.register_buffer("extra", torch.ones(1))
        del model.layers[1]
        ok, results = file.verify_module(model)
    assert not ok
    assert len(results) == len(dict(results))
    wrong = {name for name, fine in results if not fine}
    assert wrong == {".scale", ".steps", ".extra", "layers.1.weight", "layers.1.bias"}


def test_verify_module_compares_empty_strided_and_meta_tensors(tmp_path):
    module = torch.nn.Module()
    module.register_buffer("empty", torch.empty(2, 0))
    module.register_buffer("strided", torch.randn(4, 6).t()[1:])
    module.register_buffer("meta", torch.empty(3, device="meta"))
    with TensorSerializer(tmp_path / "f") as serializer:
        serializer.write_module(module)
    file = TensorDeserializer(tmp_path / "f", "cpu")
    assert file.verify_module(module)[0]
    file.load_into_module(module)
    assert file.verify_module(module)[0]
    closed = TensorDeserializer(tmp_path / "f", "cpu", lazy_load=True)
    closed.close()
    with pytest.raises(RuntimeError, match="closed file"):
        closed.verify_module(module)


# tensorizer.utils


def test_convert_bytes():
    for num, decimal, text in [
        (0, True, "0.0 bytes"),
        (999, True, "999.0 bytes"),
        (1000, True, "1.0 KB"),
        (123_456_789, True, "123.5 MB"),
        (2**40, True, "1.1 TB"),
        (5e17, True, "500.0 PB"),
        (-1500.0, True, "-1.5 KB"),
        (1023, False, "1023.0 bytes"),
        (1 << 20, False, "1.0 MiB"),
        (123_456_789, False, "117.7 MiB"),
    ]:
        assert utils.convert_bytes(num, decimal) == text


def test_memory_figures():
    usage = utils.MemoryUsage.now()
    assert usage.cpu.maxrss > 50 << 20
    assert usage.cpu.free > 0
    text = utils.get_mem_usage()
    assert text.startswith("CPU: (maxrss: ")
    assert "MiB F: " in text
    if not torch.cuda.is_available():
        assert usage.gpu is None
        assert usage.torch is None
        assert utils.GlobalGPUMemoryUsage.now() is utils.TorchGPUMemoryUsage.now() is None
        assert utils.get_gpu_name() == "N/A"
        assert utils.get_device() == torch.device("cpu")
    gpu = utils.GlobalGPUMemoryUsage(3 << 30, 1 << 30, 2 << 30)
    used = utils.TorchGPUMemoryUsage(4 << 20, 3 << 20, 2 << 20, 1 << 20)
    assert str(utils.MemoryUsage(usage.cpu, gpu, used)).endswith(
        " GPU: (U: 2,048MiB F: 1,024MiB T: 3,072MiB) TORCH: (R: 4MiB/3MiB, A: 2MiB/1MiB)"
    )


def test_no_init_or_tensor():
    original = torch.empty, torch.nn.Linear.reset_parameters
    with utils.no_init_or_tensor():
        assert torch.empty(2, device="cpu").is_meta
        with utils.no_init_or_tensor():
            assert torch.nn.Linear(2, 2).weight.is_meta
        assert torch.empty(2).is_meta
        assert not torch.zeros(2).is_meta
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(torch.nn.Linear(2, 2)))
        thread.start()
        thread.join()
        assert not elsewhere[0].weight.is_meta
    assert (torch.empty, torch.nn.Linear.reset_parameters) == original
    assert utils.no_init_or_tensor(lambda: torch.nn.Embedding(2, 2)).weight.is_meta
    with pytest.raises(TypeError, match="callable"):
        utils.no_init_or_tensor(3)
    with pytest.raises(ZeroDivisionError):
        utils.no_init_or_tensor(lambda: 1 / 0)
    assert torch.empty is original[0]


def test_no_init_or_tensor_in_tasks():
    async def task(active):
        if not active:
            await asyncio.sleep(0)
            return torch.empty(1).is_meta
        with utils.no_init_or_tensor():
            await asyncio.sleep(0.01)
            return torch.empty(1).is_meta

    async def both():
        return await asyncio.gather(task(True), task(False))

    assert asyncio.run(both()) == [True, False]


def test_no_init_or_tensor_that_ends_in_another_context():
    """As fixtures and tasks may do."""
    empty = torch.empty
    block = tensorizer.utils.no_init_or_tensor()
    contextvars.copy_context().run(block.__enter__)
    with pytest.raises(ValueError, match="different Context"):
        block.__exit__(None, None, None)
    assert torch.empty is empty


def test_extra_state_is_not_written_with_a_warning(tmp_path):
    class Scaled(torch.nn.Linear):
        def get_extra_state(self):
            return {"scale": 2}

        def set_extra_state(self, state):
            pass

    module = torch.nn.Sequential(torch.nn.Linear(2, 2), Scaled(2, 2))
    with (
        TensorSerializer(tmp_path / "f.tensors") as file,
        pytest.warns(
            UserWarning, match="the extra state of 1 modules, such as '1', is not written"
        ),
    ):
        file.write_module(module)
    assert len(tensorizer.load(tmp_path / "f.tensors")) == 4
