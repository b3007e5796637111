"""``torch.ops.tensorizer``: eager and TorchScript."""

import copy
import io
import os
import pickle
from pathlib import Path

import pytest
import tensorizer
import torch
from conftest import TENSORS, assert_same
from processes import run_python

ops = torch.ops.tensorizer


@pytest.fixture
def path(saved):
    return saved


def test_eager(path, tmp_path):
    assert ops.names(path) == list(TENSORS)
    loaded = ops.load(path)
    assert list(loaded) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert_same(loaded[name], tensor)
        assert not loaded[name].requires_grad
    half, weight = ops.load(path, ["half", "weight"])
    assert_same(half, TENSORS["half"])
    assert_same(weight, TENSORS["weight"])
    again = str(tmp_path / "again")
    ops.save(again, ["x", "y"], [weight.t(), torch.nn.Parameter(half)])
    assert_same(ops.load(again)["x"], weight.t())
    assert_same(tensorizer.load(again, verify_hash=True)["y"], half)
    assert ops.load(path, device="meta")["weight"].is_meta
    assert ops.load(path, ["bias"], device=torch.device("cpu"))[0].device.type == "cpu"


@pytest.mark.parametrize("op", [ops.load.into, ops.load_], ids=["load.into", "load_"])
def test_in_place(op, path):
    flat = torch.zeros(1300)
    out = [
        torch.zeros(5, dtype=torch.int64),
        flat[50:1250].view(40, 30),
        torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)),
        torch.zeros(0, 2),
    ]
    addresses = [tensor.data_ptr() for tensor in out]
    versions = [tensor._version for tensor in out]
    op(path, ["bias", "weight", "half", "empty"], out)
    assert [tensor.data_ptr() for tensor in out] == addresses
    assert all(tensor._version > version for tensor, version in zip(out, versions, strict=True))
    for name, tensor in zip(["bias", "weight", "half"], out[:3], strict=True):
        assert_same(tensor.detach(), TENSORS[name])
    assert flat[:50].eq(0).all()
    assert flat[1250:].eq(0).all()
    strided = torch.zeros(30, 40).t()
    ops.load(path, "weight", strided)
    assert_same(strided, TENSORS["weight"])
    assert strided.stride() == (1, 40)


def test_no_tensor_is_printed_to_choose_an_overload(tmp_path):
    """torch cannot print these under autocast, and would need 35 times as long as the load."""
    tensor = torch.arange(3000.0).to(torch.float8_e4m3fn)
    tensorizer.save({"a": tensor}, tmp_path / "f")
    with torch.autocast("cpu", torch.bfloat16):
        several, one = torch.zeros_like(tensor), torch.zeros_like(tensor)
        ops.load(str(tmp_path / "f"), ["a"], [several])
        ops.load(str(tmp_path / "f"), "a", one)
    for found in (several, one):
        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


