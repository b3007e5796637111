"""Records, progress and errors of calls, and calls that meet a server or a machine in trouble."""
# ruff: noqa: F811  # parameters are fixtures

import logging
import os
import socket
import threading
import time

import pytest
import tensorizer
import torch
from calls import (  # noqa: F401  # fixtures
    MB,
    TENSORS,
    data,
    in_thread,
    moto_keys,
    settings,
    stalls,
)
from processes import run_python
from scripted import FaultServer, Scripted
from servers import free_port
from tensorizer import TensorDeserializer, transformers as models
from tensorizer.stream_io import open_stream

# Logs, statistics, headers


def test_a_repeated_request_is_a_warning_with_fields(data, caplog):
    def flaky(number, start, end):
        return ("status", 503) if 1 <= number <= 3 else None

    seen = tensorizer.stats()
    with FaultServer(data, flaky) as server:
        tensorizer.load(f"{server.url}?token=hu5hw0rd", "cpu", num_readers=1)
        (report,) = tensorizer.stats(since=seen["call"] if seen else 0)[-1:]
    warned = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert warned and len(warned) <= 2, "at most one a second"
    (first,) = warned[:1]
    assert first.name == "tensorizer" and "hu5hw0rd" not in first.getMessage()
    assert first.uri == f"{server.url}?..." and first.error.startswith("the server answered 503")
    assert (first.attempt, first.limit, first.byte) == (2, "those in 300 s", MB)
    assert f"repeated at byte {MB}, try 2 of " in first.getMessage()
    assert (report["requests"], report["retries"]) == (5, 3)
    assert report["network_bytes"] >= len(data) - 1000


def test_a_failed_call_has_an_entry(tmp_path):
    before = tensorizer.stats(since=0)[-1:]
    for call in (
        lambda: tensorizer.load(tmp_path / "missing", "cpu"),
        lambda: tensorizer.save(TENSORS, "/proc/no-folder"),
    ):
        with pytest.raises(OSError):
            call()
    found = tensorizer.stats(since=before[0]["call"] if before else 0)
    assert [one["what"] for one in found] == ["load", "save"]
    assert all(one["error"] for one in found)
    last = tensorizer.stats()
    assert last is None or last["error"] is None, "it is the last that has succeeded"


def test_where_the_bytes_came_from(data, tmp_path):
    (tmp_path / "f.tensors").write_bytes(data)
    tensorizer.load(tmp_path / "f.tensors", "cpu")
    of_disk = tensorizer.stats()
    with FaultServer(data) as server:
        tensorizer.load(server.url, "cpu", cache_dir=tmp_path / "cache")
        cold = tensorizer.stats()
        server.etag = '"one"'
        tensorizer.load(server.url, "cpu", cache_dir=tmp_path / "cache")
        warm = tensorizer.stats()
    names = ("network_bytes", "cache_bytes", "disk_bytes")
    kinds = [[report[name] >= 7 * MB for name in names] for report in (cold, warm, of_disk)]
    assert kinds == [[True, False, False], [False, True, False], [False, False, True]]
    assert (cold["cache_bytes"], of_disk["network_bytes"], of_disk["requests"]) == (0, 0, 0)


def test_calls_under_way_say_what_they_wait_for(data):
    with FaultServer(data, stalls) as server:
        begun = time.time()
        file = TensorDeserializer(server.url, "cpu", lazy_load=True)
        thread, _ = in_thread(lambda: list(file.items()))
        while len(server.requests) < 2:
            time.sleep(0.01)
        (found,) = tensorizer.stats(running=True)
        assert found["uri"] == server.url and found["waits_for"] == f"loading `{server.url}`"
        assert begun - 1 <= found["begun"] <= found["since"] <= time.time()
        assert found["requests"] >= 1 and found["retries"] == 0
        file.close()
        thread.join(20)
    assert tensorizer.stats(running=True) == []


