"""A load reads one version of a file: validators, redirects, and time-outs."""

import contextlib
import threading
import time

import pytest
import tensorizer
import torch
from conftest import assert_same
from scripted import FaultServer, Scripted, silent
from servers import Nginx
from tensorizer.stream_io import CAInfo, open_stream

TENSORS = {"a": torch.arange(400_000), "b": torch.ones(300_000)}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("versions") / "f"
    tensorizer.save(TENSORS, path)
    return path.read_bytes()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setenv("TENSORIZER_STALL_SECONDS", "3")
    monkeypatch.setenv("TENSORIZER_TOTAL_SECONDS", "20")
    monkeypatch.setenv("TENSORIZER_ATTEMPTS", "3")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


class Versions(Scripted):
    """Serves one file; ``fields`` gives the validators of each request, by its number."""

    def __init__(self, data, fields, heeds=True, endless=False):
        self.data, self.fields, self.heeds, self.endless = data, fields, heeds, endless
        self.requests, self.sent = [], 0
        super().__init__()
        self.url = f"http://127.0.0.1:{self.port}/f"

    def answer(self, handler):
        with self.lock:
            number = len(self.requests)
            self.requests.append({n.lower(): v for n, v in handler.headers.items()})
        fields = self.fields(number)
        wanted = handler.headers.get("If-Match")
        if self.heeds and wanted is not None and wanted != fields.get("ETag"):
            handler.send_response(412)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        first, last = handler.headers["Range"].removeprefix("bytes=").split("-")
        body = self.data[int(first) : int(last) + 1]
        whole = self.endless and number > 0
        handler.send_response(200 if whole else 206)
        for name, value in fields.items():
            handler.send_header(name, value)
        if whole:
            handler.send_header("Content-Length", str(1 << 40))
            handler.end_headers()
            with contextlib.suppress(OSError):
                while not self.stopping.is_set():
                    handler.wfile.write(bytes(1 << 16))
                    self.sent += 1 << 16
            handler.close_connection = True
            return
        end = int(first) + len(body) - 1
        handler.send_header("Content-Range", f"bytes {first}-{end}/{len(self.data)}")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        with contextlib.suppress(OSError):
            handler.wfile.write(body)


def load(server):
    return tensorizer.load(server.url, num_readers=2)


def check(loaded):
    for name, tensor in TENSORS.items():
        assert_same(loaded[name], tensor)


MODIFIED = "Sat, 21 Nov 2026 10:00:00 GMT"


def test_a_whole_file_instead_of_a_range_is_ended_at_its_headers(data):
    with Versions(data, lambda number: {}, endless=True) as server:
        with pytest.raises(OSError, match="without a range"):
            load(server)
    # No more than fits into the buffers of a connection, for each attempt.
    assert server.sent < 64 << 20


class Leaving(Versions):
    """The same; it ends a connection on which it has refused, at the next request on it."""

    def answer(self, handler):
        if getattr(handler, "refused", False):
            handler.close_connection = True
            return
        handler.refused = "If-Match" in handler.headers
        super().answer(handler)


def test_a_server_that_closes_the_connection_by_which_it_refuses(data):
    with Leaving(data, lambda number: {"ETag": '"old"' if number == 0 else '"new"'}) as server:
        with pytest.raises(OSError) as caught:
            load(server)
    said = 'the file changed since it was opened: its ETag was "old", is "new"'
    assert str(caught.value).endswith(said)


def test_https_to_http_redirect_is_refused(data, tmp_path):
    nginx = Nginx(tmp_path)
    try:
        (nginx.root / "f").write_bytes(data)
        trust = CAInfo(cacert=str(tmp_path / "ca.pem"))
        with pytest.raises(OSError, match="redirects from https:// to http://"):
            open_stream(f"{nginx.https}/elsewhere/f", certificate_handling=trust)
        with open_stream(f"{nginx.https}/f", certificate_handling=trust) as stream:
            assert stream.read() == data
    finally:
        nginx.stop()


def test_certificates_are_needed_for_https_only(data, tmp_path):
    missing = tmp_path / "ca.pem"
    missing.touch()
    trust = CAInfo(cacert=str(missing))
    missing.unlink()
    with FaultServer(data) as server:
        with open_stream(server.url, certificate_handling=trust) as stream:
            assert stream.read() == data
    with pytest.raises((ValueError, OSError), match=r"ca\.pem"):
        open_stream("https://127.0.0.1:1/f", certificate_handling=trust)


@contextlib.contextmanager
def trickling(data, seconds):
    """Serve ranges so slowly that each byte takes some time; yield the address."""
    over = threading.Event()

    class Slow(Scripted):
        def answer(self, handler):
            first, last = handler.headers["Range"].removeprefix("bytes=").split("-")
            body = data[int(first) : int(last) + 1]
            handler.send_response(206)
            end = int(first) + len(body) - 1
            handler.send_header("Content-Range", f"bytes {first}-{end}/{len(data)}")
            handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            at = len(body) if int(first) == 0 else 0
            with contextlib.suppress(OSError):
                handler.wfile.write(body[:at])
                while at < len(body) and not over.wait(seconds):
                    handler.wfile.write(body[at : at + 1])
                    at += 1
            handler.close_connection = True

    with Slow() as server:
        try:
            yield f"http://127.0.0.1:{server.port}/f"
        finally:
            over.set()


def test_the_total_bounds_what_never_stalls(data, monkeypatch):
    monkeypatch.setenv("TENSORIZER_TOTAL_SECONDS", "0.7")
    with trickling(data, 0.2) as url:
        begun = time.monotonic()
        with pytest.raises(TimeoutError, match="0.7 s that TENSORIZER_TOTAL_SECONDS allows"):
            tensorizer.load(url)
        # At that pace it would take days.
        assert time.monotonic() - begun < 60


def test_the_total_bounds_a_part_that_is_not_answered(monkeypatch):
    monkeypatch.setenv("TENSORIZER_STALL_SECONDS", "0.5")
    monkeypatch.setenv("TENSORIZER_ATTEMPTS", "1")
    with silent() as host:
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            stream = open_stream("s3://b/k", "wb", "a", "b", host, force_http=True)
            tensorizer.save({"a": torch.zeros(1_000_000)}, stream)
        # It was 0.5 s and one more for each 64 KiB.
        assert time.monotonic() - begun < 40


@pytest.mark.parametrize("seconds", [2**64 - 1, 2**63, 0])
@pytest.mark.parametrize("name", ["STALL", "TOTAL", "CONNECT"])
def test_times_out_of_range_are_refused(monkeypatch, name, seconds):
    monkeypatch.setenv(f"TENSORIZER_{name}_SECONDS", str(seconds))
    with pytest.raises(ValueError, match=f"TENSORIZER_{name}_SECONDS must be a number of seconds"):
        tensorizer.load("http://127.0.0.1:1/f")
