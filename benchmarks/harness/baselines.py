"""Baselines: a few lines that do a part of the work of a load or save. They are no upper bounds."""

from __future__ import annotations

import hashlib
import http.client
import mmap
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import torch

from harness.case import Engine, Given, Measured, program
from harness.process import ROOT, fresh, in_threads

STEP = 8 << 20


def filled(memory: mmap.mmap, size: int, work: Callable[[int], None]) -> Measured:
    """Have two threads fill memory, and read every byte of it as is done for engines."""
    start = time.perf_counter()
    in_threads(2, work)
    torch.frombuffer(memory, dtype=torch.int64, count=size // 8).sum()
    return Measured(time.perf_counter() - start, size)


def interleaved(path: Path, memory: mmap.mmap | bytearray, size: int) -> Callable[[int], None]:
    """Return a function that reads every second 8 MiB of a file into memory, for two threads."""
    view = memoryview(memory)
    descriptor = os.open(path, os.O_RDONLY)

    def work(which: int) -> None:
        for offset in range(which * STEP, size, 2 * STEP):
            part = view[offset : min(offset + STEP, size)]
            assert os.preadv(descriptor, [part], offset) == len(part)

    return work


def read(given: Given) -> Measured:
    """Read the file into fresh memory."""
    size = given.file.stat().st_size
    memory = fresh(size)
    return filled(memory, size, interleaved(given.file, memory, size))


def copy_read(given: Given) -> Measured:
    """Read the file into memory that was touched."""
    size = given.file.stat().st_size
    memory = bytearray(size)
    memory[::4096] = bytes([1]) * len(memory[::4096])
    return Measured(in_threads(2, interleaved(given.file, memory, size)), size)


def direct(given: Given) -> Measured:
    """Read the file with O_DIRECT."""
    size = given.file.stat().st_size
    step = max(4096, min(4 << 20, size // 4 // 4096 * 4096))
    size = size // step * step
    descriptor = os.open(given.file, os.O_RDONLY | os.O_DIRECT)

    def work(which: int) -> None:
        buffer = mmap.mmap(-1, step)
        for offset in range(which * step, size, 4 * step):
            assert os.preadv(descriptor, [buffer], offset) == step

    return Measured(in_threads(4, work), size)


def write(given: Given, threads: int = 2, flags: int = 0) -> Measured:
    """Write as many bytes of memory to a file, and sync it."""
    step = min(STEP, given.model.total // threads // 4096 * 4096)
    size = given.model.total // step * step
    block = mmap.mmap(-1, step)
    block.write(os.urandom(step))
    start = time.perf_counter()
    descriptor = os.open(given.out / "written", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags)

    def work(which: int) -> None:
        for offset in range(which * step, size, threads * step):
            assert os.pwrite(descriptor, block, offset) == step

    in_threads(threads, work)
    os.fsync(descriptor)
    seconds = time.perf_counter() - start
    os.close(descriptor)
    (given.out / "written").unlink()
    return Measured(seconds, size)


def sha256(given: Given) -> Measured:
    """Hash memory."""
    block = os.urandom(min(given.model.total // 2, 256 << 20))
    rounds = max(1, given.model.total // 2 // len(block))

    def work(_: int) -> None:
        digest = hashlib.sha256()
        for _ in range(rounds):
            digest.update(block)

    return Measured(in_threads(2, work), 2 * rounds * len(block))


def secretbox(given: Given, *arguments: str) -> Measured:
    """Decrypt memory, or a file that is read, with the libsodium that is linked."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    build = "build --quiet --release --workspace --example secretbox"
    subprocess.run([program("cargo"), *build.split()], cwd=ROOT, check=True)
    built = target / "release/examples/secretbox"
    size = given.file.stat().st_size
    done = subprocess.run(
        [built, str(size), *arguments], capture_output=True, text=True, check=True
    )
    seconds, count = done.stdout.split()
    return Measured(float(seconds), int(count))


def curl(given: Given) -> Measured:
    """Have two curl processes fetch the halves of the file and drop them."""
    size = given.file.stat().st_size
    url = f"http://{given.host}/{given.file.name}"
    halves = (f"0-{size // 2 - 1}", f"{size // 2}-{size - 1}")
    command = [program("curl"), "--silent", "--fail", "--output", "/dev/null", url, "--range"]
    start = time.perf_counter()
    if any(one.wait() for one in [subprocess.Popen([*command, half]) for half in halves]):
        raise RuntimeError("curl failed")
    return Measured(time.perf_counter() - start, size)


def receive(given: Given) -> Measured:
    """Receive the halves of the file from two sockets into fresh memory."""
    size = given.file.stat().st_size
    memory = fresh(size)
    view = memoryview(memory)
    host, port = given.host.split(":")

    def work(which: int) -> None:
        at, end = size * which // 2, size * (which + 1) // 2
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                f"GET /{given.file.name} HTTP/1.1\r\nHost: {host}\r\nRange: bytes={at}-{end - 1}"
                "\r\nConnection: close\r\n\r\n".encode()
            )
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                received = connection.recv(1)
                assert received, f"the connection ended after {head!r}"
                head += received
            assert head.startswith(b"HTTP/1.1 206"), head
            while at < end:
                count = connection.recv_into(view[at : min(at + STEP, end)])
                assert count, f"the connection ended at byte {at}"
                at += count

    return filled(memory, size, work)


def send(given: Given) -> Measured:
    """Upload as many bytes of memory in parts, on two connections."""
    size, part = given.model.total, 64 << 20
    view = memoryview(os.urandom(STEP) * (part // STEP))
    host, port = given.host.split(":")

    def post(query: str, body: bytes) -> bytes:
        with urllib.request.urlopen(f"http://{given.host}/bucket/sent?{query}", body) as answer:
            return answer.read()

    start = time.perf_counter()
    upload = post("uploads", b"").partition(b"<UploadId>")[2].partition(b"<")[0].decode()
    parts = -(-size // part)

    def work(which: int) -> None:
        connection = http.client.HTTPConnection(host, int(port))
        for number in range(which, parts, 2):
            target = f"/bucket/sent?partNumber={number + 1}&uploadId={upload}"
            connection.request("PUT", target, view[: min(part, size - number * part)])
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200, answer.status
        connection.close()

    in_threads(2, work)
    named = "".join(f"<PartNumber>{number + 1}</PartNumber>" for number in range(parts))
    post(f"uploadId={upload}", named.encode())
    return Measured(time.perf_counter() - start, size)


def _baseline(name: str, run: Callable[[Given], Measured], form: str = "safetensors") -> Engine:
    return Engine(name, run, form, imports=(), baseline=True, touch=False)


READ = _baseline("two threads read", read)
COPY_READ = _baseline("two threads read into touched memory", copy_read)
DIRECT = _baseline("four threads read with O_DIRECT", direct)
WRITE = _baseline("two threads write and sync", write, "")
WRITE_DIRECT = _baseline(
    "four threads write with O_DIRECT", lambda given: write(given, 4, os.O_DIRECT), ""
)
SHA256 = _baseline("two threads hash memory", sha256, "")
SECRETBOX = _baseline("two threads decrypt memory", secretbox)
READ_SECRETBOX = _baseline(
    "two threads read and decrypt", lambda given: secretbox(given, str(given.file))
)
CURL = _baseline("two curl processes", curl)
RECEIVE = _baseline("two sockets", receive)
SEND = _baseline("two connections send memory", send, "")