def test_lazy_reads_are_for_debugging_and_do_not_flush_loads(data, tmp_path, caplog):
    (tmp_path / "f.tensors").write_bytes(data)
    tensorizer.load(tmp_path / "f.tensors", "cpu")
    call = tensorizer.stats()["call"]
    caplog.clear()
    with caplog.at_level(logging.INFO, "tensorizer"):
        for _ in range(60):
            with TensorDeserializer(tmp_path / "f.tensors", "cpu", lazy_load=True) as file:
                for name in TENSORS:
                    file[name]
    assert not caplog.records
    assert tensorizer.stats(since=call - 1)[0]["call"] == call, "it is still there"
    with caplog.at_level(logging.DEBUG, "tensorizer"):
        with TensorDeserializer(tmp_path / "f.tensors", "cpu", lazy_load=True) as file:
            file["t1"]
        tensorizer.load(tmp_path / "f.tensors", "cpu")
    assert [one.levelname for one in caplog.records] == ["DEBUG", "INFO"]
    assert (caplog.records[1].tensors, caplog.records[1].bytes) == (8, 8 * MB)


def test_errors_end_with_the_ids_of_the_request(data):
    names = ("x-amz-request-id", "x-amz-id-2", "x-ms-request-id", "x-guploader-uploadid")
    ids = {name: f"id-{name}" for name in (*names, "x-request-id", "cf-ray")}
    with FaultServer(data, lambda *_: ("status", 403, ids)) as server:
        with pytest.raises(PermissionError) as raised:
            tensorizer.load(server.url, "cpu")
    assert f"({', '.join(f'{name}: {value}' for name, value in ids.items())})" in str(raised.value)


def test_headers_and_the_name_of_the_product_reach_every_request(data, moto_keys, monkeypatch):
    seen = []

    class Seen(Scripted):
        def answer(self, handler):
            seen.append(dict(handler.headers))
            handler.send_response(403)
            handler.send_header("Content-Length", "0")
            handler.end_headers()

    monkeypatch.setenv("AWS_SDK_UA_APP_ID", "my-server")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "acc")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "hu5hw0rdhu5hw0rd")
    headers = {"X-Trace": "trace-1"}
    with Seen() as server:
        url = f"http://127.0.0.1:{server.port}"
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{url}/acc")
        monkeypatch.setenv("GOOGLE_BASE_URL", url)
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "hu5hw0rd")
        monkeypatch.setenv("HF_ENDPOINT", url)
        for call in (
            lambda: tensorizer.load(f"{url}/f.tensors", "cpu", headers=headers),
            lambda: tensorizer.load("s3://bucket/f.tensors", "cpu", headers=headers),
            lambda: tensorizer.save(TENSORS, "s3://bucket/f.tensors", headers=headers),
            lambda: tensorizer.save(TENSORS, "az://container/f.tensors", headers=headers),
            lambda: tensorizer.save(TENSORS, "gs://bucket/f.tensors", headers=headers),
            lambda: tensorizer.load("gs://bucket/f.tensors", "cpu", headers=headers),
            lambda: tensorizer.load("hf://org/repo", "cpu", headers=headers),
            lambda: models.from_pretrained(f"{url}/model", headers=headers),
            lambda: open_stream("s3://bucket/f", headers=headers),
            lambda: tensorizer.info(f"{url}/f.tensors", headers=headers),
        ):
            seen.clear()
            with pytest.raises(OSError):
                call()
            assert seen
            for fields in seen:
                named = {name.lower(): value for name, value in fields.items()}
                assert named["x-trace"] == "trace-1", named
                assert named["user-agent"].startswith(f"tensorizer/{tensorizer.__version__}")
                is_s3 = "AWS4" in named.get("authorization", "")
                assert is_s3 == ("app/my-server" in named.get("x-amz-user-agent", "")), named


# Riding out


