"""Objects beside the tensors of a checkpoint: left out, allowed by name, or a part by its key."""

import argparse
import collections
import fractions
import io
import pickle
import sys
import types

import numpy as np
import pytest
import tensorizer
import torch
from archives import Call, Zip, records, tensor
from tensorizer_cli.main import main


class Bag:
    """Stands for a class of a package that is not installed."""


class Settings(dict):
    """A dict of a class of its own, as Lightning keeps its hyperparameters."""


@pytest.fixture
def missing_module(monkeypatch):
    """Return a class whose module is there only while the test makes files of it."""
    module = types.ModuleType("absent.callbacks")
    kind = type("ModelCheckpoint", (), {"__module__": module.__name__})
    module.ModelCheckpoint = kind
    for name in ("absent", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)
    yield kind
    assert "absent.callbacks" not in sys.modules


def bag(**content):
    made = Bag()
    vars(made).update(content)
    return made


def saved(tree, path):
    torch.save(tree, path)
    return path


def run(*arguments):
    return main([str(argument) for argument in arguments])


def test_one_message_names_all_classes(tmp_path):
    tree = {"a": torch.ones(2), "best": np.float64(0.5), "args": argparse.Namespace(x=1)}
    path = saved(tree, tmp_path / "x.pt")
    with pytest.raises(pickle.UnpicklingError) as caught:
        tensorizer.load(path)
    for word in (
        "argparse.Namespace",
        "scalar",
        "numpy.dtype",
        "skip_objects=True",
        "--allow-class",
    ):
        assert word in str(caught.value)
    assert list(tensorizer.load(path, skip_objects=True)) == ["a"]


@pytest.mark.parametrize("old", [False, True])
def test_objects_are_left_out_and_what_they_hold_is_named(tmp_path, old):
    inner = bag(weight=torch.ones(3), up=None)
    inner.up = inner  # objects may refer to each other in circles
    tree = {
        "a": torch.arange(4),
        "bag": inner,
        "settings": Settings(lr=torch.ones(1), other=fractions.Fraction(1, 2)),
        "module": torch.nn.Linear(2, 2),
        "deque": collections.deque([torch.ones(1), *range(97, 120)]),
        "one": collections.deque([torch.ones(1)]),
        "default": collections.defaultdict(list, {"x": torch.ones(1), **dict.fromkeys("abc", 1)}),
    }
    path = tmp_path / "x.pt"
    torch.save(tree, path, _use_new_zipfile_serialization=not old)
    with pytest.warns(UserWarning, match="torch.load returns them") as caught:
        loaded = tensorizer.load(path, skip_objects=True)
    assert {name: one.tolist() for name, one in loaded.items()} == {"a": [0, 1, 2, 3]}
    (text,) = {str(one.message) for one in caught}
    assert "7 tensors that cannot be named" in text
    assert ".Bag>, 'weight'" in text and ".Settings>, 'lr'" in text and "Linear>" in text
    with (
        pytest.warns(UserWarning),
        tensorizer.TensorDeserializer(path, "cpu", skip_objects=True) as file,
    ):
        assert list(file) == ["a"]


def test_every_object_has_a_placeholder(tmp_path):
    """Strings of one letter, circles, depth, arrays, subclasses and parameters of them."""
    for letter in "aesuRhqUK":
        tree = {"t": torch.ones(1), "d": collections.deque([letter, torch.ones(1)])}
        tree["b"] = bag(**{letter: 1, "x": collections.defaultdict(list, {letter: 2})})
        with pytest.warns(UserWarning, match="1 tensor that cannot be named"):
            assert list(tensorizer.load(saved(tree, tmp_path / "x.pt"), skip_objects=True)) == ["t"]
    circle = {"t": torch.ones(1), "b": bag()}
    circle["b"].up = circle
    chain = bag()
    for _ in range(200):
        chain = bag(next=chain)
    for tree in (circle, {"t": torch.ones(1), "b": chain}):
        assert list(tensorizer.load(saved(tree, tmp_path / "x.pt"), skip_objects=True)) == ["t"]
    tree = {"t": torch.ones(1), "n": np.ones(3), "s": torch.ones(2).as_subclass(Sub)}
    path = saved(tree, tmp_path / "x.pt")
    with pytest.warns(UserWarning, match=r"1 tensors or arrays that only torch.load .*\('n',\)"):
        assert list(tensorizer.load(path, skip_objects=True)) == ["t"]
    assert run("cp", path, tmp_path / "x.tensors") == 2
    with pytest.warns(UserWarning, match="8 tensors that cannot be named"):
        path = saved(torch.nn.TransformerEncoderLayer(8, 2).self_attn, tmp_path / "x.pt")
        torch.save([torch.nn.Linear(2, 2) for _ in range(4)], path)
        assert tensorizer.load(path, skip_objects=True) == {}
    assert run("ls", path) == 0
    # The name of placeholders is not for pickles.
    own = tensorizer.file.placeholders.Placeholder
    data = Zip(records({"a": tensor(), "b": Call(own, ["x"] * 9)})).bytes
    assert list(tensorizer.load(io.BytesIO(data), skip_objects=True)) == ["a"]


