"""An S3 server that keeps objects in memory, for benchmarks that write and then read them.

    python objects.py PORT

It takes any signature, and knows single objects and parts, ranges, copies, lists and removals.
Bytes are not looked at.
"""

from __future__ import annotations

import itertools
import re
import sys
import threading
import urllib.parse
from xml.sax.saxutils import escape

from stores import Connection, serve

#: The pieces of an object, in order.
Pieces = list[memoryview]


def size_of(pieces: Pieces) -> int:
    return sum(len(piece) for piece in pieces)


class Objects:
    """The objects of all buckets, by path."""

    def __init__(self) -> None:
        self.kept: dict[str, Pieces] = {}
        self.parts: dict[str, dict[int, memoryview]] = {}
        self.lock = threading.Lock()
        self.number = itertools.count(1)

    def handle(self, connection: Connection, method: str, target: str, fields: dict) -> None:
        url = urllib.parse.urlsplit(target)
        path = urllib.parse.unquote(url.path).rstrip("/")
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        body = connection.body(fields)
        if method == "POST":
            self.post(connection, path, query, body)
        elif method == "PUT":
            self.put(connection, path, query, fields, body)
        elif method == "DELETE":
            self.kept.pop(path, None)
            connection.answer("204 No Content")
        elif "/" not in path[1:]:
            self.list(connection, path, query)
        else:
            self.get(connection, method, path, fields)

    def put(
        self, connection: Connection, path: str, query: dict, fields: dict, body: memoryview
    ) -> None:
        if "partNumber" in query:
            self.parts[query["uploadId"]][int(query["partNumber"])] = body
        elif "x-amz-copy-source" in fields:
            source = "/" + urllib.parse.unquote(fields["x-amz-copy-source"]).lstrip("/")
            self.kept[path] = self.kept[source]
            xml = b"<CopyObjectResult><ETag>&quot;one&quot;</ETag></CopyObjectResult>"
            connection.answer("200 OK", xml)
            return
        else:
            self.kept[path] = [body]
        connection.answer("200 OK", ETag='"one"')

    def post(self, connection: Connection, path: str, query: dict, body: memoryview) -> None:
        if "uploads" in query:
            with self.lock:
                upload = str(next(self.number))
            self.parts[upload] = {}
            xml = (
                "<InitiateMultipartUploadResult><Bucket>bucket</Bucket><Key>key</Key>"
                f"<UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            )
        elif "uploadId" in query:
            parts = self.parts.pop(query["uploadId"])
            named = [int(n) for n in re.findall(rb"<PartNumber>(\d+)<", body)]
            assert named == sorted(parts), "not the parts that were sent"
            self.kept[path] = [parts[number] for number in named]
            xml = "<CompleteMultipartUploadResult><ETag>&quot;all&quot;</ETag>"
            xml += "</CompleteMultipartUploadResult>"
        else:
            for key in re.findall(rb"<Key>(.*?)</Key>", bytes(body)):
                self.kept.pop(f"{path}/{key.decode()}", None)
            xml = "<DeleteResult></DeleteResult>"
        connection.answer("200 OK", xml.encode())

    def get(self, connection: Connection, method: str, path: str, fields: dict) -> None:
        pieces = self.kept.get(path)
        if pieces is None:
            xml = b"<Error><Code>NoSuchKey</Code></Error>"
            connection.answer("404 Not Found", b"" if method == "HEAD" else xml)
            return
        size = size_of(pieces)
        start, end, status = 0, size, "200 OK"
        if asked := fields.get("range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start = int(first) if first else size - int(last)
            end = min(int(last) + 1, size) if first and last else size
            status = "206 Partial Content"
        head = (
            f"HTTP/1.1 {status}\r\nContent-Length: {end - start}\r\nAccept-Ranges: bytes\r\n"
            'ETag: "one"\r\nLast-Modified: Wed, 01 Jan 2025 00:00:00 GMT\r\n'
            f"Content-Range: bytes {start}-{end - 1}/{size}\r\n\r\n"
        )
        connection.sock.sendall(head.encode())
        at = 0
        for piece in pieces if method == "GET" else ():
            part = piece[max(start - at, 0) : max(end - at, 0)]
            if len(part):
                connection.sock.sendall(part)
            at += len(piece)

    def list(self, connection: Connection, bucket: str, query: dict) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        keys, folders = [], set()
        for path in sorted(self.kept):
            key = path.removeprefix(f"{bucket}/")
            if not key.startswith(prefix):
                continue
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.split(delimiter)[0] + delimiter)
            else:
                keys.append((key, size_of(self.kept[path])))
        found = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size><ETag>one</ETag>"
            "<LastModified>2025-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, size in keys
        )
        found += "".join(
            f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in folders
        )
        xml = (
            f"<ListBucketResult><Name>{bucket[1:]}</Name><KeyCount>{len(keys)}</KeyCount>"
            f"<IsTruncated>false</IsTruncated>{found}</ListBucketResult>"
        )
        connection.answer("200 OK", xml.encode())


if __name__ == "__main__":
    serve(Objects(), int(sys.argv[1]))
