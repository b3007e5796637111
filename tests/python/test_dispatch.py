"""The operators work with torch's dispatcher: autograd, tracing, modes, subclasses."""

import struct
import warnings
from pathlib import Path

import pytest
import tensorizer
import torch
import torch.distributed.checkpoint as dcp
from conftest import TENSORS, assert_same
from tensorizer.distributed import Reader, Writer
from tensorizer.torch_compat import tensorizer_loading, tensorizer_saving
from test_compile import BACKENDS, X, assert_all_same, by_into_one, ops
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

pytestmark = pytest.mark.usefixtures("without_graphs_of_others")


@pytest.fixture
def path(saved):
    return saved


def test_autograd(path):
    factor = torch.nn.Parameter(torch.ones(30))
    for backend in (None, *BACKENDS):

        def loss(uri):
            loaded = ops.load(uri)["weight"]
            return (loaded * factor).sum(), loaded

        function = loss if backend is None else torch.compile(loss, backend=backend, fullgraph=True)
        factor.grad = None
        value, loaded = function(path)
        assert loaded.is_leaf
        assert not loaded.requires_grad
        value.backward()
        assert_same(factor.grad, TENSORS["weight"].sum(0))
        out = torch.nn.Parameter(torch.zeros(40, 30))
        ops.load(path, ["weight"], [out])
        assert out.is_leaf
        assert out.requires_grad
        assert out.grad_fn is None
    # A tensor that a graph needs for its gradient may not change under it.
    weight = torch.zeros(40, 30)
    product = (weight * factor).sum()
    ops.load(path, ["weight"], [weight])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_inference_mode(path):
    outside = torch.zeros(5, dtype=torch.int64)
    with torch.inference_mode():
        loaded = ops.load(path)["weight"]
        assert loaded.is_inference()
        inside = torch.zeros(5, dtype=torch.int64)
        for out in (inside, outside):
            ops.load(path, ["bias"], [out])
            ops.load(path, "bias", out)
            ops.load_(path, ["bias"], [out])
            assert_same(out.clone(), TENSORS["bias"])
        ops.save(path, {"weight": loaded})
        compiled = torch.compile(by_into_one, backend="inductor", fullgraph=True)
        ops.save(path, TENSORS)
        assert_all_same(compiled(path, X), by_into_one(path, X))
    assert not ops.load(path)["weight"].is_inference()


def test_device_contexts(path):
    """A device context is about factory functions; ``tensorizer.load`` is one, operators not."""
    with torch.device("meta"):
        assert ops.load(path)["weight"].device.type == "cpu"
        assert tensorizer.load(path)["weight"].is_meta
    with torch.device("cpu"):
        assert_same(tensorizer.load(path)["weight"], TENSORS["weight"])


