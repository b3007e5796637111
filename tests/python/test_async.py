"""save_async()."""

import logging
import os
import threading

import pytest
import tensorizer
import torch
from conftest import assert_same, files
from processes import run_python

pytestmark = pytest.mark.device


def test_later_changes_are_not_saved(tmp_path):
    path = tmp_path / "f.tensors"
    tensors = {
        "a": torch.zeros(3000, 1000),
        "strided": torch.arange(12.0).view(3, 4).t(),
        "nested": [torch.ones(3)],
        "meta": torch.empty(2, device="meta"),
    }
    expected = {"a": tensors["a"].clone(), "strided": tensors["strided"].clone()}
    future = tensorizer.save_async(tensors, path, hashes="crc32", allow_meta=True)
    tensors["a"] += 1
    tensors["strided"] += 1
    assert future.total_bytes == 12_000_000 + 48 + 12
    assert future.result(60) is None
    assert future.done()
    assert future.saved_bytes == future.total_bytes
    loaded = tensorizer.load(path, "cpu", verify_hash=True)
    for name, tensor in expected.items():
        assert_same(loaded[name], tensor)
    assert loaded[("nested", 0)].tolist() == [1, 1, 1]


class Gate:
    """A file that waits in its first write until it is let through."""

    def __init__(self, path):
        self.file, self.gate, self.writing = path.open("wb+"), threading.Event(), threading.Event()
        self.seek, self.read, self.tell = self.file.seek, self.file.read, self.file.tell
        self.readinto, self.close = self.file.readinto, self.file.close

    def write(self, data):
        self.writing.set()
        assert self.gate.wait(60)
        return self.file.write(data)


def test_the_caller_goes_on_and_sees_progress(tmp_path):
    gate = Gate(tmp_path / "f.tensors")
    future = tensorizer.save_async({"a": torch.arange(1_000_000)}, gate)
    assert gate.writing.wait(60)
    assert not future.done()
    assert not future.cancel()
    assert future.saved_bytes < future.total_bytes == 8_000_000
    gate.gate.set()
    future.result(60)
    assert future.saved_bytes == 8_000_000
    assert_same(tensorizer.load(tmp_path / "f.tensors", "cpu")["a"], torch.arange(1_000_000))


def test_errors(tmp_path, caplog):
    path = tmp_path / "f.tensors"
    tensorizer.save({"old": torch.ones(1)}, path)
    before = files(tmp_path)
    with caplog.at_level(logging.ERROR, "tensorizer.serialization"):
        future = tensorizer.save_async({"a": torch.eye(3).to_sparse()}, path)
        with pytest.raises(NotImplementedError, match="sparse|layout"):
            future.result(60)
    assert "f.tensors failed" in caplog.text
    assert files(tmp_path) == before
    circle = []
    circle.append(circle)
    for wrong, error in (({"a": "text"}, TypeError), ("text", TypeError), (circle, ValueError)):
        with pytest.raises(error):
            tensorizer.save_async(wrong, path)
    assert files(tmp_path) == before
    with pytest.raises(IsADirectoryError):
        tensorizer.save_async({"a": torch.ones(1)}, tmp_path)


@pytest.mark.host
def test_a_process_that_ends_waits_for_its_saves(tmp_path):
    code = (
        "import sys, tensorizer, torch\n"
        "tensorizer.save_async({'a': torch.arange(3_000_000)}, sys.argv[1])\n"
    )
    done = run_python(code, tmp_path / "f.tensors", finalize=True)
    assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path) == ["f.tensors"]
    assert tensorizer.load(tmp_path / "f.tensors", "cpu")["a"][-1] == 2_999_999


AT_EXIT = """
import atexit, os, sys, threading, weakref
def later():
    import tensorizer, torch
    future = tensorizer.save_async({"a": torch.arange(3_000_000)}, path)
    if wait: future.result()
path, way, wait = sys.argv[1], sys.argv[2], sys.argv[3] == "wait"
if way == "registered before": atexit.register(later)
import tensorizer, torch
class Object: pass
if way == "atexit": atexit.register(later)
elif way == "finalize": kept = Object(); weakref.finalize(kept, later)
elif way == "daemon":
    thread = threading.Thread(target=later, daemon=True); thread.start(); thread.join()
elif way == "fork":
    child = os.fork()
    if child: sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    later()
"""


@pytest.mark.host
@pytest.mark.parametrize(
    ("way", "wait"),
    [(way, "go on") for way in ("registered before", "atexit", "finalize", "daemon", "fork")]
    + [("atexit", "wait"), ("fork", "wait")],
)
def test_saves_begun_at_the_end_are_there(tmp_path, way, wait):
    done = run_python(AT_EXIT, tmp_path / "f.tensors", way, wait, finalize=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert tensorizer.load(tmp_path / "f.tensors", "cpu")["a"][-1] == 2_999_999


@pytest.mark.host
@pytest.mark.parametrize("way", ["atexit", "registered before", "daemon"])
def test_a_failed_save_that_no_call_asked_for_fails_the_process(tmp_path, way):
    code = AT_EXIT.replace("torch.arange(3_000_000)", "torch.eye(3).to_sparse()")
    done = run_python(code, tmp_path / "f.tensors", way, "go on", finalize=True)
    assert done.returncode == 120
    assert f"OSError: saving to {tmp_path / 'f.tensors'} failed: " in done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.host
def test_a_failed_save_whose_exception_was_asked_for_fails_no_process(tmp_path):
    code = AT_EXIT.replace("torch.arange(3_000_000)", "torch.eye(3).to_sparse()")
    asked = code.replace("if wait: future.result()", "future.exception()")
    done = run_python(asked, tmp_path / "f.tensors", "atexit", "go on", finalize=True)
    assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.host
def test_waiting_in_a_forked_child_for_a_save_of_its_parent_raises(tmp_path):
    code = """
import asyncio, concurrent.futures, io, os, sys, threading, tensorizer, torch
go, told = threading.Event(), threading.Event()
class Slow(io.BytesIO):
    def write(self, data):
        go.wait()
        return super().write(data)
def tell(future):
    print("called back in", os.getpid() == parent)
    told.set()
done = tensorizer.save_async({"a": torch.ones(3)}, sys.argv[1])
done.result()
running = tensorizer.save_async({"a": torch.ones(3)}, Slow())
running.add_done_callback(tell)
parent = os.getpid()
child = os.fork()
if child == 0:
    async def wait():
        await running
    asked = (
        running.result,
        lambda: running.result(timeout=1),
        lambda: asyncio.run(wait()),
        lambda: concurrent.futures.wait([running], timeout=60).done.pop().result(),
    )
    for ask in asked:
        try:
            ask()
        except RuntimeError as error:
            print(error)
    print(running.done(), type(running.exception()).__name__, done.result())
    sys.stdout.flush()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
go.set()
running.result()
told.wait()  # result() may return before callbacks have run
print(running.saved_bytes)
"""
    done = run_python(code, tmp_path / "f.tensors")
    assert done.returncode == 0, done.stderr
    told = "wait for a save in the process that started it: this is a forked child\n"
    assert done.stdout == told * 4 + "True RuntimeError None\ncalled back in True\n12\n"
