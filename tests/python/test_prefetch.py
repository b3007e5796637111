"""``safe_open.prefetch``: tensors that are loaded in the background, as in safetensors 0.9.

The library's own tests of it are run by ``make test-frameworks``.
"""

import contextlib
import json
import os
import struct
import threading
import time
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from processes import run_python
from scripted import FaultServer
from servers import Nginx
from tensorizer import safetensors as ours
from tensorizer.safetensors import SafetensorError, safe_open


@pytest.fixture(scope="module")
def tensors():
    torch.manual_seed(7)
    large = {f"t.{i:03}": torch.randn(100 + 37 * i % 900, 100) for i in range(60)}
    small = {f"s.{i:03}": torch.full((i,), i, dtype=torch.int32) for i in range(50)}
    return {**large, **small, "scalar": torch.tensor(1.5), "half": torch.ones(4, 6).half()}


@pytest.fixture(scope="module")
def path(tmp_path_factory, tensors):
    path = tmp_path_factory.mktemp("prefetch") / "model.safetensors"
    ours.save_file(tensors, path)
    return path


@pytest.fixture(scope="module")
def nginx(tmp_path_factory):
    server = Nginx(tmp_path_factory.mktemp("nginx"))
    yield server
    server.stop()


def assert_all(found, tensors):
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.device
@pytest.mark.parametrize("buffer_bytes", [None, 1, 1 << 20])
@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_all_tensors_come_once(path, tensors, backend, buffer_bytes):
    with safe_open(path, "pt", backend=backend) as file:
        with file.prefetch(buffer_bytes=buffer_bytes) as loader:
            assert isinstance(loader, ours.PrefetchLoader)
            assert loader.names() == file.offset_keys()
            assert len(loader) == len(tensors)
            assert_all(dict(loader), tensors)
            assert dict(loader) == {}
        assert loader.names() == file.offset_keys()


@pytest.mark.device
@pytest.mark.parametrize("buffer_bytes", [None, 1, 1 << 20])
def test_tensors_are_taken_in_any_order(path, tensors, buffer_bytes):
    loader = safe_open(path, "pt").prefetch(buffer_bytes=buffer_bytes)
    names = loader.names()
    found = {name: loader.take(name) for name in [*names[::-2], *names[:10:2]]}
    with pytest.raises(SafetensorError, match="already delivered"):
        loader.take(names[-1])
    with pytest.raises(SafetensorError, match="tensor none is not in the prefetch plan"):
        loader.take("none")
    rest = dict(loader)
    assert not rest.keys() & found.keys()
    assert_all({**found, **rest}, tensors)


def test_tensors_are_the_callers(path, tensors):
    loader = safe_open(path, "pt").prefetch()
    taken = loader.take("t.000")
    taken.zero_()
    assert taken.untyped_storage().nbytes() == taken.nbytes
    loader.close()
    assert taken.sum() == 0
    assert torch.equal(safe_open(path, "pt").get_tensor("t.000"), tensors["t.000"])


@pytest.mark.device
def test_a_plan_selects_parts(path, tensors):
    plan = {
        "t.001": slice(3, 7),
        "t.002": slice(-5, None),
        "t.003": slice(2, 2),
        "t.004": None,
        "s.030": slice(10, 20),
        "scalar": None,
        # Beyond the library: other dimensions, steps, integers.
        "t.005": (slice(None), slice(40, 60)),
        "t.006": (..., slice(0, 10, 3)),
        "t.007": (5, slice(1, 3)),
    }
    with safe_open(path, "pt") as file, file.prefetch(plan) as loader:
        assert set(loader.names()) == set(plan)
        assert loader.names() == [name for name in file.offset_keys() if name in plan]
        part = loader.take("t.005")
        found = {"t.005": part, **dict(loader)}
    expected = {
        name: tensors[name] if at is None else tensors[name][at] for name, at in plan.items()
    }
    assert_all(found, expected)


def test_wrong_plans_are_refused_before_anything_is_read(path):
    with safe_open(path, "pt") as file:
        for plan, message in [
            ({"nope": None}, "File does not contain tensor nope"),
            ({}, "selects no tensors"),
            ({3: None}, "keys must be tensor names"),
            ({"t.001": 3}, "None or a slice, got <class 'int'> for t.001"),
            ({"t.001": slice(0, 9, 2)}, "step 1, got 2"),
            ({"t.001": slice(0, 9, 0)}, "invalid prefetch plan slice"),
            ({"t.001": slice(0, 1000)}, "stop 1000 for t.001 is out of range for 137 rows"),
            ({"t.001": slice(-138, 3)}, "start -138 for t.001 is out of range"),
            ({"t.001": slice("a", 3)}, "must be integers or None"),
            ({"scalar": slice(0, 1)}, "cannot slice rows of the 0-d tensor scalar"),
            ({"t.001": (0, 0, 0)}, "invalid prefetch plan slice for t.001: too many indices"),
            ({"t.001": (0, 100)}, "out of bounds"),
        ]:
            with pytest.raises(SafetensorError, match=message):
                file.prefetch(plan)
        for options, error in [
            ({"plan": ["t.001"]}, TypeError),
            ({"threads": "8"}, TypeError),
            ({"threads": -1}, TypeError),
            ({"buffer_bytes": 0}, ValueError),
            ({"device": "meta"}, SafetensorError),
            ({"device": "nonsense"}, SafetensorError),
        ]:
            with pytest.raises(error):
                file.prefetch(**options)
    with pytest.raises(SafetensorError, match="closed"):
        file.prefetch()


