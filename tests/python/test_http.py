"""Files of HTTP servers: nginx, and a server that fails in every way."""

import contextlib
import errno
import io
import json
import os
import signal
import socket
import subprocess
import threading
import time
import zipfile

import pytest
import tensorizer
import torch
from conftest import assert_same
from processes import run_python, start_python
from scripted import FaultServer, Forwarder
from servers import Nginx
from tensorizer import TensorDeserializer
from tensorizer.stream_io import CAInfo, CURLStreamFile, open_stream
from tensorizer.streams.remote import RemoteFile

ops = torch.ops.tensorizer

TENSORS = {
    "big": torch.randn(1500, 1000),
    **{f"small.{i}": torch.full((i % 7, 3), float(i)) for i in range(60)},
    "other": torch.randn(900, 1000).to(torch.bfloat16),
    "scalar": torch.tensor(5),
}


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("http") / "f.tensors"
    tensorizer.save(TENSORS, path)
    return path.read_bytes()


@pytest.fixture(scope="session")
def nginx(tmp_path_factory, data):
    server = Nginx(tmp_path_factory.mktemp("nginx"))
    (server.root / "f.tensors").write_bytes(data)
    (server.root / "empty").touch()
    (server.root / "short").write_bytes(data[: len(data) // 2])
    (server.root / "x.json").write_text(json.dumps({"a": [1, 2]}) + "\n\nlast line")
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setenv("TENSORIZER_STALL_SECONDS", "2")
    monkeypatch.setenv("TENSORIZER_TOTAL_SECONDS", "20")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def check(loaded):
    assert list(loaded) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert_same(loaded[name].detach(), tensor)


# nginx


@pytest.mark.parametrize("place", ["", "/whole", "/moved"])
@pytest.mark.parametrize("readers", [None, 1, 3])
def test_every_way_of_loading(nginx, place, readers):
    url = f"{nginx.http}{place}/f.tensors"
    parallel = place != "/whole"
    if not parallel and readers == 3:
        with pytest.raises(ValueError, match="can only be read by one"):
            TensorDeserializer(url, device="cpu", num_readers=readers)
        return
    check(dict(TensorDeserializer(url, device="cpu", num_readers=readers).items()))
    check(tensorizer.load(url, "cpu", verify_hash=True, num_readers=readers))
    lazy = TensorDeserializer(url, device="cpu", lazy_load=True, num_readers=readers)
    for name in ("scalar", "small.3", "big"):  # against the order of the file
        assert_same(lazy[name].detach(), TENSORS[name])
    lazy.close()
    chosen = TensorDeserializer(url, device="cpu", filter_func=lambda name: name.endswith(".5"))
    assert list(chosen) == ["small.5"]
    check(ops.load(url, num_readers=readers))
    assert ops.names(url) == list(TENSORS)
    out = torch.zeros(1500, 1000)
    ops.load(url, ["big"], [out], verify=True)
    assert_same(out, TENSORS["big"])


def test_few_requests(nginx):
    """The index comes with the first request, small tensors together."""
    before = len(nginx.requests())
    tensorizer.load(f"{nginx.http}/f.tensors", "cpu", num_readers=1)
    lines = nginx.requests()[before:]
    assert len(lines) <= 3, lines
    before = len(nginx.requests())
    assert ops.names(f"{nginx.http}/f.tensors") == list(TENSORS)
    assert len(nginx.requests()) == before + 1


def test_tls_with_a_private_authority(nginx, tmp_path, no_settings_of_the_machine):
    url = f"{nginx.https}/f.tensors"
    with pytest.raises(PermissionError, match="certificate is not trusted.*certificate_handling"):
        open_stream(url)
    (tmp_path / "ca.pem").write_bytes((nginx.folder / "ca.pem").read_bytes())
    for trust in (CAInfo(cacert=nginx.folder / "ca.pem"), CAInfo(capath=tmp_path),
                  CAInfo(allow_untrusted=True)):  # fmt: skip
        stream = open_stream(url, certificate_handling=trust)
        check(dict(TensorDeserializer(stream, device="cpu").items()))
        assert stream.closed
    assert any("HTTP/2.0" in line for line in nginx.requests())
    with pytest.raises(PermissionError, match="not trusted"):
        open_stream(url)  # the last one trusted everything for itself only


def test_credentials(nginx):
    with pytest.raises(PermissionError, match="401 Unauthorized; check the credentials"):
        open_stream(f"{nginx.http}/auth/f.tensors")
    host = nginx.http.removeprefix("http://")
    check(tensorizer.load(f"http://user:word-hu5hw0rd@{host}/auth/f.tensors", "cpu"))
    check(tensorizer.load(f"http://user:word-hu5hw0rd@{host}/auth/moved", "cpu"))
    with pytest.raises(PermissionError) as refused:
        open_stream(f"http://user:wrong-hu5hw0rd@{host}/auth/f.tensors?key=hidden-hu5hw0rd")
    assert "wrong" not in str(refused.value)
    assert "hidden" not in str(refused.value)
    stream = CURLStreamFile(
        f"{nginx.http}/token/f.tensors?sig=hidden-hu5hw0rd", headers={"X-Token": "secret-hu5hw0rd"}
    )
    assert "hidden" not in stream.name + repr(stream)
    check(dict(TensorDeserializer(stream, device="cpu").items()))
    # A redirect to another host does not take the token along.
    with pytest.raises(PermissionError, match="403"):
        CURLStreamFile(f"{nginx.http}/elsewhere/", headers={"X-Token": "secret-hu5hw0rd"})


def test_failures_to_open_an_address_raise_the_fitting_error(nginx):
    with pytest.raises(FileNotFoundError, match="404 Not Found"):
        open_stream(f"{nginx.http}/nothing")
    with pytest.raises(OSError, match="more than 10 redirects"):
        open_stream(f"{nginx.http}/loop/")
    with pytest.raises(
        tensorizer.serialization.FormatError,
        match=r"no format that tensorizer reads.*an empty file",
    ):
        TensorDeserializer(f"{nginx.http}/empty")
    with pytest.raises(tensorizer.serialization.TruncatedError, match="truncated"):
        TensorDeserializer(f"{nginx.http}/short")
    with pytest.raises(ConnectionError, match="name of the server is not known"):
        open_stream("http://no-such-host.invalid/f")
    with pytest.raises(ConnectionError):
        open_stream("http://127.0.0.1:1/f")
    with pytest.raises(ValueError, match="is not an address"):
        open_stream("http://")
    # The collector closes what could not be opened, too.
    RemoteFile.__new__(RemoteFile).close()
    with pytest.raises(RuntimeError, match="404 Not Found"):
        ops.load(f"{nginx.http}/nothing")


def test_the_end_of_a_body_without_ranges_is_not_fetched_again(nginx):
    data = os.urandom(9_000_001)
    (nginx.root / "end").write_bytes(data)
    before = nginx.sent("whole/end")
    with open_stream(f"{nginx.http}/whole/end") as file:
        assert file.read() == data
        # The server has begun to send all of it when the file was opened.
        assert nginx.sent("whole/end") - before < 2 * len(data)
        before = nginx.sent("whole/end")
        for _ in range(3):
            assert file.read() == b"" and file.read(5) == b""
    assert nginx.sent("whole/end") - before <= 1000


def test_a_stream_is_a_file(nginx, data):
    with open_stream(f"{nginx.http}/f.tensors") as file:
        assert isinstance(file, io.BufferedIOBase)
        assert file.readable()
        assert file.seekable()
        assert not file.writable()
        assert file.read(6) == data[:6]
        assert file.seek(-10, os.SEEK_END) == len(data) - 10
        assert file.read() == data[-10:]
        assert file.read(5) == b""
        assert file.seek(100) == 100
        assert file.seek(50, os.SEEK_CUR) == file.tell() == 150
        buffer = bytearray(3_000_000)
        assert file.readinto(buffer) == len(buffer)
        assert buffer == data[150:3_000_150]
        assert file.response_headers["content-length"]
        assert file.bytes_read > 3_000_000
    file.close()
    with pytest.raises(ValueError, match="closed file"):
        file.read(1)
    with open_stream(f"{nginx.http}/x.json") as file:
        assert file.readline() == b'{"a": [1, 2]}\n'
        assert list(file) == [b"\n", b"last line"]
        file.seek(0)
        assert json.loads(file.readline()) == {"a": [1, 2]}
    with open_stream(f"{nginx.http}/f.tensors", begin=10, end=30) as file:
        assert file.read() == data[10:30]
        assert file.seek(0, os.SEEK_END) == 30
    with pytest.raises(ValueError, match="end must be larger"):
        open_stream(f"{nginx.http}/f.tensors", begin=10, end=10)
    with pytest.raises(ValueError, match="only be opened for reading"):
        open_stream(f"{nginx.http}/f.tensors", "wb")


def test_torch_and_zipfile_read_our_streams(nginx):
    torch.save({"w": torch.arange(10)}, nginx.root / "w.pt")
    with open_stream(f"{nginx.http}/w.pt") as file:
        assert torch.load(file)["w"].sum() == 45
    with zipfile.ZipFile(nginx.root / "z.zip", "w") as archive:
        archive.writestr("inside", b"text")
    with open_stream(f"{nginx.http}/z.zip") as file, zipfile.ZipFile(file) as archive:
        assert archive.read("inside") == b"text"


def test_a_file_may_begin_at_any_position(nginx):
    with open(nginx.root / "behind", "wb+") as file:
        file.write(b"0123456789")
        with tensorizer.TensorSerializer(file) as serializer:
            serializer.write_state_dict(TENSORS)
    check(dict(TensorDeserializer(open_stream(f"{nginx.http}/behind", begin=10), "cpu").items()))
    stream = open_stream(f"{nginx.http}/behind")
    stream.seek(10)
    check(dict(TensorDeserializer(stream, "cpu").items()))


def test_local_streams(tmp_path):
    path = tmp_path / "new/folder/f.tensors"
    with tensorizer.TensorSerializer(open_stream(path, "wb+")) as serializer:
        serializer.write_state_dict({"a": torch.ones(3)})
    with open_stream(str(path)) as file:
        assert file.read(5) == b"|TZR|"
    assert_same(TensorDeserializer(open_stream(path), "cpu")["a"].detach(), torch.ones(3))
    with pytest.raises(ValueError, match="binary mode"):
        open_stream(path, "r")


def test_ca_info():
    for arguments in ({}, {"cacert": "/nothing"}, {"capath": "/nothing"},
                      {"allow_untrusted": True, "cacert": __file__}):  # fmt: skip
        with pytest.raises(ValueError, match="cacert|capath"):
            CAInfo(**arguments)
    assert CAInfo(cacert=__file__) == CAInfo(cacert=__file__) != CAInfo(allow_untrusted=True)
    assert len({CAInfo(cacert=__file__), CAInfo(cacert=__file__)}) == 1
    with pytest.raises(TypeError, match="must be a CAInfo"):
        open_stream("http://127.0.0.1:1/", certificate_handling="/etc/ssl")


def test_the_old_package_reads_what_nginx_serves(old, nginx):
    """Both packages see the same file."""
    names = old("return list(tensorizer.TensorDeserializer(args[0], device='cpu').keys())",
                f"{nginx.http}/f.tensors")  # fmt: skip
    assert names == list(TENSORS)


# Failures


def once(*numbers, fault):
    """Fail the requests of these numbers."""
    return lambda number, start, end: fault if number in numbers else None


PASSING = {
    "reset at once": ("reset", 0),
    "reset in the middle": ("reset", 700_000),
    "short body": ("cut", 300_000),
    "stall": ("stall", 100_000),
}


@pytest.mark.parametrize("fault", PASSING)
def test_transient_failures_are_retried(data, fault):
    with FaultServer(data, once(1, fault=PASSING[fault])) as server:
        check(tensorizer.load(server.url, "cpu", num_readers=2))
        assert len(server.requests) >= 3
        # Bytes that had arrived are not requested again.
        assert server.sent <= len(data) + (1 << 20) + 100_000


def test_two_broken_requests_in_a_hundred(data):
    def script(number, start, end):
        return ("reset", 50_000) if number % 7 == 3 else None

    with FaultServer(data, script) as server:
        for _ in range(5):
            check(tensorizer.load(server.url, "cpu", num_readers=4, verify_hash=True))
    assert len(server.requests) > 10


def test_retries_end_after_the_configured_number_of_attempts(data, monkeypatch):
    monkeypatch.setenv("TENSORIZER_ATTEMPTS", "3")
    monkeypatch.setenv("TENSORIZER_STALL_SECONDS", "0.3")
    with FaultServer(data, once(1, 2, 3, fault=("stall", 1000))) as server:
        start = time.monotonic()
        with pytest.raises(OSError, match=r"at byte \d+, after 3 tries"):
            tensorizer.load(server.url, "cpu", num_readers=1)
        assert time.monotonic() - start < 15
        assert len(server.requests) == 4


@pytest.mark.parametrize("fault", [None, ("reset", 2_000_000), ("chunked",),
                                   ("unknown",)], ids=str)  # fmt: skip
def test_servers_without_ranges(data, fault):
    always = fault in (("chunked",), ("unknown",))
    script = once(*range(100) if always else (1,), fault=fault)
    with FaultServer(data, script, ranges=False) as server:
        check(tensorizer.load(server.url, "cpu"))
        lazy = TensorDeserializer(server.url, device="cpu", lazy_load=True)
        assert_same(lazy["scalar"].detach(), TENSORS["scalar"])
        assert_same(lazy["big"].detach(), TENSORS["big"])
        lazy.close()
        assert ops.names(server.url) == list(TENSORS)


def test_http_1_0(data):
    with FaultServer(data, ranges=False) as server:
        server.server.RequestHandlerClass.protocol_version = "HTTP/1.0"
        check(tensorizer.load(server.url, "cpu", verify_hash=True))


class ConnectProxy(Forwarder):
    """Tunnels CONNECT requests, which it counts, if they have the right password."""

    def __init__(self):
        self.asked = []
        super().__init__()

    def connect(self, inner):
        request = b""
        while not request.endswith(b"\r\n\r\n"):
            request += inner.recv(1)
        self.asked.append(request.decode())
        # `me:word-hu5hw0rd`
        if b"proxy-authorization: basic bwu6d29yzc1odtvodzbyza==" not in request.lower():
            inner.sendall(b"HTTP/1.1 407 No\r\nContent-Length: 4\r\n\r\nwhy?")
            return None
        host, port = request.split()[1].decode().rsplit(":", 1)
        outer = socket.create_connection((host, int(port)))
        long = b"X-Proxy: " + 9_000 * b"y"
        inner.sendall(b"HTTP/1.1 201 Connection established\r\n" + long + b"\r\n\r\n")
        return outer, None


def test_a_connect_proxy(nginx, monkeypatch):
    trust = CAInfo(cacert=nginx.folder / "ca.pem")
    with ConnectProxy() as proxy:
        monkeypatch.setenv("https_proxy", f"http://me:word-hu5hw0rd@{proxy.host}")
        with open_stream(f"{nginx.https}/f.tensors", certificate_handling=trust) as stream:
            check(dict(TensorDeserializer(stream, "cpu").items()))
        assert f"CONNECT localhost:{nginx.tls_port} HTTP/1.1" in proxy.asked[0]
        monkeypatch.setenv("https_proxy", f"http://me:wrong-hu5hw0rd@{proxy.host}")
        before = len(proxy.asked)
        with pytest.raises(ConnectionError, match=r"proxy answered 407.*: why\?;") as refused:
            open_stream(f"{nginx.https}/f.tensors", certificate_handling=trust)
        assert "wrong" not in str(refused.value)
        assert len(proxy.asked) == before + 1
        # The lower-case variable counts, and an entry with a port is for this port.
        monkeypatch.setenv("NO_PROXY", "*")
        for port, direct in ((nginx.tls_port, True), (1, False)):
            monkeypatch.setenv("no_proxy", f"example.org, localhost:{port}")
            refuses = pytest.raises(ConnectionError, match="407")
            with contextlib.nullcontext() if direct else refuses:
                open_stream(f"{nginx.https}/f.tensors", certificate_handling=trust).close()


def test_redirects_that_expect_a_cookie(nginx):
    before = len(nginx.requests())
    check(tensorizer.load(f"{nginx.http}/cookie/f.tensors", "cpu", num_readers=2))
    statuses = [line.split('"')[2].split()[0] for line in nginx.requests()[before:]]
    assert statuses[0] == "302" and set(statuses[1:]) == {"206"}


def test_hostile_sizes(data):
    """A server that promises more than it has, or goes on for ever."""
    grown = data[:-500_000]
    with FaultServer(grown) as server:
        with pytest.raises(tensorizer.serialization.TruncatedError):
            tensorizer.load(server.url, "cpu")


def test_ctrl_c_ends_a_load_that_waits(data):
    code = (
        "import sys, tensorizer\nprint('ready', flush=True)\n"
        "tensorizer.load(sys.argv[1], 'cpu', num_readers=2)"
    )
    env = {**os.environ, "TENSORIZER_STALL_SECONDS": "60"}
    with FaultServer(data, lambda n, s, e: ("stall", 1000) if n else None) as server:
        with start_python(
            code, server.url,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        ) as process:  # fmt: skip
            process.stdout.readline()
            while len(server.requests) < 2:
                time.sleep(0.05)
            time.sleep(0.3)
            start = time.monotonic()
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=30)
            assert "KeyboardInterrupt" in err
            assert time.monotonic() - start < 5


def test_a_fork_reads_with_connections_of_its_own(data):
    code = """
import os, sys, tensorizer, torch, warnings
warnings.simplefilter("ignore")
torch.set_num_threads(1)  # torch's own threads do not survive a fork
lazy = tensorizer.TensorDeserializer(sys.argv[1], device="cpu", lazy_load=True, num_readers=1)
total = lazy["big"].double().sum().item()
child = os.fork()
if child == 0:
    fine = lazy["other"].double().sum().item() == lazy["other"].double().sum().item()
    os._exit(0 if fine and lazy["scalar"].item() == 5 else 1)
assert lazy["other"].shape == (900, 1000)
assert os.waitpid(child, 0)[1] == 0
lazy.close()
"""
    with FaultServer(data) as server:
        done = run_python(code, server.url, timeout=60)
    assert done.returncode == 0, done.stderr


def test_threads_share_a_file(data):
    with FaultServer(data) as server:
        lazy = TensorDeserializer(server.url, device="cpu", lazy_load=True)
        failures = []

        def work():
            try:
                check({name: lazy[name] for name in lazy})
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        lazy.close()
    assert not failures


def test_settings_that_are_no_numbers(monkeypatch):
    monkeypatch.setenv("TENSORIZER_ATTEMPTS", "many")
    with pytest.raises(
        ValueError, match="TENSORIZER_ATTEMPTS must be a whole number of at least 1: attempts"
    ):
        open_stream("http://127.0.0.1:1/")


REFUSED = """
import ctypes, os, sys
import tensorizer
from tensorizer._C import forget_environment

os.environ.update(AWS_EC2_METADATA_DISABLED="true", AWS_ACCESS_KEY_ID="k",
                  AWS_SECRET_ACCESS_KEY="s-hu5hw0rd", AWS_ENDPOINT_URL="http://127.0.0.1:1")
forget_environment()
connects = ctypes.CDLL(None).refused_connects
connects.restype = ctypes.c_long
for address in sys.argv[1:]:
    before = connects()
    try:
        tensorizer.load(address, "cpu")
    except OSError as error:
        print(connects() - before, type(error).__name__, error)
"""


@pytest.mark.parametrize("error", [errno.EPERM, errno.EACCES])
def test_a_connection_that_the_machine_refuses_is_tried_once(with_faults, error):
    """Not as often as attempts allow, nor for each file that a folder may have."""
    addresses = ["http://127.0.0.1:1/folder", "s3://bucket/folder", "redis://127.0.0.1:1/model"]
    done = run_python(REFUSED, *addresses, env=with_faults(CONNECT=error))
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        assert line.startswith("1 ConnectionError ") and "this machine refuses" in line
    assert len(done.stdout.splitlines()) == len(addresses)
