"""Servers of one file over TLS, and a man in the middle, which do what a case says."""

import contextlib
import mmap
import random
import select
import selectors
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import cases
from certificates import make

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
from servers import free_port

#: Seconds for which anything that never ends goes on.
LONG = 12
RECORD = 1 << 14
VERSIONS = {"1.0": ssl.TLSVersion.TLSv1, "1.1": ssl.TLSVersion.TLSv1_1,
            "1.2": ssl.TLSVersion.TLSv1_2, "other ciphers": ssl.TLSVersion.TLSv1_2}  # fmt: skip
#: Bytes that a server sends in place of a handshake.
SPOKEN = {
    "an answer in the open": b'HTTP/1.1 200 OK\r\nContent-Length: 2\r\nETag: "one"\r\n\r\nhi',
    "an alert": b"\x15\x03\x03\x00\x02\x02\x28",
    "a warning": b"\x15\x03\x03\x00\x02\x01\x5a",
    "a banner": b"SSH-2.0-OpenSSH_9.2\r\n",
    "zeros": bytes(5000),
    "random bytes": random.Random(0).randbytes(5000),
    "an empty record": b"\x16\x03\x03\x00\x00",
    "a record that is too long": b"\x16\x03\x03\xff\xff" + bytes(65535),
    "a message of no kind": b"\x16\x03\x03\x00\x04\xff\x00\x00\x00",
    "a short hello": b"\x16\x03\x03\x00\x06\x02\x00\x00\x02\x03\x03",
    "data before keys": b"\x17\x03\x03\x00\x05hello",
    "nothing": b"",
}
#: Bytes in place of a handshake: their beginning, and a piece that is repeated.
FLOODS = {
    "a message without end": (b"\x16\x03\x03\x40\x00\x02\xff\xff\xff" + bytes(RECORD - 4),
                              b"\x16\x03\x03\x40\x00" + bytes(RECORD)),
    "empty records": (b"", b"\x16\x03\x03\x00\x00" * 1000),
    "changes of cipher": (b"", b"\x14\x03\x03\x00\x01\x01" * 1000),
    "warnings": (b"", b"\x15\x03\x03\x00\x02\x01\x5a" * 1000),
    "hello requests": (b"", b"\x16\x03\x03\x00\x04\x00\x00\x00\x00" * 1000),
    "data": (b"", b"\x17\x03\x03\x40\x00" + bytes(RECORD)),
}  # fmt: skip
#: Bytes that are put among encrypted data, without the key.
INJECTED = {
    "an alert": SPOKEN["an alert"],
    "a closing alert": b"\x15\x03\x03\x00\x02\x01\x00",
    "data": b"\x17\x03\x03\x00\x20" + bytes(32),
    "an empty record": b"\x17\x03\x03\x00\x00",
    "a record that is too long": b"\x17\x03\x03\xff\xff" + bytes(65535),
    "a hello": SPOKEN["a short hello"],
    "a change of cipher": b"\x14\x03\x03\x00\x01\x01",
    "the open": b"HTTP/1.1 200 OK\r\n\r\n",
}
#: Keys by which `openssl s_server` does something to its connection.
PRESSED = {"renegotiates": b"R\n", "renegotiates alone": b"r\n", "a new key": b"K\n",
           "a new key of its own": b"k\n", "asks for a certificate": b"c\n",
           "the open": b"P\n"}  # fmt: skip
#: Ends of the body of an answer, other than by its length.
CUT = ("cut", "cut without a length", "whole without a length", "closed", "closed without a length",
       "reset", "reset without a length")  # fmt: skip


def head_and_body(request: str, data: bytes, length: bool = True) -> tuple[bytes, bytes]:
    """Return what answers a request for a range, or for all."""
    start, end, status = 0, len(data), 200
    for line in request.split("\r\n"):
        if line.lower().startswith("range: bytes="):
            first, last = line.split("=")[1].split("-")
            start, end, status = int(first), min(int(last) + 1, len(data)), 206
    fields = ['ETag: "one"', "Accept-Ranges: bytes"]
    fields += [f"Content-Range: bytes {start}-{end - 1}/{len(data)}"] if status == 206 else []
    fields += [f"Content-Length: {end - start}"] if length else ["Connection: close"]
    head = "\r\n".join([f"HTTP/1.1 {status} OK", *fields, "", ""]).encode()
    return head, b"" if request.startswith("HEAD") else data[start:end]


