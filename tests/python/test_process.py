"""Effects of a load on its process: signals, forks, threads, memory, the import."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import tensorizer
import torch
from processes import run_python, start_python

INTERRUPTED = """
import sys, time, torch, tensorizer
path, way = sys.argv[1:]
class Slow:
    # A file object that takes 25 seconds for one tensor.
    def __init__(self): self.file = open(path, "rb")
    def read(self, n=-1): time.sleep(0.1); return self.file.read(min(n, 16384))
    def seek(self, *a): return self.file.seek(*a)
    def tell(self): return self.file.tell()
    def close(self): self.file.close()
print("ready", flush=True)
start = time.monotonic()
try:
    while True:
        if way == "class": tensorizer.TensorDeserializer(Slow(), "cpu")
        elif way == "verify": tensorizer.load(path, verify_hash=True)
        elif way == "operator": torch.ops.tensorizer.load(path)
        elif way == "save": tensorizer.save({"a": torch.ones(1 << 22)}, path + ".saved")
except KeyboardInterrupt:
    print("interrupted", flush=True)
except RuntimeError as error:
    # Operators raise text only.
    assert way == "operator" and "interrupted by the keyboard" in str(error)
    print("interrupted", flush=True)
torch.ops.tensorizer.load(path)
print("usable", flush=True)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    path = tmp_path_factory.mktemp("large") / "f.tensors"
    tensors = {str(i): torch.full((1 << 20,), float(i)) for i in range(24)}
    tensors["giant"] = torch.arange(16 << 20, dtype=torch.uint8)
    tensorizer.save(tensors, path)
    return path


