"""Objects of the parent stay the parent's: a forked child neither finishes nor destroys them."""

import os
import re

import pytest
import tensorizer
import torch
from conftest import ROOT, assert_same
from emulators import Doorman, Google, Tokens
from processes import run_python
from scripted import FaultServer

#: Runs ``child`` in a forked process, and fails with its traceback.
FORKED = """
import gc, os, sys, traceback
import tensorizer, torch
from tensorizer import TensorDeserializer, TensorSerializer
from tensorizer.stream_io import open_stream

def forked(child):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            child()
            gc.collect()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0, "the child failed"

def refused(call):
    try:
        call()
    except ValueError as error:
        assert "was opened for writing by process" in str(error), error
    else:
        raise AssertionError("no error")
"""

SAVES = """
target = sys.argv[1]
serializer = TensorSerializer(TARGET)
serializer.write_state_dict({"a": torch.arange(2_000_000)})

def forget():
    global serializer
    del serializer
def close():
    refused(serializer.close)
    refused(lambda: serializer.write_state_dict({"b": torch.ones(1)}))
def leave_block():
    with serializer:
        pass
for child in (forget, close, lambda: refused(leave_block)):
    forked(child)
serializer.write_state_dict({"c": torch.arange(5)})
serializer.close()
"""


@pytest.mark.parametrize(
    "target",
    ["target", "open_stream(target, 'wb+')", "open(target, 'wb+')", "'s3://bucket/forked'"],
    ids=["path", "stream", "file", "s3"],
)
def test_saves_are_the_parents(target, tmp_path, request):
    path = tmp_path / "f"
    if "s3" in target:
        request.getfixturevalue("s3")
        path = "s3://bucket/forked"
    done = run_python(FORKED + SAVES.replace("TARGET", target), path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    loaded = tensorizer.load(path, verify_hash=True)
    assert_same(loaded["a"], torch.arange(2_000_000))
    assert_same(loaded["c"], torch.arange(5))
    assert os.listdir(tmp_path) in (["f"], [])


STREAMS = """
target = sys.argv[1]
stream = open_stream(target, "wb")
stream.write(b"from the parent, ")
def forget():
    global stream
    del stream
forked(forget)
forked(lambda: refused(stream.close))
stream.write(b"all of it")
stream.close()
"""


@pytest.mark.parametrize("address", ["f", "s3://bucket/stream"])
def test_streams_are_the_parents(address, tmp_path, s3):
    target = tmp_path / address if address == "f" else address
    done = run_python(FORKED + STREAMS, target)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    with tensorizer.stream_io.open_stream(target) as stream:
        assert stream.read() == b"from the parent, all of it"


CONNECTIONS = """
lazy = TensorDeserializer(sys.argv[1], "cpu", lazy_load=True)
expected = torch.arange(2_000_000)
assert torch.equal(lazy["a"], expected)
def forget():
    global lazy
    del lazy
def read():
    assert torch.equal(lazy["b"], torch.ones(3))
for child in (forget, read, lambda: lazy.close()):
    forked(child)
    assert torch.equal(TensorDeserializer(sys.argv[1], "cpu")["b"], torch.ones(3))
assert torch.equal(lazy["b"], torch.ones(3))
"""


def test_connections_are_the_parents(s3):
    tensorizer.save({"a": torch.arange(2_000_000), "b": torch.ones(3)}, "s3://bucket/lazy")
    done = run_python(FORKED + CONNECTIONS, "s3://bucket/lazy")
    assert done.returncode == 0, done.stderr


def test_tokens_of_a_cloud_are_asked_for_by_each(no_settings_of_the_machine, monkeypatch, tmp_path):
    tensorizer.save({"a": torch.arange(2_000_000), "b": torch.ones(3)}, tmp_path / "lazy")
    server = Google()
    try:
        server.put("lazy", (tmp_path / "lazy").read_bytes())
        with Doorman(server) as door, Tokens() as tokens:
            monkeypatch.setenv("GOOGLE_BASE_URL", door.url)
            monkeypatch.setenv("GCE_METADATA_HOST", tokens.host)
            anew = "forked(lambda: TensorDeserializer(sys.argv[1], 'cpu').close())\n"
            done = run_python(FORKED + CONNECTIONS + anew, "gs://bucket/lazy")
            assert done.returncode == 0, done.stderr
            assert tokens.given == 2
    finally:
        server.stop()


IN_ORDER = """
stream = open_stream(sys.argv[1])
expected = open(sys.argv[2], "rb").read()
assert stream.read(1000) == expected[:1000]
def rest():
    signal.alarm(60)
    assert stream.read() == expected[1000:]
forked(rest)
assert stream.read(5_000_000) == expected[1000:5_001_000]
forked(lambda: stream.close())
assert stream.read() == expected[5_001_000:]
"""


def test_a_body_that_is_read_in_order_goes_on_in_both(tmp_path):
    """A server without ranges; the child has a connection of its own."""
    data = os.urandom(12_000_000)
    (tmp_path / "data").write_bytes(data)
    with FaultServer(data, ranges=False) as server:
        code = "import signal\n" + FORKED + IN_ORDER
        done = run_python(code, server.url, tmp_path / "data")
        assert done.returncode == 0, done.stderr


HELD = """
import io, signal, threading

class Slow(io.BytesIO):
    def read(self, size=-1):
        if threading.current_thread() is slow:
            entered.set()
            assert gate.wait(100)
        return super().read(size)

entered, gate = threading.Event(), threading.Event()
slow = None
lazy = TensorDeserializer(Slow(open(sys.argv[1], "rb").read()), "cpu", lazy_load=True)
found = []
slow = threading.Thread(target=lambda: found.append(lazy["a"]))
slow.start()
assert entered.wait(100)
def child():
    signal.alarm(60)
    assert torch.equal(lazy["b"], torch.ones(3))
    assert torch.equal(lazy["a"], torch.arange(2_000_000))
forked(child)
gate.set()
slow.join()
assert torch.equal(found[0], torch.arange(2_000_000))
"""


def test_a_load_that_a_thread_of_the_parent_is_in(tmp_path):
    """It has the turn at the file object and the load of the file at the fork."""
    tensorizer.save({"a": torch.arange(2_000_000), "b": torch.ones(3)}, tmp_path / "f")
    done = run_python(FORKED + HELD, tmp_path / "f")
    assert done.returncode == 0, done.stderr


BLOCKS = """
import contextlib, signal, threading
import tensorizer.safetensors
from tensorizer.modules import uninitialised
from tensorizer.safetensors import patching
from tensorizer.torch_compat import tensorizer_loading
from tensorizer.torch_hooks import save_and_load
from tensorizer.utils import no_init_or_tensor

locks = [uninitialised._patch._lock, patching._patch._lock, save_and_load._patch._lock]
assert {type(lock).__name__ for lock in locks} == {"ForkSafeLock"}
held, end = threading.Event(), threading.Event()
def hold():
    with contextlib.ExitStack() as stack:
        for lock in locks:
            stack.enter_context(lock.current())
        held.set()
        assert end.wait(100)
thread = threading.Thread(target=hold)
thread.start()
assert held.wait(100)
original = torch.load
def child():
    signal.alarm(60)
    assert no_init_or_tensor(lambda: torch.empty(3)).is_meta
    with tensorizer_loading():
        assert torch.load is not original
    with patching.tensorizer_safetensors():
        pass
forked(child)
end.set()
thread.join()
forked(child)
"""


def test_blocks_that_a_thread_of_the_parent_is_entering():
    done = run_python(FORKED + BLOCKS)
    assert done.returncode == 0, done.stderr


WORKERS = """
import multiprocessing, sys
import tensorizer, torch
from tensorizer import TensorDeserializer, TensorSerializer

class Weights(torch.utils.data.Dataset):
    def __init__(self, path):
        self.path = path
    def __len__(self):
        return 6
    def __getitem__(self, at):
        return TensorDeserializer(self.path, "cpu", lazy_load=True)[f"w{at}"].detach()

def total(path):
    return sum(tensor.sum().item() for tensor in tensorizer.load(path).values())

if __name__ == "__main__":
    path, method = sys.argv[1:]
    tensorizer.save({f"w{i}": torch.full((1000,), float(i)) for i in range(6)}, path)
    serializer = TensorSerializer(path + ".parent")
    serializer.write_state_dict(tensorizer.load(path))
    context = multiprocessing.get_context(method)
    # A worker that is not forked from this process takes long to start.
    count = 2 if method == "fork" else 1
    if method == "forkserver":
        context.set_forkserver_preload(["tensorizer"])
    if method != "spawn":
        with context.Pool(count) as pool:
            assert pool.map(total, [path] * 4) == [15_000.0] * 4
    loader = torch.utils.data.DataLoader(
        Weights(path), batch_size=2, num_workers=count, multiprocessing_context=context
    )
    assert [batch.sum().item() for batch in loader] == [1000.0, 5000.0, 9000.0]
    serializer.close()
    assert total(path + ".parent") == 15_000.0
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers(method, tmp_path):
    script = tmp_path / "workers.py"
    script.write_text(WORKERS)
    # Run from its file: spawned workers have to import it.
    code = f"import runpy\nrunpy.run_path({str(script)!r}, run_name='__main__')"
    done = run_python(code, tmp_path / "f", method, timeout=250)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f", "f.parent", "workers.py"]


def test_no_lock_of_a_process_is_inherited():
    """A thread of the parent may hold it: use `ForkSafeMutex`, or a lock in a `PerProcess`."""
    lock = re.compile(r"static \w+: (?:\w+::)*(?:Mutex|RwLock|Condvar|LazyLock)\b.*")
    folders = ("src", "csrc", "python/src")
    sources = [path for folder in folders for path in ROOT.glob(f"{folder}/**/*.rs")]
    assert len(sources) > 100
    assert {path: found for path in sources if (found := lock.findall(path.read_text()))} == {}
    # An iterator and a loader refuse another process before they take their own.
    plain = re.compile(r"threading\.(?:R?Lock|Condition|\w*Semaphore)\(")
    sources = {path.name: path for path in ROOT.glob("python/tensorizer*/**/*.py")}
    assert len(sources) > 50
    assert {name for name, path in sources.items() if plain.search(path.read_text())} == {
        "_locks.py",
        "iterate.py",
        "prefetching.py",
    }
