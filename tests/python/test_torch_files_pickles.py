"""Checkpoints of torch.save whose pickles are made to harm, or of a kind that is not read."""

import collections
import dataclasses
import io
import json
import os
import pickle
import random
import re
import warnings

import pytest
import tensorizer
import torch
from archives import Call, Storage, Zip, load, records, tensor
from conftest import GOLDEN
from processes import run_python
from tensorizer import FormatError
from tensorizer_cli.main import main

ops = torch.ops.tensorizer


STORAGES = [
    (Storage(key="7"), "storage '7' has no record"),
    (Storage(key="../0"), "has no record"),
    (Storage(key=""), "has no record"),
    (Storage(count=5), "expected 20 bytes for 5 elements of torch.float32, found 24"),
    (Storage(count=7), "expected 28 bytes for 7 elements"),
    (Storage(count=-1), "expected -4 bytes"),
    (Storage(count=1 << 62), "expected 18446744073709551616 bytes"),
    (Storage(count=1 << 200), "elements of torch.float32"),
    (Storage(count=6.0), "damaged id of a storage"),
    (Storage(count=True), "damaged id of a storage"),
    (Storage(kind=torch.DoubleStorage), "expected 48 bytes"),
    (Storage(kind=torch.Size), "damaged id of a storage"),
    (Storage(key=0), "damaged id of a storage"),
    (Storage(pid=("storage",)), "expected the id of a storage"),
    (Storage(pid=(*Storage().pid, 1)), "expected the id of a storage"),
    (Storage(pid=5), "expected the id of a storage"),
]


@pytest.mark.parametrize(("storage", "match"), STORAGES, ids=range(len(STORAGES)))
def test_storages(refuse, storage, match):
    refuse(Zip(records({"a": tensor(storage)})).bytes, match)


VIEWS = [
    {"offset": 1},
    {"offset": -1},
    {"offset": 1 << 62},
    {"offset": 1 << 63},
    {"shape": (7,), "stride": (1,)},
    {"shape": (2, 3), "stride": (4, 1)},
    {"shape": (-1,), "stride": (1,)},
    {"shape": (1 << 62,), "stride": (1,)},
    {"shape": (1 << 62, 1 << 62), "stride": (1, 1)},
    {"shape": (1 << 40, 1 << 40), "stride": (0, 0)},
    {"shape": (3,), "stride": (1 << 62,)},
    {"shape": (3,), "stride": (1 << 63,)},
    {"shape": (3,), "stride": (1, 1)},
    {"shape": (1,) * 100, "stride": (1,) * 100},
    {"shape": (1 << 62, 0), "stride": (1, 1)},
    {"shape": "abc", "stride": "abc"},
    {"shape": (2.5,), "stride": (1,)},
    {"shape": None},
]


@pytest.mark.parametrize("view", VIEWS, ids=range(len(VIEWS)))
def test_views(refuse, view):
    refuse(
        Zip(records({"a": tensor(**view)})).bytes,
        "does not lie in its storage|its pickle is damaged|is too large|dimensions",
    )


def test_a_view_that_repeats_takes_no_memory():
    loaded = load(Zip(records({"a": tensor(shape=(1 << 50,), stride=(0,))})).bytes)["a"]
    assert loaded.shape == (1 << 50,)
    assert loaded.untyped_storage().nbytes() == 24
    # A tensor without data is refused, whatever size it claims.
    meta = Call(
        torch._utils._rebuild_meta_tensor_no_storage, torch.float32, (1 << 58,), (1,), False
    )
    with pytest.raises(NotImplementedError, match="'a' was saved on the meta device"):
        load(Zip(records({"a": meta})).bytes)


class Attack:
    def __reduce__(self):
        return os.system, ("echo attacked",)


def test_only_what_the_restricted_unpickler_allows(refuse):
    for tree, match in (
        ({"a": Attack()}, "system, which could run any program: they are blocked"),
        ({"a": Call(eval, "1")}, "does not allow builtins.eval: skip_objects=True"),
        ({"a": Call(torch.load, "x")}, "does not allow torch.serialization.load: skip_objects"),
        (
            {"a": random.Random(), "b": Call(eval, "1")},
            "does not allow builtins.eval, random.Random:",
        ),
        ({"a": Storage(pid=("module", 1, 2, 3, 4))}, "Only persistent_load of storage"),
    ):
        refuse(Zip(records(tree)).bytes, match, pickle.UnpicklingError)
    content = records()
    for data in (b"", b"\x80\x02", content["data.pkl"][:-1], b"\xff" * 100, b"\x80\x02."):
        content["data.pkl"] = data
        refuse(Zip(content).bytes, "damaged|Unsupported op", (FormatError, pickle.UnpicklingError))
    # Globals that the caller allows are allowed.
    with torch.serialization.safe_globals([collections.Counter, fractions]):
        assert torch.equal(load(Zip(records({"b": Call(fractions), "a": tensor()})).bytes)["a"],
                           torch.arange(6.0).reshape(2, 3))  # fmt: skip


