"""Many tensors take as few native calls as one: none is checked or planned by itself."""

import pytest
import tensorizer
import torch
from tensorizer import Shard, TensorDeserializer
from tensorizer.file import load_plan, loaded_tensors, open_file, parts, request
from tensorizer.tensors import handles

FEW, MANY = 3, 300


class Counted:
    """Passes on to a native object, and counts the calls of its methods."""

    def __init__(self, inner, calls):
        self._inner, self._calls = inner, calls

    def __len__(self):
        return len(self._inner)

    def __getattr__(self, name):
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*args, **kwargs):
            self._calls.append(name)
            return wrapped(found(*map(inner_of, args), **kwargs), self._calls)

        return call


def inner_of(value):
    return value._inner if isinstance(value, Counted) else value


def wrapped(value, calls):
    if isinstance(value, tensorizer._C.Reader):
        return Counted(value, calls)
    if isinstance(value, tuple):
        return tuple(wrapped(one, calls) for one in value)
    return value


@pytest.fixture
def calls(monkeypatch):
    """Return a list of the native calls that were made."""
    made = []
    monkeypatch.setattr(
        open_file, "Reader", lambda *a, **kw: wrapped(tensorizer._C.Reader(*a, **kw), made)
    )
    for module, name in (
        (parts, "plan_parts"),
        (loaded_tensors, "with_earlier"),
        (handles, "_lend"),
    ):
        function = getattr(module, name)

        def call(*args, _function=function, _name=name):
            made.append(_name)
            return wrapped(_function(*map(inner_of, args)), made)

        monkeypatch.setattr(module, name, call)
    return made


def saved(path, count):
    tensors = {f"layer.{n}": torch.arange(12.0).reshape(4, 3) + n for n in range(count)}
    tensorizer.save(tensors, path)
    return tensors


def load_slices(path, tensors):
    loaded = tensorizer.load(path, "cpu", slices=dict.fromkeys(tensors, (0, 1, 3)))
    assert all(torch.equal(loaded[name], tensors[name][1:3]) for name in tensors)


def load_slices_out(path, tensors):
    out = {name: torch.zeros(2, 3) for name in tensors}
    tensorizer.load(path, slices=dict.fromkeys(tensors, (slice(-2, None), ...)), out=out)
    assert all(torch.equal(out[name], tensors[name][2:]) for name in tensors)


def load_out(path, tensors):
    out = {name: torch.zeros(4, 3) for name in tensors}
    tensorizer.load(path, out=out)
    assert all(torch.equal(out[name], tensors[name]) for name in tensors)


def load_shard(path, tensors):
    loaded = tensorizer.load(path, "cpu", shard=Shard(1, 1, 2))
    assert all(torch.equal(loaded[name], tensors[name][:, 2:]) for name in tensors)


def load_module(path, tensors):
    module = torch.nn.Module()
    module.layer = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(4, 3)) for _ in tensors)
    with TensorDeserializer(path, "cpu", lazy_load=True) as file:
        file.load_into_module(module)
    assert all(map(torch.equal, module.layer, tensors.values()))


@pytest.mark.parametrize("load", [load_slices, load_slices_out, load_out, load_shard, load_module])
def test_calls_do_not_grow_with_the_tensors(tmp_path, calls, load):
    counts = []
    for count in (FEW, MANY):
        tensors = saved(tmp_path / "f.tensors", count)
        calls.clear()
        load(tmp_path / "f.tensors", tensors)
        counts.append(sorted(calls))
    assert counts[0] == counts[1]
    # The reader is among what is counted.
    assert {"load", "load_into"} & set(counts[0])


@pytest.mark.parametrize(
    ("slices", "error", "text"),
    [
        ({"a": (0, 0, 1), "b": (9, 0, 1), "c": (8, 0, 1)}, IndexError, "the slice of 'b'"),
        ({"a": (True,), "b": (0, 0, 1)}, TypeError, "the slice of 'a'"),
        ({"a": (slice(None, None, -1),)}, ValueError, "the slice of 'a'"),
        ({"a": (9,), "missing": (0, 0, 1)}, IndexError, "the slice of 'a'"),
        ({"a": (0, 0, 1), "missing": (0, 0, 1), "b": (9,)}, KeyError, "missing"),
    ],
)
def test_the_first_wrong_slice_is_named(tmp_path, slices, error, text):
    tensorizer.save({name: torch.zeros(4, 3) for name in "abc"}, tmp_path / "f.tensors")
    with pytest.raises(error, match=text):
        tensorizer.load(tmp_path / "f.tensors", "cpu", slices=slices)


def test_a_part_is_described_when_it_is_asked_for(tmp_path):
    tensorizer.save({"a": torch.zeros(4, 3), "b": torch.zeros(2)}, tmp_path / "f.tensors")
    with open_file.OpenFile(tmp_path / "f.tensors") as file:
        plan = load_plan.LoadPlan(request.Request(slices={"a": (0, 1, 3)}), file)
        assert plan.is_cut(0) and not plan.is_cut(1)
        assert plan.part(0).shape == (2, 3) and plan.part(1).shape == (2,)
        assert plan.part(0).boxes[0].ranges == ((1, 3), (0, 3))


@pytest.mark.parametrize("length", [0, 1, 5, 8])
@pytest.mark.parametrize("rank", range(4))
def test_shards_are_those_of_torch(tmp_path, length, rank):
    tensor = torch.arange(length * 2.0).reshape(length, 2)
    tensorizer.save({"a": tensor}, tmp_path / "f.tensors")
    loaded = tensorizer.load(tmp_path / "f.tensors", "cpu", shard=Shard(-2, rank, 4))["a"]
    chunks = torch.chunk(tensor, 4)
    assert torch.equal(loaded, chunks[rank] if rank < len(chunks) else tensor[:0])


def test_a_shard_of_no_dimension_is_refused_by_name(tmp_path):
    tensorizer.save({"a": torch.zeros(4, 3), "b": torch.zeros(2)}, tmp_path / "f.tensors")
    with pytest.raises(IndexError, match="dimension 1 of tensor 'b'"):
        tensorizer.load(tmp_path / "f.tensors", "cpu", shard=Shard(1, 0, 2))
    with pytest.raises(ValueError, match="both a slice and a shard of 'a'"):
        tensorizer.load(
            tmp_path / "f.tensors", "cpu", shard=Shard(0, 0, 2), slices={"a": (0, 0, 1)}
        )