class Sub(torch.Tensor):
    """A tensor of another class."""


def test_nothing_runs(tmp_path):
    marker = tmp_path / "ran"
    for function, arguments in (
        (eval, (f"open({str(marker)!r}, 'w')",)),
        (open, (str(marker), "w")),
    ):
        data = Zip(records({"a": tensor(), "b": Call(function, *arguments)})).bytes
        assert list(tensorizer.load(io.BytesIO(data), skip_objects=True)) == ["a"]
    import os

    data = Zip(records({"a": tensor(), "b": Call(os.system, "true")})).bytes
    with pytest.raises(pickle.UnpicklingError, match="blocked"):
        tensorizer.load(io.BytesIO(data), skip_objects=True)
    assert not marker.exists()


def test_special_tensors_are_left_out(tmp_path):
    tree = {
        "a": torch.ones(2),
        "s": torch.eye(3).to_sparse(),
        "n": [torch.nn.Buffer(torch.ones(1))],
    }
    path = saved(tree, tmp_path / "x.pt")
    with pytest.raises(NotImplementedError, match="skip_objects=True"):
        tensorizer.load(path)
    with pytest.warns(UserWarning):
        assert list(tensorizer.load(path, skip_objects=True)) == ["a", ("n", 0)]


def test_the_command_lists_and_copies_what_it_can(tmp_path, capsys):
    held = saved({"a": torch.ones(2), "bag": bag(x=torch.ones(5))}, tmp_path / "held.pt")
    plain = saved({"a": torch.ones(2), "bag": bag(x=1), "s": np.float32(2)}, tmp_path / "plain.pt")
    for command in ("ls", "info", "load"):
        assert run(command, plain) == 0
    capsys.readouterr()
    assert run("ls", held) == 0
    assert "not loaded: 1 tensor that cannot be named: ('bag', <" in capsys.readouterr().out
    assert run("ls", "--skip-objects", held) == 0
    assert "not loaded" not in capsys.readouterr().out
    assert run("cp", held, tmp_path / "x.tensors") == 2
    assert "--skip-objects leaves them out" in capsys.readouterr().err
    assert run("cp", "--skip-objects", held, tmp_path / "x.tensors") == 0
    assert run("cp", plain, tmp_path / "y.tensors") == 0
    for name in ("x", "y"):
        assert list(tensorizer.load(tmp_path / f"{name}.tensors")) == ["a"]


def test_messages_say_where_the_command_has_no_way(tmp_path, capsys):
    path = tmp_path / "script.pt"
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)
    assert run("ls", path) == 2
    said = capsys.readouterr().err
    assert "load it with torch.jit.load" in said
    assert said.endswith("(in a Python program: the command cannot do it)\n")


def test_classes_are_allowed_by_name(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch._weights_only_unpickler, "_marked_safe_globals_set", set())
    path = saved({"a": torch.ones(2), "b": bag(x=torch.ones(5))}, tmp_path / "x.pt")
    name = f"{Bag.__module__}.Bag"
    assert run("ls", "--allow-class", name, path) == 0
    assert "1 storage that no name reaches" in capsys.readouterr().out
    assert run("ls", "--allow-class", f"{Bag.__module__}.Nothing", path) == 2
    assert "expected MODULE.NAME" in capsys.readouterr().err
    assert run("ls", "--allow-class", "absent.Nothing", path) == 2


