"""Loads from a server that does everything a server should not, at every byte of its answers.

A case is a seed; what must hold in all is said by `cases.py`.
"""

import contextlib
import random
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import cases
from scenes import OLD, by_path, environment, save_path, scratch, serving, tensorizer, value_of

HEAD = 4096
STATUSES = [*range(201, 207), 226, *range(300, 309), *range(400, 432), 444, 451, 499,
            *range(500, 512), 520, 599, 600, 999]  # fmt: skip
ENDS = ["close", "reset", "stall", "garbage", "flip", "zero", "newline", "drop"]
RETRIES = ["0", "1", "99999999999999", "-1", "soon", "Wed, 21 Oct 2099 07:28:00 GMT", ""]
FIELDS = {
    "Content-Length": ["-1", "0", "1", "18446744073709551615", "18446744073709551616", "ten", "",
                       "5, 5", "99999999", "0x10"],
    "Content-Range": ["", "bytes", "bytes */10", "bytes 0-0/1", "bytes 5-4/10", "bytes 7-99/100",
                      "bytes 0-18446744073709551615/18446744073709551615", "bytes -1-5/6",
                      "lines 0-10/11", "bytes 0-10/*", "bytes 0-1048639/5", "bytes a-b/c"],
    "Content-Encoding": ["gzip", "br", "deflate, gzip", "identity", "zstd", "nonsense"],
    "Transfer-Encoding": ["chunked", "gzip", "gzip, chunked", "identity", "nonsense"],
    "ETag": ['"two"', 'W/"one"', "", "one", '"' + "x" * 5000 + '"', "\xff\xfe"],
    "Last-Modified": ["Wed, 21 Oct 2099 07:28:00 GMT", "never", ""],
    "Location": ["/other", "", "http://", "//", "ftp://127.0.0.1/f", "file:///etc/passwd",
                 "http://127.0.0.1:1/f.tensors", "?", "\x01"],
    "Connection": ["close", "upgrade", "keep-alive, close"],
    "Upgrade": ["h2c"],
}  # fmt: skip
RAW = [b"", b"\r\n", b"\0", b"hello\n", b"HTTP/0.9\r\n\r\n", b"HTTP/2 200\r\n\r\n",
       b"HTTP/1.1\r\n\r\n", b"HTTP/1.1 200\r\n\r\n", b"HTTP/1.1 abc OK\r\n\r\n",
       b"ICY 200 OK\r\n\r\n",
       b"HTTP/1.1 200 OK\nContent-Length: 0\n\n", b"\x15\x03\x01\x00\x02\x02\x46",
       b"PRI * HTTP/2.0",
       b"HTTP/1.1 200 OK\r\n: empty\r\n\r\n", b"HTTP/1.1 200 OK\r\nA b: c\r\n\r\n",
       b"HTTP/1.1 200 OK\r\nA: b\r\n c\r\n\r\n", b"HTTP/1.1 200 OK\r\nA: \0\r\n\r\n",
       b"HTTP/1.1 206 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!"]  # fmt: skip
CHUNKS = [b"0\r\n\r\n", b"-1\r\n", b"ffffffffffffffffff\r\n", b"zz\r\n", b"5\r\n12345",
          b"5\r\n12345XX",
          b"5;" + b"x" * 100_000, b"5\r\n12345\r\n0\r\n" +
          b"T: x\r\n" * 20_000, b"\r\n"]  # fmt: skip


def case(number: int) -> dict:
    """Return what the server does in a case; most are of the first kind."""
    chance = random.Random(number)
    found: dict = {"request": chance.choice([0, 0, 1, 1, 2]), "times": chance.choice([1, 1, 99])}
    kind = chance.choices(
        ["head", "body", "status", "field", "raw", "chunks", "flood", "slow", "after", "redirect"],
        [50, 12, 12, 16, 5, 5, 2, 2, 4, 2],
    )[0]
    found["kind"] = kind
    if kind == "head":
        # Stalls take a second each.
        how = chance.choices(ENDS, [1, 1, 0.05, 1, 1, 1, 1, 1])[0]
        found |= {"how": how, "at": chance.randrange(HEAD), "bit": chance.randrange(8)}
    elif kind == "body":
        how = chance.choices(["close", "reset", "stall", "more"], [1, 1, 0.1, 1])[0]
        found |= {"how": how, "at": chance.choice([0, 1, 100, chance.randrange(1 << 20)])}
    elif kind == "status":
        found |= {"status": chance.choice(STATUSES), "retry": chance.choice(RETRIES)}
    elif kind == "field":
        name = chance.choice(list(FIELDS))
        status = chance.choice([206, 206, 200, 302, 308]) if name != "Location" else 302
        found |= {"name": name, "value": chance.choice(FIELDS[name]), "status": status}
        found["twice"] = chance.random() < 0.3
    elif kind == "raw":
        found["raw"] = chance.randrange(len(RAW))
    elif kind == "chunks":
        found |= {"raw": chance.randrange(len(CHUNKS)), "both": chance.random() < 0.3}
    elif kind == "flood":
        found["of"] = chance.choice(["1xx", "fields", "field", "status", "chunk", "body"])
    elif kind == "slow":
        found["of"] = chance.choice(["head", "body", "bandwidth", "latency"])
    elif kind == "redirect":
        found |= {"status": chance.choice([301, 302, 303, 307, 308]),
                  "to": chance.choice(["self", "two", "deeper", "right", "https"])}  # fmt: skip
    return found


