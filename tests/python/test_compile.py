"""``torch.ops.tensorizer`` under torch.compile, torch.export and AOTInductor."""

import json
import warnings
from pathlib import Path

import pytest
import tensorizer
import torch
from conftest import TENSORS, assert_same, whole_numbers
from safetensors.torch import save_file
from tensorizer.torch_compat import tensorizer_loading, tensorizer_saving

pytestmark = pytest.mark.usefixtures("without_graphs_of_others")

ops = torch.ops.tensorizer

BACKENDS = ["aot_eager", "inductor"]


X = whole_numbers(4)


@pytest.fixture
def path(saved):
    return saved


@pytest.fixture
def empty_cache():
    """Have torch keep what it compiles in an empty folder."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        yield


# Each takes an address and a tensor, and returns tensors; all overloads are among them.


def by_dict(uri, x):
    loaded = ops.load(uri)
    return loaded["weight"] + x.sum(), loaded["bias"], *loaded.values()


def by_dict_with_options(uri, x):
    loaded = ops.load(uri, device=torch.device("cpu"), verify=True, num_readers=1)
    return x.clone(), loaded["half"]


def by_list(uri, x):
    half, weight = ops.load(uri, ["half", "weight"], verify=True)
    return half, weight.t(), x + 1


def by_list_overload(uri, x):
    return x + 1, *ops.load.list(uri, ["empty", "bias"])


def by_checked(uri, x):
    return x - 1, *ops.load.checked(uri, ["bias"], ["int64[5]"])


def by_into(uri, x):
    flat = torch.zeros(1207)
    out = [flat[3:1203].view(40, 30), torch.zeros(5, dtype=torch.int64)]
    ops.load(uri, ["weight", "bias"], out)
    return flat, out[0] * 2, out[1], x + flat.sum()


def by_into_strided(uri, x):
    out = torch.zeros(30, 40).t()
    ops.load.into(uri, ["weight"], [out])
    return out + x.sum(), out.t().contiguous()


def by_into_one(uri, x):
    out = torch.zeros(5, dtype=torch.int64)
    ops.load(uri, "bias", out)
    return out + 1, x


def by_load_(uri, x):
    out = torch.zeros(5, dtype=torch.int64)
    ops.load_(uri, ["bias"], [out])
    return out + 1, x.clone()


def by_names(uri, x):
    names = ops.names(uri)
    return x + len(names), ops.load(uri, [name for name in names if name.startswith("b")])[0]


def by_save(uri, x):
    ops.save(uri + ".a", {"x": x, "y": x + 1})
    ops.save(uri + ".b", ["x"], [x * 2])
    return (x * 3,)


FUNCTIONS = [by_dict, by_dict_with_options, by_list, by_list_overload, by_checked, by_into,
             by_into_strided, by_into_one, by_load_, by_names, by_save]  # fmt: skip


def check_saved(path, x):
    saved = ops.load(path + ".a")
    assert_same(saved["x"], x)
    assert_same(saved["y"], x + 1)
    assert_same(ops.load(path + ".b")["x"], x * 2)
    for name in (".a", ".b"):
        Path(path + name).unlink()


def all_of_them(uri, x):
    return [tensor for function in FUNCTIONS for tensor in function(uri, x)]


def assert_all_same(found, expected):
    for left, right in zip(found, expected, strict=True):
        assert_same(left, right)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_each_alone(function, path):
    expected = function(path, X)
    if function is by_save:
        check_saved(path, X)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert_all_same(compiled(path, X), expected)
        if function is by_save:
            check_saved(path, X)


# All in one graph, and their order


def interleaved(uri, x):
    """Twelve saves and loads of one file, of which each load must see the save before it.

    All steps are the same code to inductor, which has it compiled once.
    """
    seen = []
    for step in range(4):
        ops.save(uri, ["x"], [x])
        x = x + 1
        if step % 2:
            seen.append(ops.load(uri)["x"])
        else:
            seen.append(ops.load(uri, ["x"])[0])
        out = torch.zeros(4)
        ops.load(uri, ["x"], [out])
        seen.append(out)
    return torch.stack(seen)


class Everything(torch.nn.Module):
    """The twelve of one file, then every overload with another; and what others write in shards.

    What comes after makes schedulers that may reorder want to.
    """

    def __init__(self, folder):
        super().__init__()
        self.changing, self.path = str(folder / "changing"), str(folder / "everything.tensors")
        self.shards = str(folder / "shards")
        (folder / "shards").mkdir()
        ops.save(self.changing, {"x": torch.zeros(4)})
        self.write(TENSORS)

    def write(self, tensors):
        ops.save(self.path, tensors)
        for name, tensor in tensors.items():
            save_file({name: tensor}, f"{self.shards}/{name}.safetensors")
        index = {"weight_map": {name: f"{name}.safetensors" for name in tensors}}
        Path(self.shards, "model.safetensors.index.json").write_text(json.dumps(index))

    def forward(self, x):
        order = interleaved(self.changing, x)
        return order, *ops.load(self.shards, ["half", "weight"]), *all_of_them(self.path, x)

    def check(self, run):
        """Hold compiled code against what runs as it is written."""
        expected = torch.arange(4.0).repeat_interleave(2)[:, None] + torch.ones(4)
        for _ in range(3):
            ops.save(self.changing, {"x": torch.full((4,), -7.0)})
            assert_same(run(torch.ones(4))[0], expected)
        # Traced code reads the files when it runs.
        for weight, x in ((torch.full((40, 30), 2.0), X), (TENSORS["weight"], X + 1)):
            self.write({**TENSORS, "weight": weight})
            expected = self(x)
            check_saved(self.path, x)
            assert_all_same(run(x), expected)
            check_saved(self.path, x)


@pytest.mark.parametrize("backend", ["eager", *BACKENDS])
def test_all_in_one_graph_keep_their_order(backend, tmp_path):
    module = Everything(tmp_path)
    module.check(torch.compile(module, backend=backend, fullgraph=True))


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_export(strict, tmp_path):
    module = Everything(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*tensorizer.*")
        program = torch.export.export(module, (X,), strict=strict)
    assert not program.constants, "the data of the file were frozen into the program"
    module.check(program.module())
    if not strict:  # the graphs are the same
        torch.export.save(program, tmp_path / "program.pt2")
        for form in (program.run_decompositions(), torch.export.load(tmp_path / "program.pt2")):
            module.check(form.module())


@pytest.mark.long
def test_aot_inductor(tmp_path, capfd, empty_cache):
    """Order is kept, and every overload runs, in a package without Python code."""
    module = Everything(tmp_path)
    package = torch._inductor.aoti_compile_and_package(
        torch.export.export(module, (X,)), package_path=str(tmp_path / "model.pt2")
    )
    run = torch._inductor.aoti_load_package(package)
    module.check(run)
    tensors = {**TENSORS, "weight": torch.zeros(60, 30)}
    for change in (module.write, lambda tensors: ops.save(module.path, tensors)):
        change(tensors)
        # Packages of torch 2.11 print what operators throw and raise a text of their own.
        with pytest.raises(RuntimeError) as raised:
            run(X)
        told = str(raised.value) + capfd.readouterr().err
        assert "tensor `weight`: expected float32[40,30]" in told
        module.write(TENSORS)
    module.check(run)


class Module(torch.nn.Module):
    def __init__(self, function, uri):
        super().__init__()
        self.function, self.uri = function, uri

    def forward(self, x):
        return self.function(self.uri, x)


# In place


class Filled(torch.nn.Module):
    """A module that fills its parameter and buffer, and a view of an argument."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(40, 30))
        self.register_buffer("bias", torch.zeros(5, dtype=torch.int64))

    def forward(self, uri: str, x, flat):
        with torch.no_grad():
            ops.load(uri, ["weight", "bias"], [self.weight, self.bias])
            ops.load(uri, ["weight", "bias"], [flat[7:1207].view(40, 30), flat.new_zeros(5).long()])
        return x @ self.weight + self.bias.sum(), flat[:10] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_and_views_are_filled_in_place(backend, path):
    model, flat = Filled(), torch.full((1300,), 5.0)
    in_place = [model.weight, model.bias, flat]
    addresses = [tensor.data_ptr() for tensor in in_place]
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = whole_numbers(2, 40)
    product, out = compiled(path, x, flat)
    assert_same(product.detach(), x @ TENSORS["weight"] + TENSORS["bias"].sum())
    assert [tensor.data_ptr() for tensor in in_place] == addresses
    assert_same(model.weight.detach(), TENSORS["weight"])
    assert_same(model.bias, TENSORS["bias"])
    assert_same(flat[7:1207].view(40, 30).clone(), TENSORS["weight"])
    assert flat[:7].eq(5).all()
    assert flat[1207:].eq(5).all()
    assert_same(out, flat[:10] * 2)
    # Loads in place are kept in the graph even if it does not use their values.
    model.weight.data.zero_()
    compiled(path, torch.zeros(2, 40), flat)
    assert_same(model.weight.detach(), TENSORS["weight"])


