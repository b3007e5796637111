"""Lengths that a file, a server or an object claims take no memory and end no process."""

import io
import struct
import zlib

import pytest
import tensorizer
import torch
from processes import run_python
from scripted import FaultServer
from tensorizer import EncryptionParams, TensorDeserializer
from tensorizer.serialization import FormatError
from tensorizer.stream_io import open_stream

#: Runs with little address space beyond what torch has mapped.
LIMITED = """
import resource, sys, torch, tensorizer
from tensorizer import TensorDeserializer
with open("/proc/self/statm") as statm:
    mapped = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (1 << 30),) * 2)
"""


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "f"
    tensorizer.save({"a": torch.arange(10)}, path)
    return path


def with_long_header(path, length):
    """Have the index say that the tensor's header is so long; the file is sparse."""
    data = bytearray(path.read_bytes())
    with TensorDeserializer(path, "cpu", lazy_load=True) as file:
        header, at = file._file.reader.offsets()[0]
    place = data.rindex(struct.pack("<QQ", header, at), 0, header)
    struct.pack_into("<Q", data, place + 8, header + length)
    with open(path, "wb") as out:
        out.write(data)
        out.truncate(header + length + 80)
    return path


WAYS = {
    "eager": "TensorDeserializer(sys.argv[1], 'cpu')",
    "lazy": "TensorDeserializer(sys.argv[1], 'cpu', lazy_load=True)['a']",
    "operator": "torch.ops.tensorizer.load(sys.argv[1])",
    "object": "TensorDeserializer(Lying(sys.argv[1]), 'cpu')",
}
LYING = """
import io
class Lying(io.RawIOBase):
    def __init__(self, path): self.file = open(path, "rb")
    def readable(self): return True
    def seekable(self): return True
    def read(self, size=-1): return self.file.read(size)
    def tell(self): return self.file.tell()
    def seek(self, at, whence=0):
        return 1 << 62 if whence == 2 else self.file.seek(at, whence)
"""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [1 << 40, (1 << 43) - 4096])
def test_a_header_length_of_the_index(way, length, saved):
    path = with_long_header(saved, length)
    code = LIMITED + LYING + f"try: {WAYS[way]}\nexcept Exception as error: print(error)\n"
    done = run_python(code, path)
    assert done.returncode == 0, done.stderr
    assert f"expected a header of at most 4194305 bytes, found one of {length}" in done.stdout


def test_an_index_length(saved, tmp_path):
    data = bytearray(saved.read_bytes())
    place = data.index(struct.pack("<Q", 1), 8) + 8  # behind the number of tensors
    struct.pack_into("<Q", data, place, 1 << 50)
    path = tmp_path / "long"
    with open(path, "wb") as out:
        out.write(data)
        out.truncate((1 << 43) - 4096)
    with pytest.raises(FormatError):
        TensorDeserializer(path, "cpu")
    with FaultServer(bytes(data), ranges=False) as server:
        with pytest.raises((FormatError, OSError)):
            TensorDeserializer(server.url, "cpu")


def test_a_read_of_more_than_there_is():
    with FaultServer(b"x" * 1000) as server, open_stream(server.url) as stream:
        assert stream.read(2**50) == b"x" * 1000
    with FaultServer(b"x" * 1000, ranges=False) as server, open_stream(server.url) as stream:
        assert stream.read(2**50) == b"x" * 1000
    assert isinstance(stream, io.BufferedIOBase)


def write_long_headers(path, count, length):
    """Write scalars of type uint8 behind headers of this length, most of it padding. Sparse."""
    end = struct.pack("<Q", 1)
    shared = struct.pack("<B3sB", 3, b"|u1", 0)
    names = [b"m.%06d" % number for number in range(count)]
    at = 73 + count * (2 + 8 + 1 + len(shared) + 24)
    index = bytearray()
    with open(path, "wb") as out:
        for name in names:
            record = struct.pack("<H", len(name)) + name
            start = struct.pack("<QHB", length, 0, 2) + record + shared
            start += struct.pack("<HB", 7, 1) + bytes((0, 4))
            padding = bytes(length - len(start) - 4 - len(end))
            crc = zlib.crc32(
                b"\x05", zlib.crc32(end, zlib.crc32(padding, zlib.crc32(start + bytes(4))))
            )
            index += record + b"\2" + shared + struct.pack("<QQQ", at, at + length, 1)
            out.seek(at)
            out.write(start + struct.pack("<I", crc))
            out.seek(at + length - len(end))
            out.write(end + b"\x05")
            at += length + 1
        out.write(bytes(8))
        out.seek(0)
        out.write(b"|TZR|" + struct.pack("<I32xQ8xQQ", 1, count, count, len(index)) + index)


#: Does something with a file; prints by how many bytes the peak of memory grew.
PEAK = """
import sys, torch, tensorizer
from tensorizer import DecryptionParams, TensorDeserializer
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))
path, small = sys.argv[1:]
def module_of(tensors):
    module = torch.nn.Module()
    module.m = torch.nn.Module()
    for name, tensor in tensors.items():
        module.m.register_buffer(name.removeprefix("m."), tensor.detach().clone())
    return module
before = [TensorDeserializer(small, "cpu", verify_hash=True), peak()][1]
{}
print(peak() - before)
"""
MANY_HEADERS = {
    "eager": "TensorDeserializer(path, 'cpu')",
    "verified": "TensorDeserializer(path, 'cpu', verify_hash=True)",
    "one by one": "for _ in TensorDeserializer(path, 'cpu', lazy_load=True).values(): pass",
    "module": """
with TensorDeserializer(path, 'cpu', lazy_load=True) as file:
    module = module_of(dict.fromkeys(file, torch.tensor(5, dtype=torch.uint8)))
    assert file.verify_module(module)[0]
    getattr(module.m, "000007").zero_()
    found, each = file.verify_module(module)
    assert not found and [name for name, same in each if not same] == ["m.000007"]
""",
}


