"""Baselines of this machine, measured with as little code as possible.

    python baselines.py BASELINE FILE

read     two threads read the file from the page cache into fresh, huge-page-advised memory, and
         the bytes are touched as every engine's are
sha256   two threads hash memory
secretbox  two threads decrypt memory with the libsodium that is linked
read-secretbox  two threads read the file from the page cache into fresh memory, as above, and
         run the cipher and the authenticator over each piece
send     two connections upload as many bytes of memory to the S3 server of stores.py, in parts
direct   four threads read the file with O_DIRECT
write    two threads write a file of as many bytes through the page cache, and sync it
write-direct  four threads write it with O_DIRECT, and sync it
copy-read  two threads read the file from the page cache into memory that was touched
curl     two curl processes fetch the halves of the file and drop them
receive  two threads receive the halves of the file from sockets into fresh, huge-page-advised
         memory, and the bytes are touched
ideal    16 connections of 100 MB/s each bring the file, after the index was asked for
clean    the loader itself on a server that does not fail
copy     one thread copies memory to touched memory
"""

from __future__ import annotations

import hashlib
import http.client
import json
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import torch
from machine import fresh, have_memory

STEP = 8 << 20


def in_threads(count: int, work: Callable[[int], None]) -> float:
    """Run work in threads, numbered from 0; return the seconds until all have ended.

    Raises:
        Exception: The first error of a thread.

    """
    errors: list[Exception] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    if errors:
        raise errors[0]
    return seconds


def read_interleaved(path: Path, memory: mmap.mmap | bytearray, size: int) -> Callable[[int], None]:
    """Return a function that reads every second 8 MiB of a file into memory, for two threads."""
    view = memoryview(memory)
    descriptor = os.open(path, os.O_RDONLY)

    def work(which: int) -> None:
        for offset in range(which * STEP, size, 2 * STEP):
            part = view[offset : min(offset + STEP, size)]
            assert os.preadv(descriptor, [part], offset) == len(part)

    return work