# Errors, and changes between tracing and running


@pytest.fixture
def cache_of_graphs(empty_cache):
    """Have torch keep graphs on the disk, too, as it does by default."""
    with torch._inductor.config.patch(fx_graph_cache=True):
        yield


def into_new(uri, x):
    out = torch.zeros(40, 30)
    ops.load(uri, ["weight"], [out])
    return (out,)


@pytest.mark.parametrize(
    ("function", "backend"),
    # To code generation `by_dict` is the same as `by_list`.
    [(by_dict, "aot_eager"), (by_list, "aot_eager"), (into_new, "aot_eager"),
     (by_list, "inductor"), (into_new, "inductor")],
)  # fmt: skip
def test_a_file_that_changed_under_a_compiled_graph(function, backend, path, cache_of_graphs):
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    compiled(path, X)
    changes = (
        (torch.zeros(50, 30), r"float32 ?\[50, ?30\]"),
        (torch.zeros(40, 30).half(), r"float16 ?\[40, ?30\]"),
    )
    # inductor takes long, and the operator compares shape and dtype at one place.
    for other, text in changes[: 1 if backend == "inductor" else 2]:
        ops.save(path, {**TENSORS, "weight": other})
        with pytest.raises(RuntimeError, match=rf"tensor `weight`.*({text})"):
            compiled(path, X)
        # Compiled again, it fits again, whatever is in torch's caches on the disk.
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        if other.dtype == torch.float32 and function is not into_new:
            assert_all_same(compiled(path, X), function(path, X))
        ops.save(path, TENSORS)
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        assert_all_same(compiled(path, X), function(path, X))
    ops.save(path, {"half": torch.ones(3)})
    with pytest.raises(RuntimeError, match="Tensor not found: `weight`"):
        compiled(path, X)
    Path(path).unlink()
    with pytest.raises(RuntimeError, match=r"f.tensors`: No such file"):
        compiled(path, X)


