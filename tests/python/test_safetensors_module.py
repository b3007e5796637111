"""``tensorizer.safetensors`` beside the library whose names it has."""

import ctypes
import importlib
import inspect
import json
import mmap
import os
import struct
import sys
import threading
import time
from pathlib import Path

import pytest
import tensorizer
import torch
from conftest import assert_same
from processes import run_python
from safetensors_library import FILES, assert_like, make, result_of, theirs
from tensorizer import safetensors as ours
from tensorizer.file.open_file import OpenFile
from tensorizer.file.opening import FileBytes


@pytest.fixture(scope="module", params=FILES)
def tensors(request):
    return FILES[request.param]


@pytest.fixture
def path(tensors, tmp_path):
    path = tmp_path / "f.safetensors"
    theirs.save_file(tensors, path, metadata={"format": "pt", "": "ü"})
    return path


# Signatures


def test_the_names_and_parameters_are_those_of_the_library():
    as_there = importlib.import_module("tensorizer.safetensors.torch")
    for name in ("load", "load_file", "load_model", "save", "save_file", "save_model"):
        assert getattr(as_there, name) is getattr(ours, name)
        parameters = [
            [(p.name, p.kind, p.default) for p in inspect.signature(where).parameters.values()]
            for where in (getattr(ours, name), getattr(theirs, name))
        ]
        own = ("timeout", inspect.Parameter.KEYWORD_ONLY, None)
        assert [one for one in parameters[0] if one != own] == parameters[1], name
    mine = inspect.signature(ours.safe_open)
    assert list(mine.parameters) == [*inspect.signature(theirs.safe_open).parameters, "timeout"]
    public = {name for name in dir(theirs.safe_open) if not name.startswith("_")}
    of_0_9 = {"get_tensor_meta", "prefetch"}
    assert public | of_0_9 == {name for name in dir(ours.safe_open) if not name.startswith("_")}
    assert ours.SafetensorError is theirs.SafetensorError
    assert tensorizer.safetensors is ours


def test_without_the_library():
    code = """
import sys
assert not {"safetensors", "tensorizer.safetensors"} & sys.modules.keys()
sys.modules["safetensors"] = None
import torch, tensorizer.safetensors as ours
path = sys.argv[1]
ours.save_file({"a": torch.arange(3)}, path)
assert ours.load_file(path)["a"].tolist() == [0, 1, 2]
for call in (lambda: ours.load(b""), lambda: ours.safe_open(path, "np")):
    try:
        call()
    except ours.SafetensorError as error:
        assert type(error).__mro__[1:] == (Exception, BaseException, object)
    else:
        raise AssertionError
try:
    with ours.tensorizer_safetensors():
        raise AssertionError
except ImportError:
    print("done")
"""
    done = run_python(code, f"/dev/shm/{os.getpid()}.safetensors")
    Path(f"/dev/shm/{os.getpid()}.safetensors").unlink()
    assert done.stdout == "done\n", done.stderr


# Files


@pytest.mark.parametrize("metadata", [None, {"format": "pt", "ü": ""}])
def test_saved_bytes_are_those_of_the_library(tmp_path, tensors, metadata):
    library, mine = theirs.save(tensors, metadata), ours.save(tensors, metadata)
    # The library writes several metadata in any order.
    assert mine == library or (metadata is not None and len(mine) == len(library))
    ours.save_file(tensors, tmp_path / "ours", metadata)
    assert (tmp_path / "ours").read_bytes() == mine
    with theirs.safe_open(tmp_path / "ours", "pt") as file:
        assert file.metadata() == metadata
        assert_like(file.get_tensors(), {n: tensors[n] for n in file.offset_keys()})


@pytest.mark.parametrize("device", ["cpu", None])
@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize("kind", [str, Path])
def test_load_file(path, device, backend, kind):
    mine = ours.load_file(kind(path), device, backend=backend)
    # With "pread" the library cannot load all of them.
    assert_like(mine, theirs.load_file(kind(path), device))
    assert all(tensor.is_contiguous() for tensor in mine.values())


def test_load(path, tensors):
    mine = ours.load(path.read_bytes())
    assert list(mine) == list(ours.load_file(path))
    for name, tensor in tensors.items():
        assert_same(mine[name], tensor)
        mine[name].reshape(-1).view(torch.uint8).zero_()
    assert_like(ours.load(ours.save({})), {})


