"""The memory that a call has in flight, beside its tensors, stays within its limit."""

import itertools
import json
import os
import re
import threading
import time

import pytest
import tensorizer
import torch
from conftest import assert_same as same_tensor
from processes import run_python
from scripted import FaultServer, Scripted
from servers import Nginx, Redis
from tensorizer._native import split_tensor_memory
from tensorizer_cli.main import main
from test_addresses import KEYS, Store

MIB = 1 << 20
#: Memory that an allocator, threads, an interpreter and the plan of a load take besides.
SLACK = 16 * MIB
#: Runs a call and prints how much the memory of the process grew at most.
MEASURED = """
import ctypes, json, sys, time, torch, tensorizer
# What is freed goes back to the system at once: by default glibc keeps ever larger pieces for each
# thread, and how many threads there are depends on the load of the machine. -3 is M_MMAP_THRESHOLD.
ctypes.CDLL(None).mallopt(-3, 1 << 16)
def status(name):
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
def measured(call):
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    call()
    print(json.dumps(status("VmHWM") - before))
limit = int(sys.argv[2]) << 20 or None
"""


def grown(code, *args, **env):
    """Return the bytes by which the memory of a process grew while it made a call."""
    done = run_python(MEASURED + code, *map(str, args), env=os.environ | env)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, tensor in found.items():
        same_tensor(tensor, expected[name])


def least(error):
    """Return the minimum that a message names."""
    return int(re.search(r"at least (\d+) are needed", str(error))[1])


#: Pairs of small tensors in one file, and tensors of 4 MiB in another.
ROWS, WHOLE = 5_000, 20


@pytest.fixture(scope="module")
def nginx(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nginx")
    server = Nginx(folder)
    # The first of each pair is loaded; to read the gap is always cheaper than another request.
    rows = {}
    for number in range(ROWS):
        rows[f"w{number}"] = torch.full((1_500,), number % 100, dtype=torch.uint8)
        rows[f"gap{number}"] = torch.zeros(15_000, dtype=torch.uint8)
    tensorizer.save(rows, server.root / "gaps")
    whole = {f"t{n}": torch.full((4 * MIB,), n, dtype=torch.uint8) for n in range(WHOLE)}
    tensorizer.save(whole, server.root / "whole")
    tensorizer.save(dict(list(whole.items())[:4]), server.root / "few")
    yield server
    server.stop()


# Loads

GAPS = """
tensorizer.load(sys.argv[1], names=["w0"])  # what a first call takes for ever is no part of it
measured(lambda: tensorizer.load(
    sys.argv[1], filter_func=lambda name: name[0] == "w", memory_limit=limit))
"""


def test_gaps_read_from_a_server_count_towards_the_memory_limit(nginx):
    wanted, limit = ROWS * 1_500, 16
    address = f"{nginx.http}/gaps"
    # On a busy machine fewer connections are in use at once: the larger of two loads counts.
    twice = [grown(GAPS, address, 0, TENSORIZER_NUM_READERS="24") for _ in range(2)]
    bound = grown(GAPS, address, limit, TENSORIZER_NUM_READERS="24")
    by_all = grown(
        GAPS, address, 0, TENSORIZER_NUM_READERS="24", TENSORIZER_MEMORY_LIMIT_MB=str(limit)
    )
    assert max(bound, by_all) - wanted <= limit * MIB + SLACK
    assert max(twice) > max(bound, by_all) + 8 * MIB, "the limit makes no difference"


class Counting(Scripted):
    """Serves a file slowly; ``most`` is how many requests were answered at once."""

    def __init__(self, data):
        self.data, self.now, self.most = data, 0, 0
        super().__init__()
        self.url = f"http://127.0.0.1:{self.port}/f"

    def answer(self, handler):
        first, last = handler.headers["Range"].removeprefix("bytes=").split("-")
        body = self.data[int(first) : int(last) + 1]
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.05)
        handler.send_response(206)
        handler.send_header("Content-Length", str(len(body)))
        end = int(first) + len(body) - 1
        handler.send_header("Content-Range", f"bytes {first}-{end}/{len(self.data)}")
        handler.end_headers()
        handler.wfile.write(body)
        with self.lock:
            self.now -= 1


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "f"
    tensors = {f"t{n}": torch.full((MIB,), n, dtype=torch.uint8) for n in range(64)}
    tensorizer.save(tensors, path)
    return path, tensors


@pytest.mark.parametrize(("limit", "most"), [(None, 32), (16 * MIB, 12), (3 * MIB, 2)])
def test_connections_follow_from_the_limit(small, limit, most):
    path, tensors = small
    with Counting(path.read_bytes()) as server:
        loaded = tensorizer.load(server.url, num_readers=32, memory_limit=limit)
    assert_same(loaded, tensors)
    assert 1 <= server.most <= most
    assert tensorizer.stats()["threads"] <= most
    if limit is None:
        assert tensorizer.stats()["threads"] == most


