"""``torch.ops.tensorizer`` under torch.compile, torch.export and AOTInductor."""

import struct
import warnings
from pathlib import Path

import pytest
import tensorizer
import torch
from conftest import TENSORS, assert_same
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

pytestmark = pytest.mark.usefixtures("without_graphs_of_others")

ops = torch.ops.tensorizer

BACKENDS = ["aot_eager", "inductor"]


@pytest.fixture
def path(saved):
    return saved


# Each takes an address and a tensor, and returns tensors; all overloads are among them.


def by_dict(uri, x):
    loaded = ops.load(uri)
    return loaded["weight"] + x.sum(), loaded["bias"], *loaded.values()


def by_dict_with_options(uri, x):
    loaded = ops.load(uri, device=torch.device("cpu"), verify=True, num_readers=1)
    return x.clone(), loaded["half"]


def by_list(uri, x):
    half, weight = ops.load(uri, ["half", "weight"], verify=True)
    return half * 2, weight.t().sum(1), x + 1


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


def close(found, expected):
    found, expected = list(found), list(expected)
    assert len(found) == len(expected)
    for left, right in zip(found, expected, strict=True):
        assert left.dtype == right.dtype
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_compile(function, backend, path):
    x = torch.randn(4)
    expected = function(path, x)
    if function is by_save:
        check_saved(path, x)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for _ in range(2):
        close(compiled(path, x), expected)
        if function is by_save:
            check_saved(path, x)


class Module(torch.nn.Module):
    def __init__(self, function, uri):
        super().__init__()
        self.function, self.uri = function, uri

    def forward(self, x):
        return self.function(self.uri, x)


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_export(function, strict, path, tmp_path):
    x = torch.randn(4)
    expected = function(path, x)
    if function is by_save:
        check_saved(path, x)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*tensorizer.*")
        program = torch.export.export(Module(function, path), (x,), strict=strict)
    assert not program.constants, "the data of the file were frozen into the program"
    torch.export.save(program, tmp_path / "program.pt2")
    for form in (
        program,
        program.run_decompositions(),
        torch.export.load(tmp_path / "program.pt2"),
    ):
        close(form.module()(x), expected)
        if function is by_save:
            check_saved(path, x)


def test_a_graph_does_not_hold_the_data(path):
    """What was traced reads the file when it runs."""
    compiled = torch.compile(by_list, backend="inductor", fullgraph=True)
    compiled(path, torch.ones(4))
    ops.save(path, {**TENSORS, "weight": torch.full((40, 30), 2.0)})
    assert compiled(path, torch.ones(4))[1].eq(80).all()


def test_parameters_are_filled_in_place(path):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(40, 30))
            self.register_buffer("bias", torch.zeros(5, dtype=torch.int64))

        def forward(self, uri: str, x):
            with torch.no_grad():
                ops.load(uri, ["weight", "bias"], [self.weight, self.bias])
            return x @ self.weight + self.bias.sum()

    for backend in BACKENDS:
        model = Model()
        addresses = [model.weight.data_ptr(), model.bias.data_ptr()]
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        x = torch.randn(2, 40)
        expected = x @ TENSORS["weight"] + TENSORS["bias"].sum()
        torch.testing.assert_close(compiled(path, x).detach(), expected)
        assert [model.weight.data_ptr(), model.bias.data_ptr()] == addresses
        assert_same(model.weight.detach(), TENSORS["weight"])
        assert_same(model.bias, TENSORS["bias"])
        # What does not use the loaded values still sees them in the module.
        model.weight.data.zero_()
        compiled(path, torch.zeros(2, 40))
        assert_same(model.weight.detach(), TENSORS["weight"])


def test_views_of_a_buffer_that_is_an_argument(path):
    def fill(uri, flat):
        ops.load(uri, ["weight", "bias"], [flat[7:1207].view(40, 30), flat.new_zeros(5).long()])
        return flat[:10] * 2

    for backend in BACKENDS:
        flat = torch.full((1300,), 5.0)
        address = flat.data_ptr()
        out = torch.compile(fill, backend=backend, fullgraph=True)(path, flat)
        assert flat.data_ptr() == address
        assert_same(flat[7:1207].view(40, 30).clone(), TENSORS["weight"])
        assert flat[:7].eq(5).all()
        assert flat[1207:].eq(5).all()
        assert_same(out, flat[:10] * 2)


# Order


