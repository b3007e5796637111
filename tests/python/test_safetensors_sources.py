"""Files of safetensors from everywhere, and to devices."""

import contextlib
import io
import os
import pathlib
import threading

import pytest
import tensorizer
import torch
from conftest import assert_same
from packing import FILES, check, feeding, stored_name, write
from safetensors.torch import load_file
from scripted import FaultServer
from servers import Nginx
from tensorizer import FormatError, TensorDeserializer

ops = torch.ops.tensorizer


@pytest.fixture(scope="module", params=FILES)
def path(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "model.safetensors"
    write(request.param, path)
    return path


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    path = tmp_path_factory.mktemp("mixed") / "model.safetensors"
    write("dtypes", path)
    return path


@pytest.fixture(scope="module")
def nginx(tmp_path_factory):
    server = Nginx(tmp_path_factory.mktemp("nginx"))
    yield server
    server.stop()


class Unseekable(io.RawIOBase):
    """A Python object that gives few bytes at a time."""

    def __init__(self, data):
        self.inner = io.BytesIO(data)

    def readable(self):
        return True

    def readinto(self, buffer):
        part = self.inner.read(min(len(buffer), 1000))
        buffer[: len(part)] = part
        return len(part)


@contextlib.contextmanager
def named_pipe(fifo, data):
    os.mkfifo(fifo)
    thread = threading.Thread(target=lambda: fifo.write_bytes(data))
    thread.start()
    yield fifo
    thread.join()
    fifo.unlink()


@contextlib.contextmanager
def opened(kind, path, nginx, moto):
    """Yield what finds a file: one that can be opened once."""
    data, name = path.read_bytes(), path.parent.name
    match kind:
        case "text":
            yield str(path)
        case "bytes":
            yield os.fsencode(path)
        case "pathlib":
            yield pathlib.Path(path)
        case "file address":
            yield path.as_uri()
        case "file":
            yield path.open("rb")
        case "file from the middle":
            (path.parent / "behind").write_bytes(b"x" * 77 + data)
            file = (path.parent / "behind").open("rb")
            file.seek(77)
            yield file
        case "descriptor":
            with path.open("rb") as file:
                yield file.fileno()
        case "memory":
            yield io.BytesIO(data)
        case "memory from the middle":
            file = io.BytesIO(b"{" * 13 + data)
            file.seek(13)
            yield file
        case "object":
            yield Unseekable(data)
        case "pipe":
            with feeding(data) as number:
                yield number
        case "pipe as a path":
            with feeding(data) as number:
                yield f"/proc/self/fd/{number}"
        case "named pipe":
            with named_pipe(path.parent / "fifo", data) as fifo:
                yield fifo
        case "http" | "no ranges":
            (nginx.root / name).write_bytes(data)
            yield f"{nginx.http}{'' if kind == 'http' else '/whole'}/{name}"
        case "unknown" | "chunked":
            with FaultServer(data, lambda *_: (kind,), ranges=False) as server:
                yield server.url
        case "s3":
            moto.client().put_object(Bucket="bucket", Key=f"in/{name}", Body=data)
            yield f"s3://bucket/in/{name}"


KINDS = ["text", "bytes", "pathlib", "file address", "file", "file from the middle", "descriptor",
         "memory", "memory from the middle", "object", "pipe", "pipe as a path", "named pipe",
         "no ranges", "unknown", "chunked", "s3"]  # fmt: skip


@pytest.mark.device
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["library", "unpadded", "no tensors", "tiny"], indirect=True)
def test_files_from_every_source(kind, path, nginx, s3):
    with opened(kind, path, nginx, s3) as source:
        check(tensorizer.load(source, "cpu"), path)
    with opened(kind, path, nginx, s3) as source:
        with TensorDeserializer(source, "cpu", lazy_load=True) as file:
            check(dict(file.items()), path)
    if kind in ("text", "pipe as a path", "http", "no ranges", "s3"):
        with opened(kind, path, nginx, s3) as source:
            assert set(ops.load(source)) == {stored_name(name) for name in load_file(path)}


@pytest.mark.device
@pytest.mark.parametrize("kind", KINDS)
def test_some_tensors_from_every_source(kind, mixed, nginx, s3):
    chosen = ["F32.matrix", "F4.matrix", "C64.scalar", "U8.empty"]
    with opened(kind, mixed, nginx, s3) as source:
        loaded = TensorDeserializer(source, "cpu", filter_func=lambda name: name in chosen)
        for name in chosen:
            assert_same(loaded[name].detach(), load_file(mixed)[name])


def test_trailing_data_are_accepted_only_in_a_pipe():
    """In a pipe only the header tells where the file ends; a file of known size is refused."""
    data = FILES["dtypes"]
    with feeding(data + b"next") as number:
        tensorizer.load(number, "cpu")
    with pytest.raises(FormatError, match="expected the file to end"):
        tensorizer.load(io.BytesIO(data + b"next"), "cpu")
