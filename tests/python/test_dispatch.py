"""What torch's dispatcher does around the operators: autograd, modes, subclasses."""

import pytest
import tensorizer
import torch
from conftest import TENSORS, assert_same
from test_compile import BACKENDS, by_into_one, close, ops

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
        torch.testing.assert_close(factor.grad, TENSORS["weight"].sum(0))
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
        close(compiled(path, torch.ones(2)), by_into_one(path, torch.ones(2)))
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