@dataclass
class Asked:
    """A request, the case that it is of, and what a server should answer."""

    connection: socket.socket
    what: dict
    status: int
    fields: dict[str, str]
    body: bytes
    path: str

    @property
    def number(self) -> str:
        """The number of the case."""
        return self.path.split("/")[1]


class Server:
    """Answers as cases say, which are named in the addresses."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.asked: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            connection, _ = self.listener.accept()
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection: socket.socket) -> None:
        connection.settimeout(20)
        with contextlib.suppress(OSError, ValueError, IndexError), connection:
            while True:
                request = b""
                while b"\r\n\r\n" not in request:
                    more = connection.recv(65536)
                    if not more:
                        return
                    request += more
                if not self.answer(connection, request.decode()):
                    return

    def answer(self, connection: socket.socket, request: str) -> bool:
        """Answer; return whether the connection stays."""
        path = request.split()[1]
        name = path.split("/")[1]
        with self.lock:
            number = self.asked[name]
            self.asked[name] += 1
        start, end, status = 0, len(self.data), 200
        for line in request.split("\r\n"):
            if line.lower().startswith("range: bytes="):
                first, last = line.split("=")[1].split("-")
                start, end, status = int(first), min(int(last) + 1, len(self.data)), 206
        what = case(int(name))
        if not what["request"] <= number < what["request"] + what["times"]:
            what = {"kind": "none"}
        fields = {"ETag": '"one"', "Content-Length": str(end - start), "Accept-Ranges": "bytes"}
        if status == 206:
            fields["Content-Range"] = f"bytes {start}-{end - 1}/{len(self.data)}"
        body = self.data[start:end]
        asked = Asked(connection, what, status, fields, body, path)
        return getattr(self, f"do_{what['kind']}")(asked)

    @staticmethod
    def head(status: int, fields: dict[str, str], length: int = 0) -> bytes:
        """Return the head of an answer, made so long."""
        lines = [f"HTTP/1.1 {status} Said", *(f"{name}: {value}" for name, value in fields.items())]
        short = "\r\n".join([*lines, "", ""]).encode("latin-1")
        if length > len(short) + 10:
            # The padding comes first, and the fields that matter at the end of the head.
            lines.insert(1, "X-Pad: " + "p" * (length - len(short) - 9))
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def do_none(self, asked: Asked) -> bool:
        asked.connection.sendall(self.head(asked.status, asked.fields) + asked.body)
        return True

    def do_head(self, asked: Asked) -> bool:
        # Half of the heads are short, so that the fields that matter are met.
        head, at, how = (
            self.head(asked.status, asked.fields, HEAD if asked.what["bit"] % 2 else 0),
            asked.what["at"],
            asked.what["how"],
        )
        at %= len(head)
        if how in ("close", "reset", "stall"):
            asked.connection.sendall(head[:at])
            return self.end(asked.connection, how)
        changed = {
            "garbage": head[:at] + random.Random(at).randbytes(2000),
            "flip": head[:at] + bytes([head[at] ^ 1 << asked.what["bit"]]) + head[at + 1 :],
            "zero": head[:at] + b"\0" + head[at + 1 :],
            "newline": head[:at] + b"\r\n" + head[at:],
            "drop": head[:at] + head[at + 1 :],
        }[how]
        asked.connection.sendall(changed + asked.body)
        # Other changes close the connection: a client would wait for a body that is too short.
        return how == "flip"

    def end(self, connection: socket.socket, how: str) -> bool:
        if how == "stall":
            select.select([connection], [], [], 10)
        if how == "reset":
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        return False

    def do_body(self, asked: Asked) -> bool:
        if asked.what["how"] == "more":
            asked.connection.sendall(
                self.head(asked.status, asked.fields) + asked.body + self.data[:70_000]
            )
            return True
        asked.connection.sendall(
            self.head(asked.status, asked.fields)
            + asked.body[: asked.what["at"] % max(1, len(asked.body))]
        )
        return self.end(asked.connection, asked.what["how"])

    def do_status(self, asked: Asked) -> bool:
        asked.fields["Retry-After"] = asked.what["retry"]
        asked.connection.sendall(self.head(asked.what["status"], asked.fields) + asked.body)
        return False

    def do_field(self, asked: Asked) -> bool:
        asked.status = asked.what["status"] if asked.what["status"] != 206 else asked.status
        if asked.what["twice"]:
            asked.fields[asked.what["name"].lower()] = asked.fields.get(asked.what["name"], "x")
        asked.fields[asked.what["name"]] = asked.what["value"]
        asked.connection.sendall(self.head(asked.status, asked.fields) + asked.body)
        return False

    def do_raw(self, asked: Asked) -> bool:
        asked.connection.sendall(RAW[asked.what["raw"]])
        return False

    def do_chunks(self, asked: Asked) -> bool:
        if not asked.what["both"]:
            del asked.fields["Content-Length"]
        asked.fields["Transfer-Encoding"] = "chunked"
        # Chunks that a client may accept have the right bytes: it could not detect others.
        asked.connection.sendall(
            self.head(asked.status, asked.fields)
            + CHUNKS[asked.what["raw"]].replace(b"12345", asked.body[:5])
        )
        return False

    def do_flood(self, asked: Asked) -> bool:
        begin, piece = {
            "1xx": (b"", b"HTTP/1.1 103 Hint\r\nLink: x\r\n\r\n" * 100),
            "fields": (b"HTTP/1.1 200 OK\r\n", b"X-Field: value\r\n" * 100),
            "field": (b"HTTP/1.1 200 OK\r\nX: ", b"x" * 10_000),
            "status": (b"HTTP/1.1 200 ", b"x" * 10_000),
            "chunk": (
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
                b"1\r\nx\r\n" * 2000,
            ),
            "body": (b'HTTP/1.1 200 OK\r\nETag: "one"\r\n\r\n', b"x" * 10_000),
        }[asked.what["of"]]
        asked.connection.sendall(begin)
        end = time.monotonic() + 12
        while time.monotonic() < end:
            asked.connection.sendall(piece)
        return False

    def do_slow(self, asked: Asked) -> bool:
        head = self.head(asked.status, asked.fields)
        if asked.what["of"] == "latency":
            time.sleep(0.5)
        body = asked.body
        pieces = {
            "head": [*(bytes([one]) for one in head), body],
            "bandwidth": [head, *(body[at : at + 100_000] for at in range(0, len(body), 100_000))],
            "latency": [head, body],
            "body": [head, *(body[at : at + 1] for at in range(300)), body[300:]],
        }
        for piece in pieces[asked.what["of"]]:
            asked.connection.sendall(piece)
            time.sleep(0.02)
        return True

    def do_after(self, asked: Asked) -> bool:
        # One answer more, that was not requested: bytes of another range.
        asked.connection.sendall(self.head(asked.status, asked.fields) + asked.body)
        asked.connection.sendall(self.head(asked.status, asked.fields) + asked.body[::-1])
        return True

    def do_redirect(self, asked: Asked) -> bool:
        number = self.asked[asked.number]
        to = {
            "self": asked.path,
            "two": f"{asked.path}?{number % 2}",
            "deeper": f"{asked.path}{'x' * 200}",
            "right": asked.path,
            "https": f"https://127.0.0.1:{self.port}{asked.path}",
        }[asked.what["to"]]
        if asked.what["to"] == "right" and "?there" in asked.path:
            return self.do_none(asked)
        asked.fields = {
            "Location": to + ("?there" if asked.what["to"] == "right" else ""),
            "Content-Length": "0",
        }
        asked.connection.sendall(self.head(asked.what["status"], asked.fields))
        return True


def main() -> None:
    campaign = cases.Campaign(case, "kind", cases.options(__doc__).parse_args())
    with scratch() as folder, environment(cases.PATIENCE):
        save_path(folder, OLD)
        by_path(folder)
        data = (folder / "f.tensors").read_bytes()
        address = lambda server: f"http://127.0.0.1:{server.port}"  # noqa: E731
        with serving(lambda: Server(data), address) as url:

            def load(number: int) -> float:
                return value_of(tensorizer.load(
                    f"{url}/{number}/f.tensors", "cpu", num_readers=[None, 1][number % 2],
                    verify_hash=number % 3 == 0))  # fmt: skip

            def batch(numbers: list[int]) -> Iterator[dict]:
                return cases.run_batch(lambda one: cases.judged(one, partial(load, one)), numbers)

            campaign.run(batch)
    campaign.end("network", "faults of a server")


if __name__ == "__main__":
    main()
