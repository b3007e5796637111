"""A server of Redis cannot take more than time and memory that are bounded."""

import contextlib
import os
import socketserver
import threading

import pytest
from processes import run_python
from scripted import stop


class Hostile:
    """Speaks RESP: ``answer`` gets a command and what to write to; None answers OK."""

    def __init__(self, answer):
        outer = self
        self.answer, self.commands, self.over = answer, [], threading.Event()

        class Handler(socketserver.StreamRequestHandler):
            def handle(self):
                with contextlib.suppress(OSError, ValueError):
                    while line := self.rfile.readline():
                        words = []
                        for _ in range(int(line[1:])):
                            size = int(self.rfile.readline()[1:])
                            words.append(self.rfile.read(size + 2)[:-2])
                        outer.commands.append(words)
                        if not outer.answer(words, self.wfile, outer.over):
                            self.wfile.write(b"+OK\r\n")

        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.block_on_close = False
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()
        self.url = f"redis://127.0.0.1:{self.server.server_address[1]}/x"

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.over.set()
        stop(self.server, self.thread)


LOAD = """
import resource, sys, tensorizer
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    tensorizer.load(sys.argv[1])
except (OSError, ValueError, MemoryError) as error:
    print(type(error).__name__, error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def load(server, seconds="60"):
    """Load in another process; return the error, and by how many MiB the process has grown."""
    env = os.environ | {"TENSORIZER_TOTAL_SECONDS": seconds, "TENSORIZER_ATTEMPTS": "2"}
    done = run_python(LOAD, server.url, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    *error, grown = done.stdout.splitlines()
    return "\n".join(error), int(grown)


def scan(words):
    return words[0].upper() == b"SCAN"


def test_a_scan_without_end():
    def answer(words, out, over):
        if scan(words):
            out.write(b"*2\r\n$3\r\n%03d\r\n*0\r\n" % (len(words) + 100))
            return True
        return None

    with Hostile(answer) as server:
        error, grown = load(server, seconds="1")
    assert error.startswith("TimeoutError"), error
    assert "TENSORIZER_TOTAL_SECONDS" in error
    assert grown < 50


def test_keys_without_end():
    number = iter(range(1 << 60))

    def answer(words, out, over):
        if scan(words):
            keys = b"".join(b"$1000\r\nx:%0998d\r\n" % next(number) for _ in range(1000))
            out.write(b"*2\r\n$1\r\n7\r\n*1000\r\n" + keys)
            return True
        return None

    with Hostile(answer) as server:
        error, grown = load(server, seconds="1")
    assert error.startswith(("TimeoutError", "OSError")), error
    # Keys may take 64 MiB, and again that while their list grows.
    assert grown < 200


@pytest.mark.parametrize(
    ("start", "body"),
    [
        (b"$1000000000000\r\n", bytes(60_000)),
        (b"*2\r\n$1\r\n0\r\n*2147483647\r\n", b"$0\r\n\r\n" * 10_000),
        (b"*2\r\n$1\r\n0\r\n*2147483647\r\n", b"*0\r\n" * 10_000),
        (b"*2\r\n$1\r\n0\r\n*2147483647\r\n", b"*4\r\n" * 90 + b"*0\r\n" * 10_000),
    ],
    ids=["string", "strings", "lists", "nested lists"],
)
def test_an_answer_without_end(start, body):

    def answer(words, out, over):
        if scan(words):
            out.write(start)
            while not over.is_set():
                out.write(body)
            return True
        return None

    with Hostile(answer) as server:
        error, grown = load(server)
    assert "sent more than the 2097152 bytes that the commands may return" in error
    assert grown < 100


@pytest.mark.parametrize("length", [2**62, 2**63 - 1, 10])
def test_lengths_that_lie(length):
    def answer(words, out, over):
        command = words[0].upper()
        if command == b"SCAN":
            out.write(b"*2\r\n$1\r\n0\r\n*1\r\n$3\r\nx:0\r\n")
        elif command == b"STRLEN":
            out.write(b":%d\r\n" % length)
        elif command in (b"GET", b"GETRANGE"):
            with contextlib.suppress(OSError):
                out.write(b"$1000000000000\r\n")
                while not over.is_set():
                    out.write(bytes(60_000))
        else:
            return False
        return True

    with Hostile(answer) as server:
        error, grown = load(server)
    assert "more than the" in error
    assert "that the commands may return" in error
    assert grown < 100
