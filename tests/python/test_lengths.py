"""Lengths that a file, a server or an object claims take no memory and end no process."""

import io
import struct

import pytest
import tensorizer
import torch
from conftest import run_python
from servers import FaultServer
from tensorizer import TensorDeserializer
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
        header, at = file._reader.offsets()[0]
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