def test_a_dtype_that_torch_lacks_is_refused(tmp_path):
    header = (
        b'{"x":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]},'
        b'"y":{"dtype":"U8","shape":[1],"data_offsets":[3,4]}}'
    )
    (tmp_path / "f").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with safe_open(tmp_path / "f", "pt") as file:
        with pytest.raises(SafetensorError, match="F6_E2M3"):
            file.prefetch()
        assert dict(file.prefetch({"y": None}))["y"].tolist() == [0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_a_device_that_is_not_there_is_an_error_of_the_call(path):
    with pytest.raises(SafetensorError, match="while prefetching"):
        safe_open(path, "pt", "cuda:0").prefetch()


@pytest.mark.parametrize("threads", [0, 1, 2, 10_000])
def test_any_number_of_threads(path, tensors, threads):
    assert_all(dict(safe_open(path, "pt").prefetch(threads=threads)), tensors)


def test_several_loaders_and_the_file_itself(path, tensors):
    with safe_open(path, "pt") as file:
        one, other = file.prefetch(), file.prefetch({"half": None})
        assert torch.equal(file.get_tensor("t.003"), tensors["t.003"])
        assert torch.equal(other.take("half"), tensors["half"])
        one.close()
        assert torch.equal(file.get_slice("t.004")[1:3], tensors["t.004"][1:3])
        third = file.prefetch()
    # A loader outlives the file that it came from.
    assert_all(dict(third), tensors)


def test_threads_share_a_loader(path, tensors):
    loader, found, lock = safe_open(path, "pt").prefetch(buffer_bytes=100_000), {}, threading.Lock()
    later = loader.names()[50]

    def iterate():
        for name, tensor in loader:
            with lock:
                assert name not in found
                found[name] = tensor

    def take():
        try:
            tensor = loader.take(later)
        except SafetensorError as error:
            assert "already delivered" in str(error)
            return
        with lock:
            found[later] = tensor

    threads = [threading.Thread(target=target) for target in (iterate, take, iterate)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_all(found, tensors)


def test_a_tensor_that_another_thread_takes_meanwhile_is_no_error(path, tensors):
    loader = safe_open(path, "pt").prefetch()
    while len(loader._ready) < len(loader):
        loader._ready.update(loader._next())
    taken, others = loader.take("half"), []
    # Another call for it: all have landed, and nothing more will.
    thread = threading.Thread(target=lambda: others.append(loader._take("half")))
    thread.start()
    thread.join()
    assert others == [None]
    assert_all({"half": taken, **dict(loader)}, tensors)


def test_closing(path):
    loader = safe_open(path, "pt").prefetch(buffer_bytes=1 << 20)
    stream = iter(loader)
    next(stream)
    loader.close()
    loader.close()
    with pytest.raises(SafetensorError, match="closed"):
        next(stream)
    with pytest.raises(SafetensorError, match="closed"):
        loader.take(loader.names()[-1])


def test_closing_leaves_no_descriptor_and_no_thread(path):
    def count():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    dict(safe_open(path, "pt").prefetch())
    before = count()
    for taken in range(4):
        loader = safe_open(path, "pt").prefetch(buffer_bytes=1 << 20)
        for _ in zip(range(taken), loader, strict=False):
            pass
        if taken % 2:
            loader.close()
        del loader
        assert count() == before


def test_closing_wakes_a_thread_that_waits(path):
    data = path.read_bytes()
    # Everything but the head comes late.
    with FaultServer(data, lambda number, *_: ("stall", 10) if number else None) as server:
        loader = safe_open(server.url, "pt").prefetch()
        last, errors = loader.names()[-1], []

        def take():
            with pytest.raises(SafetensorError, match="closed") as raised:
                loader.take(last)
            errors.append(raised.value)

        threads = [threading.Thread(target=take) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        begun = time.monotonic()
        loader.close()
        for thread in threads:
            thread.join()
        assert len(errors) == 2
        # A server may be silent for a minute before it is given up.
        assert time.monotonic() - begun < 20


def test_threads_that_wait_cost_nothing(path):
    with FaultServer(path.read_bytes(), lambda n, *_: ("stall", 10) if n else None) as server:
        loader = safe_open(server.url, "pt").prefetch()
        threads = [threading.Thread(target=suppressed, args=(loader.take, name))
                   for name in loader.names()[-4:]]  # fmt: skip
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.25
        loader.close()
        for thread in threads:
            thread.join()


def suppressed(call, *args):
    with contextlib.suppress(SafetensorError):
        call(*args)


INTERRUPTED = """
import os, signal, sys, threading, time
from tensorizer.safetensors import SafetensorError, safe_open
loader = safe_open(sys.argv[1], "pt").prefetch()
last = loader.names()[-1]
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    loader.take(last)
except KeyboardInterrupt:
    print("interrupted")
try:
    loader.take(last)
except SafetensorError as error:
    print(error)
thread = threading.Thread(target=loader.close)
thread.start()
thread.join(20)
print(thread.is_alive())
"""


def test_an_interrupt_ends_a_load_and_leaves_no_lock(path):
    with FaultServer(path.read_bytes(), lambda n, *_: ("stall", 10) if n else None) as server:
        done = run_python(INTERRUPTED, server.url)
    expected = "interrupted\nthe load has failed: KeyboardInterrupt\nFalse\n"
    assert (done.stdout, done.returncode) == (expected, 0), done.stderr


def test_a_closed_loader_keeps_no_tensors(tmp_path):
    ours.save_file({f"{n}": torch.ones(4 << 20) for n in range(12)}, tmp_path / "f")
    kept = []
    held = Path("/proc/self/statm").read_text().split()
    for pause in (0.001, 0.01, 0.03, 0.05):
        loader = safe_open(tmp_path / "f", "pt", backend="pread").prefetch()
        time.sleep(pause)
        loader.close()
        kept.append(loader)
    now = Path("/proc/self/statm").read_text().split()
    assert (int(now[1]) - int(held[1])) * os.sysconf("SC_PAGE_SIZE") < 100 << 20


def test_a_lost_server_is_an_error_of_every_later_call(path):
    data = path.read_bytes()
    half = len(data) // 2
    broken = lambda _, start, end: ("status", 404) if end > half else None  # noqa: E731
    with FaultServer(data, broken) as server:
        loader = safe_open(server.url, "pt").prefetch()
        for _ in range(2):
            with pytest.raises(SafetensorError, match="404"):
                loader.take(loader.names()[-1])
        with pytest.raises(SafetensorError, match="404"):
            dict(loader)
        loader.close()


def test_a_truncated_file_is_refused(path, tmp_path):
    (tmp_path / "f").write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SafetensorError), safe_open(tmp_path / "f", "pt") as file:
        dict(file.prefetch())


def test_addresses_and_shards(tensors, nginx):
    ours.save_file(tensors, nginx.root / "f.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for number in range(3):
        shard = f"model-{number}.safetensors"
        ours.save_file({name: tensors[name] for name in names[number::3]}, nginx.root / shard)
        weight_map |= dict.fromkeys(names[number::3], shard)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (nginx.root / "model.safetensors.index.json").write_text(index)
    for address in ("f.safetensors", "model.safetensors.index.json", ""):
        with safe_open(f"{nginx.http}/{address}", "pt") as file:
            assert_all(dict(file.prefetch()), tensors)
            found = dict(file.prefetch({"t.008": (slice(None), slice(90, None))}))
            assert torch.equal(found["t.008"], tensors["t.008"][:, 90:])


def test_a_part_of_a_remote_file_is_read_alone(nginx):
    tensors = {name: torch.randn(4000, 1000) for name in "ab"}
    ours.save_file(tensors, nginx.root / "large")
    file = safe_open(f"{nginx.http}/large", "pt")
    before = len(nginx.requests())
    part = file.prefetch({"b": slice(2000, 2003)}).take("b")
    assert torch.equal(part, tensors["b"][2000:2003])
    (request,) = nginx.requests()[before:]
    assert " 206 12000 " in request


FORKED = """
import os, sys
from tensorizer.safetensors import SafetensorError, safe_open
loader = safe_open(sys.argv[1], "pt").prefetch(buffer_bytes=1 << 20)
loader.take("t.000")
child = os.fork()
if child == 0:
    try:
        loader.take("t.001")
    except SafetensorError as error:
        assert "was made by the parent process" in str(error)
        loader.close()
        del loader
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print(1 + len(dict(loader)))
left_open = safe_open(sys.argv[1], "pt").prefetch(buffer_bytes=1)
"""


def test_a_forked_process_leaves_it_alone(path, tensors):
    done = run_python(FORKED, path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{len(tensors)}\n", "")


# Headers


def test_tensor_meta_is_what_the_header_says(path, nginx, tensors):
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    header.pop("__metadata__", None)
    ours.save_file(tensors, nginx.root / "f.safetensors")
    for where in (path, f"{nginx.http}/f.safetensors"):
        with safe_open(where, "pt") as file:
            for name, entry in header.items():
                meta = file.get_tensor_meta(name)
                assert isinstance(meta, ours.TensorMeta)
                assert (meta.dtype, meta.shape) == (entry["dtype"], entry["shape"])
                assert list(meta.data_offsets) == entry["data_offsets"]
            with pytest.raises(SafetensorError, match="does not contain"):
                file.get_tensor_meta("nope")
    with pytest.raises(SafetensorError, match="closed"):
        file.get_tensor_meta("half")


def test_tensor_meta_of_packed_elements_and_shards(tmp_path):
    header = b'{"x":{"dtype":"F4","shape":[4,8],"data_offsets":[0,16]}}'
    for shard in ("a", "b"):
        content = header.replace(b"x", shard.encode())
        (tmp_path / shard).write_bytes(struct.pack("<Q", len(content)) + content + bytes(range(16)))
    index = {"metadata": {}, "weight_map": {"a": "a", "b": "b"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with safe_open(tmp_path, "pt") as file:
        meta = file.get_tensor_meta("b")
        assert (meta.dtype, meta.shape, meta.data_offsets) == ("F4", [4, 8], (0, 16))
        rows = file.prefetch({"b": slice(1, 3)}).take("b")
    assert rows.dtype is torch.float4_e2m1fn_x2
    assert rows.view(torch.uint8).flatten().tolist() == list(range(4, 12))


# In a block of tensorizer_safetensors, code sees what the library has: this is how loaders of
# transformers and vLLM use it.


def shards_of_a_server(files, device):
    """Yield the weights of files one after another, as vLLM's iterators do."""
    for name in files:
        with safetensors.safe_open(name, framework="pt", device=device) as file:
            yield from file.prefetch()


def rows_of_a_rank(filename, device, rank, ranks):
    """Take this rank's rows of each tensor by name, as transformers' loader does."""
    with safetensors.safe_open(filename, framework="pt", device="cpu") as file:
        plan = {}
        for name in file.keys():  # noqa: SIM118
            shape = file.get_slice(name).get_shape()
            rows = len(shape) and shape[0] // ranks
            plan[name] = slice(rank * rows, (rank + 1) * rows) if rows else None
        assert isinstance(file.get_slice("half"), safetensors.PySafeSlice)
        loader = file.prefetch(plan, device=device)
    return {name: loader.take(name) for name in sorted(plan, reverse=True)}


@pytest.fixture
def library(monkeypatch):
    """Give the library the names of 0.9, if the installed one is older."""
    for name in ("PySafeSlice", "PrefetchLoader", "TensorMeta"):
        if not hasattr(safetensors, name):
            monkeypatch.setattr(safetensors, name, type(name, (), {}), raising=False)


def test_a_block_replaces_what_programs_ask_for_by_type(library, path):
    before = [getattr(safetensors, n) for n in ("PySafeSlice", "PrefetchLoader", "TensorMeta")]
    with ours.tensorizer_safetensors():
        with safetensors.safe_open(path, "pt") as file:
            assert isinstance(file.get_slice("half"), safetensors.PySafeSlice)
            assert isinstance(file.get_tensor_meta("half"), safetensors.TensorMeta)
            assert not isinstance(file.get_tensor_meta("half"), safetensors.PySafeSlice)
    after = [getattr(safetensors, n) for n in ("PySafeSlice", "PrefetchLoader", "TensorMeta")]
    assert before == after
    assert ours.PySafeSlice.__name__ == "PySafeSlice"


def test_a_block_refuses_other_devices_as_the_library_does(path):
    with ours.tensorizer_safetensors():
        with safetensors.safe_open(path, "pt", "cpu") as file:
            for device in (None, "cpu"):
                with pytest.raises(SafetensorError, match="cuda devices, not cpu"):
                    file.prefetch(device=device)


def test_loaders_of_frameworks(library, path, tensors, monkeypatch):
    # The loaders are for CUDA; here the CPU stands in for it.
    monkeypatch.setattr(torch, "device", torch.device)
    with ours.tensorizer_safetensors():
        monkeypatch.setattr(safetensors.safe_open, "_prefetches_to_any_device", True)
        assert_all(dict(shards_of_a_server([path], "cpu")), tensors)
        parts = [rows_of_a_rank(path, "cpu", rank, 2) for rank in range(2)]
    whole = torch.cat([part["t.010"] for part in parts])
    assert torch.equal(whole, tensors["t.010"][: len(whole)])
