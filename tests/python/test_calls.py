"""Calls that are ended from outside: by time limits, other threads, and the end of the program."""
# ruff: noqa: F811  # parameters are fixtures

import contextlib
import inspect
import io
import itertools
import os
import re
import signal
import statistics
import subprocess
import time

import pytest
import tensorizer
import torch
import torch.distributed.checkpoint as dcp
from calls import (  # noqa: F401  # fixtures
    MB,
    TENSORS,
    data,
    in_thread,
    moto_keys,
    settings,
    stalls,
)
from conftest import assert_same
from processes import run_python, start_python
from scripted import FaultServer, Scripted, silent
from tensorizer import (
    ClosedError,
    TensorDeserializer,
    TensorSerializer,
    safetensors as st,
    transformers as models,
)
from tensorizer.distributed import Reader, Writer, load_state
from tensorizer.safetensors import safe_open
from tensorizer.stream_io import (
    CURLStreamFile,
    RedisStreamFile,
    open_stream,
    s3_download,
    s3_upload,
)
from tensorizer.torch_compat import tensorizer_loading, tensorizer_saving
from torch.distributed.checkpoint.api import CheckpointException


@contextlib.contextmanager
def ended_within(seconds, *errors, match=""):
    begun = time.monotonic()
    with pytest.raises(errors, match=match):
        yield
    assert time.monotonic() - begun < seconds


# timeout=


def of_rank(call):
    """Raise the error of this process that torch collects from all ranks."""
    try:
        call()
    except CheckpointException as error:
        raise error.failures[0][0] from None


