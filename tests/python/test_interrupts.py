"""Ctrl-C ends every call that waits, within a second, whatever it waits for."""

import contextlib
import os
import signal
import subprocess
import threading
import time
import weakref

import pytest
import tensorizer
import torch
from processes import COMMAND, run_python, start_python
from scripted import FaultServer, Relay, silent
from tensorizer.file.file_writer import FileWriter

CODE = """
import os, sys, tensorizer, torch
from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer
from tensorizer.stream_io import open_stream
address = sys.argv[1]
torch.ops.tensorizer.names  # loaded before the clock runs
def slow():
    import time
    class Slow:
        def read(self, size=-1):
            time.sleep(600)
        def seek(self, *_): ...
        def tell(self): return 0
        def seekable(self): return True
        def readable(self): return True
    return Slow()
print("ready", flush=True)
try:
    {call}
except KeyboardInterrupt:
    print("interrupted", flush=True)
except RuntimeError as error:
    # Operators raise text only.
    assert "interrupted by the keyboard" in str(error), error
    print("interrupted", flush=True)
print("usable", torch.ones(3).sum().item(), flush=True)
"""


def interrupt(call, address, env=None, wait=lambda: time.sleep(0.7)):
    """Run a call in another process, interrupt it, and return for how long it went on."""
    code = CODE.replace("{call}", call)
    env = {**os.environ, "AWS_EC2_METADATA_DISABLED": "true", **(env or {})}
    process = start_python(code, address, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout.readline() == "ready\n"
        wait()
        assert process.poll() is None
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        went_on = time.monotonic() - sent
        assert process.stdout.readline() == "usable 3.0\n"
        assert process.wait(60) == 0
    finally:
        process.close()
    return went_on


#: The promise is one second; the rest is for a busy machine. All of them waited for much longer.
SOON = 5

S3 = "access_key='a', secret_key='b', force_http=True"


@pytest.mark.parametrize(
    "call",
    [
        "tensorizer.load('http://' + address)",
        "torch.ops.tensorizer.load('http://' + address)",
        "tensorizer.iterate('http://' + address)",
        "torch.ops.tensorizer.iterate('http://' + address)",
        "torch.ops.tensorizer.names('redis://' + address + '/x')",
        "open_stream('http://' + address)",
        "tensorizer.load('redis://' + address + '/x')",
        "TensorDeserializer('redis://' + address + '/x', lazy_load=True)",
        "open_stream('s3://b/k', s3_access_key_id='a', s3_secret_access_key='b', "
        "s3_endpoint=address, force_http=True)",
        "tensorizer.save({'a': torch.zeros(10_000_000)}, "
        "open_stream('s3://b/k', 'wb', s3_access_key_id='a', s3_secret_access_key='b', "
        "s3_endpoint=address, force_http=True))",
        "tensorizer.save({'a': torch.zeros(10)}, "
        "open_stream('s3://b/k', 'wb', s3_access_key_id='a', s3_secret_access_key='b', "
        "s3_endpoint=address, force_http=True))",
    ],
)
def test_a_server_that_says_nothing(call):
    with silent() as address:
        assert interrupt(call, address) < SOON


def test_an_upload_whose_server_falls_silent(moto):
    """Neither the part that is on its way nor the upload's end is answered."""

    def script(method, path, number):
        return ("stall",) if method in ("PUT", "DELETE") else None

    call = (
        "tensorizer.save({'a': torch.zeros(10_000_000)}, "
        "open_stream('s3://bucket/silent', 'wb', s3_access_key_id='a', s3_secret_access_key='b', "
        "s3_endpoint=address, force_http=True))"
    )

    def asked(method):
        """Wait until the server is asked for something; return True if it is."""
        until = time.monotonic() + 20
        while all(method != one for one, _, _ in relay.requests):
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    with Relay(moto.host, script) as relay:
        assert interrupt(call, relay.host, wait=lambda: asked("PUT")) < SOON
        # The process may have ended before the relay has read its last request.
        assert asked("PUT") and asked("DELETE")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("interrupts") / "f"
    tensorizer.save({"a": torch.zeros(1_000_000), "b": torch.zeros(4)}, path)
    return path.read_bytes()


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize(
    "call",
    [
        "tensorizer.load(address, num_readers=1)",
        "list(tensorizer.iterate(address, buffer_bytes=1 << 20))",
        "torch.ops.tensorizer.iterate_next(torch.ops.tensorizer.iterate(address))",
        "open_stream(address).read()",
    ],
)
def test_a_server_that_falls_silent(data, ranges, call):
    silence = lambda number, start, end: ("stall", 1000) if number else None  # noqa: E731
    with FaultServer(data, silence, ranges=ranges) as server:
        assert interrupt(call, server.url) < SOON


@pytest.mark.parametrize("call", ["tensorizer.load(address)", "torch.ops.tensorizer.load(address)"])
def test_an_interrupt_ends_the_wait_for_a_named_pipe_without_a_writer(tmp_path, call):
    os.mkfifo(tmp_path / "pipe")
    assert interrupt(call, tmp_path / "pipe") < SOON


@pytest.mark.parametrize(
    ("most", "call"),
    [
        (10, "TensorDeserializer(os.open(address, os.O_RDONLY), 'cpu')"),
        (300_000, "TensorDeserializer(os.open(address, os.O_RDONLY), 'cpu')"),
        (300_000, "list(tensorizer.iterate(address, 'cpu'))"),
    ],
)
def test_a_pipe_whose_writer_falls_silent(tmp_path, data, most, call):
    os.mkfifo(tmp_path / "pipe")
    over = threading.Event()

    def write():
        with contextlib.suppress(BrokenPipeError), open(tmp_path / "pipe", "wb") as pipe:
            pipe.write(data[:most])
            pipe.flush()
            over.wait(120)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert interrupt(call, tmp_path / "pipe") < SOON
    finally:
        over.set()
        writer.join()


def test_a_file_object_that_hangs():
    assert interrupt("TensorDeserializer(slow(), 'cpu')", "") < SOON


def test_the_derivation_of_a_key():
    # Some twenty seconds of work, which goes on by itself.
    call = "EncryptionParams.from_string('words', opslimit=60, memlimit=1 << 30)"
    assert interrupt(call, "") < SOON


@pytest.mark.parametrize(
    "call", ["tensorizer.load('http://host/f')", "tensorizer.load('redis://host/f')"]
)
def test_the_resolution_of_a_name(with_faults, call):
    assert interrupt(call, "", with_faults(SLOW_NAMES=1)) < SOON


def test_the_command(tmp_path):
    with silent() as address:
        process = start_python(
            f"print(flush=True)\n{COMMAND}", "ls", f"http://{address}/f",
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        process.stdout.readline()
        time.sleep(1)
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert time.monotonic() - sent < SOON
        assert process.returncode == 130
        assert "Traceback" not in said


OWNED = """
import ctypes, os, signal, sys, threading, time
import tensorizer, torch
path = sys.argv[1]
rss = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
def interrupted(after):
    main = threading.main_thread().ident
    timer = threading.Timer(after, signal.pthread_kill, (main, signal.SIGINT))
    loading = False
    try:
        timer.start()
        loading = True
        tensorizer.load(path)
        loading = False
        timer.join()
    except KeyboardInterrupt:
        pass
    return loading
tensorizer.load(path)
begun = time.monotonic(); tensorizer.load(path); after = time.monotonic() - begun
before = rss()
hits = 0
for _ in range(40):  # around the end: later after each hit, earlier after each miss
    hit = interrupted(after)
    after *= 1.05 if hit else 0.8
    hits += hit
print(hits, (rss() - before) >> 20)
"""


def test_nothing_is_left_of_a_load_that_was_interrupted_near_its_end(tmp_path):
    tensorizer.save({str(n): torch.ones(1 << 20) for n in range(16)}, tmp_path / "f")
    done = run_python(OWNED, tmp_path / "f")
    assert done.returncode == 0, done.stderr
    hits, grown = map(int, done.stdout.split())
    assert hits > 5
    # A model takes 64 MiB.
    assert grown < 40


def test_a_save_ends_its_file_before_memory_is_given_back(monkeypatch, tmp_path):
    """Ctrl-C may come while that takes its time, and Python loses it in a ``__del__``."""
    alive = []

    def tensor():
        made = torch.ones(1000)
        alive.append(weakref.ref(made))
        return made

    monkeypatch.setattr(FileWriter, "__del__", lambda _: alive.append(alive[0]() is not None))
    tensorizer.save({"a": tensor()}, tmp_path / "f")
    assert alive[1:] == [True]
    assert alive[0]() is None
