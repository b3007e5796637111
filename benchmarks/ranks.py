"""Measure a load by a group of ranks beside loads of each by itself, from one slow server.

    python benchmarks/ranks.py [--quick] [--rounds N] [--ranks N] [--record]

nginx serves the shards; all connections to it go through one relay, which lets 200 MB/s pass in
total, however many they are, and counts the bytes. Ranks are processes of gloo on this machine. All
bytes are compared. The figure is the time from the moment when all ranks are there to the moment
when the last one has its tensors; ``--record`` keeps the figures under ``benchmarks/records``.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from machine import commit, version
from run import HERE
from serve import server

#: Bytes a second that the server sends, over all connections.
RATE = 200_000_000
#: Bytes that are taken from the bucket at a time.
PIECE = 1 << 18


class Bucket:
    """Lets so many bytes a second pass; nothing is saved up beyond 20 ms."""

    def __init__(self, rate: float) -> None:
        self._rate, self._free, self._lock = rate, time.monotonic(), threading.Lock()

    def wait(self, count: int) -> None:
        """Wait until so many bytes may pass."""
        with self._lock:
            self._free = max(self._free, time.monotonic() - 0.02) + count / self._rate
            until = self._free
        time.sleep(max(0.0, until - time.monotonic()))


def relay(listener: socket.socket, port: int, served: Any) -> None:
    """Pass connections on to a server, and its answers back at a limited rate; count these."""
    bucket = Bucket(RATE)

    def forward(source: socket.socket, target: socket.socket, limited: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE):
                if limited:
                    bucket.wait(len(data))
                    with served.get_lock():
                        served.value += len(data)
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    while True:
        client, _ = listener.accept()
        behind = socket.create_connection(("127.0.0.1", port))
        for pair in ((client, behind, False), (behind, client, True)):
            threading.Thread(target=forward, args=pair, daemon=True).start()


def rank(number: int, world: int, port: int, what: tuple[str, bool], answers: Any) -> None:
    """Load once, and say how long all of them took, and whether all bytes are right."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    url, together = what
    import tensorizer
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=number, world_size=world)
    dist.barrier()
    begun, cpu = time.perf_counter(), time.process_time()
    found = tensorizer.load(url, "cpu", group=dist.group.WORLD if together else None)
    cpu = time.process_time() - cpu
    dist.barrier()
    took = time.perf_counter() - begun
    right = all(bool((tensor == int(name)).all()) for name, tensor in found.items())
    answers.put((took, cpu, right, sum(tensor.nbytes for tensor in found.values())))
    answers.close()
    answers.join_thread()
    os._exit(0)


def measure(world: int, url: str, together: bool, size: int) -> tuple[float, float]:
    """Return the seconds of one load by all ranks, and the CPU seconds of each for a GB."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    answers = context.Queue()
    started = [
        context.Process(target=rank, args=(number, world, port, (url, together), answers))
        for number in range(world)
    ]
    for process in started:
        process.start()
    found = [answers.get(timeout=120) for _ in started]
    for process in started:
        process.join(20)
    if any(not right or nbytes != size for _, _, right, nbytes in found):
        raise RuntimeError("other bytes were loaded than were written")
    return max(one[0] for one in found), sum(one[1] for one in found) / world / (size / 1e9)


def table(world: int, size: int, found: dict[bool, list[tuple[float, float, float]]]) -> str:
    """Return the figures as a page."""
    rows = []
    for together, what in (
        (True, "`load(url, group=)`"),
        (False, "`load(url)` at each rank at once"),
    ):
        seconds, cpu, served = (
            statistics.median(column) for column in zip(*found[together], strict=True)
        )
        each = "  ".join(f"{one[0]:.2f}" for one in found[together])
        of_rate = seconds / (size / RATE)
        rows.append(
            f"| {what} | {seconds:.2f} | {each} | {of_rate:.2f} | {served:.3f} | {cpu:.2f} |"
        )
    rounds = len(found[True])
    return f"""# One download for {world} ranks

{os.cpu_count()} cores, torch {version("torch")}, commit {commit()}.
{size / 1e9:.3g} GB of tensors in shards at nginx, behind a relay that lets {RATE // 10**6} MB/s pass
over all connections together; {world} ranks of gloo on the same machine, in turns, {rounds} rounds, medians.
All bytes were compared. One copy of the file at that rate takes {size / RATE:.2f} s.

    python benchmarks/ranks.py --rounds {rounds} --ranks {world}

| | seconds | each | of one copy | bytes served, of the file | CPU s/GB/rank |
|---|---|---|---|---|---|
{chr(10).join(rows)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="64 MB, one round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--record", action="store_true", help="keep the figures")
    chosen = parser.parse_args()
    count = 16 if chosen.quick else 500
    rounds = 1 if chosen.quick else chosen.rounds
    import tensorizer
    import torch

    with tempfile.TemporaryDirectory() as name, server("nginx", Path(name)) as host:
        if host is None:
            raise SystemExit("nginx is not installed")
        made = {str(n): torch.full((1000, 1000), float(n)) for n in range(count)}
        tensorizer.save(made, Path(name) / "model.safetensors", max_shard_size=count * 10**6)
        size = sum(tensor.nbytes for tensor in made.values())
        del made
        listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        context = multiprocessing.get_context("fork")
        served = context.Value("q", 0)
        between = context.Process(target=relay, args=(listener, int(host.split(":")[1]), served))
        between.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/model.safetensors.index.json"
        found: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
        try:
            for _ in range(rounds):
                for together in (True, False):
                    before = served.value
                    figures = measure(chosen.ranks, url, together, size)
                    found[together].append((*figures, (served.value - before) / size))
        finally:
            between.terminate()
            between.join()
    page = table(chosen.ranks, size, found)
    print(page)
    if chosen.record:
        folder = HERE / "records" / f"{os.cpu_count()}-core-{os.uname().machine}"
        day = datetime.datetime.now(datetime.timezone.utc).date()
        (folder / f"ranks-{chosen.ranks}-{day}.md").write_text(page)


if __name__ == "__main__":
    main()
