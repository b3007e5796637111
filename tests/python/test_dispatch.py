"""The operators work with torch's dispatcher: autograd, tracing, modes, subclasses."""

import struct
from pathlib import Path

import pytest
import tensorizer
import torch
from conftest import TENSORS, assert_same
from test_compile import BACKENDS, X, assert_all_same, by_into_one, ops

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

    from torch._subclasses.fake_tensor import FakeTensorMode
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
    from torch._subclasses.fake_tensor import FakeTensorMode

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