@pytest.mark.parametrize("function", [by_dict, by_list, by_names], ids=lambda f: f.__name__)
def test_a_missing_file_while_tracing(function, tmp_path):
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="missing`: No such file"):
        compiled(str(tmp_path / "missing"), torch.ones(4))
    with pytest.raises(Exception, match="missing`: No such file"):
        torch.export.export(Module(function, str(tmp_path / "missing")), (torch.ones(4),))


def test_errors_in_compiled_code_leave_out_untouched(path):
    def fill(uri, names: list[str], first, second):
        ops.load(uri, names, [first, second])
        return first + 1

    for backend in BACKENDS:
        compiled = torch.compile(fill, backend=backend, fullgraph=True)
        good = torch.full((5,), 9)
        for names, second, text in (
            (["bias", "weight"], torch.zeros(3, 3), r"`weight`.*float32 \[40, 30\].*\[3, 3\]"),
            (["bias", "weight"], torch.zeros(40, 30).int(), "`weight`.*float32.*int32"),
            (["bias", "nothing"], torch.zeros(3), "Tensor not found: `nothing`"),
            (["bias", "bias"], torch.zeros(5).long(), "`bias` is asked for twice"),
        ):
            with pytest.raises(RuntimeError, match=text):
                compiled(path, names, good, second)
            assert good.eq(9).all()