def test_conjugated_and_negated_destinations(path):
    values = torch.randn(6, dtype=torch.complex64)
    ops.save(path, {"z": values, "i": values.imag.contiguous()})
    out = torch.zeros(6, dtype=torch.complex64)
    ops.load(path, ["z"], [out.conj()])
    assert_same(out, values.conj().resolve_conj())
    negated = torch.zeros(6, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    ops.load(path, "i", negated)
    assert_same(negated.resolve_neg(), values.imag.contiguous())


def test_opcheck(path, tmp_path):
    check = torch.library.opcheck
    out = [torch.zeros(40, 30), torch.zeros(5, dtype=torch.int64)]
    check(ops.load.list, (path, ["weight", "half"]))
    check(ops.load.list, (path, ["weight"]), {"verify": True, "num_readers": 1})
    check(ops.load.checked, (path, ["bias"], ["int64[5]"]))
    check(ops.load.into, (path, ["weight", "bias"], out))
    check(ops.load.into_one, (path, "bias", out[1]))
    check(ops._load_into.default, (path, ["weight", "bias"], out, torch.empty(0)))
    check(ops._begin.default, (path,))
    check(ops._end.default, (out,))
    check(ops.save.list, (str(tmp_path / "s"), ["a"], [torch.ones(2)]))
    check(ops.save.default, (str(tmp_path / "s"), {"a": torch.ones(2)}))
    check(ops.load.default, (path,))


# Tracing, and modes


def sparse_file(path, gib):
    """Write a file of one tensor of so many GiB that takes no room on the disk."""
    rows = 1_234_567
    tensorizer.save({"big": torch.empty(rows, 2, dtype=torch.uint8)}, path)
    data = Path(path).read_bytes()[: -2 * rows]
    for old, new in (
        (struct.pack("<II", rows, 2), struct.pack("<II", gib << 20, 1024)),
        (struct.pack("<Q", 2 * rows), struct.pack("<Q", gib << 30)),
    ):
        assert data.count(old) >= 2  # in the index, in the header, and the sum of all lengths
        data = data.replace(old, new)
    with open(path, "wb") as file:
        file.write(data)
        file.truncate(len(data) + (gib << 30))


def bytes_read():
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_tracing_reads_only_the_index(tmp_path):
    path = str(tmp_path / "big")
    sparse_file(path, 10)
    assert Path(path).stat().st_size > 10 << 30

    def everything(x):
        return x, ops.load(path)["big"], ops.load(path, ["big"])[0]

    from torch.fx.experimental.proxy_tensor import make_fx

    def trace():
        with FakeTensorMode() as mode:
            return make_fx(everything)(mode.from_tensor(torch.ones(2)))

    trace()  # imports
    before = bytes_read()
    graph = trace()
    assert bytes_read() - before < 1_000_000
    expected = [node.args[2] for node in graph.graph.nodes if node.target == ops.load.checked]
    assert expected == [["uint8[10485760,1024]"]] * 2


def test_fake_tensors(path, tmp_path):
    with FakeTensorMode():
        weight, half = ops.load(path, ["weight", "half"], device="meta")
        assert (weight.shape, weight.dtype, weight.device.type) == ((40, 30), torch.float32, "meta")
        assert half.dtype == torch.bfloat16
        loaded = ops.load(path)
        assert list(loaded) == list(TENSORS)
        assert type(loaded["empty"]).__name__ == "FakeTensor"
        assert loaded["empty"].shape == (0, 2)
        out = torch.empty(5, dtype=torch.int64)
        ops.load(path, ["bias"], [out])
        ops.load(path, "bias", out)
        ops.load_(path, ["bias"], [out])
        ops.save(str(tmp_path / "never"), {"x": out})
        with pytest.raises(RuntimeError, match="Tensor not found: `nothing`"):
            ops.load(path, ["nothing"])
        with pytest.raises(RuntimeError, match="missing"):
            ops.load(str(tmp_path / "missing"), ["weight"])
    assert not (tmp_path / "never").exists()


@pytest.fixture
def models(tmp_path):
    """The state of a model in each format."""
    state = torch.nn.Linear(3, 2).state_dict()
    for name in ("m.tensors", "m.safetensors"):
        tensorizer.save(state, tmp_path / name)
    torch.save({**state, "part": state["weight"].t()[1:]}, tmp_path / "m.pt")
    with tensorizer_saving():
        torch.save(state, tmp_path / "pair.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": state}, storage_writer=Writer(tmp_path / "dcp"), no_dist=True)
    return tmp_path


def _of_module(file, **options):
    module = torch.nn.Linear(3, 2)
    with tensorizer.TensorDeserializer(file, "cpu", **options) as opened:
        opened.load_into_module(module)
    return module.state_dict()


def _of_stand_in(file, load):
    with tensorizer.safetensors.safe_open(file, "pt") as opened:
        return load(opened)


def _into_model(file):
    module = torch.nn.Linear(3, 2)
    tensorizer.safetensors.load_model(module, file)
    return module.state_dict()


def _of_pair(file):
    with tensorizer_loading():
        return torch.load(file)


def _of_checkpoint(folder):
    state = {"model": torch.nn.Linear(3, 2).state_dict()}
    dcp.load(state, storage_reader=Reader(folder), no_dist=True)
    return state["model"]