def interleaved(uri, x):
    """Twelve saves and loads of one file, of which each load must see the save before it."""
    seen = []
    for step in range(4):
        ops.save(uri, ["x"], [x + step])
        if step % 2:
            seen.append(ops.load(uri)["x"])
        else:
            seen.append(ops.load(uri, ["x"])[0])
        out = torch.zeros(4)
        ops.load(uri, ["x"], [out])
        seen.append(out)
    return torch.stack(seen)


def check_order(run, uri):
    expected = torch.arange(4.0).repeat_interleave(2)[:, None] + torch.ones(4)
    for _ in range(3):
        ops.save(uri, {"x": torch.full((4,), -7.0)})
        assert_same(run(torch.ones(4)), expected)


@pytest.mark.parametrize("backend", ["eager", *BACKENDS])
def test_saves_and_loads_keep_their_order(backend, path, tmp_path):
    uri = str(tmp_path / "f")
    ops.save(uri, {"x": torch.zeros(4)})

    def function(x):
        # What comes after makes schedulers that may reorder want to.
        return interleaved(uri, x), *by_list(path, x)

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    check_order(lambda x: compiled(x)[0], uri)


def test_aot_inductor(path, tmp_path, capfd):
    """Order is kept, and every overload runs, in a package without Python code."""
    uri = str(tmp_path / "f")
    ops.save(uri, {"x": torch.zeros(4)})

    class Everything(torch.nn.Module):
        def forward(self, x):
            found = [y for f in FUNCTIONS for y in f(path, x)]
            return interleaved(uri, x), *found

    program = torch.export.export(Everything(), (torch.ones(4),))
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "model.pt2")
    )
    run = torch._inductor.aoti_load_package(package)
    check_order(lambda x: run(x)[0], uri)
    x = torch.randn(4)
    close(run(x)[1:], [y for f in FUNCTIONS for y in f(path, x)])
    check_saved(path, x)
    run(x)
    check_saved(path, x)
    ops.save(path, {**TENSORS, "weight": torch.zeros(60, 30)})
    # Packages of torch 2.11 print what operators throw and raise a text of their own.
    with pytest.raises(RuntimeError) as raised:
        run(x)
    told = str(raised.value) + capfd.readouterr().err
    assert "tensor `weight`: expected float32[40,30]" in told


# What goes wrong between tracing and running


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", [by_dict, by_list, by_into], ids=lambda f: f.__name__)
def test_a_file_that_changed_under_a_compiled_graph(function, backend, path):
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    x = torch.ones(4)
    compiled(path, x)
    for other, text in (
        (torch.zeros(50, 30), r"float32 ?\[50, ?30\]"),
        (torch.zeros(40, 30).half(), r"float16 ?\[40, ?30\]"),
    ):
        ops.save(path, {**TENSORS, "weight": other})
        with pytest.raises(RuntimeError, match=rf"tensor `weight`.*({text})"):
            compiled(path, x)
        # Compiled again, it fits again, whatever is in torch's caches on the disk.
        torch._dynamo.reset()
        if other.dtype == torch.float32 and function is not by_into:
            close(torch.compile(function, backend=backend, fullgraph=True)(path, x)[:1],
                  function(path, x)[:1])  # fmt: skip
        ops.save(path, TENSORS)
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        close(compiled(path, x), function(path, x))
    ops.save(path, {"half": torch.ones(3)})
    with pytest.raises(RuntimeError, match="Tensor not found: `weight`"):
        compiled(path, x)
    Path(path).unlink()
    with pytest.raises(RuntimeError, match=r"f.tensors`: No such file"):
        compiled(path, x)


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

    monkeypatch.setattr(dynamo, "_make_handlers", fail)
    handlers = Function._get_handlers()
    fresh = {op: f for op, f in handlers.items() if "tensorizer" not in str(op)}
    assert len(fresh) < len(handlers)
    monkeypatch.setattr(Function, "_get_handlers", staticmethod(lambda: dict(fresh)))
    dynamo.extend_dynamo(torch._dynamo.variables.torch)
    compiled = torch.compile(by_list, backend="aot_eager", fullgraph=True)
    with pytest.warns(UserWarning, match=r"will not take torch.ops.tensorizer.load\(uri\)"):
        close(compiled(path, torch.ones(4)), by_list(path, torch.ones(4)))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(by_dict, backend="aot_eager", fullgraph=True)(path, torch.ones(4))


# Tracing itself


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
