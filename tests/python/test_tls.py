"""Rules that hold for all encrypted connections."""

import contextlib
import socket
import ssl
import struct
import threading

import pytest
import tensorizer
import torch
from servers import make_certificates
from tensorizer.stream_io import CAInfo, open_stream

TENSORS = {"a": torch.randn(1000, 1000)}
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
INITIAL_WINDOW = 4


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    make_certificates(folder)
    return folder


@pytest.fixture(autouse=True)
def impatient(no_settings_of_the_machine, monkeypatch):
    monkeypatch.setenv("TENSORIZER_ATTEMPTS", "2")
    monkeypatch.setenv("TENSORIZER_STALL_SECONDS", "5")


class TlsServer:
    """Gives each connection to ``serve`` once it is encrypted."""

    def __init__(self, folder, serve, protocols):
        self.serve = serve
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(folder / "server.pem", folder / "server.key")
        self.context.set_alpn_protocols(protocols)
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"https://localhost:{self.listener.getsockname()[1]}/f"
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()

    def accept(self):
        while True:
            try:
                plain, _ = self.listener.accept()
            except OSError:
                return
            self.threads.append(threading.Thread(target=self.encrypt, args=(plain,)))
            self.threads[-1].start()

    def encrypt(self, plain):
        with contextlib.suppress(OSError), plain:
            plain.settimeout(20)
            with self.context.wrap_socket(plain, server_side=True) as connection:
                self.serve(connection)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self.threads:
            thread.join(20)


def test_sessions_are_known_to_all_connections(certificates, tmp_path):
    tensorizer.save(TENSORS, tmp_path / "f")
    data, reused = (tmp_path / "f").read_bytes(), []

    def serve(connection):
        """Answers one request, and closes."""
        reused.append(connection.session_reused)
        fields = b""
        while not fields.endswith(b"\r\n\r\n"):
            fields += connection.recv(4096)
        wanted = fields.lower().split(b"range: bytes=")[1].split(b"\r\n")[0]
        first, last = map(int, wanted.split(b"-"))
        body = data[first : last + 1]
        span = f"bytes {first}-{first + len(body) - 1}/{len(data)}"
        head = f"HTTP/1.1 206 OK\r\nContent-Range: {span}\r\nContent-Length: {len(body)}\r\n"
        connection.sendall(head.encode() + b"Connection: close\r\n\r\n" + body)
        with contextlib.suppress(OSError):
            connection.unwrap()

    trust = CAInfo(cacert=certificates / "ca.pem")
    with TlsServer(certificates, serve, ["http/1.1"]) as server:
        for _ in range(3):
            with open_stream(server.url, certificate_handling=trust) as stream:
                assert stream.read() == data
    # Sessions are reused by other streams, too.
    assert len(reused) >= 6
    assert reused == [False] + [True] * (len(reused) - 1)


def test_windows_of_http_2_fill_a_long_way(certificates):
    """1 Gbit/s at 50 ms are 6.25 MB on their way, and a server hears only of half a window."""
    found = {}

    def receive(connection, size):
        data = b""
        while len(data) < size:
            more = connection.recv(size - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def serve(connection):
        assert connection.selected_alpn_protocol() == "h2"
        assert receive(connection, len(PREFACE)) == PREFACE
        connection.sendall(struct.pack(">HBBBL", 0, 0, 4, 0, 0))  # our settings: none
        with contextlib.suppress(EOFError, OSError):
            while len(found) < 2:
                high, low, kind, flags, stream = struct.unpack(">BHBBL", receive(connection, 9))
                body = receive(connection, (high << 16) + low)
                if kind == 4 and not flags & 1:
                    pairs = struct.iter_unpack(">HL", body)
                    found["stream"] = dict(pairs).get(INITIAL_WINDOW, 65535)
                if kind == 8 and stream == 0:
                    found["connection"] = 65535 + struct.unpack(">L", body)[0]

    trust = CAInfo(cacert=certificates / "ca.pem")
    with TlsServer(certificates, serve, ["h2"]) as server, pytest.raises(OSError):
        open_stream(server.url, certificate_handling=trust)
    assert found["stream"] >= 2 * 6_250_000
    assert found["connection"] >= 2 * 6_250_000