def module():
    """Return a module with tensors of the names in the file."""
    made = torch.nn.Module()
    for name in TENSORS:
        made.register_buffer(name, torch.zeros(MB // 4))
    return made


LIMIT = {"timeout": 0.3}
READS = {
    "load": lambda url: tensorizer.load(url, "cpu", **LIMIT),
    "iterate": lambda url: list(tensorizer.iterate(url, "cpu", **LIMIT)),
    "TensorDeserializer": lambda url: TensorDeserializer(url, "cpu", **LIMIT),
    "lazy": lambda url: TensorDeserializer(url, "cpu", lazy_load=True, **LIMIT)["t7"],
    "verify_module": lambda url: TensorDeserializer(
        url, "cpu", lazy_load=True, **LIMIT
    ).verify_module(module()),
    "stream": lambda url: open_stream(url, **LIMIT).read(),
    "CURLStreamFile": lambda url: CURLStreamFile(url, **LIMIT).read(),
}
#: Further calls, which are not for files of this format.
OPENINGS = {
    "info": lambda url: tensorizer.info(url, **LIMIT),
    "load_file": lambda url: st.load_file(url, **LIMIT),
    "load_model": lambda url: st.load_model(torch.nn.Linear(1, 1), url, **LIMIT),
    "safe_open": lambda url: safe_open(url, "pt", **LIMIT),
    "load_state": lambda url: of_rank(lambda: load_state(f"{url}/", **LIMIT)),
    "load_config": lambda url: models.load_config(url, **LIMIT),
    "load_tokenizer": lambda url: models.load_tokenizer(url, **LIMIT),
    "load_processor": lambda url: models.load_processor(url, **LIMIT),
    "from_pretrained": lambda url: models.from_pretrained(url, device="cpu", **LIMIT),
}


@pytest.mark.parametrize("way", READS)
def test_a_read_ends_by_its_time_limit(data, way):
    with FaultServer(data, stalls) as server, ended_within(10, TimeoutError) as raised:
        READS[way](server.url)
    del raised


@pytest.mark.parametrize("way", [*READS, *OPENINGS])
def test_an_opening_ends_by_its_time_limit(way):
    with silent() as host:
        url = f"http://{host}/f"
        said = rf"timeout=0.3 s passed while (opening|fetching .* of) `{url}"
        with ended_within(10, TimeoutError, match=said):
            (READS | OPENINGS)[way](url)


def test_what_needs_other_libraries_has_the_option_too():
    for call in (models.load_adapter, RedisStreamFile, s3_upload, s3_download, st.serialize_file):
        assert inspect.signature(call).parameters["timeout"].default is None
    for block in (tensorizer_loading, tensorizer_saving):
        with (
            pytest.raises(ValueError, match="timeout must be a positive number"),
            block(timeout=-1),
        ):
            pass


def test_a_checkpoint_of_ranks_has_a_time_limit():
    with silent() as host, ended_within(10, TimeoutError):
        of_rank(lambda: dcp.load({}, storage_reader=Reader(f"http://{host}/c", **LIMIT)))


def test_a_time_limit_says_what_was_waited_for(data):
    def fails(number, start, end):
        return None if number == 0 else ("status", 503, {"x-request-id": "id-7"})

    # On a busy machine the file may not be open after half a second.
    for limit in (0.5, 5, 20):
        with FaultServer(data, fails) as server, pytest.raises(TimeoutError) as raised:
            tensorizer.load(f"{server.url}?token=hu5hw0rd", "cpu", timeout=limit)
        said = str(raised.value)
        if "the last failure was" in said:
            break
    assert said.startswith(f"load: timeout={limit} s passed while loading `{server.url}?...`")
    assert "the last failure was: the server answered 503" in said and "id-7" in said
    assert "hu5hw0rd" not in said


def test_a_save_ends_by_its_time_limit(moto_keys, nothing_taken):
    """The server takes no byte of the upload."""
    saves = {
        "save": lambda: tensorizer.save(TENSORS, nothing_taken, timeout=0.3),
        "save_async": lambda: tensorizer.save_async(TENSORS, nothing_taken, timeout=0.3).result(),
    }
    for save in saves.values():
        with ended_within(20, TimeoutError, match="timeout=0.3 s passed while saving"):
            save()
    writer = TensorSerializer(nothing_taken, timeout=0.3)
    with ended_within(20, TimeoutError):
        writer.write_state_dict(TENSORS)
        writer.close()


def test_a_local_save_that_ends_leaves_the_old_files(tmp_path):
    """A checkpoint of ranks and shards, too; each on a thread of its own, which checks at once."""
    tensorizer.save({"old": torch.ones(1)}, tmp_path / "f.tensors")
    limit = {"timeout": 1e-6}
    for save in (
        lambda: tensorizer.save(TENSORS, tmp_path / "f.tensors", **limit),
        lambda: tensorizer.save_async(TENSORS, tmp_path / "f.tensors", **limit).result(),
        lambda: tensorizer.save(TENSORS, tmp_path / "s.safetensors", max_shard_size=MB, **limit),
        lambda: st.save_file(TENSORS, tmp_path / "s.safetensors", **limit),
        lambda: st.save_model(torch.nn.Linear(999, 999), tmp_path / "s.safetensors", **limit),
        lambda: of_rank(
            lambda: dcp.save(TENSORS, storage_writer=Writer(tmp_path, **limit), no_dist=True)
        ),
    ):
        thread, errors = in_thread(save)
        thread.join(60)
        assert [type(error) for error in errors] == [TimeoutError]
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == ["f.tensors"]
    assert list(tensorizer.load(tmp_path / "f.tensors", "cpu")) == ["old"]


@pytest.fixture
def nothing_taken(monkeypatch):
    with silent() as host:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{host}")
        yield "s3://bucket/f.tensors"


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_time_limit_is_positive(timeout):
    with pytest.raises(ValueError, match="timeout must be a positive number of seconds"):
        tensorizer.load("f", "cpu", timeout=timeout)


def test_time_limits_that_do_not_pass_change_nothing(data):
    for timeout in (60, 1e300, float("inf")):
        with FaultServer(data) as server:
            loaded = tensorizer.load(server.url, "cpu", timeout=timeout)
        assert_same(loaded["t3"], TENSORS["t3"])
    assert tensorizer.stats(running=True) == []


# close() from another thread


@pytest.mark.parametrize("way", ["items", "tree", "verify_module", "stream", "iterate"])
def test_close_ends_what_another_thread_does(data, way):
    with FaultServer(data, stalls) as server:
        if way == "stream":
            opened = open_stream(server.url)
            work = opened.read
        elif way == "iterate":
            opened = tensorizer.iterate(server.url, "cpu")
            work = lambda: list(opened)  # noqa: E731
        else:
            opened = TensorDeserializer(server.url, "cpu", lazy_load=True)
            work = {
                "items": lambda: list(opened.items()),
                "tree": opened.tree,
                "verify_module": lambda: opened.verify_module(module()),
            }[way]
        thread, errors = in_thread(work)
        while len(server.requests) < 2:
            time.sleep(0.01)
        begun = time.monotonic()
        opened.close()
        thread.join(20)
        assert time.monotonic() - begun < 10
        assert [type(error) for error in errors] == [ClosedError]


def test_an_iterator_that_was_closed_between_two_tensors_says_so(tmp_path):
    """Otherwise a thread would go on with a part of the weights."""
    tensorizer.save(TENSORS, tmp_path / "f.tensors")
    for by_other in (True, False):
        iterator = tensorizer.iterate(tmp_path / "f.tensors", "cpu")
        next(iterator)
        if by_other:
            thread, _ = in_thread(iterator.close)
            thread.join()
            with pytest.raises(ClosedError, match="closed by another thread"):
                list(iterator)
        else:
            iterator.close()
            assert list(iterator) == []


def test_a_file_object_is_not_closed_while_it_is_read(tmp_path):
    tensorizer.save(TENSORS, tmp_path / "f.tensors")

    class File(io.BytesIO):
        reading, closed_early = False, False

        def readinto(self, into):
            File.reading = True
            time.sleep(0.1)
            done = super().readinto(into)
            File.reading = False
            return done

        def close(self):
            File.closed_early = File.closed_early or File.reading
            super().close()

    iterator = tensorizer.iterate(File((tmp_path / "f.tensors").read_bytes()), "cpu")
    next(iterator)
    iterator.close()
    assert not File.closed_early


def test_the_end_of_the_program_ends_what_fetches_small_files():
    code = """
import sys, threading, time
from tensorizer.transformers import load_config
threading.Thread(target=load_config, args=(sys.argv[1],)).start()
time.sleep(1)
"""
    with silent() as host:
        begun, env = time.monotonic(), os.environ | {"TENSORIZER_STALL_SECONDS": "600"}
        run_python(code, f"http://{host}/model", env=env)
        assert time.monotonic() - begun < 100


# The end of the program

POOL = """
import asyncio, concurrent.futures, signal, sys, threading, time, tensorizer
url, way = sys.argv[1:]
def load():
    tensorizer.load(url, "cpu")
def end(*_):
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
async def main():
    task = asyncio.current_task()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    print("go", flush=True)
    await asyncio.to_thread(load)
if way == "thread":
    threading.Thread(target=load).start()
    print("go", flush=True)
    time.sleep(60)
elif way == "pool":
    with concurrent.futures.ThreadPoolExecutor() as pool:
        pool.submit(load)
        print("go", flush=True)
        time.sleep(60)
else:
    try:
        asyncio.run(main())
    except asyncio.CancelledError:
        sys.exit(0)
"""


@pytest.mark.parametrize("way", ["thread", "pool", "asyncio"])
def test_the_end_of_the_program_ends_loads(data, way, monkeypatch):
    monkeypatch.setenv("TENSORIZER_STALL_SECONDS", "600")
    with FaultServer(data, stalls) as server:
        child = start_python(POOL, server.url, way, stdout=subprocess.PIPE)
        assert child.stdout.readline().strip() in ("go", b"go")
        while len(server.requests) < 2:
            time.sleep(0.01)
        child.send_signal(signal.SIGTERM)
        # Much longer than it takes, and shorter than it would wait for the server.
        assert child.wait(100) == 0


WAITS = """
import concurrent.futures, sys, tensorizer
import os
with concurrent.futures.ThreadPoolExecutor() as pool:
    loads = [pool.submit(tensorizer.load, sys.argv[1], "cpu") for _ in range(2)]
print(sum(len(one.result()) for one in loads))
try:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        load = pool.submit(tensorizer.load, sys.argv[1], "cpu")
        raise LookupError
except LookupError:
    print(len(load.result()))
"""


def test_a_pool_whose_results_are_wanted_is_waited_for(data):
    """Its block is left while the loads run: normally, and by an ordinary exception."""

    def slow(number, start, end):
        time.sleep(0.5)

    with FaultServer(data, slow) as server:
        assert run_python(WAITS, server.url).stdout.split() == ["16", "8"]


def test_a_save_goes_on_to_its_end(tmp_path):
    code = """
import sys, threading, torch, tensorizer
def save():
    for n in range(40):
        tensorizer.save({"a": torch.ones(2_000_000)}, sys.argv[1])
threading.Thread(target=save).start()
"""
    run_python(code, tmp_path / "f.tensors")
    assert list(tensorizer.load(tmp_path / "f.tensors", "cpu")) == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["f.tensors"]


# progress=


def test_progress_is_called_while_a_load_waits_and_while_bytes_arrive(data):
    calls = []

    def wait_until(found):
        end = time.monotonic() + 10
        while not found() and time.monotonic() < end:
            time.sleep(0.01)

    def done():
        return max((done for _, done, _ in calls), default=0)

    class Slow(Scripted):
        """Goes on only once progress has been called, however slow the machine is."""

        def answer(self, handler):
            start, end = map(int, re.findall(r"\d+", handler.headers["Range"]))
            body = data[start : end + 1]
            handler.send_response(206)
            handler.send_header("ETag", '"1"')
            handler.send_header("Content-Length", str(len(body)))
            handler.send_header(
                "Content-Range", f"bytes {start}-{start + len(body) - 1}/{len(data)}"
            )
            handler.end_headers()
            before = len(calls)
            wait_until(lambda: len(calls) >= before + 2)
            for at in range(0, len(body), 3 * MB):
                arrived = done()
                handler.wfile.write(body[at : at + 3 * MB])
                if at + 3 * MB < len(body):
                    wait_until(lambda: done() > arrived)  # noqa: B023

    with Slow() as server:
        url, begun = f"http://127.0.0.1:{server.port}/f", time.monotonic()
        tensorizer.load(
            url, "cpu", num_readers=1, progress=lambda *of: calls.append((time.monotonic(), *of))
        )
    told = [(done, total) for _, done, total in calls]
    assert told[:2] == [(0, 0)] * 2, "the file is not open yet"
    times = [begun, *(at for at, _, _ in calls)]
    # Without calls the server waits for 10 s.
    assert max(later - sooner for sooner, later in itertools.pairwise(times)) < 8
    # Once a second while nothing arrives; a busy machine delays some calls.
    repeats = [
        later[0] - sooner[0]
        for sooner, later in itertools.pairwise(calls)
        if sooner[1:] == later[1:]
    ]
    assert statistics.median_low(repeats) < 2.4
    arriving = {done for done, _ in told}
    assert len(arriving) >= 4 and max(arriving) == 8 * MB


@pytest.mark.parametrize("way", ["save", "iterate", "lazy"])
def test_progress_is_called_while_other_calls_wait(data, way, moto_keys, nothing_taken):
    calls = []

    def progress(done, total):
        calls.append((done, total))
        if len(calls) == 3:
            raise LookupError

    with FaultServer(data, stalls) as server, ended_within(30, LookupError):
        if way == "save":
            tensorizer.save(TENSORS, nothing_taken, progress=progress)
        elif way == "iterate":
            list(tensorizer.iterate(server.url, "cpu", progress=progress))
        elif way == "lazy":
            file = TensorDeserializer(server.url, "cpu", lazy_load=True, progress=progress)
            calls.clear()
            file["t7"]
    assert len(calls) == 3 and max(done for done, _ in calls) <= 8 * MB


def test_an_exception_from_progress_ends_a_call_that_waits():
    class Enough(Exception):
        pass

    def progress(done, total):
        raise Enough

    with silent() as host, ended_within(10, Enough):
        tensorizer.load(f"http://{host}/f.tensors", "cpu", progress=progress)
