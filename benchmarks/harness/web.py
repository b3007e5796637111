"""Servers for measurements: S3 in memory, and ranges of files with a chosen speed.

python web.py objects PORT
python web.py ranges PORT FOLDER OPTIONS    options as JSON, see Ranges
"""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import sys
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Protocol
from xml.sax.saxutils import escape

Fields = dict[str, str]


class Connection:
    """One connection: requests, one after another."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.held = b""
        #: True after the first request that counts.
        self.counted = False

    def until(self, mark: bytes) -> bytes | None:
        """Read up to a mark; None at the end of the connection."""
        while mark not in self.held:
            more = self.sock.recv(1 << 16)
            if not more:
                return None
            self.held += more
        found, self.held = self.held.split(mark, 1)
        return found

    def request(self) -> tuple[str, str, Fields] | None:
        """Read a request up to its body."""
        head = self.until(b"\r\n\r\n")
        if head is None:
            return None
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

    def body(self, fields: Fields) -> memoryview:
        """Read a body; boto3's come in chunks with sums behind them."""
        if fields.get("expect") == "100-continue":
            self.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if "aws-chunked" not in fields.get("content-encoding", ""):
            body = memoryview(bytearray(int(fields.get("content-length", 0))))
            self.body_into(body)
            return body
        body = memoryview(bytearray(int(fields["x-amz-decoded-content-length"])))
        at = 0
        while size := int((self.until(b"\r\n") or b"0").split(b";")[0], 16):
            self.body_into(body[at : at + size])
            at += size
            self.until(b"\r\n")
        while self.until(b"\r\n"):
            pass
        return body

    def answer(self, status: str, body: bytes = b"", **fields: str) -> None:
        """Send a response."""
        named = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
        head = f"HTTP/1.1 {status}\r\n{named}Content-Length: {len(body)}\r\n\r\n"
        self.sock.sendall(head.encode() + body)


def range_of(fields: Fields, size: int) -> tuple[int, int, str]:
    """Return the start and end that a request asks for, and the head of the response."""
    start, end, state = 0, size, "200 OK"
    if asked := fields.get("range"):
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start = int(first) if first else size - int(last)
        end = min(int(last) + 1, size) if first and last else size
        state = "206 Partial Content"
    head = (
        f"HTTP/1.1 {state}\r\nContent-Length: {end - start}\r\nAccept-Ranges: bytes\r\n"
        f'ETag: "{size}"\r\nLast-Modified: Wed, 01 Jan 2025 00:00:00 GMT\r\n'
        f"Content-Range: bytes {start}-{end - 1}/{size}\r\n\r\n"
    )
    return start, end, head


def xml(name: str, *parts: str) -> bytes:
    """Return an XML document."""
    return f"<{name}>{''.join(parts)}</{name}>".encode()


