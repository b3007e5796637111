"""Tensors one by one, with the next on their way."""

import gc
import io
import os
import threading
import time
from pathlib import Path

import pytest
import tensorizer
import torch
from processes import run_python
from scripted import FaultServer

safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture(scope="module")
def tensors():
    torch.manual_seed(5)
    return {f"t.{i:03}": torch.randn(1 + 37 * i % 900, 100) for i in range(120)}


@pytest.fixture(scope="module")
def paths(tmp_path_factory, tensors):
    folder = tmp_path_factory.mktemp("iterate")
    tensorizer.save(tensors, folder / "f.tensors")
    safetensors.save_file(tensors, folder / "f.safetensors")
    return folder


def native_threads():
    """Return how many threads of the native code there are."""
    names = [Path(f"/proc/self/task/{task}/comm") for task in os.listdir("/proc/self/task")]
    return sum(name.exists() and name.read_text() == "tensorizer\n" for name in names)


@pytest.mark.parametrize("buffer_bytes", [1, 100_000, 1 << 20, 1 << 40])
@pytest.mark.parametrize("file", ["f.tensors", "f.safetensors"])
@pytest.mark.device
def test_all_come_in_the_order_of_the_file(paths, file, buffer_bytes):
    tensors = safetensors.load_file(paths / "f.safetensors")
    found = list(tensorizer.iterate(paths / file, buffer_bytes=buffer_bytes))
    assert [name for name, _ in found] == list(tensorizer.info(paths / file).tensors)
    assert len(found) == len(tensors)
    for name, tensor in found:
        assert torch.equal(tensor, tensors[name])
        # No other tensor is in its storage.
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_options(paths, tensors):
    found = dict(
        tensorizer.iterate(
            paths / "f.tensors",
            "cpu",
            dtype=torch.float64,
            verify_hash=True,
            num_readers=2,
            filter_func=lambda name: name.endswith("5"),
        )
    )
    assert list(found) == [name for name in tensors if name.endswith("5")]
    assert all(torch.equal(t, tensors[name].double()) for name, t in found.items())
    with pytest.raises(ValueError, match="buffer_bytes must be positive, not 0"):
        tensorizer.iterate(paths / "f.tensors", "cpu", buffer_bytes=0)
    with pytest.raises(FileNotFoundError):
        tensorizer.iterate(paths / "none.tensors", "cpu")
    with pytest.raises(tensorizer.HashMismatchError, match="safetensors files hold no hashes"):
        next(tensorizer.iterate(paths / "f.safetensors", "cpu", verify_hash=True))


PEAK = """
import sys, torch, tensorizer
def memory(name):
    return next(int(l.split()[1]) << 10 for l in open("/proc/self/status") if l.startswith(name))
path, option, limit, order = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
list(tensorizer.iterate(path, "cpu", names=["0"]))
before, total = memory("VmHWM"), 0
for name, tensor in tensorizer.iterate(path, "cpu", order=order, **{option: limit}):
    assert tensor[0] == float(name) == tensor[-1]
    total += tensor.nbytes
    del tensor
print(total, memory("VmHWM") - before, memory("VmRSS") - before)
"""


@pytest.mark.parametrize("order", ["file", "ready"])
@pytest.mark.parametrize(
    ("count", "elements", "buffer_bytes"),
    [(24, 1_000_000, 16 << 20), (24, 1_000_000, 1), (10_000, 2_000, 4 << 20)],
    ids=["large", "one", "small"],
)
def test_the_peak_is_what_is_read_ahead_and_one_tensor(
    tmp_path, count, elements, buffer_bytes, order
):
    """Beyond the index, where the caller keeps nothing."""
    path = tmp_path / "f.safetensors"
    tensorizer.save({f"{i}": torch.full((elements,), float(i)) for i in range(count)}, path)
    done = run_python(PEAK, path, "buffer_bytes", buffer_bytes, order)
    assert done.returncode == 0, done.stderr
    total, beyond, _ = map(int, done.stdout.split())
    assert total == count * elements * 4
    most = max(buffer_bytes, elements * 4) + elements * 4
    # The index has an entry for each tensor, and malloc keeps memory of small ones.
    assert beyond <= most + (count << 10) + (20 << 20)


@pytest.mark.parametrize("elements", [16_384, 51_200, 230_400, 498_073, 1 << 19, 1 << 20])
def test_memory_of_dropped_tensors_is_used_again_at_every_size(tmp_path, elements):
    """By blocks of the heap, and by mappings: no allocator may keep what was dropped."""
    path, count = tmp_path / "f.tensors", (128 << 20) // (elements * 4)
    tensors = {f"{i}": torch.full((elements,), float(i)) for i in range(count)}
    tensorizer.save(tensors, path, hashes="crc32")
    for option in ("buffer_bytes", "memory_limit"):
        done = run_python(PEAK, path, option, 16 << 20, "file")
        assert done.returncode == 0, done.stderr
        total, during, after = map(int, done.stdout.split())
        assert total == count * elements * 4, option
        assert during < 64 << 20, option
        assert after < 48 << 20, option


