"""Servers that do not limit their clients, and one that does.

    python stores.py s3 FOLDER PORT        takes uploads of the S3 protocol into files
    python stores.py slow FOLDER PORT      serves ranges after 50 ms, with 100 MB/s a connection
    python stores.py faulty FOLDER PORT    serves ranges; every 50th answer breaks off

The S3 server knows what uploads need: single objects and parts, and to put them together. It takes
any signature, and keeps bytes where the file is to be, without looking at them.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import sys
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Protocol

#: The slow server: seconds until an answer, and bytes a second of a connection.
LATENCY, RATE = 0.05, 100e6
#: Bytes that are sent at a time.
STEP = 1 << 20


class Connection:
    """One connection: requests, one after another."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.held = b""

    def request(self) -> tuple[str, str, dict[str, str]] | None:
        """Read a request up to its body."""
        while b"\r\n\r\n" not in self.held:
            more = self.sock.recv(1 << 16)
            if not more:
                return None
            self.held += more
        head, self.held = self.held.split(b"\r\n\r\n", 1)
        first, *lines = head.decode().split("\r\n")
        method, target, _ = first.split()
        fields = dict(line.split(": ", 1) for line in lines)
        return method, target, {name.lower(): value for name, value in fields.items()}

    def body_into(self, buffer: memoryview) -> None:
        """Read a body of known length."""
        kept = self.held[: len(buffer)]
        buffer[: len(kept)] = kept
        self.held = self.held[len(kept) :]
        at = len(kept)
        while at < len(buffer):
            read = self.sock.recv_into(buffer[at:])
            if read == 0:
                raise ConnectionError
            at += read

    def line(self) -> bytes:
        while b"\r\n" not in self.held:
            more = self.sock.recv(1 << 16)
            if not more:
                raise ConnectionError
            self.held += more
        line, self.held = self.held.split(b"\r\n", 1)
        return line

    def body(self, fields: dict[str, str]) -> memoryview:
        """Read a body; boto3's come in chunks with sums behind them."""
        if fields.get("expect") == "100-continue":
            self.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if "aws-chunked" not in fields.get("content-encoding", ""):
            body = memoryview(bytearray(int(fields.get("content-length", 0))))
            self.body_into(body)
            return body
        outer = fields.get("transfer-encoding") == "chunked"
        assert not outer, "chunks in chunks"
        body = memoryview(bytearray(int(fields["x-amz-decoded-content-length"])))
        at = 0
        while size := int(self.line().split(b";")[0], 16):
            self.body_into(body[at : at + size])
            at += size
            self.line()
        while self.line():
            pass
        return body

    def answer(self, status: str, body: bytes = b"", **fields: str) -> None:
        named = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
        head = f"HTTP/1.1 {status}\r\n{named}Content-Length: {len(body)}\r\n\r\n"
        self.sock.sendall(head.encode() + body)


class S3:
    """Uploads to files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parts: dict[str, dict[int, memoryview]] = {}
        self.lock = threading.Lock()
        self.number = itertools.count()

    def handle(self, connection: Connection, method: str, target: str, fields: dict) -> None:
        url = urllib.parse.urlsplit(target)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        path = self.folder / url.path.split("/", 2)[2]
        body = connection.body(fields)
        if method == "PUT" and "partNumber" in query:
            self.parts[query["uploadId"]][int(query["partNumber"])] = body
            connection.answer("200 OK", ETag=f'"{query["partNumber"]}"')
        elif method == "PUT":
            path.write_bytes(body)
            connection.answer("200 OK", ETag='"one"')
        elif method == "POST" and "uploads" in query:
            upload = str(next(self.number))
            self.parts[upload] = {}
            xml = (
                "<InitiateMultipartUploadResult><Bucket>bucket</Bucket><Key>key</Key>"
                f"<UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            )
            connection.answer("200 OK", xml.encode())
        elif method == "POST":
            named = [int(n) for n in re.findall(rb"<PartNumber>(\d+)<", body)]
            parts = self.parts.pop(query["uploadId"])
            assert sorted(named) == sorted(parts) == named, "not the parts that were sent"
            # Parts are kept in memory: the time to write them is not measured.
            self.joined = (path, [parts[number] for number in named])
            xml = "<CompleteMultipartUploadResult><ETag>&quot;all&quot;</ETag>"
            connection.answer("200 OK", (xml + "</CompleteMultipartUploadResult>").encode())
        elif method == "GET":  # what was put together last, for its verification
            path, parts = self.joined
            with path.open("wb") as file:
                for part in parts:
                    file.write(part)
            del self.joined
            connection.answer("200 OK", str(path).encode())
        else:
            connection.answer("404 Not Found")


class Ranges:
    """Ranges of the files of a folder."""

    def __init__(self, folder: Path, faulty: bool) -> None:
        self.folder, self.faulty = folder, faulty
        self.number = itertools.count(1)

    def handle(self, connection: Connection, method: str, target: str, fields: dict) -> None:
        with (self.folder / target.rsplit("/", maxsplit=1)[-1]).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            field = fields.get("range", f"bytes=0-{size - 1}").removeprefix("bytes=")
            first, _, last = field.partition("-")
            start, end = int(first), min(int(last or size - 1) + 1, size)
            begun = time.perf_counter()
            status = "206 Partial Content" if "range" in fields else "200 OK"
            head = (
                f"HTTP/1.1 {status}\r\nContent-Range: bytes {start}-{end - 1}/{size}\r\n"
                f"Accept-Ranges: bytes\r\nContent-Length: {end - start}\r\n\r\n"
            )
            stop = end
            if self.faulty and next(self.number) % 50 == 0:
                stop = (start + end) // 2
            if not self.faulty:
                time.sleep(LATENCY)
            connection.sock.sendall(head.encode())
            at = start
            while at < stop:
                at += os.sendfile(connection.sock.fileno(), file.fileno(), at, min(STEP, stop - at))
                if not self.faulty:
                    ahead = LATENCY + (at - start) / RATE - (time.perf_counter() - begun)
                    time.sleep(max(0, ahead))
            if stop < end:
                connection.sock.shutdown(socket.SHUT_RDWR)
                raise ConnectionError


class Handler(Protocol):
    """Answers requests."""

    def handle(self, connection: Connection, method: str, target: str, fields: dict) -> None: ...


def serve(handler: Handler, port: int) -> None:
    """Answer requests at a port, each connection on a thread."""

    def work(sock: socket.socket) -> None:
        try:
            with sock:
                connection = Connection(sock)
                while request := connection.request():
                    handler.handle(connection, *request)
        except OSError:
            pass

    with socket.create_server(("127.0.0.1", port), backlog=256) as listener:
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=work, args=(sock,), daemon=True).start()


if __name__ == "__main__":
    kind, folder, port = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    serve(S3(folder) if kind == "s3" else Ranges(folder, kind == "faulty"), port)