@pytest.mark.parametrize("way", ["class", "verify", "operator", "save"])
def test_ctrl_c_stops_within_a_second(way, large):
    process = start_python(INTERRUPTED, large, way, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        sent = time.monotonic()
        assert process.stdout.readline() == "interrupted\n"
        # The promise is one second; the rest is for a busy machine.
        assert time.monotonic() - sent < 20
        assert process.stdout.readline() == "usable\n"
        assert process.wait(60) == 0
    finally:
        process.close()


FORK = """
import os, sys, tensorizer, torch
path = sys.argv[1]
expected = tensorizer.load(path, verify_hash=True) if sys.argv[2] == "after a load" else None
lazy = tensorizer.TensorDeserializer(path, "cpu", lazy_load=True)
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        try:
            loaded = tensorizer.load(path, verify_hash=True)
            assert torch.equal(loaded["7"], torch.full((1 << 20,), 7.0))
            assert torch.equal(lazy["9"], torch.full((1 << 20,), 9.0))
            if expected: assert torch.equal(expected["giant"], loaded["giant"])
            tensorizer.save({"a": torch.ones(1 << 20)}, path + ".child")
        except BaseException:
            import traceback; traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
assert torch.equal(tensorizer.load(path)["3"], torch.full((1 << 20,), 3.0))
"""


@pytest.mark.parametrize("when", ["after the import", "after a load"])
def test_a_forked_child_can_load(when, large):
    done = run_python(FORK, large, when)
    assert done.returncode == 0, done.stderr


def test_the_gil_is_free_during_a_load(large):
    """Another thread gets on while the core reads and hashes."""
    code = """
import sys, threading, time, tensorizer
# Nothing takes the GIL from a thread that does not release it.
sys.setswitchinterval(1000)
count, stop = 0, False
def spin():
    global count
    while not stop:
        count += 1
        time.sleep(0)
thread = threading.Thread(target=spin)
thread.start()
during = 0
for _ in range(20):
    before = count
    tensorizer.load(sys.argv[1], verify_hash=True)
    during += count - before
stop = True
thread.join()
print(during)
"""
    done = run_python(code, large)
    assert done.returncode == 0, done.stderr
    # Loads of a file of a few bytes leave about a hundred turns, all 20 together.
    assert int(done.stdout) > 2000


IMPORT = """
import json, sys, threading
import torch
before = set(sys.modules)
threads = threading.active_count()
import tensorizer
print(json.dumps({
    "new": sorted(set(sys.modules) - before),
    "cuda": torch.cuda.is_initialized(),
    "threads": threading.active_count() - threads,
}))
"""


def test_the_import_is_light():
    """The import adds no heavy modules, which are what makes an import slow."""
    done = run_python(IMPORT, fresh=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not found["cuda"]
    assert found["threads"] == 0
    heavy = (
        "torch._dynamo",
        "torch._inductor",
        "numpy",
        "boto3",
        "redis",
        "psutil",
        "transformers",
    )
    assert not [name for name in found["new"] if name.startswith(heavy)]
    others = [name for name in found["new"] if not name.startswith("tensorizer")]
    assert len(others) <= 15, others


MINOR = """
import sys, torch
for name in [name for name in sys.modules if name.startswith("tensorizer")]:
    del sys.modules[name]
torch.__version__ = "2.10.1+cpu"
import tensorizer
"""


def test_another_torch_than_the_one_built_against():
    done = run_python(MINOR)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    minor = ".".join(torch.__version__.split(".")[:2])
    assert last.startswith(f"ImportError: tensorizer was built against torch {minor}, and this is")
    assert "torch 2.10.1+cpu: install its wheel for this torch, *+torch2.10-*.whl" in last
    assert "`pip install --force-reinstall --no-deps .` in its source folder" in last
    assert "It is made for torch 2.10 to 2.15" in last
    last = run_python(MINOR.replace("2.10.1", "2.9.1")).stderr.strip().splitlines()[-1]
    assert "torch 2.9.1+cpu: there is no wheel for this torch: install another one. It is" in last


MEMORY = """
import sys, tensorizer, torch
def peak():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) << 10
tensorizer.save({"warm": torch.ones(1)}, sys.argv[1] + ".warm")
tensorizer.load(sys.argv[1] + ".warm", verify_hash=True)
# Threads and code of torch itself.
torch.ones(1 << 20, dtype=torch.int64).sum()
open("/proc/self/clear_refs", "w").write("5")
before = peak()
if sys.argv[2] == "save":
    big = torch.ones(25 << 20)
    before = peak()
    view = big.view(10 << 10, -1)
    tensorizer.save({"big": big, "strided": view[:64].t()}, sys.argv[1] + ".saved")
    print(peak() - before)
else:
    options = {"mapped": {"mmap": True}, "read": {}, "verify": {"verify_hash": True}}[sys.argv[2]]
    loaded = tensorizer.load(sys.argv[1], **options)
    for tensor in loaded.values():
        tensor.view(torch.int64).sum()
    print(peak() - before - sum(t.nbytes for t in loaded.values()))
"""


@pytest.mark.parametrize("way", ["mapped", "read", "verify", "save"])
def test_peak_memory(way, large):
    """At most 16 MiB more than the tensors; a save holds one strided tensor more, and copies."""
    done = run_python(MEMORY, large, way)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < (24 if way == "save" else 16) << 20


@pytest.mark.parametrize("mmap", [True, False])
def test_memory_of_large_tensors_returns_when_they_go(mmap, large):
    code = """
import sys, tensorizer
def resident():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmRSS")) << 10
loaded = tensorizer.load(sys.argv[1], mmap=eval(sys.argv[2]))
assert all(tensor.numel() > 0 and tensor.max() >= 0 for tensor in loaded.values())
full = resident()
kept = loaded.pop("5")
loaded.clear()
print(full - resident(), kept.unique().tolist())
"""
    done = run_python(code, large, mmap)
    assert done.returncode == 0, done.stderr
    released, kept = done.stdout.split(maxsplit=1)
    assert int(released) > 90 << 20
    assert kept.strip() == "[5.0]"


@pytest.mark.skipif(os.geteuid() != 0, reason="a limit on processes of a user needs another user")
def test_a_process_that_may_not_have_threads(large):
    code = """
import os, resource, sys, threading, tensorizer
file = os.open(sys.argv[1], os.O_RDONLY)
os.setgroups([]); os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
try:
    threading.Thread(target=print).start()
except RuntimeError:
    assert len(tensorizer.load(file, verify_hash=True)) == 25
    print("loaded")
"""
    done = run_python(code, large)
    assert done.stdout == "loaded\n", done.stderr


@pytest.mark.device
def test_many_threads_load_at_once(large):
    import threading

    results = []

    def load():
        results.append(tensorizer.load(large, names=["giant", "3"], verify_hash=True))

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert all(torch.equal(result["giant"], results[0]["giant"]) for result in results)


def test_tensors_one_by_one_share_their_mappings(tmp_path):
    """A process may have about 65,000, and a file may have more tensors."""
    block = torch.arange(5000 * 300).view(5000, 300)
    tensorizer.save({str(i): row for i, row in enumerate(block)}, tmp_path / "f")
    before = len(Path("/proc/self/maps").read_text().splitlines())
    with tensorizer.TensorDeserializer(tmp_path / "f", "cpu", lazy_load=True, mmap=True) as file:
        assert all(torch.equal(file[str(i)], row) for i, row in enumerate(block))
        assert len(Path("/proc/self/maps").read_text().splitlines()) < before + 100
