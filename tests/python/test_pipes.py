"""Pipes: signals that are handled meanwhile, and files that a pipe cannot give."""

import contextlib
import json
import os
import subprocess
import threading
import time
import warnings

import pytest
import tensorizer
import torch
from processes import run_python
from tensorizer import DecryptionParams, EncryptionParams

SIGNALS = """
import signal, sys, tensorizer
count = 0
def handle(*_):
    global count
    count += 1
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
way, number = sys.argv[1], int(sys.argv[2])
source = {"number": number, "path": f"/proc/self/fd/{number}"}.get(way) or open(number, "rb", 0)
loaded = tensorizer.TensorDeserializer(source, "cpu", verify_hash=True)
signal.setitimer(signal.ITIMER_REAL, 0)
print(count > 5, loaded["a"].sum().item())
"""


def trickle(data, into):
    with open(into, "wb", buffering=0) as pipe:
        for at in range(0, len(data), 200_000):
            pipe.write(data[at : at + 200_000])
            time.sleep(0.05)


@pytest.mark.parametrize("way", ["number", "path", "file"])
def test_signals_that_are_handled(tmp_path, way):
    tensorizer.save({"a": torch.ones(500_000)}, tmp_path / "f")
    out, into = os.pipe()
    writer = threading.Thread(target=trickle, args=((tmp_path / "f").read_bytes(), into))
    writer.start()
    done = run_python(SIGNALS, way, out, pass_fds=[out])
    writer.join()
    os.close(out)
    assert done.stdout == "True 500000.0\n", done.stderr


def test_a_sealed_file_says_why_it_needs_more_than_a_pipe(tmp_path):
    params = EncryptionParams.random(manifest=True)
    tensorizer.save({"a": torch.ones(5)}, tmp_path / "f", encryption=params)
    out, into = os.pipe()
    writer = threading.Thread(target=feed, args=((tmp_path / "f").read_bytes(), into))
    writer.start()
    try:
        with pytest.raises(NotImplementedError, match="has a manifest, which is checked before"):
            tensorizer.load(out, encryption=DecryptionParams.from_key(params.key))
    finally:
        os.close(out)
        writer.join()


def feed(data, into):
    try:
        with open(into, "wb", buffering=0) as pipe:
            pipe.write(data)
    except BrokenPipeError:
        pass


@contextlib.contextmanager
def pipe_of(path):
    """Yield the reading end of a pipe that gives the bytes of a file."""
    out, into = os.pipe()
    writer = threading.Thread(target=feed, args=(path.read_bytes(), into), daemon=True)
    writer.start()
    with os.fdopen(out, "rb") as pipe:
        yield pipe
    writer.join()


def test_only_tensors_before_the_wanted_ones_are_kept(tmp_path):
    tensors = {name: torch.full((3,), float(at)) for at, name in enumerate("abcde")}
    tensorizer.save(tensors, tmp_path / "f.tensors")
    with pipe_of(tmp_path / "f.tensors") as pipe:
        file = tensorizer.TensorDeserializer(
            pipe, "cpu", lazy_load=True, filter_func=lambda name: name != "b"
        )
        assert torch.equal(file["c"], tensors["c"])
        # `a` was kept, `b` was left out, and `d` and `e` are still in the pipe.
        assert file.total_bytes_read == 24
        (fallback,) = tensorizer.stats()["fallbacks"]
        assert fallback.startswith("tensors before the wanted ones were loaded too, because ")
        assert torch.equal(file["a"], tensors["a"])
        assert torch.equal(file["d"], tensors["d"]) and file.total_bytes_read == 36
        assert tensorizer.stats()["fallbacks"] == []
        assert torch.equal(file["e"], tensors["e"])


def test_modules_are_filled_from_a_pipe(tmp_path):
    """In place if nothing that may be wanted is passed by that; else all of it is loaded first."""
    made = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    tensorizer.save(made.state_dict(), tmp_path / "f.tensors")
    for dtypes in ((torch.float32, torch.float32), (torch.float64, torch.float32)):
        net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        for layer, dtype in zip(net, dtypes, strict=True):
            layer.to(dtype)
        memory = net[1].weight.data_ptr()
        with pipe_of(tmp_path / "f.tensors") as pipe, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the dtype that the module had
            tensorizer.TensorDeserializer(pipe, "cpu", lazy_load=True).load_into_module(net)
        assert all(map(torch.equal, net.state_dict().values(), made.state_dict().values()))
        assert net[1].weight.data_ptr() == memory


def test_arrays_of_a_pipe_are_kept_too(tmp_path):
    tensors = {name: torch.full((3,), float(at)) for at, name in enumerate("abc")}
    tensorizer.save(tensors, tmp_path / "f.tensors")
    with pipe_of(tmp_path / "f.tensors") as pipe:
        file = tensorizer.TensorDeserializer(pipe, "cpu", lazy_load=True)
        assert [row[2] for row in file.read_numpy_arrays(num_tensors=2)] == ["a", "b"]
        assert all(torch.equal(file[name], tensor) for name, tensor in tensors.items())


PEAK_OF_A_LOAD = """
import sys, tensorizer
def peak():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) << 10
tensorizer.load(sys.argv[1], "cpu")
open("/proc/self/clear_refs", "w").write("5")
before = peak()
loaded = tensorizer.load(sys.stdin.buffer, "cpu")
size = sum(tensor.nbytes for tensor in loaded.values())
assert size == 200_000_000
print(peak() - before - size)
"""


def test_a_load_from_a_pipe_holds_its_tensors_once(tmp_path):
    count, size = 10, 20_000_000
    header = {
        f"t{n}": {"dtype": "U8", "shape": [size], "data_offsets": [n * size, n * size + size]}
        for n in range(count)
    }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    path = tmp_path / "f.safetensors"
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded)
    os.truncate(path, 8 + len(encoded) + count * size)
    tensorizer.save({"a": torch.zeros(8)}, tmp_path / "small.safetensors")
    with subprocess.Popen(["cat", path], stdout=subprocess.PIPE) as source:
        small = tmp_path / "small.safetensors"
        done = run_python(PEAK_OF_A_LOAD, small, stdin=source.stdout)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 10_000_000
