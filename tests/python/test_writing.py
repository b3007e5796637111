"""``TensorSerializer``: calls, names, ownership, and files that appear whole or not at all."""

import gc
import io
import os
import stat
import sys

import numpy as np
import pytest
import tensorizer
import torch
from conftest import OWN_MOUNTS, assert_same, bits
from processes import run_python
from tensorizer import TensorDeserializer, TensorSerializer, TensorType
from tensorizer.stream_io import open_stream

pytestmark = pytest.mark.device


def entries(path):
    with TensorDeserializer(path, "cpu", lazy_load=True, verify_hash=True) as file:
        return {name: (index, kind, t.detach()) for index, kind, name, t in file.read_tensors()}


TARGETS = {
    "str": str,
    "pathlike": lambda path: path,
    "bytes path": os.fsencode,
    "open file": lambda path: path.open("wb+"),
    "unbuffered": lambda path: path.open("wb+", buffering=0),
}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_targets(target, tmp_path):
    path = tmp_path / "f.tensors"
    tensor = torch.randn(1000, 700)
    serializer = TensorSerializer(target(path))
    serializer.write_state_dict({"a": tensor, "b": tensor.int()})
    assert serializer.total_tensor_bytes == 2 * tensor.nbytes
    serializer.close()
    serializer.close()
    found = entries(path)
    assert_same(found["a"][2], tensor)
    assert_same(found["b"][2], tensor.int())


def test_a_descriptor_stays_the_callers_and_bytesio_is_closed(tmp_path):
    descriptor = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    with TensorSerializer(descriptor) as serializer:
        serializer.write_state_dict({"a": torch.ones(3)})
    os.fstat(descriptor)
    os.close(descriptor)
    assert_same(entries(tmp_path / "f")["a"][2], torch.ones(3))

    class Kept(io.BytesIO):
        def close(self):
            self.data = self.getvalue()
            super().close()

    stream = Kept()
    with TensorSerializer(stream) as serializer:
        serializer.write_state_dict({"a": torch.arange(1 << 20)})
    assert stream.closed
    assert_same(tensorizer.load(io.BytesIO(stream.data))["a"], torch.arange(1 << 20))


def test_a_file_begins_at_the_position_of_its_object(tmp_path):
    for make in (io.BytesIO, lambda: (tmp_path / "f").open("wb+")):
        stream = make()
        stream.write(b"x" * 100)
        serializer = TensorSerializer(stream)
        serializer.write_state_dict({"a": torch.ones(3)})
        stream.seek(100)
        if isinstance(stream, io.BytesIO):
            stream = io.BytesIO(stream.getvalue())
            stream.seek(100)
        assert_same(tensorizer.load(stream)["a"], torch.ones(3))


def test_several_calls_on_one_object(tmp_path):
    path = tmp_path / "f.tensors"
    module = torch.nn.Linear(3, 2)
    with TensorSerializer(path) as serializer:
        serializer.write_tensor(3, "first", TensorType.BUFFER, torch.arange(4))
        serializer.write_module(module)
        serializer.write_tensor(9, "array", TensorType.PARAM, np.eye(3))
        serializer.write_state_dict({"nested": {"x": torch.zeros(2)}})
        with pytest.raises(ValueError, match="Conflicting tensor paths"):
            serializer.write_tensor(0, "first", TensorType.PARAM, torch.ones(1))
        with pytest.raises(ValueError, match="Conflicting tensor paths"):
            serializer.write_state_dict({"nested": torch.ones(1)})
        serializer.write_tensor(0, "last", TensorType.PARAM, torch.ones(1))
    found = entries(path)
    assert list(found) == ["first", ".weight", ".bias", "array", ("nested", "x"), "last"]
    assert found["first"][:2] == (3, TensorType.BUFFER)
    assert found["array"][:2] == (9, TensorType.PARAM)
    assert_same(found[".weight"][2], module.weight.detach())
    assert_same(found["array"][2], torch.eye(3, dtype=torch.float64))