def test_a_connection_that_is_refused_at_first_is_repeated(data):
    with FaultServer(data) as source:
        del source
        port = free_port()
    late = []

    def serve():
        time.sleep(1)
        late.append(socket.create_server(("127.0.0.1", port)))
        connection, _ = late[0].accept()
        connection.recv(10_000)
        body = b"not found"
        connection.sendall(b"HTTP/1.1 404 no\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(FileNotFoundError):
        tensorizer.load(f"http://127.0.0.1:{port}/f.tensors", "cpu")
    thread.join()
    late[0].close()
    begun = time.monotonic()
    with pytest.raises(ConnectionError, match="refused"):
        tensorizer.load(f"http://127.0.0.1:{port}/f.tensors", "cpu")
    assert 2.5 < time.monotonic() - begun < 15


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_bytes_per_second_are_limited_over_all_connections(nginx, data, how, tmp_path):
    (nginx.root / "paced.tensors").write_bytes(data)
    url, rate = f"{nginx.http}/paced.tensors", 5_000_000
    code = """
import sys, time, tensorizer
rate = int(sys.argv[2])
begun = time.monotonic()
tensorizer.load(sys.argv[1], "cpu", num_readers=4, max_bytes_per_second=rate or None)
print(time.monotonic() - begun)
"""
    given = (url, rate) if how == "argument" else (url, 0)
    env = {"TENSORIZER_MAX_BYTES_PER_SECOND": str(rate)} if how == "variable" else {}
    seconds = float(run_python(code, *given, env=os.environ | env).stdout)
    # At least; how much longer is up to the machine.
    assert seconds > len(data) / rate - 0.5


def test_a_changed_number_of_cores_counts_for_the_next_call(tmp_path):
    code = """
import os, sys, time, torch, tensorizer
cores = os.sched_getaffinity(0)
found = []
for some in ({min(cores)}, cores):
    os.sched_setaffinity(0, some)
    time.sleep(1.1)
    tensorizer.save({f"t{n}": torch.ones(1 << 20) for n in range(8)}, sys.argv[1])
    found.append(tensorizer.stats()["threads"])
print(len(cores), *found)
"""
    cores, one, all_ = map(int, run_python(code, tmp_path / "f.tensors").stdout.split())
    assert one == 1 and (all_ > 1 or cores == 1)


def test_uploaded_bytes_per_second_are_limited(s3):
    rate, begun = 4_000_000, time.monotonic()
    tensorizer.save(TENSORS, "s3://bucket/paced.tensors", max_bytes_per_second=rate)
    assert time.monotonic() - begun > 8 * MB / rate - 0.5
    assert len(tensorizer.load("s3://bucket/paced.tensors", "cpu")) == 8


def test_sixty_four_connections_need_few_descriptors(tmp_path):
    path = tmp_path / "f.tensors"
    tensorizer.save({f"t{n}": torch.zeros(MB // 4) for n in range(64)}, path)
    all_requested = threading.Barrier(64)

    def script(number, *_):
        # No tensor comes before all are requested, so that all connections are open at once.
        if number > 0:
            all_requested.wait(20)

    code = """
import os, sys, threading, tensorizer
most, running = 0, True
def count():
    global most
    while running:
        most = max(most, len(os.listdir("/proc/self/fd")))
before = len(os.listdir("/proc/self/fd"))
thread = threading.Thread(target=count, daemon=True)
thread.start()
tensorizer.load(sys.argv[1], "cpu", num_readers=64)
running = False
thread.join()
print(most - before, 4 * max(8, len(os.sched_getaffinity(0))))
"""
    with FaultServer(path.read_bytes(), script) as server:
        found, of_loops = map(int, run_python(code, server.url).stdout.split())
    assert 64 < found < 64 + of_loops + 10


def test_too_many_open_files_name_the_limit(data, tmp_path):
    (tmp_path / "f.tensors").write_bytes(data)
    code = """
import os, resource, sys, tensorizer
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True: held.append(os.open("/", os.O_RDONLY))
except OSError:
    pass
for file in sys.argv[1:]:
    try:
        tensorizer.load(file, "cpu", timeout=20)
    except OSError as error:
        print("ulimit -n" in str(error))
"""
    with FaultServer(data) as server:
        done = run_python(code, tmp_path / "f.tensors", server.url)
    assert done.stdout.split() == ["True", "True"], done.stderr