def test_bad_use_leaves_out_untouched(path, tmp_path):
    good = torch.full((5,), 9)
    cases = [
        (["bias", "missing"], [good, good], "Tensor not found: `missing`"),
        (["bias"], [good, good], "1 names for 2 tensors"),
        (["bias", "bias"], [good, good.clone()], "`bias` is asked for twice"),
        (["bias", "weight"], [good, torch.zeros(3, 3)], r"`weight`.*float32 \[40, 30\].*\[3, 3\]"),
        (["bias", "weight"], [good, torch.zeros(40, 30).int()], "`weight`.*float32.*int32"),
        (
            ["bias"],
            [torch.zeros(5, device="meta").long()],
            "tensor `bias`: expected a strided tensor with data.*Meta",
        ),
    ]
    flat = torch.full((8,), 9)
    cases.append((["bias"], [flat[:3]], r"`bias`.*\[5\].*\[3\]"))
    for names, out, text in cases:
        with pytest.raises((RuntimeError, ValueError), match=text):
            ops.load_(path, names, out)
        assert good.eq(9).all()
    overlapping = torch.zeros(1203)
    tensorizer.save({"a": torch.ones(1000), "b": torch.ones(1000)}, tmp_path / "two")
    with pytest.raises(RuntimeError, match="overlap in memory"):
        ops.load_(str(tmp_path / "two"), ["a", "b"], [overlapping[:1000], overlapping[3:1003]])
    for call in (
        lambda: ops.load(str(tmp_path / "missing")),
        lambda: ops.load(str(tmp_path / "missing"), ["a"]),
        lambda: ops.names(str(tmp_path / "missing")),
    ):
        with pytest.raises(RuntimeError, match="missing`: No such file"):
            call()
    with pytest.raises(RuntimeError, match="is given twice"):
        ops.save(path, ["a", "a"], [good, good])
    with pytest.raises(RuntimeError, match="2 names for 1 tensors"):
        ops.save(path, ["a", "b"], [good])
    with pytest.raises(RuntimeError, match="tensor `s`: tensors of layout Sparse"):
        ops.save(path, {"s": torch.eye(2).to_sparse()})
    with pytest.raises(RuntimeError, match="`redis://` addresses cannot be written: copy a file"):
        ops.save("redis://host/key", {"a": good})
    with pytest.raises(RuntimeError, match="`http://` addresses cannot be written: upload"):
        ops.save("http://host/key", {"a": good})
    assert_same(ops.load(path)["bias"], TENSORS["bias"])


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        # The operator itself: hand it on as it is.
        if func.namespace == "tensorizer":
            with torch._C._DisableTorchDispatch():
                return func(*args, **(kwargs or {}))
        raise NotImplementedError(str(func))


def test_subclasses_without_storage_are_refused(tmp_path):
    with pytest.raises(RuntimeError, match="tensor subclasses that implement __torch_dispatch__"):
        ops.save(str(tmp_path / "f"), {"t": Wrapper(torch.ones(2))})
    with pytest.raises(RuntimeError, match="tensor subclasses that implement __torch_dispatch__"):
        tensorizer.save({"t": Wrapper(torch.ones(2))}, tmp_path / "f")


# TorchScript


@torch.jit.script
def load_all(uri: str):
    return torch.ops.tensorizer.load(uri)


@torch.jit.script
def save_between_loads(uri: str, first: torch.Tensor, second: torch.Tensor):
    torch.ops.tensorizer.save(uri, {"x": first})
    a = torch.ops.tensorizer.load(uri)["x"]
    torch.ops.tensorizer.save(uri, {"x": second})
    b = torch.ops.tensorizer.load(uri)["x"]
    c = torch.ops.tensorizer.load(uri, ["x"])[0]
    return a, b, c


@torch.jit.script
def only_save(uri: str, x: torch.Tensor):
    torch.ops.tensorizer.save(uri, ["x"], [x])
    return x + 1


def test_scripted_functions(path, tmp_path):
    for _ in range(3):  # profiled, optimised, optimised again
        loaded = load_all(path)
        assert list(loaded) == list(TENSORS)
        assert_same(loaded["weight"], TENSORS["weight"])
        uri = str(tmp_path / "s")
        a, b, c = save_between_loads(uri, torch.ones(2), torch.zeros(2))
        assert a.tolist() == [1, 1]
        assert b.tolist() == c.tolist() == [0, 0]
        gone = tmp_path / "gone"
        gone.unlink(missing_ok=True)
        only_save(str(gone), torch.ones(3))
        assert_same(ops.load(str(gone))["x"], torch.ones(3))


class Loader(torch.nn.Module):
    def __init__(self, uri: str):
        super().__init__()
        self.uri = uri
        self.register_buffer("weight", torch.zeros(40, 30))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        names = ["weight"]
        out = [self.weight]
        torch.ops.tensorizer.load_(self.uri, names, out)
        whole = torch.ops.tensorizer.load(self.uri)
        torch.ops.tensorizer.save(self.uri + ".seen", {"x": x})
        return x @ self.weight + whole["bias"].sum()


def in_memory(module):
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return torch.jit.load(file)