@pytest.mark.host
def test_an_index_that_outgrows_its_space(tmp_path):
    """The old package stops at 256 KiB of index and leaves a damaged file."""
    path = tmp_path / "f.tensors"
    with TensorSerializer(path) as serializer:
        for call in range(6):
            serializer.write_state_dict({f"{call}.{i}": torch.tensor(i) for i in range(2000)})
    loaded = tensorizer.load(path, verify_hash=True)
    assert len(loaded) == 12_000
    assert loaded["5.1999"].item() == 1999


def test_the_callers_tensors_are_never_modified(tmp_path):
    """Tied, overlapping, read-only and huge ones."""
    base = torch.randn(2_000_000)
    tied = torch.nn.Parameter(base)
    array = np.arange(10)
    array.flags.writeable = False
    tensors = {
        "tied1": tied,
        "tied2": tied,
        "left": base[:1_500_000],
        "right": base[500_000:],
        "shifted": base[1:],
        "readonly": torch.from_numpy(array.copy()),
    }
    before = {name: bits(tensor) for name, tensor in tensors.items()}
    versions = {name: tensor._version for name, tensor in tensors.items()}
    tensorizer.save(tensors, tmp_path / "f")
    with TensorSerializer(tmp_path / "g") as serializer:
        serializer.write_tensor(0, "readonly", TensorType.PARAM, array)
    loaded = tensorizer.load(tmp_path / "f", verify_hash=True)
    for name, tensor in tensors.items():
        assert bits(tensor) == bits(loaded[name]) == before[name]
        assert tensor._version == versions[name]


def test_modules(tmp_path):
    path = tmp_path / "f.tensors"
    root = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    root.register_buffer("kept", torch.ones(1))
    root.register_buffer("dropped", torch.ones(2), persistent=False)
    root.register_parameter("none", None)
    root[0].register_buffer("scratch", torch.ones(3), persistent=False)
    with TensorSerializer(path) as serializer:
        serializer.write_module(root, include_non_persistent_buffers=False)
    assert set(entries(path)) == {
        ".kept", "0.weight", "0.bias", "1.weight", "1.bias",
        "1.running_mean", "1.running_var", "1.num_batches_tracked",
    }  # fmt: skip
    with TensorSerializer(path) as serializer:
        serializer.write_module(root)
    found = entries(path)
    assert list(found)[:4] == [".kept", ".dropped", "0.weight", "0.bias"]
    assert found["1.running_mean"][:2] == (2, TensorType.BUFFER)
    with TensorSerializer(path) as serializer:
        serializer.write_module(root, remove_tensors=True)
    assert root[0].weight is None
    assert root.kept is None
    assert set(entries(path)) == set(found)


@pytest.mark.host
def test_more_modules_than_an_index_can_count(tmp_path):
    class Tiny(torch.nn.Module):
        pass

    root, empty, last = Tiny(), Tiny(), Tiny()
    for i in range(65_599):
        # Twenty times as fast as to call the class.
        root._modules[str(i)] = child = Tiny.__new__(Tiny)
        vars(child).update(vars(empty))
    root._modules["65599"] = last
    last.register_buffer("x", torch.ones(1))
    with TensorSerializer(tmp_path / "f") as serializer:
        serializer.write_module(root)
    assert entries(tmp_path / "f")["65599.x"][0] == 65_535


