"""Servers of HTTP and Redis that answer with something a little wrong, while a file is loaded.

What is loaded is what was saved, or the load ends with an error in time.
"""

import argparse
import contextlib
import fnmatch
import json
import os
import random
import socket
import socketserver
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

#: One try, which does not wait long: a hostile server is the rule here.
os.environ |= {"TENSORIZER_ATTEMPTS": "2", "TENSORIZER_STALL_SECONDS": "1",
               "TENSORIZER_TOTAL_SECONDS": "5", "TENSORIZER_CONNECT_SECONDS": "2"}  # fmt: skip

import parts
import tensorizer
import torch
from hostile_bases import of_bytes, state
from hostile_ways import DEFECTS, REFUSALS, compared

#: Seconds that a load may take: those of all tries, and as much again on a busy machine.
SLOW = 20
HEADS = [b"HTTP/1.1 206 Partial Content", b"HTTP/1.1 200 OK", b"HTTP/1.1 416 Range Not Satisfiable",
         b"HTTP/1.0 206 x", b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 206 x", b"HTTP/1.1 302 Found",
         b"HTTP/1.1 204 No Content", b"HTTP/1.1 304 Not Modified", b"HTTP/1.1 503 Busy",
         b"HTTP/1.1 999 x", b"HTTP/9 206"]  # fmt: skip
FIELDS = [b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: 99999999999999999999",
          b"Transfer-Encoding: chunked", b"Content-Encoding: gzip", b"Content-Range: bytes 0-5/9",
          b"Content-Range: bytes */*", b"Content-Range: bytes 5-1/2", b"ETag: W/\"x\"",
          b"ETag: \"y\"", b"Location: /other", b"Location: http://[::", b"Connection: close",
          b"Retry-After: 99999999999", b"X: " + b"y" * 70_000, b": ", b"\xff\xfe: 1",
          b"Last-Modified: now"]  # fmt: skip


