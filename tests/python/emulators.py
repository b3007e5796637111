"""Servers on loopback that speak as the clouds do: the Makefile says how they are installed."""

import base64
import contextlib
import datetime
import email.utils
import hashlib
import hmac
import io
import json
import os
import socket
import ssl
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import shared
from scripted import Forwarder, Relay, Scripted
from servers import Program, free_port, make_certificates, wait_for

#: The folder in which they are installed.
CLOUDS = Path(
    os.environ.get("TENSORIZER_CLOUDS", Path(__file__).resolve().parents[2] / ".venv-clouds")
)
#: The version of Azure's API that requests ask for.
VERSION = "2023-11-03"


def installed(pattern):
    """Return a program; without it the test is skipped, in CI it fails."""
    found = sorted(CLOUDS.glob(pattern))
    if not found:
        if os.environ.get("CI"):
            pytest.fail(f"{CLOUDS / pattern} is required in CI")
        pytest.skip(f"there is no {CLOUDS / pattern}: make .make/clouds, which needs npm")
    return found[0]


def ask(method, url, data=b"", **headers):
    """Send a request; return the body of the answer."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, data, names, method=method)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
        return answer.read()


class Google(Program):
    """A server of Google Cloud Storage that keeps objects in memory, and lets everybody in."""

    def __init__(self):
        program = installed("lib/python*/site-packages/fake_gcs_server*/vendor/*/bin/fake-gcs-*")
        program.chmod(0o755)
        self.port = free_port()
        self.host = f"127.0.0.1:{self.port}"
        self.url = f"http://{self.host}"
        self.process = subprocess.Popen(
            [program, "-backend", "memory", "-scheme", "http", "-host", "127.0.0.1",
             "-port", str(self.port), "-public-host", self.host],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        wait_for(self.port, self.process)
        ask("POST", f"{self.url}/storage/v1/b?project=p", b'{"name": "bucket"}')

    def put(self, name, data):
        query = urllib.parse.urlencode({"uploadType": "media", "name": name})
        ask("POST", f"{self.url}/upload/storage/v1/b/bucket/o?{query}", data)

    def settings(self):
        """Return the variables that make it the server of a process."""
        return {"STORAGE_EMULATOR_HOST": self.host}


class Azurite(Program):
    """A server of Azure's blobs, which checks credentials. The container ``open`` is public.

    Each worker of a run has an account of its own.
    """

    account = "account" + os.environ.get("PYTEST_XDIST_WORKER", "")
    key = base64.b64encode(b"hu5hw0rd, a key of thirty-two bytes").decode()

    def __init__(self, folder, tls=False, any_version=False, popen=subprocess.Popen):
        self.folder = Path(folder)
        self.port = free_port()
        self.host = f"127.0.0.1:{self.port}"
        address = f"localhost:{self.port}" if tls else self.host
        self.url = f"{'https' if tls else 'http'}://{address}"
        more = ["--skipApiVersionCheck"] if any_version else []
        if tls:
            make_certificates(self.folder)
            # Tokens are looked at only over TLS.
            more += ["--oauth", "basic", "--cert", "server.pem", "--key", "server.key"]
        accounts = ["account", *(f"accountgw{number}" for number in range(100))]
        self.process = popen(
            [installed("node_modules/.bin/azurite-blob"), "--blobHost", "127.0.0.1", "--blobPort",
             str(self.port), "--inMemoryPersistence", "--silent", "--disableTelemetry", *more],
            cwd=self.folder, stdout=subprocess.DEVNULL,
            env=os.environ | {"AZURITE_ACCOUNTS": ";".join(f"{a}:{self.key}" for a in accounts)},
        )  # fmt: skip
        wait_for(self.port, self.process)

    @classmethod
    @contextlib.contextmanager
    def of_run(cls, tls=False):
        """Yield the one that all workers share."""
        name = "azurite-tls" if tls else "azurite"

        def start(popen):
            folder = shared.made(f"{name}-files", lambda _: None)
            return cls(folder, tls, popen=popen)

        with shared.server(name, start) as server:
            yield server

    def sign(self, text):
        key = base64.b64decode(self.key)
        return base64.b64encode(hmac.digest(key, text.encode(), hashlib.sha256)).decode()

    def ask(self, method, path, data=b"", query="", **headers):
        """Send a request that the account's key signs."""
        fields = {"x-ms-version": VERSION, "x-ms-date": email.utils.formatdate(usegmt=True)}
        fields |= {f"x-ms-{name.replace('_', '-')}": value for name, value in headers.items()}
        path = f"/{self.account}/{urllib.parse.quote(path)}"
        said = "".join(f"{name}:{value}\n" for name, value in sorted(fields.items()))
        pairs = sorted(urllib.parse.parse_qsl(query))
        resource = f"/{self.account}{path}" + "".join(f"\n{name}:{value}" for name, value in pairs)
        kind = "application/octet-stream"
        lines = [method, "", "", str(len(data) or ""), "", kind, *[""] * 6, said + resource]
        proof = f"SharedKey {self.account}:{self.sign(chr(10).join(lines))}"
        url = f"{self.url}{path}" + (f"?{query}" if query else "")
        ask(method, url, data, **fields, Authorization=proof, Content_Type=kind)

    def make_containers(self):
        self.ask("PUT", "bucket", query="restype=container")
        self.ask("PUT", "open", query="restype=container", blob_public_access="blob")

    def put(self, name, data, container="bucket"):
        self.ask("PUT", f"{container}/{name}", data, blob_type="BlockBlob")

    def shared_access(self, hours=1, rights="r"):
        """Return the signature of an address that is good for some time, or was."""
        now = datetime.datetime.now(datetime.timezone.utc)
        until = (now + datetime.timedelta(hours=hours)).strftime("%Y-%m-%dT%H:%M:%SZ")
        fields = {"sp": rights, "ss": "b", "srt": "o", "st": "", "se": until, "sip": "", "spr": "",
                  "sv": VERSION, "ses": ""}  # fmt: skip
        text = "".join(f"{value}\n" for value in [self.account, *fields.values()])
        given = {name: value for name, value in fields.items() if value}
        return urllib.parse.urlencode(given | {"sig": self.sign(text)})

    def settings(self):
        """Return the variables that make it the server of a process, with the account's key."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": self.account,
            "AZURE_STORAGE_ACCOUNT_KEY": self.key,
            "AZURE_STORAGE_ENDPOINT": f"{self.url}/{self.account}",
        }


class Tokens(Scripted):
    """Gives every request a token: ``hu5hw0rd-1``, ``hu5hw0rd-2`` and so on, or ``make(number)``.

    It stands for the metadata server of a Google machine, for Azure's, and for Azure's authority.
    """

    def __init__(self, lifetime=3600, make="hu5hw0rd-{}".format, status=200, tls=None):
        self.lifetime, self.make, self.status = lifetime, make, status
        self.given, self.asked, self.fields = 0, [], []
        super().__init__()
        self.host = f"127.0.0.1:{self.port}"
        if tls is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(tls / "server.pem", tls / "server.key")
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)

    def answer(self, handler):
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        with self.lock:
            self.given += 1
            self.asked.append(handler.path)
            self.fields.append(dict(urllib.parse.parse_qsl(body.decode())))
            token = self.make(self.given)
        until = datetime.datetime.now().timestamp() + self.lifetime
        said = {"access_token": token, "expires_in": self.lifetime, "expires_on": str(int(until)),
                "token_type": "Bearer"}  # fmt: skip
        if self.status != 200:
            said = {"error": "invalid_client", "error_description": "The client is not known."}
        data = json.dumps(said).encode()
        handler.send_response(self.status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)


class Tunnel(Forwarder):
    """A proxy that has one server behind every name."""

    def __init__(self, port):
        self.port, self.asked = port, []
        super().__init__()

    def connect(self, inner):
        said = b""
        while not said.endswith(b"\r\n\r\n"):
            more = inner.recv(1)
            if not more:
                return None
            said += more
        self.asked.append(said.split()[1].decode())
        inner.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        return socket.create_connection(("127.0.0.1", self.port)), None


class Front(Relay):
    """Hands requests on to another server, and counts them."""

    def __init__(self, server):
        super().__init__(server.host)
        self.url = f"http://{self.host}"

    def answer(self, handler):
        handler.headers.replace_header("Host", self.to)
        super().answer(handler)


class Doorman(Front):
    """Lets requests through to another server that say ``Bearer`` and a token that is good."""

    def __init__(self, server, good=lambda token, number: True):
        self.good, self.shown = good, []
        super().__init__(server)

    def answer(self, handler):
        shown = handler.headers.get("Authorization", "")
        with self.lock:
            self.shown.append(shown)
            number = len(self.shown)
        if not shown.startswith("Bearer ") or not self.good(shown[7:], number):
            handler.send_response(401)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        super().answer(handler)


def crc32c(data, known={}):  # noqa: B006  # what is known is kept
    """Return the CRC-32C of bytes as Google has it, in base64."""
    if data not in known:
        crc = 0xFFFFFFFF
        for byte in data:
            crc = _TABLE[(crc ^ byte) & 255] ^ (crc >> 8)
        known[data] = base64.b64encode((crc ^ 0xFFFFFFFF).to_bytes(4, "big")).decode()
    return known[data]


def _of_byte(value):
    for _ in range(8):
        value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value


_TABLE = [_of_byte(value) for value in range(256)]


SIGNED = "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, Signature=0"


class GoogleXml(Relay):
    """Google's XML API, before a server of S3, which has the same requests by other names.

    No emulator of Google's knows uploads in parts. Tokens are checked here, and sums.
    """

    def __init__(self, server, good=lambda token, number: True, longest_sum=1_000_000):
        self.good, self.longest_sum, self.shown, self.summed = good, longest_sum, [], 0
        self.projects = set()
        super().__init__(server.host)

    def refuse(self, handler, status, code):
        data = f"<Error><Code>{code}</Code><Message>No.</Message></Error>".encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def answer(self, handler):
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        connection, handler.rfile = handler.rfile, io.BytesIO(body)
        try:
            self.answer_to(handler, body)
        finally:
            # Otherwise a body that was not read would be taken for the next request.
            handler.rfile = connection

    def answer_to(self, handler, body):
        shown = handler.headers.get("Authorization", "")
        with self.lock:
            self.shown.append(shown)
            self.projects.add(handler.headers.get("x-goog-user-project"))
            number = len(self.shown)
        if not shown.startswith("Bearer ") or not self.good(shown[7:], number):
            return self.refuse(handler, 401, "Unauthorized")
        # The server behind does not look at signatures, only for them.
        handler.headers.replace_header("Authorization", SIGNED)
        said = handler.headers.get("x-goog-hash")
        if handler.command == "PUT":
            assert said.startswith("crc32c=")
            if len(body) <= self.longest_sum:
                self.summed += 1
                if said != f"crc32c={crc32c(body)}":
                    return self.refuse(handler, 400, "BadDigest")
        for name, value in handler.headers.items():
            if name.lower().startswith("x-goog-"):
                del handler.headers[name]
                handler.headers[name.lower().replace("x-goog-", "x-amz-")] = value
        del handler.headers["x-amz-hash"]
        send = handler.send_header
        handler.send_header = lambda name, value: send(
            name.lower().replace("x-amz-meta-", "x-goog-meta-"), value
        )
        return super().answer(handler)