def test_state_dicts(tmp_path):
    path = tmp_path / "f.tensors"
    with TensorSerializer(path) as serializer:
        serializer.write_state_dict([torch.zeros(1), {"x": (torch.ones(1), {})}, []])
    assert list(entries(path)) == [(0,), (1, "x", 0)]
    cycle = {}
    cycle["self"] = cycle
    for bad, error, text in [
        ({"a": "text"}, TypeError, r"expected a tensor at \['a'\], found str"),
        ({"a": b"bytes"}, TypeError, "found bytes"),
        ({"a": [None]}, TypeError, r"at \['a', 0\], found NoneType"),
        ({"a": 1.5}, TypeError, "found float"),
        ({"a": np.ones(1)}, TypeError, "found ndarray"),
        ({"a": {torch.ones(1)}}, TypeError, "found set"),
        ({1: torch.ones(1)}, TypeError, "keys must be str, found 1"),
        (cycle, ValueError, "contains itself"),
        (torch.ones(1), TypeError, "expected a mapping or a sequence, not Tensor: give it a name"),
        (torch.nn.Linear(1, 1), TypeError, "not Linear: write_module takes modules"),
        ("text", TypeError, "expected a mapping or a sequence"),
    ]:
        with pytest.raises(error, match=text), TensorSerializer(io.BytesIO()) as serializer:
            serializer.write_state_dict(bad)
    shared = [torch.ones(1)]
    with TensorSerializer(path) as serializer:
        serializer.write_state_dict({"a": shared, "b": shared})
    assert list(entries(path)) == [("a", 0), ("b", 0)]


@pytest.mark.host
def test_every_character_of_a_name_comes_back(tmp_path):
    """As the key of a mapping and as a whole name."""
    texts = [
        "".join(map(chr, range(start, start + 1024)))
        for start in range(0, 0x110000, 1024)
        if not 0xD800 <= start < 0xE000
    ]
    path = tmp_path / "f"
    one = torch.zeros(1, dtype=torch.uint8)
    with TensorSerializer(path) as serializer:
        serializer.write_state_dict({"nested": dict.fromkeys(texts, one)})
    read = TensorDeserializer(path, "cpu", lazy_load=True)
    assert list(read["nested"]) == texts
    with TensorSerializer(path) as serializer:
        serializer.write_state_dict(dict.fromkeys(texts, one))
    assert list(TensorDeserializer(path, "cpu")) == texts


@pytest.mark.parametrize("name", ["\ud800", "a\udfff", "\ud800\udc00"])
def test_lone_surrogates_in_names_are_refused(name, tmp_path):
    path = tmp_path / "f"
    tensorizer.save({"a": torch.ones(1)}, path)
    for bad in ({name: torch.ones(1)}, {"nested": {name: torch.ones(1)}}):
        with pytest.raises(ValueError, match="must be valid Unicode, found a lone surrogate"):
            tensorizer.save(bad, path)
        with pytest.raises(ValueError, match="must be valid Unicode, found a lone surrogate"):
            with TensorSerializer(tmp_path / "other") as serializer:
                serializer.write_state_dict(bad)
    with TensorDeserializer(path, "cpu", lazy_load=True) as file:
        assert name not in file
        assert list(file) == ["a"]
        with pytest.raises(KeyError):
            file[name]


def test_bad_arguments(tmp_path):
    with TensorSerializer(tmp_path / "f") as s:
        for name in (("a", 0), b"a", None):
            with pytest.raises(TypeError, match="name must be a str"):
                s.write_tensor(0, name, TensorType.PARAM, torch.ones(1))
        for index in (-1, 65_536):
            with pytest.raises(ValueError, match="idx must be 0 to 65535"):
                s.write_tensor(index, "a", TensorType.PARAM, torch.ones(1))
        with pytest.raises(ValueError, match="TensorType"):
            s.write_tensor(0, "a", 7, torch.ones(1))
        with pytest.raises(TypeError):
            s.write_tensor(0, "a", TensorType.PARAM, [1, 2])
        with pytest.raises((TypeError, ValueError)):
            s.write_tensor(0, "a", TensorType.PARAM, np.array([1, 2], dtype=">i4"))
        with pytest.raises(TypeError):
            s.write_tensor(0, "a", TensorType.PARAM, np.array(["text"]))
        s.write_tensor(0, "a", TensorType.PARAM, torch.ones(1))
    with pytest.raises(ValueError, match="closed file"):
        s.write_state_dict({"a": torch.ones(1)})
    for limit, error in ((0, ValueError), ("2", TypeError)):
        with pytest.raises(error, match="limit_cpu_concurrency"):
            TensorSerializer(tmp_path / "g", limit_cpu_concurrency=limit)
    for alignment in (0, 3, 1 << 30):
        with pytest.raises(ValueError, match="alignment must be (a power of two|at least 1)"):
            TensorSerializer(tmp_path / "g", alignment=alignment)
    for address in ("http://host/key", "https://host/key", "redis://host/key"):
        with pytest.raises(ValueError, match="only be opened for reading"):
            TensorSerializer(address)
    with pytest.raises(ValueError, match="readable"), (tmp_path / "w").open("wb") as file:
        TensorSerializer(file)
    with pytest.raises(ValueError, match="text"), (tmp_path / "t").open("w+") as file:
        TensorSerializer(file)
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb"), os.fdopen(writing, "wb") as file:
        with pytest.raises(ValueError, match="readable|seekable"):
            TensorSerializer(file)
    assert not (tmp_path / "g").exists()
    with pytest.warns(UserWarning, match="no effect"):
        serializer = TensorSerializer(tmp_path / "c", compress_tensors=True)
    serializer.write_state_dict({"a": torch.ones(1)})
    serializer.close()
    serializer = TensorSerializer(tmp_path / "l", limit_cpu_concurrency=1)
    assert serializer.cpu_limit == 1
    serializer.write_state_dict({"a": torch.ones(1 << 20)})
    serializer.close()