def test_bytes_are_read_in_place_by_several_readers(path):
    data = path.read_bytes()
    with OpenFile(FileBytes(data, "<bytes>")) as file:
        assert file.reader.parallel
        before = sys.getrefcount(data)
    # The file has let them go.
    assert sys.getrefcount(data) < before
    with pytest.raises(TypeError, match="FileBytes"):
        tensorizer.save({}, FileBytes(b"", "<bytes>"))
    with pytest.raises(ours.SafetensorError, match="<bytes>"):
        ours.load(data[:-9])


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="Linux")
def test_a_tensor_that_is_asked_for_is_read_ahead(tmp_path):
    # So large that the kernel's own read-ahead is not all of it.
    tensors = {name: torch.arange(8 << 20, dtype=torch.int32) for name in "abc"}
    path = tmp_path / "f.safetensors"
    ours.save_file(tensors, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if any(in_memory(file, 0, path.stat().st_size)):
            pytest.skip("the file system keeps files in memory")
        with ours.safe_open(path, "pt") as opened:
            half = opened.get_slice("a")[: 4 << 20]
            start = half.data_ptr() - opened.get_tensor("c").data_ptr()
        each = 32 << 20
        first, last = path.stat().st_size - 3 * each, path.stat().st_size - each
        for begin, size in ((first, each // 2), (last, each)):
            deadline = time.monotonic() + 30
            while not all(in_memory(file, begin, size)) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert all(in_memory(file, begin, size))
        # Nothing of what was not asked for.
        assert not any(in_memory(file, last - each // 2, each // 4))
    assert start == -2 * each
    assert torch.equal(half, tensors["a"][: 4 << 20])


def in_memory(file, start, size):
    """Say of each page of a range of a file whether it is in the page cache."""
    page = mmap.PAGESIZE
    start = start // page * page
    with mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, offset=start) as memory:
        pages = (ctypes.c_ubyte * -(-size // page))()
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0
    return [bool(found & 1) for found in pages]


def test_safe_open(path, tensors):
    with ours.safe_open(path, "pt") as mine, theirs.safe_open(path, "pt") as library:
        assert mine.keys() == library.keys()
        # The library lists tensors without bytes in any order.
        assert [n for n in mine.offset_keys() if n != "empty"] == [
            n for n in library.offset_keys() if n != "empty"
        ]
        assert mine.metadata() == library.metadata() == {"format": "pt", "": "ü"}
        for name in tensors:
            assert_like(mine.get_tensor(name), library.get_tensor(name))
            left, right = mine.get_slice(name), library.get_slice(name)
            assert (left.get_shape(), left.get_dtype()) == (right.get_shape(), right.get_dtype())
            assert type(left).__name__ == type(right).__name__
            if "float4" not in name:  # which the library cannot
                assert_like(left[...], right[...])
        assert_like(mine.get_tensors(), dict.fromkeys(mine.offset_keys()) | library.get_tensors())
    for name in ("torch", "pytorch"):
        assert ours.safe_open(path, name, device=None).keys() == sorted(tensors)
    plain = ours.safe_open(path, framework="pt", device=torch.device("cpu"), backend="pread")
    assert plain.keys() == sorted(tensors)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}])
def test_empty_metadata_are_not_none(tmp_path, metadata):
    path = tmp_path / "f"
    theirs.save_file({"a": torch.ones(1)}, path, metadata)
    with ours.safe_open(path, "pt") as mine, theirs.safe_open(path, "pt") as library:
        assert mine.metadata() == library.metadata() == metadata
    header = b'{"__metadata__":null,"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    with ours.safe_open(path, "pt") as mine, theirs.safe_open(path, "pt") as library:
        assert mine.metadata() is library.metadata() is None


def test_a_closed_file_behaves_as_in_the_library(path):
    opened = [module.safe_open(path, "pt") for module in (ours, theirs)]
    slices = [file.get_slice("cube") for file in opened]
    for file in opened:
        file.__exit__(None, None, None)
        file.__exit__(None, None, None)
    for call in ("keys", "offset_keys", "metadata", "get_tensors"):
        assert_like(*(result_of(getattr(file, call)) for file in opened))
    for call in ("get_tensor", "get_slice"):
        assert_like(*(result_of(lambda f=f, c=call: getattr(f, c)("cube")) for f in opened))
    assert_like(*(part[1:3] for part in slices))


def test_files_are_closed_with_the_last_that_needs_them(path):
    def count():
        return [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                if os.path.exists(f"/proc/self/fd/{fd}")].count(str(path))  # fmt: skip

    with ours.safe_open(path, "pt", backend="pread") as file:
        part = file.get_slice("cube")
        assert count()
    assert part[0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    del part
    assert count() == 0


INDICES = [
    *(0, -1, 3, 4, -4, -5, True, False, None, 1.5, "a", ...),
    *(slice(None), slice(1, 3), slice(-2, None), slice(3, 1), slice(0, 99), slice(None, None, 2)),
    *(slice(None, None, -1), slice(None, None, 0), slice(99, None), slice("a", None)),
    *(
        (),
        (1, 2),
        (1, 2, 3),
        (1, 2, 3, 4),
        (..., 0),
        (0, ..., 1),
        (..., ..., 0),
        (slice(1, 2), ...),
    ),
    *((slice(None), slice(1, 3), slice(None, None, 3)), (slice(None), -5), (slice(None), -6)),
    *([], [0, 1], [[0, 1]], (slice(None), [1, 0]), (None, 1), (1, None, ..., None), (0, True)),
    *(torch.tensor(1), torch.tensor([2, 0]), torch.arange(4) > 1, torch.tensor([9])),
    *((slice(None), torch.tensor(2)), slice(torch.tensor(1), torch.tensor(2)), torch.tensor(1.0)),
]


@pytest.mark.parametrize("where", ["local", "pread", "http"])
@pytest.mark.parametrize("name", ["cube", "scalar", "empty"])
def test_slices(path, nginx, where, name):
    (nginx.root / "f").write_bytes(path.read_bytes())
    library = theirs.safe_open(path, "pt").get_slice(name)
    mine = ours.safe_open(
        f"{nginx.http}/f" if where == "http" else path,
        "pt",
        backend="pread" if where == "pread" else "mmap",
    ).get_slice(name)
    for index in INDICES:
        left, right = (result_of(lambda part=part, i=index: part[i]) for part in (mine, library))
        assert isinstance(left, torch.Tensor) == isinstance(right, torch.Tensor), (index, left)
        if isinstance(left, torch.Tensor):
            assert_same(left, right)
            if where == "local" and left.numel():
                assert left.stride() == right.stride()
        else:
            assert left == right, index


def test_a_slice_reads_no_more_than_it_takes(nginx):
    tensor = torch.randn(4000, 1000)
    ours.save_file({"a": tensor}, nginx.root / "f")
    part = ours.safe_open(f"{nginx.http}/f", "pt").get_slice("a")
    before = len(nginx.requests())
    assert torch.equal(part[2000:2003], tensor[2000:2003])
    (request,) = nginx.requests()[before:]
    assert " 206 12000 " in request


def errors(module, path):
    """Return calls that fail, by what is wrong."""
    file, ones = module.safe_open(path, "pt"), torch.ones(2, 3)
    base = torch.zeros(10)
    return {
        "no tensor": lambda: file.get_tensor("x"),
        "no slice": lambda: file.get_slice("x"),
        "no file": lambda: module.safe_open("nofile", "pt"),
        "no file to load": lambda: module.load_file("no/file"),
        "framework": lambda: module.safe_open(path, "xx"),
        "device": lambda: module.safe_open(path, "pt", device="bogus"),
        "meta": lambda: module.load_file(path, "meta"),
        "negative device": lambda: module.load_file(path, -1),
        "numpy on a device": lambda: module.safe_open(path, "np", device="cuda:0"),
        "backend": lambda: module.load_file(path, backend="x"),
        "no dict": lambda: module.save_file([ones], path),
        "no dict to bytes": lambda: module.save(None),
        "no tensors": lambda: module.save({"a": {"b": 1}}),
        "sparse": lambda: module.save({"a": ones, "b": ones.to_sparse()}),
        "sparse to a file": lambda: module.save_file({"b": ones.to_sparse_csr()}, path),
        "on meta": lambda: module.save({"a": torch.ones(1, device="meta")}),
    }, {
        "names": lambda: file.get_tensor(3),
        "slice names": lambda: file.get_slice(None),
        "file names": lambda: module.safe_open(3, "pt"),
        "bytes for names": lambda: module.safe_open(os.fsencode(path), "pt"),
        "to bytes": lambda: module.save_file({"a": ones}, os.fsencode(path)),
        "missing framework": lambda: module.safe_open(path),
        "not bytes": lambda: module.load(str(path)),
        "bytearray": lambda: module.load(bytearray(path.read_bytes())),
        "metadata": lambda: module.save({"a": ones}, {"a": 1}),
        "metadata list": lambda: module.save({"a": ones}, ["a"]),
        "tensor names": lambda: module.save({1: ones}),
        "shared": lambda: module.save({"a": base, "b": base}),
        "shared in part": lambda: module.save_file({"a": base[:4], "b": base[3:]}, path),
        "shared with its own view": lambda: module.save({"a": ones, "b": ones.t()}),
        "not contiguous": lambda: module.save_file({"a": ones.t()}, path),
        "no header": lambda: module.load(b""),
        "half a header": lambda: module.load(path.read_bytes()[:100]),
        "half the data": lambda: module.load(path.read_bytes()[:-9]),
        "not json": lambda: module.load(struct.pack("<Q", 8) + b"{{{{{{{{"),
        "another file": lambda: module.safe_open(__file__, "pt"),
        "into a file": lambda: module.save_file({"a": ones}, path.parent),
        "cuda": lambda: module.load_file(path, "cuda:0"),
        "number": lambda: module.load_file(path, 0),
    }  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a process without CUDA")
def test_errors(path):
    before = path.read_bytes()
    for same_text, mine, library in zip(
        (True, False), errors(ours, path), errors(theirs, path), strict=True
    ):
        for what in mine:
            left, right = result_of(mine[what]), result_of(library[what])
            assert isinstance(left, tuple), (what, left, right)
            assert left[0] is right[0], (what, left, right)
            assert left[1] == right[1] or not same_text, what
    assert path.read_bytes() == before


def test_files_of_other_formats_are_none(tmp_path):
    for name in ("f.tensors", "f.pt"):
        if name == "f.pt":
            torch.save({"a": torch.ones(1)}, tmp_path / name)
        else:
            tensorizer.save({"a": torch.ones(1)}, tmp_path / name)
        with pytest.raises(ours.SafetensorError, match="expected a safetensors file"):
            ours.safe_open(tmp_path / name, "pt")


def test_dtypes_that_torch_lacks(tmp_path):
    header = json.dumps(
        {"a": {"dtype": "F6_E2M3", "shape": [2, 4], "data_offsets": [0, 6]}}
    ).encode()
    path = tmp_path / "f"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(6))
    mine, library = (module.safe_open(path, "pt") for module in (ours, theirs))
    assert mine.get_slice("a").get_dtype() == library.get_slice("a").get_dtype()
    assert mine.get_slice("a").get_shape() == library.get_slice("a").get_shape()
    for call in (
        lambda f: f.get_tensor("a"),
        lambda f: f.get_tensors(),
        lambda f: f.get_slice("a")[:],
    ):
        assert_like(*(result_of(lambda f=f, c=call: c(f)) for f in (mine, library)))


def test_other_frameworks_are_those_of_the_library(path):
    with ours.safe_open(path, framework="np") as file:
        assert file.get_tensor("cube").tolist() == make()["cube"].tolist()
        assert type(file.get_tensor("cube")).__module__ == "numpy"


def test_from_several_threads(path, tensors):
    file = ours.safe_open(path, "pt")
    found: list = []

    def run():
        for name, tensor in tensors.items():
            assert_same(file.get_tensor(name), tensor)
            assert_same(file.get_slice(name)[...], tensor)
        found.append(True)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4


# Addresses, folders and indices


def test_addresses(path, tensors, nginx):
    (nginx.root / "f").write_bytes(path.read_bytes())
    address = f"{nginx.http}/f"
    loaded = ours.load_file(address)
    assert list(loaded) == list(ours.load_file(path))
    with ours.safe_open(address, framework="pt", device="cpu") as file:
        assert file.keys() == sorted(tensors)
        assert file.metadata() == {"format": "pt", "": "ü"}
        for name, tensor in tensors.items():
            assert_same(loaded[name], tensor)
            assert_same(file.get_tensor(name), tensor)
    with pytest.raises(FileNotFoundError, match="nofile"):
        ours.load_file(f"{nginx.http}/nofile")


def test_to_and_from_s3(s3, tensors):
    ours.save_file(tensors, "s3://bucket/module/f.safetensors", {"a": "b"})
    loaded = ours.load_file("s3://bucket/module/f.safetensors")
    for name, tensor in tensors.items():
        assert_same(loaded[name], tensor)


def test_folders_and_indices(tmp_path, nginx):
    tensors = {f"t{i}": torch.full((1000,), float(i)) for i in range(10)}
    for folder in (tmp_path, nginx.root / "sharded"):
        folder.mkdir(exist_ok=True)
        tensorizer.save(tensors, folder / "model.safetensors", max_shard_size="12KB")
    for place in (
        tmp_path,
        tmp_path / "model.safetensors.index.json",
        f"{nginx.http}/sharded/model.safetensors.index.json",
    ):
        assert_like(ours.load_file(place), tensors)
        with ours.safe_open(place, "pt") as file:
            assert file.offset_keys() == list(tensors)
            assert file.get_slice("t7")[3:5].tolist() == [7, 7]
