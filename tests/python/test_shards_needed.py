"""Checkpoints of many shards: which of them are opened, by how many connections and descriptors."""

import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import tensorizer
import torch
from processes import run_python
from safetensors.torch import save_file
from tensorizer import TensorDeserializer
from tensorizer.safetensors import safe_open

INDEX = "model.safetensors.index.json"
COUNT = 40


class Counting(ThreadingHTTPServer):
    """Serves a folder by ranges, and counts what it was asked for."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, folder, pause=0):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.lock, self.pause = folder, threading.Lock(), pause
        self.requests, self.connections, self.sent = [], 0, 0
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self.thread.start()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}/{INDEX}"

    def process_request(self, request, client_address):
        with self.lock:
            self.connections += 1
        super().process_request(request, client_address)

    def handle_error(self, request, client_address):
        """Clients may leave."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_GET(self):
        try:
            whole = (self.server.folder / self.path[1:]).read_bytes()
        except OSError:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        first, last = self.headers["Range"].removeprefix("bytes=").split("-")
        body = whole[int(first) : int(last) + 1]
        with self.server.lock:
            self.server.requests.append((self.path[1:], len(body)))
            self.server.sent += len(body)
        self.send_response(206)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{len(whole)}"')
        end = int(first) + len(body) - 1
        self.send_header("Content-Range", f"bytes {first}-{end}/{len(whole)}")
        self.end_headers()
        for start in range(0, len(body), 64 << 10):
            self.wfile.write(body[start : start + (64 << 10)])
            time.sleep(self.server.pause)

    def log_message(self, *args):
        pass


def shard(number):
    return f"model-{number:05}.safetensors"


def write(folder, count=COUNT, size=50_000):
    weight_map = {}
    for number in range(count):
        save_file({f"t{number}": torch.full((size,), float(number))}, folder / shard(number))
        weight_map[f"t{number}"] = shard(number)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder / INDEX


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many")
    write(folder)
    return folder


@pytest.fixture
def server(folder):
    server = Counting(folder)
    yield server
    server.shutdown()
    server.server_close()
    server.thread.join()


def by_load(address):
    return tensorizer.load(address, names=["t7"])["t7"]


def by_iterate(address):
    ((_, tensor),) = tensorizer.iterate(address, names=["t7"])
    return tensor


def by_names(address):
    with TensorDeserializer(address, "cpu", names=["t7"]) as file:
        return file["t7"].detach()


def by_deserializer(address):
    with TensorDeserializer(address, "cpu", lazy_load=True) as file:
        first = file["t7"]
        assert file["t7"] is first
        return first.detach()


def by_safe_open(address):
    with safe_open(address, "pt") as file:
        return file.get_tensor("t7")


@pytest.mark.parametrize("call", [by_load, by_iterate, by_names, by_deserializer, by_safe_open])
def test_one_tensor_opens_its_own_shard(server, call):
    assert torch.equal(call(server.address), torch.full((50_000,), 7.0))
    assert {path for path, _ in server.requests} == {INDEX, shard(7)}
    assert len(server.requests) <= 4
    assert server.connections <= 4
    heads = [length for path, length in server.requests if path == shard(7)]
    assert heads[0] == 64 << 10


def test_all_shards_share_connections(server):
    loaded = tensorizer.load(server.address)
    assert len(loaded) == COUNT
    assert [int(loaded[f"t{n}"][-1]) for n in range(COUNT)] == list(range(COUNT))
    assert len(server.requests) == COUNT + 1
    assert server.connections <= COUNT


def test_a_name_that_the_index_lacks(server, folder):
    with pytest.raises(KeyError, match="Tensor 'none' not found"):
        tensorizer.load(server.address, names=["t1", "none"])
    assert {path for path, _ in server.requests} == {INDEX, *(shard(n) for n in range(COUNT))}


def test_a_lazy_file_opens_the_others_when_they_are_asked_for(server):
    with TensorDeserializer(server.address, "cpu", lazy_load=True) as file:
        early = file["t3"]
        assert len({path for path, _ in server.requests}) == 2
        assert len(file) == COUNT
        assert file["t3"] is early
        assert file.total_tensor_bytes == COUNT * 200_000
        with pytest.raises(KeyError, match="none"):
            file["none"]
    assert list(file) == [f"t{number}" for number in range(COUNT)]


def test_a_lazy_file_reads_its_index_once_and_each_shard_once(server):
    with TensorDeserializer(server.address, "cpu", lazy_load=True) as file:
        names = [f"t{number}" for number in range(10)] * 3
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(lambda name: file[name], names))
    assert [int(tensor[0]) for tensor in found] == list(range(10)) * 3
    paths = [path for path, _ in server.requests]
    assert paths.count(INDEX) == 1
    heads = Counter(path for path, length in server.requests if length == 64 << 10)
    assert heads == {shard(number): 1 for number in range(10)}


def test_a_lazy_file_that_was_closed_still_has_names(folder):
    file = TensorDeserializer(folder / INDEX, "cpu", lazy_load=True)
    file.close()
    assert set(file) == {f"t{number}" for number in range(COUNT)}
    with pytest.raises(ValueError, match="closed"):
        file["t1"]


def test_a_missing_shard_that_is_not_needed(tmp_path):
    index = write(tmp_path, 3)
    (tmp_path / shard(1)).unlink()
    assert int(tensorizer.load(index, names=["t2"])["t2"][0]) == 2
    with pytest.raises(FileNotFoundError, match=shard(1)):
        tensorizer.load(index, names=["t1"])
    with pytest.raises(FileNotFoundError, match=shard(1)):
        tensorizer.load(index)


def test_an_index_that_promises_what_a_needed_shard_lacks(tmp_path):
    index = write(tmp_path, 3)
    said = json.loads(index.read_text())
    said["weight_map"]["other"] = shard(1)
    index.write_text(json.dumps(said))
    assert int(tensorizer.load(index, names=["t2"])["t2"][0]) == 2
    with pytest.raises(ValueError, match="expected tensor `other`"):
        tensorizer.load(index, names=["t1"])


FEW_DESCRIPTORS = """
import resource, sys, tensorizer
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (160, hard))
loaded = tensorizer.load(sys.argv[1])
assert [int(loaded[f"t{n}"][9]) for n in range(400)] == list(range(400))
lazily = tensorizer.TensorDeserializer(sys.argv[1], "cpu", lazy_load=True)
assert len(lazily) == 400 and int(lazily["t399"][0]) == 399
"""


def test_more_shards_than_descriptors(tmp_path):
    done = run_python(FEW_DESCRIPTORS, write(tmp_path, 400, 10))
    assert done.returncode == 0, done.stderr


def test_scattered_tensors_are_not_read_over(tmp_path):
    tensors = {f"t{n}": torch.full((25_000,), float(n)) for n in range(300)}
    save_file(tensors, tmp_path / "one.safetensors")
    # 3 MB a second: what lies between two takes 275 ms, and 4 requests are under way.
    server = Counting(tmp_path, pause=0.02)
    names = [f"t{n}" for n in range(0, 300, 10)]
    try:
        address = server.address.replace(INDEX, "one.safetensors")
        loaded = tensorizer.load(address, names=names)
    finally:
        server.shutdown()
        server.server_close()
        server.thread.join()
    assert all(torch.equal(loaded[name], tensors[name]) for name in names)
    wanted = sum(loaded[name].nbytes for name in names)
    assert server.sent <= 1.5 * wanted