def test_alignment(tmp_path):
    for alignment in (1, 64, 4096):
        tensorizer.save(
            {str(i): torch.ones(i) for i in range(50)}, tmp_path / "f", alignment=alignment
        )
        loaded = tensorizer.load(tmp_path / "f", verify_hash=True, mmap=True)
        assert all(torch.equal(loaded[str(i)], torch.ones(i)) for i in range(50))


# Files that appear whole or not at all


def test_the_old_file_stays_until_close(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"old")
    path.chmod(0o640)
    serializer = TensorSerializer(path)
    serializer.write_state_dict({"a": torch.ones(1)})
    assert path.read_bytes() == b"old"
    serializer.close()
    assert_same(entries(path)["a"][2], torch.ones(1))
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_an_exception_in_the_block_leaves_the_old_file(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), TensorSerializer(path) as serializer:
        serializer.write_state_dict({"a": torch.ones(1)})
        1 / 0
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_serializer_that_wrote_nothing_leaves_nothing(tmp_path):
    untouched = TensorSerializer(tmp_path / "g")
    del untouched
    assert list(tmp_path.iterdir()) == []


def test_links_devices_and_new_folders(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    tensorizer.save({"a": torch.ones(1)}, link)
    assert link.is_symlink()
    assert_same(entries(target)["a"][2], torch.ones(1))
    deep = tmp_path / "new" / "folders" / "f"
    tensorizer.save({"a": torch.ones(1)}, deep)
    assert deep.exists()
    tensorizer.save({"a": torch.ones(1)}, "/dev/null")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        tensorizer.save({"a": torch.ones(1)}, tmp_path)
    with pytest.raises(NotADirectoryError):
        tensorizer.save({"a": torch.ones(1)}, deep / "below")
    name = "n" * 250
    tensorizer.save({"a": torch.ones(1)}, tmp_path / name)
    assert (tmp_path / name).exists()


KILLED = """
import os, sys, threading, torch, tensorizer
tensors = {str(i): torch.ones(1 << 20) for i in range(40)}
threading.Timer(float(sys.argv[2]), lambda: os.kill(os.getpid(), 9)).start()
print("ready", flush=True)
while True:
    tensorizer.save(tensors, sys.argv[1])
"""


@pytest.mark.host
@pytest.mark.parametrize("after", [0.02, 0.05, 0.1, 0.15])
def test_a_killed_save_leaves_a_whole_file(tmp_path, after):
    path = tmp_path / "f"
    tensorizer.save({"old": torch.ones(3)}, path)
    done = run_python(KILLED, path, after)
    assert done.returncode == -9, done.stderr
    assert done.stdout.startswith("ready")
    loaded = tensorizer.load(path, verify_hash=True)
    assert list(loaded) == ["old"] or len(loaded) == 40


FULL = """
import resource, signal, sys, torch, tensorizer
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, 8 << 20))
try:
    tensorizer.save({str(i): torch.ones(1 << 20) for i in range(8)}, sys.argv[1])
except OSError as error:
    print(type(error).__name__, error.filename)
"""


@pytest.mark.host
def test_a_file_that_may_not_grow(tmp_path):
    """The same path as a full disk, without needing one."""
    path = tmp_path / "f"
    path.write_bytes(b"old")
    done = run_python(FULL, path)
    assert done.stdout.split() == ["OSError", str(path)], done.stderr
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.host
@pytest.mark.skipif(
    os.geteuid() != 0 or sys.platform != "linux", reason="mounting a small disk needs root"
)
def test_a_full_disk(tmp_path):
    """A real one: a tmpfs of 16 MiB in a mount namespace of its own."""
    code = """
import os, torch, tensorizer
disk = sys.argv[1]
mount("-t", "tmpfs", "-o", "size=16m", "none", disk)
path = os.path.join(disk, "f")
open(path, "wb").write(b"old")
try:
    tensorizer.save({str(i): torch.ones(1 << 20) for i in range(8)}, path)
except OSError as error:
    print(error.errno, error.filename, open(path, "rb").read().decode(), len(os.listdir(disk)))
try:
    with tensorizer.TensorSerializer(open(os.path.join(disk, "g"), "wb+")) as s:
        s.write_state_dict({str(i): torch.ones(1 << 20) for i in range(8)})
except OSError as error:
    print(error.errno, error.filename)
"""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = run_python(OWN_MOUNTS + code, disk)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["28", str(disk / "f"), "old", "1"], done.stdout
    assert lines[1].split() == ["28", str(disk / "g")]


class Unwilling(io.BytesIO):
    """Fails after some bytes."""

    def write(self, data):
        if self.tell() > 300_000:
            raise TimeoutError("the far end does not answer")
        return super().write(data)


def test_exceptions_of_file_objects_come_through():
    serializer = TensorSerializer(Unwilling())
    with pytest.raises(TimeoutError, match="does not answer"):
        serializer.write_state_dict({"a": torch.ones(1 << 20)})
    with pytest.raises(ValueError, match="earlier write"):
        serializer.write_state_dict({"b": torch.ones(1)})
    with pytest.raises(ValueError, match="earlier write"):
        serializer.close()


@pytest.mark.parametrize("mode", ["wb", "wb+"])
def test_local_streams_are_atomic(tmp_path, mode, caplog):
    path = tmp_path / "f"
    path.write_bytes(b"old")
    path.chmod(0o640)
    with pytest.raises(RuntimeError, match="mine"), open_stream(path, mode) as stream:
        stream.write(b"new")
        stream.flush()
        raise RuntimeError("mine")
    assert path.read_bytes() == b"old"
    stream = open_stream(path, mode)
    assert isinstance(stream, io.BufferedIOBase)
    assert stream.name == str(path)
    stream.write(b"new")
    assert stream.tell() == 3
    assert stream.readable() == (mode == "wb+")
    assert path.read_bytes() == b"old"
    stream.close()
    stream.close()
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o640
    stream = open_stream(path, mode)
    stream.write(b"lost")
    del stream
    gc.collect()
    assert path.read_bytes() == b"new"
    assert "was not closed" in caplog.text
    assert os.listdir(tmp_path) == ["f"]


def test_tensors_through_a_local_stream_are_atomic(tmp_path):
    path = tmp_path / "f.tensors"
    tensors = {"a": torch.arange(300_000)}
    serializer = TensorSerializer(open_stream(path, "wb+"))
    serializer.write_state_dict(tensors)
    assert not path.exists()
    serializer.close()
    assert_same(tensorizer.load(path, "cpu", verify_hash=True)["a"], tensors["a"])
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="mine"):
        with TensorSerializer(open_stream(path, "wb+")) as serializer:
            serializer.write_state_dict({"b": torch.ones(5)})
            raise RuntimeError("mine")
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["f.tensors"]
