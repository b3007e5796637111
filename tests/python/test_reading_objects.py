"""Sources of TensorDeserializer: paths, descriptors, pipes and Python objects."""

import gzip
import io
import os
import tempfile
import threading
import zipfile

import pytest
import tensorizer
import torch
from conftest import assert_same
from reading import NAMES, TENSORS, check
from tensorizer import TensorDeserializer, stream_io

pytestmark = pytest.mark.device


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "f.tensors"
    tensorizer.save(TENSORS, path)
    return path


class Seekable:
    """The least that a Python object must have."""

    def __init__(self, data):
        self.file = io.BytesIO(data)

    def read(self, size=-1):
        return self.file.read(size)

    def seek(self, offset, whence=0):
        self.file.seek(offset, whence)  # returns nothing, like some streams

    def tell(self):
        return self.file.tell()


class OneByteFewer(Seekable):
    """Returns less than was asked for, and other types than bytes."""

    def read(self, size=-1):
        return bytearray(self.file.read(max(1, size - 1)))


SOURCES = {
    "str": str,
    "pathlike": lambda path: path,
    "bytes path": os.fsencode,
    "open file": lambda path: path.open("rb"),
    "unbuffered file": lambda path: path.open("rb", buffering=0),
    "read-write file": lambda path: path.open("rb+"),
    "BytesIO": lambda path: io.BytesIO(path.read_bytes()),
    "least object": lambda path: Seekable(path.read_bytes()),
    "short reads": lambda path: OneByteFewer(path.read_bytes()),
}


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_sources(source, lazy, path):
    with TensorDeserializer(source(path), "cpu", lazy_load=lazy, verify_hash=True) as file:
        check(file)


