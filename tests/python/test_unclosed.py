"""Serializers that are forgotten without having been closed lose no file."""

import gc
import os

import pytest
import tensorizer
import torch
from conftest import assert_same, run_python
from tensorizer import TensorSerializer
from tensorizer.stream_io import open_stream

OLD, NEW = {"old": torch.arange(3)}, {"new": torch.arange(5)}


def forget(target, tensors=NEW):
    """Write tensors and lose the serializer; return the warnings."""
    serializer = TensorSerializer(target)
    serializer.write_state_dict(tensors)
    with pytest.warns(RuntimeWarning) as warned:
        del serializer
        gc.collect()
    return [str(warning.message) for warning in warned]


def holds(path, tensors):
    loaded = tensorizer.load(path, verify_hash=True)
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        assert_same(loaded[name], tensor)


@pytest.mark.parametrize("how", ["path", "stream"])
def test_a_new_name_is_given_to_what_was_written(how, tmp_path):
    path = tmp_path / "f"
    (text,) = forget(path if how == "path" else open_stream(path, "wb+"))
    assert text.startswith(f"{path} was not closed: what was written has been finished")
    holds(path, NEW)
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.parametrize("how", ["path", "stream"])
def test_a_file_that_has_the_name_stays(how, tmp_path):
    path = tmp_path / "f"
    tensorizer.save(OLD, path)
    other = {"other": torch.zeros(2)}
    for name, tensors in (("f.unclosed", NEW), ("f.unclosed.2", other), ("f.unclosed.3", NEW)):
        (text,) = forget(path if how == "path" else open_stream(path, "wb+"), tensors)
        assert f"{path} was not closed: the file of that name stays" in text
        assert str(tmp_path / name) in text
        holds(tmp_path / name, tensors)
    holds(path, OLD)
    holds(tmp_path / "f.unclosed", NEW)
    assert sorted(os.listdir(tmp_path)) == ["f", "f.unclosed", "f.unclosed.2", "f.unclosed.3"]


def test_a_file_that_gets_the_name_meanwhile_stays(tmp_path):
    path = tmp_path / "f"
    serializer = TensorSerializer(path)
    serializer.write_state_dict(NEW)
    tensorizer.save(OLD, path)
    with pytest.warns(RuntimeWarning, match=r"f\.unclosed"):
        del serializer
    holds(path, OLD)
    holds(tmp_path / "f.unclosed", NEW)


def test_a_file_of_the_caller_is_finished_where_it_is(tmp_path):
    path = tmp_path / "f"
    (text,) = forget(open(path, "wb+"))  # noqa: SIM115
    assert "what was written has been finished" in text
    holds(path, NEW)


def test_a_failed_write_is_given_up(tmp_path):
    path = tmp_path / "f"
    tensorizer.save(OLD, path)
    serializer = TensorSerializer(path)
    serializer.write_state_dict(NEW)
    with pytest.raises(ValueError, match="new"):
        serializer.write_state_dict(NEW)
    del serializer
    holds(path, OLD)
    assert os.listdir(tmp_path) == ["f"]


def test_objects_of_s3_are_given_up(s3, tmp_path):
    tensorizer.save(OLD, "s3://bucket/forgotten")
    (text,) = forget("s3://bucket/forgotten")
    assert "s3://bucket/forgotten was not closed: it was given up" in text
    holds("s3://bucket/forgotten", OLD)


AT_THE_END = """
import sys, tensorizer, torch
kept = tensorizer.TensorSerializer(sys.argv[1])
kept.write_state_dict({"new": torch.arange(5)})
"""
EXCEPTION = AT_THE_END + 'raise RuntimeError("mine")\n'


@pytest.mark.parametrize("code", [AT_THE_END, EXCEPTION], ids=["end", "exception"])
def test_the_end_of_the_interpreter(code, tmp_path):
    path = tmp_path / "f"
    tensorizer.save(OLD, path)
    done = run_python(code, path)
    assert "f.unclosed" in done.stderr, done.stderr
    holds(path, OLD)
    holds(tmp_path / "f.unclosed", NEW)
    assert sorted(os.listdir(tmp_path)) == ["f", "f.unclosed"]