def test_the_next_are_on_their_way_while_one_is_used(paths, tensors):
    data = (paths / "f.safetensors").read_bytes()
    with FaultServer(data) as server:
        iterator = tensorizer.iterate(server.url, "cpu", buffer_bytes=8 << 20)
        next(iterator)
        deadline = time.monotonic() + 30
        while len(server.requests) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        # The head, the first batch, and the second, which was not asked for yet.
        asked = [start for start, _, _ in server.requests]
        assert len(asked) >= 3
        assert 1 << 20 < max(asked) < 9 << 20
        names = [name for name, _ in iterator]
    assert len(names) == len(tensors) - 1


def test_a_large_tensor_comes_alone(tmp_path):
    tensors = {"a": torch.ones(10), "b": torch.ones(3_000_000), "c": torch.ones(20)}
    tensorizer.save(tensors, tmp_path / "f.tensors")
    found = tensorizer.iterate(tmp_path / "f.tensors", "cpu", buffer_bytes=1 << 20)
    assert [(name, tensor.numel()) for name, tensor in found] == [
        ("a", 10),
        ("b", 3_000_000),
        ("c", 20),
    ]


@pytest.mark.parametrize("taken", [0, 1, 50])
@pytest.mark.parametrize("source", ["path", "file object", "object of Python"])
def test_nothing_is_left_of_an_iterator_that_is_given_up(paths, source, taken):
    path = paths / "f.tensors"
    opened = {"path": lambda: path, "file object": lambda: path.open("rb"),
              "object of Python": lambda: io.BytesIO(path.read_bytes())}[source]  # fmt: skip
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    for end in ("close", "forget"):
        given = opened()
        iterator = tensorizer.iterate(given, "cpu", buffer_bytes=1 << 20)
        for _ in range(taken):
            next(iterator)
        if end == "close":
            iterator.close()
            assert list(iterator) == []
            iterator.close()
        del iterator
        assert native_threads() == 0
        assert source == "path" or given.closed
        assert len(os.listdir("/proc/self/fd")) <= files
    assert next(tensorizer.iterate(path, "cpu"))[0] == "t.000"


def test_an_iterator_that_has_ended_holds_neither_file_nor_threads(paths, tensors):
    files = len(os.listdir("/proc/self/fd"))
    iterator = tensorizer.iterate(paths / "f.tensors", "cpu", buffer_bytes=1 << 20)
    assert len(list(iterator)) == len(tensors)
    assert (native_threads(), len(os.listdir("/proc/self/fd"))) == (0, files)
    assert list(iterator) == []


COLLECTED = """
import gc, io, sys, threading, time, tensorizer
held, reading, go_on = threading.Event(), threading.Event(), threading.Event()
class Collecting(io.BytesIO):
    def readinto(self, buffer):
        if held.is_set():
            reading.set()
            go_on.wait()
            gc.collect()
        return super().readinto(buffer)
    def read(self, *size):
        data = bytearray(size[0])
        return bytes(data[:self.readinto(data)])
file = Collecting(open(sys.argv[1], "rb").read())
cycle = [tensorizer.iterate(file, "cpu", buffer_bytes=1 << 20)]
next(cycle[0])
place = None
while place != (place := file.tell()):  # until the budget is full
    time.sleep(0.5)
held.set()
while not reading.wait(0.1):  # room in the budget lets a read begin
    next(cycle[0])
cycle.append(cycle)
gc.disable()
del cycle
go_on.set()
until = time.monotonic() + 20
while not file.closed and time.monotonic() < until:
    time.sleep(0.01)
print(file.closed)
"""


def test_an_iterator_may_be_collected_by_its_own_load(paths):
    """Reads of an object of Python collect garbage on the thread of the load."""
    done = run_python(COLLECTED, paths / "f.tensors")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_a_load_that_hangs_is_given_up(paths):
    data = (paths / "f.safetensors").read_bytes()

    def script(number, start, end):
        return ("stall", 10) if number else None

    with FaultServer(data, script) as server:
        iterator = tensorizer.iterate(server.url, "cpu", buffer_bytes=1 << 20)
        next(iterator)
        begun = time.monotonic()
        iterator.close()
        # A server may be silent for a minute before it is given up.
        assert time.monotonic() - begun < 20