def fractions():
    return object()


def test_an_environment_variable_changes_nothing(tmp_path):
    (tmp_path / "x.pt").write_bytes(Zip(records({"a": Call(eval, "print('attacked')")})).bytes)
    # It is read when something is loaded.
    code = (
        "import os, sys, tensorizer\n"
        "os.environ['TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD'] = '1'\n"
        "tensorizer.load(sys.argv[1])"
    )
    done = run_python(code, tmp_path / "x.pt")
    assert "UnpicklingError" in done.stderr
    assert "attacked" not in done.stdout


def test_structures(refuse):
    loop = []
    loop.append({"a": loop})
    refuse(Zip(records(loop)).bytes, "contains itself")
    deep = tensor()
    for _ in range(300):
        deep = [deep]
    refuse(Zip(records(deep)).bytes, "nested more than 256 levels", NotImplementedError)
    # A short pickle that names one tensor 2 to the 60 times, and one that names nothing as often.
    many = tensor()
    for _ in range(60):
        many = [many, many]
    refuse(Zip(records(many)).bytes, "repeats its containers")
    none = []
    for _ in range(60):
        none = [none, none]
    assert load(Zip(records({"a": tensor(), "none": none})).bytes).keys() == {"a"}
    wide = [tensor(), *[[]] * 2000]
    with pytest.raises(FormatError, match="repeats its containers"):
        load(Zip(records([wide] * 4000)).bytes)
    long = {"k" * 60000: [tensor()] * 1000}
    refuse(Zip(records(long)).bytes, "repeats its containers")
    refuse(Zip(records({"k" * 70000: tensor()})).bytes, "name is too long")
    # Values that are no tensors may be beside tensors, under any key.
    assert load(Zip(records({"a": tensor(), 1: 2, None: "x", (1, 2): [3]})).bytes).keys() == {"a"}


UNNAMED = [1.5, None, True, -1, 1 << 64, b"k" * 5000, (1, 2)]


@pytest.mark.parametrize("key", UNNAMED, ids=range(len(UNNAMED)))
def test_tensors_that_cannot_be_named_are_left_out_with_a_warning(refuse, key):
    text = rf"without 2 tensors that cannot be named: \({re.escape(repr(key)[:90])}.*returns them"
    with pytest.warns(UserWarning, match=text) as warned:
        loaded = load(
            Zip(records({key: tensor(), "a": tensor(), "b": [tensor(), {key: [tensor()]}]})).bytes
        )
    assert list(loaded) == ["a", ("b", 0)]
    assert len(str(warned[0].message)) < 1000
    text = "has only 1 tensor that cannot be named: .*torch.load it"
    refuse(Zip(records({key: tensor()})).bytes, text, NotImplementedError)