class Wrong:
    """Changes some of the answers of one load."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.number = rng, 0
        self.which = {rng.randrange(4) for _ in range(rng.choice((1, 1, 2)))}
        self.lock = threading.Lock()

    def changed(self, answer: bytes, http: bool) -> bytes:
        with self.lock:
            self.number += 1
            if self.number - 1 not in self.which:
                return answer
            head, _, body = answer.partition(b"\r\n\r\n")
            if http and self.rng.random() < 0.6:
                lines = head.split(b"\r\n")
                if self.rng.random() < 0.3:
                    lines[0] = self.rng.choice(HEADS)
                else:
                    at = self.rng.randrange(1, len(lines) + 1)
                    lines[at : at + self.rng.randrange(2)] = [self.rng.choice(FIELDS)]
                return b"\r\n".join(lines) + b"\r\n\r\n" + body
            return bytes(of_bytes(self.rng, bytearray(answer)))


class Handler(socketserver.StreamRequestHandler):
    """Answers until a connection is closed; the server has what to answer with."""

    def handle(self) -> None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while line := self.rfile.readline():
                http = line[:1] != b"*"
                answer = self.http(line) if http else self.redis(line)
                if (wrong := self.server.wrong) is not None:  # type: ignore[attr-defined]
                    answer = wrong.changed(answer, http)
                self.wfile.write(answer)

    def http(self, line: bytes) -> bytes:
        asked = None
        while field := self.rfile.readline().strip():
            name, _, value = field.partition(b": ")
            if name.lower() == b"range":
                asked = value.removeprefix(b"bytes=").split(b"-")
        data: bytes = self.server.data  # type: ignore[attr-defined]
        first, last = int(asked[0]), min(int(asked[1]), len(data) - 1)  # type: ignore[index]
        part = data[first : last + 1]
        return (
            f'HTTP/1.1 206 Partial Content\r\nETag: "x"\r\nContent-Length: {len(part)}\r\n'
            f"Content-Range: bytes {first}-{last}/{len(data)}\r\n\r\n"
        ).encode() + part

    def redis(self, line: bytes) -> bytes:
        words = []
        for _ in range(int(line[1:])):
            size = int(self.rfile.readline()[1:])
            words.append(self.rfile.read(size + 2)[:-2])
        keys: dict[bytes, bytes] = self.server.keys  # type: ignore[attr-defined]
        match words[0].upper():
            case b"SCAN":
                pattern = words[words.index(b"MATCH") + 1].decode()
                found = [key for key in keys if fnmatch.fnmatchcase(key.decode(), pattern)]
                bulks = b"".join(b"$%d\r\n%s\r\n" % (len(key), key) for key in found)
                return b"*2\r\n$1\r\n0\r\n*%d\r\n" % len(found) + bulks
            case b"STRLEN":
                return b":%d\r\n" % len(keys.get(words[1], b""))
            case b"GET":
                return self.bulk(keys.get(words[1], b""))
            case b"GETRANGE":
                return self.bulk(keys.get(words[1], b"")[int(words[2]) : int(words[3]) + 1])
        return b"+OK\r\n"

    @staticmethod
    def bulk(value: bytes) -> bytes:
        return b"$%d\r\n%s\r\n" % (len(value), value)


class Kept(dict[bytes, bytes]):
    """Stands in for a client of Redis, with the calls by which a file is copied to it."""

    def pipeline(self, **_: Any) -> Any:
        return self

    def execute(self) -> list[bool]:
        return []

    def set(self, key: str, value: Any, **_: Any) -> bool:
        self[self._key(key)] = bytes(value)
        return True

    @staticmethod
    def _key(key: str | bytes) -> bytes:
        return key if isinstance(key, bytes) else key.encode()


class Server(socketserver.ThreadingTCPServer):
    daemon_threads, block_on_close, allow_reuse_address = True, False, True
    request_queue_size = 64

    def __init__(self, data: bytes, keys: dict[bytes, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.data, self.keys, self.wrong = data, keys, None
        self.place = f"127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


def tried(url: str, expected: dict[str, torch.Tensor]) -> tuple[str, str | None]:
    """Load; return how it ended, and what is wrong with that."""
    began = time.monotonic()
    try:
        loaded = tensorizer.load(url, "cpu", verify_hash=True)
    except (*REFUSALS, tensorizer.HashMismatchError) as error:
        how = type(error).__name__
        if any(word in str(error) for word in DEFECTS):
            return how, f"a defect: {error}"
        took = time.monotonic() - began
        return how, f"it took {took:.0f} s: {error}" if took > SLOW else None
    except BaseException as error:
        return type(error).__name__, f"{type(error).__name__}: {error}"
    return "loaded", compared(expected, loaded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts.ending(parser)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.monotonic()
    findings: list[str] = []
    ended: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    keys = Kept()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "f.tensors"
        tensorizer.save(state(), path)
        data = path.read_bytes()
        with tensorizer.TensorDeserializer(path, device="cpu", lazy_load=True) as file:
            file.to_redis(keys, "x", force=True)
    server = Server(data, keys)
    number = arguments.first
    urls = {"http": f"http://{server.place}/f.tensors", "redis": f"redis://{server.place}/x"}
    expected = {kind: tensorizer.load(url, "cpu", verify_hash=True) for kind, url in urls.items()}
    assert all(len(tensors) == len(state()) for tensors in expected.values())
    while not parts.enough(arguments, began, number - arguments.first):
        rng = random.Random(f"{arguments.seed}/{number}")
        kind = rng.choice(("http", "redis"))
        server.wrong = Wrong(rng)
        how, what = tried(urls[kind], expected[kind])
        kinds[kind] += 1
        ended[how] += 1
        if what:
            findings.append(f"load {number} of seed {arguments.seed}, by {kind}: {what}"[:700])
            print(f"FINDING {findings[-1]}", file=sys.stderr, flush=True)
        number += 1
    print(json.dumps({
        "campaign": "hostile servers", "inputs": number - arguments.first,
        "what": "loads from servers with a wrong answer", "kinds": dict(kinds),
        "ended": dict(ended.most_common()), "findings": findings,
        "seconds": round(time.monotonic() - began, 1),
    }))  # fmt: skip
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