def test_a_limit_that_is_too_small_names_the_minimum(small):
    path, tensors = small
    with FaultServer(path.read_bytes()) as server:
        with pytest.raises(ValueError, match="a memory limit of 1000 bytes is too small") as caught:
            tensorizer.load(server.url, memory_limit=1000)
        enough = least(caught.value)
        with pytest.raises(ValueError, match=f"at least {enough} are"):
            tensorizer.load(server.url, memory_limit=enough - 1)
        assert_same(tensorizer.load(server.url, memory_limit=enough), tensors)
    # A file needs no connection.
    assert_same(tensorizer.load(path, memory_limit=MIB), tensors)


@pytest.mark.parametrize("wrong", [0, -1, 1 << 63])
def test_invalid_memory_limits_are_refused(small, wrong):
    with pytest.raises(ValueError, match="memory_limit must be a positive number of bytes"):
        tensorizer.load(small[0], memory_limit=wrong)
    for other in (True, "64", 1.5):
        with pytest.raises(TypeError, match="memory_limit must be an int or None"):
            tensorizer.TensorDeserializer(small[0], memory_limit=other)


ITERATE = """
def call():
    for _, tensor in tensorizer.iterate(sys.argv[1], memory_limit=limit):
        time.sleep(0.01)
measured(call)
"""


def test_a_slow_consumer(nginx):
    address = f"{nginx.http}/whole"
    assert grown(ITERATE, address, 32) <= 32 * MIB + SLACK
    assert grown(ITERATE, address, 0) > 32 * MIB + SLACK, "the limit makes no difference"


def test_a_tensor_that_iterate_has_no_room_for(nginx):
    with pytest.raises(ValueError, match="a tensor of 4194304 bytes is held") as caught:
        tensorizer.iterate(f"{nginx.http}/whole", memory_limit=4 * MIB)
    with tensorizer.TensorDeserializer(f"{nginx.http}/whole", lazy_load=True) as file:
        some = list(tensorizer.iterate(f"{nginx.http}/whole", memory_limit=least(caught.value)))
        assert len(some) == len(file) == WHOLE


def test_a_verified_tensor_that_slices_have_no_room_for(nginx):
    address = f"{nginx.http}/whole"
    name = next(iter(tensorizer.info(address).tensors))
    options = {"names": [name], "slices": {name: (0, 0, 1)}, "verify_hash": True}
    with pytest.raises(ValueError, match="a tensor of 4194304 bytes is held") as caught:
        tensorizer.load(address, "cpu", memory_limit=4 * MIB, **options)
    (part,) = tensorizer.load(address, "cpu", memory_limit=least(caught.value), **options).values()
    assert len(part) == 1


# Uploads

UPLOAD = """
tensors = {f"t{n}": torch.full((20 << 20,), n, dtype=torch.uint8) for n in range(10)}
measured(lambda: tensorizer.save(tensors, sys.argv[1], memory_limit=limit))
"""


class SlowStore(Store):
    """Takes its time for each part of an upload, so that others wait for it in memory."""

    def pause(self):
        time.sleep(0.1)

    def answer(self, handler):
        if "partNumber" in handler.path:
            self.pause()
        super().answer(handler)


@pytest.fixture
def store():
    with SlowStore() as server:
        yield server


def test_parts_of_an_upload(store):
    """Without a limit six parts of 47.5 MiB together, and 25 of 200 MiB, of which 20 are held."""

    def of(size, limit=0):
        code = UPLOAD.replace("20 << 20", size)
        return grown(code, "s3://bucket/f", limit, **store.settings(), **KEYS)

    # A first upload takes some, however short it is.
    anyway = of("1 << 10")
    short, bound = of("19 << 18"), of("20 << 20", 64)
    # On a slow machine a part may be sent before the next is made: here they wait for the twelfth.
    begun, all_begun = itertools.count(1), threading.Event()

    def pause():
        if next(begun) == 12:
            all_begun.set()
        all_begun.wait(20)
        time.sleep(0.1)

    store.pause = pause
    free = of("20 << 20")
    assert short - anyway <= 10 * (19 << 18)
    assert free - anyway <= 1.2 * 20 * 8 * MIB
    assert bound <= 64 * MIB + SLACK < free


def test_an_upload_without_room_for_its_parts(store, monkeypatch):
    store.use(monkeypatch)
    tensors = {"a": torch.arange(10 * MIB, dtype=torch.int32)}
    with pytest.raises(
        ValueError,
        match="two parts of the upload 8388608 each and the beginning of the file 8388608",
    ) as caught:
        tensorizer.save(tensors, "s3://bucket/small", memory_limit=16 * MIB)
    tensorizer.save(tensors, "s3://bucket/small", memory_limit=least(caught.value))
    assert_same(tensorizer.load("s3://bucket/small"), tensors)