@pytest.fixture(scope="module")
def long_headers(tmp_path_factory):
    path = tmp_path_factory.mktemp("headers") / "long"
    write_long_headers(path, 60, 4 << 20)
    return path


@pytest.mark.parametrize("way", MANY_HEADERS)
def test_long_headers_are_not_kept(way, saved, long_headers):
    done = run_python(PEAK.replace("{}", MANY_HEADERS[way]), long_headers, saved)
    assert done.returncode == 0, done.stderr
    # A quarter of the headers.
    assert int(done.stdout) < 60 << 20


@pytest.mark.parametrize("encrypted", [False, True])
def test_headers_of_huge_pages_are_not_kept(encrypted, saved, tmp_path):
    path = tmp_path / "aligned"
    params = EncryptionParams(b"k" * 32, manifest=True) if encrypted else None
    tensors = {f"m.t{n}": torch.tensor([n, 7]) for n in range(40)}
    tensorizer.save(tensors, path, alignment=2 << 20, encryption=params)
    code = """
key = DecryptionParams.from_key(b"k" * 32) if {} else None
file = TensorDeserializer(path, "cpu", encryption=key, verify_hash=True)
module = module_of(file)
assert file.verify_module(module)[0]
module.m.t20[1] = 8
found, each = file.verify_module(module)
assert not found and [name for name, same in each if not same] == ["m.t20"]
"""
    done = run_python(PEAK.replace("{}", code.replace("{}", str(encrypted))), path, saved)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 40 << 20


def test_a_header_without_memory_for_it(saved, tmp_path):
    path = tmp_path / "long"
    write_long_headers(path, 2, 4 << 20)
    code = """
import resource, sys, torch, tensorizer
from tensorizer import TensorDeserializer
file = TensorDeserializer(sys.argv[1], "cpu", lazy_load=True)
small = TensorDeserializer(sys.argv[2], "cpu", lazy_load=True)
small["a"]
with open("/proc/self/statm") as statm:
    mapped = int(statm.read().split()[0]) * resource.getpagesize()
# Less than a header.
resource.setrlimit(resource.RLIMIT_AS, (mapped + (2 << 20),) * 2)
try: file["m.000000"]
except MemoryError as error: print(error)
"""
    done = run_python(code, path, saved)
    assert "4194304 bytes for headers of tensors" in done.stdout, done.stderr


META = """
import resource, sys, tensorizer, torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for dtype in (torch.bfloat16, torch.float64):
    for lazy in (True, False):
        opened = tensorizer.TensorDeserializer(sys.argv[1], "cpu", dtype=dtype, lazy_load=lazy)
        tensor = opened["large"]
        assert tensor.dtype == dtype and tensor.shape == (1 << 29, 2), tensor.shape
        assert tensor[12345].tolist() == [0, 0] and opened["small"].tolist() == [1, 1, 1]
        assert opened["numbers"].dtype == torch.int32 and not opened["numbers"].any()
        tensor.data[0] = 1
        del opened, tensor
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def test_a_large_tensor_without_data_takes_no_memory_in_another_dtype(tmp_path):
    tensors = {
        "large": torch.empty(1 << 29, 2, device="meta"),
        "small": torch.ones(3),
        "numbers": torch.empty(4, dtype=torch.int32, device="meta"),
    }
    tensorizer.save(tensors, tmp_path / "f", allow_meta=True)
    assert (tmp_path / "f").stat().st_size < 300_000
    done = run_python(META, tmp_path / "f")
    assert done.returncode == 0, done.stderr
    # 4 GB as they are in the file, 8 in the larger dtype.
    assert int(done.stdout) < 200


def test_a_copy_by_torch_without_memory_is_a_memory_error(tmp_path):
    """torch copies a tensor that is not in row-major order before it is saved."""
    code = """
import resource, sys, tensorizer, torch
tensor = torch.empty(15_000, 5_000).t()
with open("/proc/self/statm") as statm:
    mapped = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (250 << 20),) * 2)
try:
    tensorizer.save({"a": tensor}, sys.argv[1])
except MemoryError as error:
    print(error)
"""
    done = run_python(code, tmp_path / "f")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("cannot allocate 300000000 bytes for a copy by torch")


def test_bytes_for_python_without_memory_are_a_memory_error(tmp_path):
    code = """
import resource, sys
from tensorizer import _C
source = _C.open(sys.argv[1])
with open("/proc/self/statm") as statm:
    mapped = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (450 << 20),) * 2)
try:
    source.read(0, 300 << 20)
except MemoryError:
    print("MemoryError")
"""
    with open(tmp_path / "f", "wb") as file:
        file.truncate(300 << 20)
    done = run_python(code, tmp_path / "f")
    assert (done.returncode, done.stdout) == (0, "MemoryError\n"), done.stderr


@pytest.mark.parametrize("name", ["f.tensors", "f.safetensors"])
def test_a_tensor_of_more_than_64_dimensions_is_refused_when_it_is_saved(tmp_path, name):
    tensorizer.save({"a": torch.ones((1,) * 64)}, tmp_path / name)
    before = (tmp_path / name).read_bytes()
    saves = [tensorizer.save]
    if name == "f.tensors":  # the only format of the operator
        saves.append(lambda state, path: torch.ops.tensorizer.save(str(path), state))
    for save in saves:
        with pytest.raises((ValueError, RuntimeError), match="at most 64 dimensions, found 65"):
            save({"a": torch.ones((1,) * 65)}, tmp_path / name)
    assert (tmp_path / name).read_bytes() == before
    assert tensorizer.load(tmp_path / name)["a"].dim() == 64