FORMS = {
    "scripted": lambda module: module,
    "saved": in_memory,
    "copied": copy.deepcopy,
    "frozen": lambda module: torch.jit.freeze(in_memory(module)),
    "optimized": torch.jit.optimize_for_inference,
    "pickled": lambda module: pickle.loads(pickle.dumps(Holder(module))).module,
}


class Holder:
    """An object with a scripted module in it, pickled as torch has it."""

    def __init__(self, module):
        self.module = module

    def __getstate__(self):
        file = io.BytesIO()
        torch.jit.save(self.module, file)
        return file.getvalue()

    def __setstate__(self, state):
        self.module = torch.jit.load(io.BytesIO(state))


@pytest.mark.parametrize("form", FORMS)
def test_scripted_modules(form, path):
    module = FORMS[form](torch.jit.script(Loader(path).eval()))
    x = torch.randn(2, 40)
    for _ in range(3):
        assert torch.equal(module(x), x @ TENSORS["weight"] + TENSORS["bias"].sum())
        assert_same(ops.load(path + ".seen")["x"], x)
    # The weights are loaded when the module runs, not when it was frozen.
    ops.save(path, {**TENSORS, "weight": torch.zeros(40, 30)})
    assert torch.equal(module(x), torch.zeros(2, 30) + TENSORS["bias"].sum())


def test_a_scripted_module_with_in_place_loading_of_one(path):
    @torch.jit.script
    def load_one(uri: str, out: torch.Tensor):
        torch.ops.tensorizer.load(uri, "weight", out)
        return out.sum()

    out = torch.zeros(40, 30)
    for _ in range(3):
        out.zero_()
        assert torch.equal(load_one(path, out), TENSORS["weight"].sum())


def test_errors_in_torchscript_carry_the_text(tmp_path):
    with pytest.raises(RuntimeError, match="missing`: No such file"):
        load_all(str(tmp_path / "missing"))


def test_alias_analysis_and_effects():
    schemas = {name: torch._C._jit_get_schemas_for_operator(f"tensorizer::{name}") for name in
               ("load", "load_", "names", "save")}  # fmt: skip
    overloads = {name: sorted(s.overload_name for s in found) for name, found in schemas.items()}
    assert overloads == {
        "load": ["", "checked", "into", "into_one", "list"],
        "load_": [""],
        "names": [""],
        "save": ["", "list"],
    }
    from torch._higher_order_ops.effects import _get_effect  # the private API that torch has

    for op in (ops.save.default, ops.save.list, ops.load.checked):
        assert _get_effect(op) is not None


BOTH = """
import sys, torch, tensorizer
from pathlib import Path
lib = Path(tensorizer.__file__).parent / "lib/libtensorizer_torch.so"
torch.ops.load_library(str(lib))
torch.ops.tensorizer.save(sys.argv[1], {"a": torch.ones(1)})
print(torch.ops.tensorizer.load(sys.argv[1])["a"].item())
"""

OTHER_ORDER = """
import sys, torch
torch.ops.load_library(sys.argv[2])
torch.ops.tensorizer.save(sys.argv[1], {"a": torch.ones(1)})
print(torch.ops.tensorizer.load(sys.argv[1])["a"].item())
try:
    import tensorizer
except ImportError as error:
    print(error)
"""


def test_the_library_behind_the_package_is_a_sentence(tmp_path):
    done = run_python(BOTH, tmp_path / "f")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1.0"
    assert "not both" in done.stderr


def test_the_library_alone_and_the_package_behind_it(tmp_path):
    lib = next((Path(tensorizer.__file__).parent / "lib").glob("*.so"))
    env = os.environ | {"TENSORIZER_NUM_READER": "4"}
    done = run_python(OTHER_ORDER, tmp_path / "f", lib, env=env, fresh=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the nearest known name is TENSORIZER_NUM_READERS") == 1, done.stderr
    assert done.stdout.startswith("1.0\n")
    assert "load either the Python package or libtensorizer_torch.so, not both" in done.stdout
