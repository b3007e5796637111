"""Tensors one by one, with the next on their way."""

import gc
import os
import threading
import time

import pytest
import tensorizer
import torch
from conftest import run_python
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


@pytest.mark.parametrize("buffer_bytes", [1, 100_000, 1 << 20, 1 << 40])
@pytest.mark.parametrize(
    ("file", "device"),
    [("f.tensors", "host"), ("f.tensors", "stand-in"), ("f.safetensors", "host")],
)
def test_all_come_in_the_order_of_the_file(paths, monkeypatch, file, buffer_bytes, device):
    tensors = safetensors.load_file(paths / "f.safetensors")
    if device == "stand-in":
        monkeypatch.setenv("TENSORIZER_FAKE_DEVICE", "5")
    found = list(tensorizer.iterate(paths / file, buffer_bytes=buffer_bytes))
    assert [name for name, _ in found] == list(tensorizer.info(paths / file).tensors)
    assert len(found) == len(tensors)
    for name, tensor in found:
        assert torch.equal(tensor, tensors[name])
        # No other tensor is in its storage.
        assert tensor.untyped_storage().nbytes() == tensor.nbytes or device == "stand-in"
    tensorizer.release_pinned()


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


def test_no_more_than_the_buffer_is_held(tmp_path):
    """Peak memory beyond what the caller keeps, which is nothing."""
    path = tmp_path / "f.safetensors"
    safetensors.save_file({f"{i}": torch.full((2_500_000,), float(i)) for i in range(60)}, path)
    code = """
import sys, torch, tensorizer
def peak():
    return next(int(l.split()[1]) << 10 for l in open("/proc/self/status") if l.startswith("VmHWM"))
list(tensorizer.iterate(sys.argv[2], "cpu"))
before, total = peak(), 0
for name, tensor in tensorizer.iterate(sys.argv[1], "cpu", buffer_bytes=64 << 20):
    assert tensor[0] == float(name) == tensor[-1]
    total += tensor.nbytes
print(total, peak() - before)
"""
    small = tmp_path / "small.safetensors"
    safetensors.save_file({"a": torch.zeros(3)}, small)
    done = run_python(code, path, small)
    assert done.returncode == 0, done.stderr
    total, beyond = map(int, done.stdout.split())
    assert total == 600_000_000
    assert beyond <= 75 << 20


def test_the_next_are_on_their_way_while_one_is_used(paths, tensors):
    data = (paths / "f.safetensors").read_bytes()
    with FaultServer(data) as server:
        iterator = tensorizer.iterate(server.url, "cpu", buffer_bytes=8 << 20)
        next(iterator)
        deadline = time.monotonic() + 30
        while len(server.requests) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        # The head, the first batch, and the second, for which nobody has asked yet.
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


def test_nothing_is_left_of_an_iterator_that_is_given_up(paths):
    def threads():
        return [t for t in threading.enumerate() if t.name == "tensorizer-iterate"]

    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    for end in ("close", "forget"):
        iterator = tensorizer.iterate(paths / "f.tensors", "cpu", buffer_bytes=1 << 20)
        next(iterator)
        if end == "close":
            iterator.close()
            assert list(iterator) == []
            iterator.close()
        del iterator
        gc.collect()
        assert not threads()
        assert len(os.listdir("/proc/self/fd")) <= files
    assert next(tensorizer.iterate(paths / "f.tensors", "cpu"))[0] == "t.000"


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
        "this iterator belongs to the process that made it",
        "119",
    ], done.stderr


@pytest.mark.parametrize("ask", [next, lambda iterator: iterator.close()])
def test_progress_cannot_use_its_own_iterator(paths, ask):
    iterator = tensorizer.iterate(
        paths / "f.tensors", "cpu", progress=lambda done, total: ask(iterator)
    )
    with pytest.raises(RuntimeError, match="a load that this iterator waits for"):
        list(iterator)
    assert list(iterator) == []


def test_an_iterator_that_nobody_closes_ends_with_the_interpreter(paths):
    code = """
import sys, tensorizer
iterator = tensorizer.iterate(sys.argv[1], "cpu", buffer_bytes=1 << 20)
next(iterator)
"""
    for _ in range(6):
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