@pytest.mark.parametrize("first", ["a", 1])
def test_of_strings_beside_integers_the_strings_are_names(first):
    def both(inner):
        found = {"a": inner, 1: inner}
        return {first: found.pop(first)} | found

    with pytest.warns(UserWarning, match=r"without 1 tensor that cannot be named: \(1,\) "):
        assert list(load(Zip(records(both(tensor()))).bytes)) == ["a"]
    with pytest.warns(UserWarning, match=r"without 3 tensors .*: \('b', "):
        loaded = load(Zip(records({"b": both([both(tensor())]), 2: 5})).bytes)
    assert list(loaded) == [("b", "a", 0, "a")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Strings without tensors are no reason to leave integers out,
        assert list(load(Zip(records({"x": 5, "y": [], 1: tensor()})).bytes)) == [(1,)]
    # nor are those whose tensors cannot be named.
    with pytest.warns(UserWarning, match="without 1 tensor "):
        loaded = load(Zip(records({"x": {None: tensor()}, 1: tensor()})).bytes)
    assert list(loaded) == [(1,)]


def test_many_tensors_that_cannot_be_named():
    tree = {"a": tensor()} | dict.fromkeys([(n,) * 300 for n in range(2000)], tensor())
    with pytest.warns(UserWarning, match=r"without 2,000 tensors .*, \.\.\. \(names") as warned:
        assert list(load(Zip(records(tree)).bytes)) == ["a"]
    assert len(str(warned[0].message)) < 1500


@dataclasses.dataclass
class State:
    ema: torch.Tensor


def with_attribute(inner):
    inner.ema = torch.zeros(5)
    return inner


def ordered(inner):
    found = collections.OrderedDict(a=inner)
    found.extra = torch.ones(2)
    return found


#: Objects of a pickle with tensors that no name reaches, and the number of their storages.
UNREACHED = {
    "storage": (lambda: torch.ones(6).untyped_storage(), [], 1),
    "attribute of a tensor": (lambda: with_attribute(torch.ones(3)), [], 1),
    "attribute of a parameter": (lambda: with_attribute(torch.nn.Parameter(torch.ones(3))), [], 1),
    "attribute of a dict": (lambda: ordered(torch.ones(3)), [], 1),
    "ParameterList": (
        lambda: torch.nn.ParameterList([torch.ones(2), torch.ones(2)]),
        [torch.nn.ParameterList],
        2,
    ),
    "dataclass": (lambda: State(torch.ones(2)), [State], 1),
    "module": (lambda: torch.nn.Linear(2, 2), [torch.nn.Linear], 2),
}


@pytest.mark.parametrize("what", UNREACHED)
def test_tensors_that_no_name_reaches_are_named(what, tmp_path, capsys):
    make, classes, count = UNREACHED[what]
    path, storages = str(tmp_path / "f.pt"), "1 storage" if count == 1 else f"{count} storages"
    torch.save({"plain": torch.arange(3), "other": make()}, path)
    text = rf"{storages} that no name reaches \(of tensors inside objects\):"
    text += r"( data/\d+ \(\d+ bytes\),?)+"
    with torch.serialization.safe_globals([*classes, set]):
        for read in (
            tensorizer.load,
            lambda path: dict(tensorizer.iterate(path)),
            lambda path: tensorizer.TensorDeserializer(path, "cpu", lazy_load=True),
            tensorizer.info,
        ):
            with pytest.warns(UserWarning, match=f"without {text}; torch.load returns"):
                read(path)
        for command, title in (("ls", "not loaded: "), ("info", "  not loaded +")):
            assert main([command, path]) == 0
            assert re.search(f"(?m)^{title}{text}", capsys.readouterr().out)
            assert main([command, path, "--json"]) == 0
            assert re.match(text, json.loads(capsys.readouterr().out)["unreached"][0])
        copy = tmp_path / "f.tensors"
        for command in (["cp", path, str(copy)], ["diff", path, path]):
            assert main(command) == 2
            assert re.search(f"{text}.*--skip-objects leaves", capsys.readouterr().err)
            assert command[0] == "diff" or not copy.exists()
            assert main([*command, "--skip-objects"]) == 0
            capsys.readouterr()


def test_a_checkpoint_of_which_no_name_reaches_a_tensor_is_refused(tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "f.pt")
    with torch.serialization.safe_globals([torch.nn.Linear, set]):
        text = "has only 2 storages that no name reaches .*torch.load it"
        with pytest.raises(NotImplementedError, match=text):
            tensorizer.load(tmp_path / "f.pt")


def test_storages_that_are_used_or_empty_are_no_reason_to_warn(tmp_path):
    base = torch.arange(6)
    shared = with_attribute(base[:3])
    shared.ema = base[3:]
    tree = {"shared": shared, "none": torch.empty(0).untyped_storage()}
    torch.save(tree, tmp_path / "f.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(tensorizer.load(tmp_path / "f.pt")["shared"], base[:3])


def saved(value):
    buffer = io.BytesIO()
    torch.save({"plain": torch.ones(2), "other": value}, buffer)
    return buffer.getvalue()


@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_not_plain(refuse):
    for value, match in (
        (torch.eye(3).to_sparse(), "tensor 'other' is sparse_coo"),
        (torch.eye(3).to_sparse_csr(), "tensor 'other' is sparse_csr"),
        (torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8), "a quantized tensor"),
        (torch.nested.nested_tensor([torch.randn(2)]), "a nested tensor"),
        (
            torch.nested.nested_tensor([torch.randn(2)], layout=torch.jagged),
            "tensor 'other' is of the class NestedTensor",
        ),
    ):
        refuse(saved(value), match, NotImplementedError)
    assert torch._utils._sparse_tensors_to_validate == []
    # Members of sets have no names.
    with pytest.warns(UserWarning, match=r"cannot be named: \('other', None\)"):
        assert list(tensorizer.load(io.BytesIO(saved({torch.ones(1)})))) == ["plain"]

    class Special(torch.Tensor):
        pass

    Special.__module__, Special.__qualname__ = __name__, "Special"
    globals()["Special"] = Special
    with torch.serialization.safe_globals([Special]):
        special = torch.ones(3).as_subclass(Special)
        refuse(saved(special), "of the class Special", NotImplementedError)


def test_half_of_a_pair(tmp_path):
    with tensorizer.torch_compat.tensorizer_saving(str(tmp_path / "x.tensors")):
        torch.save({"a": torch.ones(3)}, tmp_path / "x.pt")
    # The other is of the old package.
    for path in (tmp_path / "x.pt", GOLDEN / "tc_linear.pt"):
        with pytest.raises(FormatError, match=r".pt is one half of .* tensorizer_loading"):
            tensorizer.load(path)