# Groups, Redis and the command


def test_a_group_without_room(ranks, small):
    path, _ = small
    for found in ranks.start("groups.limited", 2, path, 64 * MIB):
        assert found["result"] == "the same"
    for found in ranks.start("groups.limited", 2, path, 2 * MIB):
        assert "a memory limit of 2097152 bytes is too small" in found["result"]


def test_members_with_limits_of_their_own(ranks, small):
    path, _ = small
    for found in ranks.start("groups.limited", 2, path, [64 * MIB, 16 * MIB]):
        assert found["result"] == "the same"
    for found in ranks.start("groups.limited", 2, path, [64 * MIB, 2 * MIB]):
        assert "a memory limit of 2097152 bytes is too small" in found["result"]


def test_shares_of_tensors():
    assert split_tensor_memory(None, 100, 1000, MIB) == (100, 0)
    tensors, beside = split_tensor_memory(64 * MIB, 1 << 30, 1, MIB)
    assert tensors == beside == 48 * MIB


def test_values_of_redis(small, tmp_path):
    redis = pytest.importorskip("redis")
    path, tensors = small
    server = Redis(tmp_path)
    try:
        client = redis.Redis.from_url(server.address)
        with tensorizer.TensorDeserializer(path, lazy_load=True, memory_limit=2 * MIB) as file:
            file.to_redis(client, "limited")
        lens = [client.strlen(key) for key in client.keys("limited:*")]
        assert max(lens) <= MIB // 2
        loaded = tensorizer.load(f"{server.address}/limited", memory_limit=8 * MIB)
        assert_same(loaded, tensors)
        client.close()
    finally:
        server.stop()


def test_values_of_redis_are_not_tiny(small, tmp_path):
    redis = pytest.importorskip("redis")
    path, _ = small
    server = Redis(tmp_path)
    try:
        client = redis.Redis.from_url(server.address)

        def store(limit):
            with tensorizer.TensorDeserializer(path, lazy_load=True, memory_limit=limit) as file:
                file.to_redis(client, "least")

        with pytest.raises(ValueError, match="at least") as caught:
            store(MIB + MIB // 4)
        store(least(caught.value))
        assert max(client.strlen(key) for key in client.keys("least:t*")) == 64 << 10
        client.close()
    finally:
        server.stop()


COPY = """
from tensorizer_cli.main import main
def call():
    options = [f"--memory-limit={limit >> 20}MiB"] if limit else []
    assert main(["cp", "--quiet", *options, *sys.argv[4:], sys.argv[1], sys.argv[3]]) == 0
measured(call)
"""


def test_copies_by_the_command(nginx, tmp_path, store):
    path = nginx.root / "whole"
    assert grown(COPY, path, 32, tmp_path / "copy") <= 32 * MIB + SLACK
    assert_same(tensorizer.load(tmp_path / "copy"), tensorizer.load(path))
    assert grown(COPY, path, 0, tmp_path / "copy") > 32 * MIB + SLACK
    # By the environment, and to a server.
    took = grown(COPY, path, 0, tmp_path / "copy", TENSORIZER_MEMORY_LIMIT_MB="32")
    assert took <= 32 * MIB + SLACK
    took = grown(COPY, path, 48, "s3://bucket/copy", **store.settings(), **KEYS)
    assert took <= 48 * MIB + SLACK


def test_copies_that_are_verified(nginx, tmp_path):
    # The system has not got back all that the copy took when it is read again.
    path = nginx.root / "whole"
    assert grown(COPY, path, 32, tmp_path / "copy", "--verify") <= 2 * 32 * MIB + SLACK
    assert grown(COPY, path, 0, tmp_path / "copy", "--verify") > 2 * 32 * MIB + SLACK


@pytest.mark.parametrize("command", ["cp", "diff", "cp --verify", "cp s3", "cp safetensors"])
def test_commands_state_their_minimum_memory_limit(  # noqa: PLR0917
    nginx, tmp_path, store, monkeypatch, capsys, command
):
    store.use(monkeypatch)
    path, (name, *more) = str(nginx.root / "few"), command.split()
    others = {"s3": "s3://bucket/least", "safetensors": str(tmp_path / "copy.safetensors")}
    target = path if name == "diff" else others.get(more[0] if more else "", str(tmp_path / "copy"))
    options = ["--verify"] if "--verify" in more else []

    def call(limit):
        return main([name, "--quiet", *options, f"--memory-limit={limit}", path, target])

    # Bytes that are not hashed are written without a copy.
    little = MIB // 8 if target.endswith(".safetensors") else 3 * MIB
    assert call(little) != 0
    said = capsys.readouterr().err
    assert f"a memory limit of {little} bytes is too small" in said
    enough = least(said)
    assert call(enough) == 0, capsys.readouterr().err
    assert call(64 * MIB) == 0 or enough > 64 * MIB