CLOSED = """
import os, sys, threading, time, tensorizer
iterator = tensorizer.iterate(sys.argv[1], "cpu", buffer_bytes=1 << 20)
next(iterator)
errors = []
def take():
    try:
        list(iterator)
    except Exception as error:
        errors.append(type(error).__name__)
threads = [threading.Thread(target=take) for _ in range(2)]
[thread.start() for thread in threads]
time.sleep(1)
closing = threading.Thread(target=iterator.close)
closing.start()
closing.join(20)
[thread.join(20) for thread in threads]
print(closing.is_alive(), len(errors) > 0, *set(errors), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("kind", ["contiguous", "strided"])
def test_closing_ends_calls_of_other_threads_that_wait(tmp_path, kind):
    path = tmp_path / "f.pt"
    later = torch.ones(3000, 2000)
    torch.save({"a": torch.ones(10), "b": later.t() if kind == "strided" else later}, path)
    data = path.read_bytes()
    inside = data.index(later[:10].numpy().tobytes()) + 5_000_000
    silence = lambda _, start, end: ("stall", 10) if start < inside < end else None  # noqa: E731
    with FaultServer(data, silence) as server:
        done = run_python(CLOSED, server.url)
    assert done.stdout == "False True ClosedError\n", done.stderr


def test_errors_come_where_they_are(tmp_path, tensors):
    path = tmp_path / "f.tensors"
    tensorizer.save(tensors, path)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    iterator = tensorizer.iterate(path, "cpu", buffer_bytes=1 << 20, verify_hash=True)
    seen = 0
    with pytest.raises(tensorizer.HashMismatchError, match=r"t\.119"):
        for _ in iterator:
            seen += 1
    assert 80 < seen < 120
    assert list(iterator) == []


def test_a_forked_child_is_told_that_it_is_not_its_own(paths):
    code = """
import os, sys, tensorizer
iterator = tensorizer.iterate(sys.argv[1], "cpu", buffer_bytes=1 << 20)
next(iterator)
child = os.fork()
if child == 0:
    try:
        next(iterator)
    except RuntimeError as error:
        print(error, flush=True)
    del iterator
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(sum(1 for _ in iterator))
"""
    done = run_python(code, paths / "f.tensors")
    assert done.stdout.split("\n")[:2] == [
        "this iterator was made by the parent process, before fork(): make a new one",
        "119",
    ], done.stderr


@pytest.mark.parametrize("ask", [next, lambda iterator: iterator.close()])
def test_progress_cannot_use_its_own_iterator(paths, ask):
    iterator = tensorizer.iterate(
        paths / "f.tensors", "cpu", progress=lambda done, total: ask(iterator)
    )
    with pytest.raises(RuntimeError, match="an iterator that waits for the same load"):
        list(iterator)
    assert list(iterator) == []


def test_an_unclosed_iterator_ends_with_the_interpreter(paths):
    code = """
import sys, tensorizer
iterator = tensorizer.iterate(sys.argv[1], "cpu", buffer_bytes=1 << 20)
next(iterator)
"""
    for _ in range(2):
        done = run_python(code, paths / "f.safetensors", finalize=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_threads_share_an_iterator(paths, tensors):
    iterator = tensorizer.iterate(paths / "f.tensors", "cpu", buffer_bytes=200_000)
    found = []
    threads = [
        threading.Thread(target=lambda: found.extend(name for name, _ in iterator))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(tensors)


def test_tensors_of_a_checkpoint_share_nothing(tmp_path):
    base = torch.arange(2_000_000, dtype=torch.float32)
    tensors = {"a": base, "b": base, "half": base[:1_000_000], "t": base.view(1000, 2000).t()}
    torch.save(tensors, tmp_path / "f.pt")
    for name, tensor in tensorizer.iterate(tmp_path / "f.pt", "cpu"):
        assert torch.equal(tensor, tensors[name])
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        tensor.mul_(3)


def test_dtypes_that_torch_cannot_copy(tmp_path):
    values = torch.tensor([0, 1, 0x7A, 0xFF], dtype=torch.uint8)
    dtypes = [torch.uint1, torch.uint7, torch.int1, torch.int4, torch.bits8, torch.bool]
    tensors = {str(dtype): values.view(dtype) for dtype in dtypes}
    with pytest.raises(NotImplementedError, match="copy_kernel"):
        tensors["torch.int4"].clone()
    tensorizer.save_async(tensors, tmp_path / "f.tensors").result(60)
    found = dict(tensorizer.iterate(tmp_path / "f.tensors", "cpu"))
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        name: tensor.dtype for name, tensor in tensors.items()
    }
    for tensor in found.values():
        # Booleans too: no hash would fit others.
        assert torch.equal(tensor.view(torch.uint8), values)
        assert tensor.untyped_storage().nbytes() == 4


def test_few_bytes_of_a_local_file_start_no_thread(tmp_path):
    path = tmp_path / "f.tensors"
    tensorizer.save({"a": torch.arange(9), "none": torch.zeros(0), "b": torch.ones(3)}, path)
    code = """
import os, sys, tensorizer
def threads():
    return len(os.listdir("/proc/self/task"))
before = threads()
iterator = tensorizer.iterate(sys.argv[1], "cpu")
assert threads() == before
name, first = next(iterator)
iterator.close()
assert name == "a" and first.tolist() == list(range(9))
assert [name for name, _ in tensorizer.iterate(sys.argv[1], "cpu")] == ["a", "none", "b"]
data = bytearray(open(sys.argv[1], "rb").read())
data[data.index(bytes(first.numpy().tobytes()))] ^= 1
open(sys.argv[1], "wb").write(data)
damaged = tensorizer.iterate(sys.argv[1], "cpu", verify_hash=True)
try:
    list(damaged)
except tensorizer.HashMismatchError as error:
    assert "a" in str(error)
else:
    sys.exit("no error")
"""
    done = run_python(code, path)
    assert done.returncode == 0, done.stderr