def test_an_unknown_torch_loses_the_dict_form_only(path, monkeypatch):
    from tensorizer.torch_hooks import dynamo
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable as Function

    def fail(function):
        raise AttributeError("no such thing in this torch")

    # Built when it is asked for first, which may be here.
    handlers = Function._get_handlers()
    monkeypatch.setattr(dynamo, "_make_handlers", fail)
    fresh = {op: f for op, f in handlers.items() if "tensorizer" not in str(op)}
    assert len(fresh) < len(handlers)
    monkeypatch.setattr(Function, "_get_handlers", staticmethod(lambda: dict(fresh)))
    dynamo.extend_dynamo(torch._dynamo.variables.torch)
    compiled = torch.compile(by_list, backend="aot_eager", fullgraph=True)
    with pytest.warns(UserWarning, match=r"does not support torch.ops.tensorizer.load\(uri\)"):
        assert_all_same(compiled(path, X), by_list(path, X))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(by_dict, backend="aot_eager", fullgraph=True)(path, torch.ones(4))


def _save(path, x):
    tensorizer.save({"x": x * 2}, path)


def _serialize(path, x):
    with tensorizer.TensorSerializer(path) as file:
        file.write_tensor(0, "x", tensorizer.TensorType.PARAM, x * 2)


def _load(path, x):
    tensorizer.save({"x": x * 2}, path)
    x.copy_(tensorizer.load(path, "cpu")["x"] / 2)


def _load_into(path, x):
    _save(path, x)
    tensorizer.load(path, out={"x": x})
    x.mul_(0.5)


def _iterate(path, x):
    _save(path, x)
    x.copy_(dict(tensorizer.iterate(path, "cpu"))["x"] / 2)


def _load_module(path, x):
    module = torch.nn.Module()
    module.register_buffer("x", torch.zeros(4))
    _save(path, x)
    with tensorizer.TensorDeserializer(path, "cpu", lazy_load=True) as file:
        file.load_into_module(module)
    x.copy_(module.x / 2)


def _safetensors(path, x):
    tensorizer.safetensors.save_file({"x": x * 2}, path)
    with tensorizer.safetensors.safe_open(path, "pt") as file:
        x.copy_(file.get_tensor("x") / 2)


def _pair(path, x):
    with tensorizer_saving():
        torch.save({"x": x * 2}, path)
    with tensorizer_loading():
        x.copy_(torch.load(path)["x"] / 2)


@pytest.mark.parametrize(
    "call",
    [_save, _serialize, _load, _load_into, _iterate, _load_module, _safetensors, _pair],
)
def test_python_calls_break_the_graph(call, tmp_path):
    @torch.compile(backend="aot_eager")
    def function(x):
        y = x + 1
        call(tmp_path / "f", y)
        return y + 1

    for start in (torch.zeros(4), torch.ones(4)):
        assert_same(function(start), start + 2)
        if call in (_save, _serialize):
            assert_same(tensorizer.load(tmp_path / "f", "cpu")["x"], start * 2 + 2)


def test_python_calls_are_refused_where_a_graph_cannot_break(tmp_path):
    class Model(torch.nn.Module):
        def forward(self, x):
            return x + tensorizer.load(path)["x"]

    path = str(tmp_path / "f")
    tensorizer.save({"x": X}, path)
    with pytest.raises(RuntimeError, match=r"cannot be traced.*torch\.ops\.tensorizer\.load"):
        torch.export.export(Model(), (X,), strict=False)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="marked as skipped"):
        torch.compile(Model(), backend="eager", fullgraph=True)(X)