class Objects:
    """S3 in memory: objects, parts, ranges, copies, lists and removals, with any signature."""

    def __init__(self) -> None:
        self.kept: dict[str, list[memoryview]] = {}
        self.parts: dict[str, dict[int, memoryview]] = {}
        self.number = itertools.count(1)

    def handle(self, connection: Connection, method: str, target: str, fields: Fields) -> None:
        """Answer a request."""
        url = urllib.parse.urlsplit(target)
        path = urllib.parse.unquote(url.path).rstrip("/")
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        body = connection.body(fields)
        if method == "POST":
            connection.answer("200 OK", self.post(path, query, body))
        elif method == "PUT":
            connection.answer("200 OK", self.put(path, query, fields, body), ETag='"one"')
        elif method == "DELETE":
            self.kept.pop(path, None)
            connection.answer("204 No Content")
        elif "/" not in path[1:]:
            connection.answer("200 OK", self.list(path, query))
        else:
            self.get(connection, method, path, fields)

    def put(self, path: str, query: Fields, fields: Fields, body: memoryview) -> bytes:
        """Keep a part or an object."""
        if "partNumber" in query:
            self.parts[query["uploadId"]][int(query["partNumber"])] = body
        elif source := fields.get("x-amz-copy-source"):
            self.kept[path] = self.kept["/" + urllib.parse.unquote(source).lstrip("/")]
            return xml("CopyObjectResult", "<ETag>one</ETag>")
        else:
            self.kept[path] = [body]
        return b""

    def post(self, path: str, query: Fields, body: memoryview) -> bytes:
        """Begin or end an upload in parts, or remove objects."""
        if "uploads" in query:
            upload = str(next(self.number))
            self.parts[upload] = {}
            place = "<Bucket>bucket</Bucket><Key>key</Key>"
            return xml("InitiateMultipartUploadResult", place, f"<UploadId>{upload}</UploadId>")
        if "uploadId" in query:
            parts = self.parts.pop(query["uploadId"])
            named = [int(n) for n in re.findall(rb"<PartNumber>(\d+)<", body)]
            assert named == sorted(parts), "not the parts that were sent"
            self.kept[path] = [parts[number] for number in named]
            return xml("CompleteMultipartUploadResult", "<ETag>all</ETag>")
        for key in re.findall(rb"<Key>(.*?)</Key>", bytes(body)):
            self.kept.pop(f"{path}/{key.decode()}", None)
        return xml("DeleteResult")

    def get(self, connection: Connection, method: str, path: str, fields: Fields) -> None:
        """Send an object, or a range of it."""
        pieces = self.kept.get(path)
        if pieces is None:
            error = xml("Error", "<Code>NoSuchKey</Code>")
            connection.answer("404 Not Found", b"" if method == "HEAD" else error)
            return
        start, end, head = range_of(fields, sum(map(len, pieces)))
        connection.sock.sendall(head.encode())
        at = 0
        for piece in pieces if method == "GET" else ():
            part = piece[max(start - at, 0) : max(end - at, 0)]
            if len(part):
                connection.sock.sendall(part)
            at += len(piece)

    def list(self, bucket: str, query: Fields) -> bytes:
        """Return the keys below a prefix."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        found, folders = "", set()
        for path, pieces in sorted(self.kept.items()):
            key = path.removeprefix(f"{bucket}/")
            rest = key[len(prefix) :]
            if not path.startswith(f"{bucket}/{prefix}"):
                continue
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.split(delimiter)[0] + delimiter)
                continue
            size = sum(map(len, pieces))
            found += (
                f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size><ETag>&quot;{size}&quot;"
                "</ETag><LastModified>2025-01-01T00:00:00.000Z</LastModified></Contents>"
            )
        common = (f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>" for f in folders)
        ended = "<IsTruncated>false</IsTruncated>"
        return xml("ListBucketResult", f"<Name>{bucket[1:]}</Name>", ended, found, *common)


class Ranges:
    """Ranges of the files of a folder, at a chosen speed.

    Options: ``latency``, seconds until each answer, and once more for each connection if
    ``connecting``; ``rate``, bytes a second of each connection; ``total``, of all connections
    together; ``breaks``, the answer that breaks off, one in so many. ``/counts`` returns requests,
    connections and bytes sent so far.
    """

    def __init__(self, folder: Path, options: dict[str, float]) -> None:
        self.folder, self.options = folder, options
        self.number = itertools.count(1)
        self.lock, self.free = threading.Lock(), time.monotonic()
        self.counts = {"requests": 0, "connections": 0, "bytes served": 0}

    def count(self, name: str, more: int) -> None:
        """Add to a count."""
        with self.lock:
            self.counts[name] += more

    def pass_on(self, count: int) -> None:
        """Wait until all connections together may send so many bytes; 20 ms may be saved up."""
        if total := self.options.get("total"):
            with self.lock:
                self.free = max(self.free, time.monotonic() - 0.02) + count / total
                until = self.free
            time.sleep(max(0.0, until - time.monotonic()))

    def handle(self, connection: Connection, method: str, target: str, fields: Fields) -> None:
        """Answer a request."""
        if target == "/counts":
            connection.answer("200 OK", json.dumps(self.counts).encode())
            return
        latency, rate = self.options.get("latency", 0), self.options.get("rate")
        if not connection.counted:
            connection.counted = True
            self.count("connections", 1)
            time.sleep(latency if self.options.get("connecting") else 0)
        self.count("requests", 1)
        path = urllib.parse.unquote(urllib.parse.urlsplit(target).path)
        name = path.removeprefix("/bucket").lstrip("/")
        if not (self.folder / name).is_file():
            connection.answer("404 Not Found")
            return
        with (self.folder / name).open("rb") as file:
            start, end, head = range_of(fields, os.fstat(file.fileno()).st_size)
            begun, stop, at = time.monotonic(), end, start
            breaks = self.options.get("breaks")
            if breaks and next(self.number) % breaks == 0:
                stop = (start + end) // 2
            time.sleep(latency)
            connection.sock.sendall(head.encode())
            while method == "GET" and at < stop:
                step = min(1 << 20 if not self.options.get("total") else 1 << 18, stop - at)
                self.pass_on(step)
                sent = os.sendfile(connection.sock.fileno(), file.fileno(), at, step)
                at += sent
                self.count("bytes served", sent)
                if rate:
                    ahead = latency + (at - start) / rate - (time.monotonic() - begun)
                    time.sleep(max(0, ahead))
            if stop < end:
                connection.sock.shutdown(socket.SHUT_RDWR)
                raise ConnectionError


class Handler(Protocol):
    """Answers requests."""

    def handle(self, connection: Connection, method: str, target: str, fields: Fields) -> None:
        """Answer a request."""


def serve(handler: Handler, port: int) -> None:
    """Answer requests at a port, each connection on a thread."""

    def work(sock: socket.socket) -> None:
        try:
            with sock:
                connection = Connection(sock)
                while request := connection.request():
                    handler.handle(connection, *request)
        except OSError:
            pass  # clients may leave

    with socket.create_server(("127.0.0.1", port), backlog=1024) as listener:
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=work, args=(sock,), daemon=True).start()


if __name__ == "__main__":
    kind, port, *rest = sys.argv[1:]
    serve(Objects() if kind == "objects" else Ranges(Path(rest[0]), json.loads(rest[1])), int(port))