OUT = {"weight": (2, 3), "bias": (2,)}
FAKE = {
    "tensors": lambda at: tensorizer.load(at / "m.tensors", "cpu", verify_hash=True),
    "a device": lambda at: tensorizer.load(at / "m.tensors", "cuda"),
    "each on a device": lambda at: tensorizer.load(
        at / "m.tensors", lambda name: "cuda:1" if name == "bias" else "cpu"
    ),
    "dtype": lambda at: tensorizer.load(at / "m.tensors", "cpu", dtype=torch.float16),
    "mmap": lambda at: tensorizer.load(at / "m.safetensors", "cpu", mmap=True),
    "torch": lambda at: tensorizer.load(at / "m.pt", "cpu"),
    "slices": lambda at: tensorizer.load(at / "m.pt", "cpu", slices={"part": (0, 0, 1)}),
    "out": lambda at: tensorizer.load(
        at / "m.tensors", out={name: torch.empty(shape) for name, shape in OUT.items()}
    ),
    "iterate": lambda at: dict(tensorizer.iterate(at / "m.tensors", "cpu")),
    "iterate over torch": lambda at: dict(tensorizer.iterate(at / "m.pt", "cpu", order="ready")),
    "deserializer": lambda at: dict(tensorizer.TensorDeserializer(at / "m.tensors", "cpu")),
    "module": lambda at: _of_module(at / "m.tensors"),
    "module, lazily": lambda at: _of_module(at / "m.tensors", lazy_load=True),
    "load_file": lambda at: tensorizer.safetensors.load_file(at / "m.safetensors"),
    "load_model": lambda at: _into_model(at / "m.safetensors"),
    "get_tensor": lambda at: _of_stand_in(
        at / "m.safetensors", lambda file: {name: file.get_tensor(name) for name in OUT}
    ),
    "get_slice": lambda at: _of_stand_in(
        at / "m.safetensors", lambda file: {"column": file.get_slice("weight")[:, 1]}
    ),
    "prefetch": lambda at: _of_stand_in(at / "m.safetensors", lambda file: dict(file.prefetch())),
    "pair": lambda at: _of_pair(at / "pair.pt"),
    "dcp": lambda at: _of_checkpoint(at / "dcp"),
}


@pytest.mark.parametrize("load", FAKE.values(), ids=FAKE)
def test_python_loads_make_fake_tensors(load, models):
    with warnings.catch_warnings():
        # torch warns where memory of a fake tensor is looked at.
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "torch.distributed is")
        with FakeTensorMode():
            found = load(models)
    assert found
    for name, tensor in found.items():
        assert isinstance(tensor, FakeTensor), name
        assert tensor.shape == OUT.get(name, tensor.shape)


def test_fake_tensors_are_kept_apart_from_real_ones(models):
    path = models / "m.tensors"
    real = torch.nn.Linear(3, 2)
    with FakeTensorMode():
        fake = torch.nn.Linear(3, 2)
        with pytest.raises(RuntimeError, match="is active, and the module was made outside of it"):
            tensorizer.TensorDeserializer(path, "cpu").load_into_module(real)
        for save in (tensorizer.save, tensorizer.save_async):
            with pytest.raises(NotImplementedError, match="FakeTensor, which has a form and no"):
                save({"x": torch.empty(3)}, models / "never")
            done = save({"x": real.bias}, models / "real")
            if done is not None:
                done.result()
        with tensorizer.TensorDeserializer(path, "cpu", lazy_load=True) as file:
            array = next(iter(file.read_numpy_arrays()))[3]
    assert array.any()
    assert_same(tensorizer.load(models / "real", "cpu")["x"], real.bias.detach())
    with pytest.raises(RuntimeError, match="is not active, and the module was made in it"):
        tensorizer.TensorDeserializer(path, "cpu").load_into_module(fake)
    assert not (models / "never").exists()


def test_another_dispatch_mode_sees_what_happens_and_changes_nothing(path):
    from torch.utils._python_dispatch import TorchDispatchMode

    calls = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    with Log():
        loaded = ops.load(path)
        out = torch.zeros(5, dtype=torch.int64)
        ops.load(path, ["bias"], [out])
    for name, tensor in TENSORS.items():
        assert_same(loaded[name], tensor)
    assert_same(out, TENSORS["bias"])
    assert any("tensorizer" in call for call in calls)
