"""Checkpoints of many shards, and scattered tensors, of a server that answers after 100 ms.

Each row is the median of some rounds, with the requests, connections and bytes that the server has
counted beside it. Loaded bytes are compared. ``python benchmarks/shards.py`` prints a table.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import tensorizer
import torch
from safetensors.torch import save_file
from tensorizer.safetensors import safe_open

INDEX = "model.safetensors.index.json"
SHARDS, SIZE = 300, 10_000
LATENCY = 0.1
#: Bytes after which a slow server pauses.
STEP = 64 << 10
NAMES = ("requests", "connections", "bytes")


class Server(ThreadingHTTPServer):
    """Serves a folder by ranges; each answer, and each connection, waits for the latency."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, folder: Path, latency: float, pause: float, counts: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.latency, self.pause, self.counts = folder, latency, pause, counts

    def count(self, number: int, more: int) -> None:
        with self.counts.get_lock():
            self.counts[number] += more

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients may leave."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    server: Server

    def setup(self) -> None:
        self.server.count(1, 1)
        time.sleep(self.server.latency)
        super().setup()

    def do_GET(self) -> None:
        time.sleep(self.server.latency)
        path = self.server.folder / self.path[1:]
        size = path.stat().st_size
        first, last = self.headers.get("Range", f"bytes=0-{size - 1}")[6:].split("-")
        start, end = int(first), min(int(last or size), size - 1)
        self.send_response(206)
        self.send_header("Content-Length", str(end + 1 - start))
        self.send_header("ETag", f'"{size}"')
        self.send_header("Content-Range", f"bytes {start}-{end}/{size}")
        self.end_headers()
        self.wfile.flush()
        most = STEP if self.server.pause else end + 1 - start
        with path.open("rb") as file:
            while start <= end:
                len_ = min(most, end + 1 - start)
                start += os.sendfile(self.connection.fileno(), file.fileno(), start, len_)
                time.sleep(self.server.pause)
        self.server.count(0, 1)
        self.server.count(2, end + 1 - int(first))

    def log_message(self, *args: Any) -> None:
        pass


def serve(folder: Path, latency: float, pause: float, counts: Any, port: Any) -> None:
    """Serve until the process is ended."""
    server = Server(folder, latency, pause, counts)
    port.value = server.server_port
    server.serve_forever()


class Served:
    """A server in a process of its own."""

    def __init__(self, folder: Path, latency: float, pause: float = 0) -> None:
        self._counts, port = multiprocessing.Array("q", 3), multiprocessing.Value("i", 0)
        self._process = multiprocessing.Process(
            target=serve, args=(folder, latency, pause, self._counts, port), daemon=True
        )
        self._process.start()
        while not port.value:
            time.sleep(0.01)
        self.address = f"http://127.0.0.1:{port.value}"

    def measured(self, what: Callable[[], Any], rounds: int) -> dict[str, float]:
        """Return the median of the seconds of a call, and what it was of the counts."""
        times = []
        for _ in range(rounds):
            self._counts[:] = [0, 0, 0]
            begun = time.perf_counter()
            what()
            times.append(time.perf_counter() - begun)
        counts = dict(zip(NAMES, self._counts[:], strict=True))
        return {"seconds": statistics.median(times), **counts}

    def stop(self) -> None:
        self._process.terminate()
        self._process.join()


def value(number: int) -> torch.Tensor:
    return torch.full((SIZE,), float(number))


def write(folder: Path, count: int) -> None:
    weight_map = {}
    for number in range(count):
        name = f"model-{number:05}.safetensors"
        save_file({f"t{number}": value(number)}, folder / name)
        weight_map[f"t{number}"] = name
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def is_right(number: int, tensor: torch.Tensor) -> None:
    if not torch.equal(tensor.detach(), value(number)):
        raise AssertionError(f"t{number} has other bytes")


def one_by_load(address: str) -> None:
    is_right(7, tensorizer.load(address, "cpu", names=["t7"])["t7"])


def one_lazily(address: str) -> None:
    with tensorizer.TensorDeserializer(address, "cpu", lazy_load=True) as file:
        is_right(7, file["t7"])


def one_by_safe_open(address: str) -> None:
    with safe_open(address, "pt") as file:
        is_right(7, file.get_tensor("t7"))


def every(address: str) -> None:
    loaded = tensorizer.load(address, "cpu")
    for number in range(SHARDS):
        is_right(number, loaded[f"t{number}"])


def show(what: str, found: dict[str, float]) -> None:
    counts = " | ".join(f"{int(found.get(name, 0)):,}" for name in NAMES)
    print(f"| {what} | {found['seconds']:.2f} | {counts} |", flush=True)


def many_shards(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), SHARDS)
        server = Served(Path(name), LATENCY)
        address = f"{server.address}/{INDEX}"
        for call in (one_by_load, one_lazily, one_by_safe_open, every):
            found = server.measured(lambda call=call: call(address), rounds)  # type: ignore[misc]
            show(f"{SHARDS} shards, 100 ms: {call.__name__}", found)
        server.stop()


def scattered(rounds: int) -> None:
    """Every fifth of 5,000 tensors of 21 kB."""
    tensors = {f"t{n}": torch.full((5_250,), float(n)) for n in range(5_000)}
    names = [f"t{n}" for n in range(0, 5_000, 5)]
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder) / "one.safetensors")
        for latency, pause in ((0.0, 0.0), (0.0, 0.004), (0.002, 0.004), (LATENCY, 0.0)):
            server = Served(Path(folder), latency, pause)

            def some(address: str = server.address) -> None:
                loaded = tensorizer.load(f"{address}/one.safetensors", "cpu", names=names)
                if not all(torch.equal(loaded[name], tensors[name]) for name in names):
                    raise AssertionError("other bytes")

            found = server.measured(some, rounds)
            at = ", 16 MB/s a connection" if pause else ""
            show(f"1,000 of 5,000 tensors, 21 of 105 MB, {latency * 1000:.0f} ms{at}", found)
            server.stop()


def few_descriptors() -> None:
    """5,000 local shards with 512 descriptors."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), 5_000)
        program = (
            "import sys, time, tensorizer; begun = time.perf_counter()\n"
            f"loaded = tensorizer.load({str(Path(folder) / INDEX)!r}, 'cpu')\n"
            "assert all((loaded[f't{n}'] == n).all() for n in range(5_000))\n"
            "print(time.perf_counter() - begun)"
        )

        def limited() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))

        ran = subprocess.run(
            [sys.executable, "-c", program],
            check=False,
            preexec_fn=limited,
            capture_output=True,
            text=True,
        )
        if ran.returncode:
            print(f"| 5,000 local shards, 512 descriptors | {ran.stderr.splitlines()[-1]} | | | |")
        else:
            show("5,000 local shards, 512 descriptors", {"seconds": float(ran.stdout)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print("| | seconds | requests | connections | bytes sent |\n|---|---:|---:|---:|---:|")
    many_shards(rounds)
    scattered(rounds)
    few_descriptors()


if __name__ == "__main__":
    main()