def test_a_file_descriptor_stays_the_callers(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        check(TensorDeserializer(descriptor, "cpu"))
        check(TensorDeserializer(descriptor, "cpu", lazy_load=True))
        os.fstat(descriptor)
    finally:
        os.close(descriptor)


def test_temporary_files_and_files_with_unflushed_bytes(path):
    with tempfile.NamedTemporaryFile() as file:
        file.write(path.read_bytes())
        file.seek(0)
        check(TensorDeserializer(file, "cpu"))
    with tempfile.TemporaryFile("w+b", buffering=1 << 22) as file:
        file.write(path.read_bytes())
        file.seek(0)
        check(TensorDeserializer(file, "cpu"))


def test_a_file_object_whose_descriptor_has_other_bytes(path):
    """``GzipFile.fileno()`` is that of the compressed file."""
    packed = path.with_suffix(".gz")
    packed.write_bytes(gzip.compress(path.read_bytes(), 1))
    with gzip.open(packed) as file:
        check(TensorDeserializer(file, "cpu"))


@pytest.mark.parametrize("packed", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_member_of_a_zip_file(packed, path):
    """Its mode is ``"r"``, though it is binary."""
    archive = path.with_suffix(".zip")
    with zipfile.ZipFile(archive, "w", packed) as file:
        file.write(path, "c")
        file.writestr("text", "text")
    with zipfile.ZipFile(archive) as file:
        check(TensorDeserializer(file.open("c"), "cpu"))
        with pytest.raises(ValueError, match="expected a binary file, found a text file"):
            TensorDeserializer(io.TextIOWrapper(file.open("text")), "cpu")
        with tempfile.NamedTemporaryFile("w+") as wrapped:
            with pytest.raises(ValueError, match="expected a binary file, found a text file"):
                TensorDeserializer(wrapped, "cpu")


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("as_descriptor", [False, True])
def test_a_pipe_is_read_in_one_pass(lazy, as_descriptor, path):
    reading, writing = os.pipe()

    def feed():
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(path.read_bytes())

    feeder = threading.Thread(target=feed)
    feeder.start()
    file_obj = reading if as_descriptor else os.fdopen(reading, "rb")
    try:
        with TensorDeserializer(file_obj, "cpu", lazy_load=lazy, verify_hash=True) as file:
            assert_same(file["e"].detach(), TENSORS["e"])
            check(file)
    finally:
        feeder.join()
        if as_descriptor:
            os.close(reading)


def test_a_pipe_and_a_filter(path):
    reading, writing = os.pipe()
    feeder = threading.Thread(target=lambda: os.fdopen(writing, "wb").write(path.read_bytes()))
    feeder.start()
    with TensorDeserializer(
        os.fdopen(reading, "rb"), "cpu", filter_func=lambda name: name in ("c", "f")
    ) as file:
        assert list(file) == ["c", "f"]
        assert_same(file["f"].detach(), TENSORS["f"])
    feeder.join()


def test_a_pipe_cannot_have_several_readers(path):
    reading, writing = os.pipe()
    feeder = threading.Thread(target=lambda: os.fdopen(writing, "wb").write(path.read_bytes()))
    feeder.start()
    drain = os.dup(reading)
    with pytest.raises(ValueError, match="num_readers=2"):
        TensorDeserializer(os.fdopen(reading, "rb"), num_readers=2)
    while os.read(drain, 1 << 20):
        pass
    feeder.join()
    os.close(drain)


class Failing(Seekable):
    def __init__(self, data, after):
        super().__init__(data)
        self.after = after

    def read(self, size=-1):
        if self.file.tell() >= self.after:
            raise ConnectionResetError("the far end went away")
        return super().read(size)


def test_exceptions_of_file_objects_come_through(path):
    for after in (0, 100, 263_000):
        with pytest.raises(ConnectionResetError, match="far end"):
            TensorDeserializer(Failing(path.read_bytes(), after), "cpu")

    class TooMuch(Seekable):
        def read(self, size=-1):
            return self.file.read(size) + b"more"

    class Nothing(Seekable):
        def read(self, size=-1):
            return None

    with pytest.raises(OSError, match="more bytes than asked for"):
        TensorDeserializer(TooMuch(path.read_bytes()), "cpu")
    with pytest.raises(OSError, match="no bytes"):
        TensorDeserializer(Nothing(path.read_bytes()), "cpu")


def test_an_open_file_of_a_python_object_from_two_threads(path):
    lazy = TensorDeserializer(io.BytesIO(path.read_bytes()), "cpu", lazy_load=True)
    errors = []

    def read(names):
        try:
            for name in names:
                assert_same(lazy[name].detach(), TENSORS[name])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(names,)) for names in (NAMES, NAMES[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    lazy.close()


@pytest.mark.parametrize("opened", ["memory", "file", "temporary file"])
@pytest.mark.parametrize("kind", ["tensors", "safetensors"])
def test_save_and_load_leave_a_file_object_open(opened, kind, tmp_path):
    make = {
        "memory": io.BytesIO,
        "file": lambda: (tmp_path / "f").open("wb+"),
        "temporary file": tempfile.NamedTemporaryFile,
    }[opened]
    tensors = {"a": torch.arange(5)}
    with make() as file:
        tensorizer.save(tensors, file, format=kind)
        end = file.tell()
        assert not file.closed and file.seek(0, os.SEEK_END) == end
        for _ in range(2):
            file.seek(0)
            assert_same(tensorizer.load(file, "cpu")["a"], tensors["a"])
        file.seek(0)
        assert tensorizer.info(file).format == kind
        file.seek(0)
        tensorizer.save_async(tensors, file, format=kind).result(60)
        file.seek(0)
        with pytest.raises(KeyError):
            tensorizer.load(file, names=["b"])
        with pytest.raises(ValueError, match="meta device"):
            tensorizer.save({"a": torch.empty(2, device="meta")}, file, format=kind)
        assert not file.closed
        file.seek(0)
        with TensorDeserializer(file, "cpu"):
            pass
        assert file.closed


def test_save_completes_a_stream_of_this_package(tmp_path):
    stream = stream_io.open_stream(tmp_path / "f", "wb+")
    tensorizer.save({"a": torch.arange(5)}, stream)
    assert stream.closed
    assert_same(tensorizer.load(tmp_path / "f", "cpu")["a"], torch.arange(5))