def fill_and_touch(memory: mmap.mmap, size: int, work: Callable[[int], None]) -> dict[str, float]:
    """Have two threads fill memory, and read every byte of it as is done for engines."""
    start = time.perf_counter()
    in_threads(2, work)
    moved = time.perf_counter() - start
    torch.frombuffer(memory, dtype=torch.int64, count=size // 8).sum()
    return {"seconds": time.perf_counter() - start, "load_seconds": moved, "bytes": size}


def read(path: Path) -> dict[str, float]:
    size = path.stat().st_size
    memory = fresh(size)
    return fill_and_touch(memory, size, read_interleaved(path, memory, size))


def copy_read(path: Path) -> dict[str, float]:
    size = path.stat().st_size
    memory = bytearray(size)
    memory[::4096] = bytes([1]) * len(memory[::4096])
    return {"seconds": in_threads(2, read_interleaved(path, memory, size)), "bytes": size}


def write(path: Path, threads: int = 2, flags: int = 0) -> dict[str, float]:
    size = path.stat().st_size
    step = min(STEP, size // threads // 4096 * 4096)
    size = size // step * step
    out = path.with_suffix(".out")
    block = mmap.mmap(-1, step)
    block.write(os.urandom(step))
    start = time.perf_counter()
    descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags)

    def work(which: int) -> None:
        for offset in range(which * step, size, threads * step):
            assert os.pwrite(descriptor, block, offset) == step

    in_threads(threads, work)
    os.fsync(descriptor)
    seconds = time.perf_counter() - start
    os.close(descriptor)
    out.unlink()
    return {"seconds": seconds, "bytes": size}


def write_direct(path: Path) -> dict[str, float]:
    return write(path, 4, os.O_DIRECT)


def sha256(path: Path) -> dict[str, float]:
    size = path.stat().st_size
    block = os.urandom(min(size // 2, 256 << 20))
    rounds = max(1, size // 2 // len(block))

    def work(_: int) -> None:
        digest = hashlib.sha256()
        for _ in range(rounds):
            digest.update(block)

    return {"seconds": in_threads(2, work), "bytes": 2 * rounds * len(block)}


def secretbox(path: Path, *arguments: str) -> dict[str, float]:
    root = Path(__file__).resolve().parents[1]
    command = "cargo build --quiet --release --workspace --example secretbox"
    subprocess.run(command.split(), cwd=root, check=True)
    program = root / os.environ.get("CARGO_TARGET_DIR", "target") / "release/examples/secretbox"
    done = subprocess.run(
        [program, str(path.stat().st_size), *arguments], capture_output=True, text=True, check=True
    )
    seconds, size = done.stdout.split()
    return {"seconds": float(seconds), "bytes": int(size)}


def read_secretbox(path: Path) -> dict[str, float]:
    return secretbox(path, str(path))


def direct(path: Path) -> dict[str, float]:
    size = path.stat().st_size
    step = max(4096, min(4 << 20, size // 4 // 4096 * 4096))
    size = size // step * step
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def work(which: int) -> None:
        buffer = mmap.mmap(-1, step)
        for offset in range(which * step, size, 4 * step):
            assert os.preadv(descriptor, [buffer], offset) == step

    return {"seconds": in_threads(4, work), "bytes": size}


def send(path: Path) -> dict[str, float]:
    size, part = path.stat().st_size, 64 << 20
    parts = -(-size // part)
    view = memoryview(os.urandom(STEP) * (part // STEP))
    host, port = os.environ["BENCHMARK_SERVER"].split(":")
    url = f"http://{host}:{port}/bucket/sent"

    def post(query: str, body: bytes) -> bytes:
        with urllib.request.urlopen(f"{url}?{query}", body) as answer:
            return answer.read()

    start = time.perf_counter()
    upload = post("uploads", b"").partition(b"<UploadId>")[2].partition(b"<")[0].decode()

    def work(which: int) -> None:
        connection = http.client.HTTPConnection(host, int(port))
        for number in range(which, parts, 2):
            body = view[: min(part, size - number * part)]
            target = f"/bucket/sent?partNumber={number + 1}&uploadId={upload}"
            connection.request("PUT", target, body)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200, answer.status
        connection.close()

    in_threads(2, work)
    named = "".join(f"<PartNumber>{number + 1}</PartNumber>" for number in range(parts))
    post(f"uploadId={upload}", named.encode())
    return {"seconds": time.perf_counter() - start, "bytes": size}


def curl(path: Path) -> dict[str, float]:
    size = path.stat().st_size
    url = f"http://{os.environ['BENCHMARK_SERVER']}/{path.name}"
    ranges = (f"0-{size // 2 - 1}", f"{size // 2}-{size - 1}")
    start = time.perf_counter()
    for process in [
        subprocess.Popen(["curl", "--silent", "--fail", "--output", "/dev/null", "--range", r, url])
        for r in ranges
    ]:
        if process.wait() != 0:
            raise RuntimeError("curl failed")
    return {"seconds": time.perf_counter() - start, "bytes": size}


def receive(path: Path) -> dict[str, float]:
    size = path.stat().st_size
    memory = fresh(size)
    view = memoryview(memory)
    host, port = os.environ["BENCHMARK_SERVER"].split(":")

    def work(which: int) -> None:
        at, end = size * which // 2, size * (which + 1) // 2
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                f"GET /{path.name} HTTP/1.1\r\nHost: {host}\r\nRange: bytes={at}-{end - 1}\r\n"
                "Connection: close\r\n\r\n".encode()
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

    return fill_and_touch(memory, size, work)


def ideal(path: Path) -> dict[str, float]:
    from stores import LATENCY, RATE

    size = path.stat().st_size
    return {"seconds": 2 * LATENCY + size / RATE / 16, "bytes": size}


def clean(path: Path) -> dict[str, float]:
    from engines import checksum, load_http, warm_up
    from serve import server

    warm_up("ours http")
    with server("nginx", path.parent) as address:
        os.environ["BENCHMARK_SERVER"] = address or ""
        start = time.perf_counter()
        tensors = load_http(path.with_suffix(""))
        moved = time.perf_counter() - start
        checksum(tensors)
    size = sum(tensor.nbytes for tensor in tensors.values())
    return {"seconds": time.perf_counter() - start, "load_seconds": moved, "bytes": size}


def copy(path: Path) -> dict[str, float]:
    size = path.stat().st_size
    source = torch.ones(size // 8, dtype=torch.int64)
    target = torch.zeros_like(source)
    torch.set_num_threads(1)
    start = time.perf_counter()
    target.copy_(source)
    return {"seconds": time.perf_counter() - start, "bytes": size}


def measure(baseline: str, path: Path) -> dict[str, object]:
    """Measure a baseline with a file."""
    have_memory(path.stat().st_size)
    result = globals()[baseline.replace("-", "_")](path)
    return {**result, "verified": True}


if __name__ == "__main__":
    baseline, path = sys.argv[1:]
    print(json.dumps(measure(baseline, Path(path))))
    sys.stdout.flush()
    os._exit(0)