def test_a_class_as_a_key_is_its_name(tmp_path, missing_module, monkeypatch):
    path = tmp_path / "sd.ckpt"
    weights = {f"model.{n}": torch.randn(3) for n in range(4)}
    callbacks = {missing_module: {"best": torch.tensor(0.5), "path": "x"}}
    torch.save({"state_dict": weights, "epoch": 2, "callbacks": callbacks}, path)
    monkeypatch.undo()
    with pytest.raises(pickle.UnpicklingError, match="absent.callbacks.ModelCheckpoint"):
        tensorizer.load(path)
    assert run("cp", path, tmp_path / "x.tensors") == 0
    best = tensorizer.load(tmp_path / "x.tensors")[
        "callbacks", "absent.callbacks.ModelCheckpoint", "best"
    ]
    assert best == 0.5
    # Two parts are no one part.
    assert run("cp", path, tmp_path / "x.safetensors") == 2
    assert run("cp", "--verify", "--key", "state_dict", path, tmp_path / "x.safetensors") == 0
    found = tensorizer.load(tmp_path / "x.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.fixture
def nested(tmp_path):
    tree = {
        "model": {"ema": {"a.w": torch.ones(2), "b": [torch.zeros(1), torch.ones(1)]}},
        "model.raw": {"a": torch.ones(3)},
        "step": torch.tensor(4),
    }
    tensorizer.save(tree, tmp_path / "x.tensors")
    return saved(tree, tmp_path / "x.pt"), tmp_path / "x.tensors"


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("model", ['["ema", "a.w"]', '["ema", "b", 0]', '["ema", "b", 1]', "raw.a"]),
        ("model.ema", ["a.w", '["b", 0]', '["b", 1]']),
        ("model.ema.a", ["w", None]),
        ("model.raw", ["a"]),
        ("step", ["step"]),
    ],
)
def test_a_part_by_its_key(nested, capsys, key, names):
    if names[0] == '["ema", "a.w"]':
        names[-1] = '["raw", "a"]'
    for file in nested:
        assert run("ls", "--key", key, file) == 0
        out = capsys.readouterr().out
        rows = [line.split("  ")[0] for line in out.splitlines()[1:-1]]
        assert rows == [name for name in names if name is not None]
        assert run("info", "--key", key, file) == 0
        capsys.readouterr()
        copy = file.with_name("copy.tensors")
        assert run("cp", "--verify", "--key", key, file, copy) == 0
        assert len(tensorizer.load(copy)) == len(rows)
    assert run("verify", "--key", key, nested[1]) == 0
    assert f"{len(rows)} of {len(rows)}" in capsys.readouterr().out


def test_a_part_of_a_part(tmp_path, capsys):
    tree = {"model": {"ema": {"a": torch.zeros(1)}}, "ema": {"a": torch.ones(1)}}
    path = saved(tree, tmp_path / "x.pt")
    assert run("cp", "--verify", "--key", "model", path, tmp_path / "x.safetensors") == 0
    assert tensorizer.load(tmp_path / "x.safetensors")["a"] == 0
    path = saved({"m": {"a": torch.ones(1)}, "m.a": torch.ones(1)}, path)
    assert run("cp", "--key", "m", path, tmp_path / "y.tensors") == 2
    assert "would have the same name" in capsys.readouterr().err


def test_keys_that_are_not_there(nested, capsys):
    for key in ("modell", "model.em", "x", "step.0"):
        for file in nested:
            assert run("cp", "--key", key, file, file.with_name("copy.tensors")) == 2
            assert f"no tensors below {key!r}, but below model, " in capsys.readouterr().err
    assert run("cp", nested[0], nested[0].with_name("x.safetensors")) == 2
    assert "--key takes a part, such as model" in capsys.readouterr().err


def test_the_only_part_goes_to_safetensors_by_itself(tmp_path, capsys):
    weights = {"a.w": torch.ones(2), "b": torch.zeros(3)}
    path = saved({"state_dict": weights, "epoch": 3}, tmp_path / "x.ckpt")
    assert run("cp", "--verify", path, tmp_path / "x.safetensors") == 0
    assert "the names are those below state_dict" in capsys.readouterr().err
    assert tensorizer.load(tmp_path / "x.safetensors").keys() == weights.keys()