class Server:
    """Listens at a port for each case of a batch, of which shared memory has the first number."""

    def __init__(
        self, data: bytes, folder: Path, first: mmap.mmap, case: Callable[[int], dict]
    ) -> None:
        self.data, self.folder, self.first, self.case = data, folder, first, case
        self.listeners = [socket.create_server(("127.0.0.1", 0), backlog=64)
                          for _ in range(cases.BATCH)]  # fmt: skip
        self.lock = threading.Lock()
        self.contexts: dict[tuple, ssl.SSLContext] = {}
        self.made: dict[int, int] = {}
        threading.Thread(target=self.accept, daemon=True).start()

    @property
    def ports(self) -> str:
        return ",".join(str(listener.getsockname()[1]) for listener in self.listeners)

    def accept(self) -> None:
        chosen = selectors.DefaultSelector()
        for place, listener in enumerate(self.listeners):
            chosen.register(listener, selectors.EVENT_READ, place)
        while True:
            for key, _ in chosen.select():
                connection, _ = key.fileobj.accept()  # type: ignore[union-attr]
                number = struct.unpack("q", self.first[:8])[0] + key.data
                nth = self.made[number] = self.made.get(number, -1) + 1
                given = (connection, self.case(number), nth)
                threading.Thread(target=self.serve, args=given, daemon=True).start()

    def context(self, certificate: str = "good", protocol: str = "") -> ssl.SSLContext:
        """Return the settings of TLS; they are shared, since sessions depend on them."""
        with self.lock:
            known = self.contexts.get((certificate, protocol))
            if known:
                return known
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            if protocol in ("1.0", "1.1") or certificate == "of a short key":
                context.set_ciphers("ALL:@SECLEVEL=0")
            context.load_cert_chain(self.folder / f"{certificate}.pem",
                                    self.folder / f"{certificate}.key")  # fmt: skip
            if protocol in VERSIONS:
                context.minimum_version = context.maximum_version = VERSIONS[protocol]
            if protocol == "other ciphers":
                context.set_ciphers("ECDHE-ECDSA-AES128-SHA256")
            context.set_alpn_protocols(["http/1.1"])
            return self.contexts.setdefault((certificate, protocol), context)

    def serve(self, connection: socket.socket, what: dict, nth: int) -> None:
        connection.settimeout(20)
        kind = what["kind"] if nth < what["times"] else "none"
        with contextlib.suppress(OSError, ValueError, IndexError), connection:
            getattr(self, f"do_{kind}")(connection, what)

    def answers(
        self, connection: socket.socket, context: ssl.SSLContext, ends: str = "", at: int = 0
    ) -> None:
        """Answer requests, of which one may end as it should not."""
        with context.wrap_socket(connection, server_side=True) as encrypted:
            while request := self.request(encrypted):
                head, body = head_and_body(request, self.data, "without" not in ends)
                if not ends:
                    encrypted.sendall(head + body)
                    continue
                encrypted.sendall(head + (body if "whole" in ends else body[: at % len(body)]))
                if ends.startswith("closed"):
                    encrypted.unwrap().close()
                    return
                if ends.startswith("reset"):
                    linger = struct.pack("ii", 1, 0)
                    encrypted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                # Closed without an alert that says so.
                return

    def request(self, connection: socket.socket) -> str:
        """Return the head of the next request, or nothing at the end."""
        request = b""
        while b"\r\n\r\n" not in request:
            more = connection.recv(RECORD)
            if not more:
                return ""
            request += more
        return request.decode()

    def do_none(self, connection: socket.socket, what: dict) -> None:
        self.answers(connection, self.context())

    def do_certificate(self, connection: socket.socket, what: dict) -> None:
        self.answers(connection, self.context(what["of"], what["protocol"]))

    def do_protocol(self, connection: socket.socket, what: dict) -> None:
        self.answers(connection, self.context(protocol=what["of"]))

    def do_body(self, connection: socket.socket, what: dict) -> None:
        self.answers(connection, self.context(), what["of"], what["at"])

    def do_spoken(self, connection: socket.socket, what: dict) -> None:
        if what["listens"]:
            connection.recv(RECORD)
        connection.sendall(SPOKEN[what["of"]])
        select.select([connection], [], [], what["waits"])

    def do_flood(self, connection: socket.socket, what: dict) -> None:
        begin, piece = FLOODS[what["of"]]
        connection.recv(RECORD)
        connection.sendall(begin)
        end = time.monotonic() + LONG
        while time.monotonic() < end:
            connection.sendall(piece)

    def do_plain(self, connection: socket.socket, what: dict) -> None:
        """Answer a TLS client without TLS, and a client without TLS with TLS."""
        if what["scheme"] == "http":
            self.answers(connection, self.context())
            return
        connection.recv(RECORD)
        head, body = head_and_body("", self.data)
        connection.sendall(head + body)

    def do_injected(self, connection: socket.socket, what: dict) -> None:
        with self.context(protocol=what["protocol"]).wrap_socket(
            connection, server_side=True
        ) as encrypted:
            head, body = head_and_body(self.request(encrypted), self.data)
            at = what["at"] % len(body)
            encrypted.sendall(head + body[:at])
            with socket.socket(fileno=encrypted.fileno()) as raw:
                raw.sendall(INJECTED[what["of"]])
                raw.detach()
            encrypted.sendall(body[at:])
            self.request(encrypted)

    def do_between(self, connection: socket.socket, what: dict) -> None:
        """Pass on what both say, but for one byte."""
        inner, outer = socket.socketpair()
        context = self.context(protocol=what["protocol"])
        answering = threading.Thread(target=self.inner, args=(inner, context), daemon=True)
        answering.start()
        with outer:
            self.pass_on(connection, outer, what)

    def inner(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        connection.settimeout(20)
        with contextlib.suppress(OSError, ValueError, IndexError), connection:
            self.answers(connection, context)

    def pass_on(self, client: socket.socket, server: socket.socket, what: dict) -> None:
        left = what["at"]
        while True:
            for one in select.select([client, server], [], [], 20)[0]:
                data = one.recv(RECORD)
                if not data:
                    return
                other = server if one is client else client
                if (one is client) != (what["to"] == "server") or left < 0:
                    other.sendall(data)
                    continue
                if left >= len(data):
                    left -= len(data)
                    other.sendall(data)
                    continue
                before, after = data[:left], data[left:]
                left = -1
                if what["how"] in ("close", "reset", "stall"):
                    other.sendall(before)
                    if what["how"] == "stall":
                        select.select([client], [], [], LONG)
                    if what["how"] == "reset":
                        linger = struct.pack("ii", 1, 0)
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    return
                changed = {
                    "flip": bytes([after[0] ^ 1 << what["bit"]]) + after[1:],
                    "drop": after[1:],
                    "double": after[:1] + after,
                }[what["how"]]
                other.sendall(before + changed)

    def do_pressed(self, connection: socket.socket, what: dict) -> None:
        """Have `openssl s_server` answer, and do something in the middle of that."""
        port = free_port()
        version = ["-tls1_3"] if "key" in what["of"] or "asks" in what["of"] else ["-tls1_2"]
        with tempfile.TemporaryFile() as nowhere:
            process = subprocess.Popen(
                ["openssl", "s_server", "-accept", f"127.0.0.1:{port}", "-naccept", "1", *version,
                 "-alpn", "http/1.1", "-legacy_renegotiation",
                 "-cert", str(self.folder / "good.pem"),
                 "-key", str(self.folder / "good.key")],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=nowhere,
            )  # fmt: skip
        try:
            wait_for_listening(port, process)
            with socket.create_connection(("127.0.0.1", port)) as server:
                pressing = threading.Thread(target=self.press, args=(process, what), daemon=True)
                pressing.start()
                self.pass_on(connection, server, {"at": 1 << 60, "to": "server"})
        finally:
            process.kill()
            process.wait()

    def press(self, process: subprocess.Popen, what: dict) -> None:
        said, wanted = b"", PRESSED[what["of"]]
        with contextlib.suppress(OSError, ValueError):
            while more := process.stdout.read1(RECORD):
                said += more
                at = said.find(b"GET ")
                end = said.find(b"\r\n\r\n", at)
                if at < 0 or end < 0:
                    continue
                head, body = head_and_body(said[at:end].decode(), self.data)
                said = said[end + 4 :]
                # Each read of the program's is a line, or data.
                place = what["at"] % len(body)
                for piece in (head, body[:place], wanted, body[place:]):
                    process.stdin.write(piece)
                    process.stdin.flush()
                    time.sleep(0.05)


def wait_for_listening(port: int, process: subprocess.Popen) -> None:
    """Wait until it listens, without a connection, of which it would have one only."""
    while process.poll() is None:
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
        if any(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"
               for line in lines):  # fmt: skip
            return
        time.sleep(0.02)
    raise OSError("openssl s_server does not listen")


def start(data: bytes, folder: Path, first: mmap.mmap, case: Callable[[int], dict]) -> Server:
    """Make the certificates, and the server."""
    make(folder)
    return Server(data, folder, first, case)
