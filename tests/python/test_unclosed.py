"""Serializers that are forgotten without having been closed lose no file."""

import gc
import io
import os

import pytest
import tensorizer
import torch
from conftest import assert_same
from processes import run_python
from tensorizer import TensorSerializer
from tensorizer.stream_io import open_stream

OLD, NEW = {"old": torch.arange(3)}, {"new": torch.arange(5)}


def forget(target, tensors=NEW):
    """Write tensors and lose the serializer; return the warnings."""
    serializer = TensorSerializer(target)
    serializer.write_state_dict(tensors)
    with pytest.warns(RuntimeWarning) as warned:
        del serializer
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
    assert text.startswith(f"{path} was not closed: the file was completed")
    holds(path, NEW)
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.parametrize("how", ["path", "stream"])
def test_a_file_that_has_the_name_stays(how, tmp_path):
    path = tmp_path / "f"
    tensorizer.save(OLD, path)
    # A newer file replaces an older one that was forgotten, too.
    for tensors in (NEW, {"other": torch.zeros(2)}, NEW):
        (text,) = forget(path if how == "path" else open_stream(path, "wb+"), tensors)
        assert f"{path} was not closed: the file of that name is unchanged" in text
        assert str(tmp_path / "f.unclosed") in text
        holds(tmp_path / "f.unclosed", tensors)
    holds(path, OLD)
    assert sorted(os.listdir(tmp_path)) == ["f", "f.unclosed"]


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
    assert "the file was completed with what was written" in text
    holds(path, NEW)


@pytest.mark.parametrize(
    "bad", [NEW, {"sparse": torch.eye(2).to_sparse()}], ids=["the same name", "no bytes"]
)
def test_a_write_that_was_refused_leaves_those_before_it(bad, tmp_path):
    path = tmp_path / "f"
    serializer = TensorSerializer(path)
    serializer.write_state_dict(NEW)
    with pytest.raises((ValueError, NotImplementedError)):
        serializer.write_state_dict(bad)
    with pytest.warns(RuntimeWarning, match="file was completed"):
        del serializer
    holds(path, NEW)


def test_a_failed_write_is_given_up(tmp_path):
    path = tmp_path / "f"
    tensorizer.save(OLD, path)

    class Full(io.BytesIO):
        def write(self, data):
            if self.tell() > 1 << 20:
                raise OSError("full")
            return super().write(data)

    serializer = TensorSerializer(Full())
    serializer.write_state_dict(NEW)
    with pytest.raises(OSError, match="full"):
        serializer.write_state_dict({"large": torch.ones(1 << 20)})
    del serializer
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.parametrize("how", ["path", "stream", "file"])
def test_cycles_of_references(how, tmp_path):
    path = tmp_path / "f"
    targets = {
        "path": path,
        "stream": lambda: open_stream(path, "wb+"),
        "file": lambda: open(path, "wb+"),  # noqa: SIM115
    }
    target = targets[how]() if callable(targets[how]) else targets[how]

    class Holder:
        pass

    holder = Holder()
    holder.me, holder.stream = holder, target
    holder.serializer = TensorSerializer(target)
    holder.serializer.write_state_dict(NEW)
    with pytest.warns(RuntimeWarning, match="file was completed"):
        del holder, target
        targets.clear()
        gc.collect()
    holds(path, NEW)


@pytest.mark.parametrize("forgotten", [False, True])
def test_the_folder_may_change_meanwhile(forgotten, tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    serializer = TensorSerializer("f")
    serializer.write_state_dict(NEW)
    monkeypatch.chdir(tmp_path / "other")
    if forgotten:
        with pytest.warns(RuntimeWarning):
            del serializer
    else:
        serializer.close()
    holds(tmp_path / "f", NEW)
    assert sorted(os.listdir(tmp_path)) == ["f", "other"]


def test_a_link_to_nothing_is_followed(tmp_path):
    (tmp_path / "link").symlink_to("real")
    tensorizer.save(NEW, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    holds(tmp_path / "real", NEW)


def test_unclosed_uploads_are_aborted(s3, tmp_path):
    tensorizer.save(OLD, "s3://bucket/forgotten")
    (text,) = forget("s3://bucket/forgotten")
    assert "s3://bucket/forgotten was not closed: the upload was aborted" in text
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
    done = run_python(code, path, finalize=True)
    assert "f.unclosed" in done.stderr, done.stderr
    holds(path, OLD)
    holds(tmp_path / "f.unclosed", NEW)
    assert sorted(os.listdir(tmp_path)) == ["f", "f.unclosed"]


@pytest.mark.filterwarnings("error")
def test_a_stream_that_was_closed_before(tmp_path):
    with open_stream(tmp_path / "f", "wb+") as stream:
        serializer = TensorSerializer(stream)
        serializer.write_state_dict(NEW)
    holds(tmp_path / "f", NEW)
    del serializer, stream
    gc.collect()
    holds(tmp_path / "f", NEW)

    with open_stream(tmp_path / "f", "wb+") as stream:
        serializer = TensorSerializer(stream)
        serializer.write_state_dict(OLD)
    serializer.close()
    holds(tmp_path / "f", OLD)

    with pytest.raises(ZeroDivisionError), open_stream(tmp_path / "f", "wb+") as stream:
        serializer = TensorSerializer(stream)
        serializer.write_state_dict(NEW)
        raise ZeroDivisionError
    del serializer, stream
    gc.collect()
    holds(tmp_path / "f", OLD)
    assert os.listdir(tmp_path) == ["f"]
