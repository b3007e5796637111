"""Rules that hold for all encrypted connections."""

import contextlib
import socket
import ssl
import struct
import subprocess
import threading

import pytest
import tensorizer
import torch
from servers import make_certificates, need
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

    def __init__(self, folder, serve, protocols, name="server"):
        self.serve = serve
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
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


def answer(connection, data):
    """Answer one request with its range of the data, and close."""
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


def test_sessions_are_known_to_all_connections(certificates, tmp_path):
    tensorizer.save(TENSORS, tmp_path / "f")
    data, reused = (tmp_path / "f").read_bytes(), []

    def serve(connection):
        reused.append(connection.session_reused)
        answer(connection, data)

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


#: Certificates that people make for their servers: the subject, the extensions, and the authority;
#: without extensions they have version 1.
MADE = {
    "root": ("Root", "basicConstraints=critical,CA:TRUE", None),
    "old": ("localhost", "", "root"),
    "named": ("localhost", "basicConstraints=CA:FALSE", "root"),
    "wild": ("*.local", "basicConstraints=CA:FALSE", "root"),
    "authority": ("x", "basicConstraints=CA:TRUE\nsubjectAltName=DNS:localhost", "root"),
    "itself": ("x", "basicConstraints=CA:TRUE\nsubjectAltName=DNS:localhost", None),
    "plain": ("x", "basicConstraints=CA:FALSE\nsubjectAltName=DNS:localhost", "root"),
    "expired": ("x", "subjectAltName=DNS:localhost", "root"),
    "other": ("localhost", "subjectAltName=DNS:storage.example", "root"),
    "client": ("x", "extendedKeyUsage=clientAuth\nsubjectAltName=DNS:localhost", "root"),
}


@pytest.fixture(scope="module")
def made(certificates):
    """The folder with these certificates."""

    def run(*command):
        command = [need("openssl"), *command]
        subprocess.run(command, cwd=certificates, check=True, capture_output=True)

    for name, (subject, extensions, authority) in MADE.items():
        (certificates / "ext").write_text(extensions)
        # Of an elliptic curve, keys are made in no time; one authority and one client have others.
        curve = ["ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        kind = ["rsa:2048"] if name in ("root", "client") else curve
        run("req", "-new", "-newkey", *kind, "-nodes", "-keyout", f"{name}.key",
            "-out", "csr", "-subj", f"/CN={subject}")  # fmt: skip
        signer = ["-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial"]
        run("x509", "-req", "-in", "csr", "-out", f"{name}.pem",
            *(signer if authority else ["-signkey", f"{name}.key"]),
            *(["-extfile", "ext"] if extensions else []),
            "-days", "-1" if name == "expired" else "2")  # fmt: skip
    return certificates


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize(("name", "bundle", "reason"), [
    ("old", "root", None),
    ("old", "itself", "not trusted"),
    ("named", "root", None),
    ("wild", "root", "localhost.*no name that could be compared"),
    ("authority", "root", None),
    ("authority", "itself", "not trusted"),
    ("itself", "itself", None),
    ("plain", "plain", None),
    ("plain", "itself", "itself.pem.*does not have the certificate of the authority"),
    ("expired", "root", "it has expired on .* GMT, and the clock of this machine says .* GMT$"),
    ("expired", "expired", "it has expired on .* GMT"),
    ("other", "root", "storage.example.*use a name in the address that the certificate has"),
    ("client", "client", "it is not for servers"),
])  # fmt: skip
def test_certificates_that_openssl_accepts(made, name, bundle, reason, version):
    trust = CAInfo(cacert=made / f"{bundle}.pem")
    data = bytes(100)
    with TlsServer(made, lambda to: answer(to, data), ["http/1.1"], name) as server:
        server.context.minimum_version = server.context.maximum_version = version
        if reason is None:
            with open_stream(server.url, certificate_handling=trust) as stream:
                assert stream.read() == data
        else:
            with pytest.raises(PermissionError, match=reason):
                open_stream(server.url, certificate_handling=trust)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_client_certificate(made, tmp_path, monkeypatch, version):
    trust = CAInfo(cacert=made / "ca.pem")
    with TlsServer(made, lambda to: answer(to, bytes(100)), ["http/1.1"]) as server:
        server.context.minimum_version = server.context.maximum_version = version
        server.context.verify_mode = ssl.CERT_REQUIRED
        server.context.load_verify_locations(made / "root.pem")
        with pytest.raises(OSError, match="TENSORIZER_CLIENT_CERT"):
            open_stream(server.url, certificate_handling=trust)
        monkeypatch.setenv("TENSORIZER_CLIENT_KEY", str(made / "client.key"))
        with pytest.raises(ValueError, match="TENSORIZER_CLIENT_CERT is not"):
            open_stream(server.url, certificate_handling=trust)
        monkeypatch.setenv("TENSORIZER_CLIENT_CERT", str(made / "client.pem"))
        with open_stream(server.url, certificate_handling=trust) as stream:
            assert stream.read() == bytes(100)
        both = (made / "client.pem").read_bytes() + (made / "client.key").read_bytes()
        (tmp_path / "both.pem").write_bytes(both)
        monkeypatch.delenv("TENSORIZER_CLIENT_KEY")
        monkeypatch.setenv("TENSORIZER_CLIENT_CERT", str(tmp_path / "both.pem"))
        with open_stream(server.url, certificate_handling=trust) as stream:
            assert stream.read() == bytes(100)
        monkeypatch.setenv("TENSORIZER_CLIENT_CERT", str(made / "client.pem"))
        with pytest.raises(ValueError, match="no private key in PEM form without a passphrase"):
            open_stream(server.url, certificate_handling=trust)


def test_a_server_without_tls_is_recognised():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(OSError, match=r"does not use TLS.*http://"):
            open_stream(f"https://localhost:{listener.getsockname()[1]}/f")
        thread.join(20)
