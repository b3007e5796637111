"""Measure loads of a sharded model by a group of ranks, beside other loaders and each by itself.

    python benchmarks/ranks.py [--quick] [--rounds N] [--ranks N] [--record] [NAME ...]

Ranks are processes of gloo on this machine. nginx serves the shards by HTTP and by S3; all
connections to it go through one relay, which lets 200 MB/s pass in total, however many they are,
and counts the bytes. Local shards are in the page cache. The loads to a device need CUDA, or the
emulated one: ``tests/cuda/emulator/run.sh python benchmarks/ranks.py device``. All bytes are
compared. The figure is the time from the moment when all ranks are there to the moment when the
last one has its tensors; ``--record`` keeps the figures under ``benchmarks/records``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import peers
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


class Load(NamedTuple):
    """A way to load: its text, where the shards are, and the loader."""

    text: str
    source: str
    loader: str


#: The loads that are measured, in turns.
LOADS = {
    "http": Load("`load(url, group=)`", "http", "group"),
    "http-alone": Load("`load(url)` at each rank at once", "http", "alone"),
    "s3": Load("S3, `load(url, group=)`", "s3", "group"),
    "s3-runai": Load("S3, run:ai, distributed", "s3", "run:ai"),
    "local": Load("local shards, `load(path, group=)`", "local", "group"),
    "local-fastsafetensors": Load("local shards, fastsafetensors", "local", "fastsafetensors"),
    "device": Load("local shards to CUDA, `load(path, group=)`", "local", "device"),
}


class Figures(NamedTuple):
    """The time and the bytes of one load.

    Attributes:
        seconds: Until all ranks had their tensors.
        cpu: CPU seconds of a rank for a GB.
        served: Bytes that the server sent, by those of the tensors; None without a server.
        read: Bytes that a rank read of files, at most, by those of the tensors.
        bus: Bytes over the bus of a rank, at most, by those of the tensors; None without the
            emulated CUDA, which counts them.

    """

    seconds: float
    cpu: float
    served: float | None
    read: float
    bus: float | None


def load_by(loader: str, files: list[str], index: str) -> dict[str, Any]:
    """Load all tensors by all ranks."""
    import torch.distributed as dist

    if loader == "run:ai":
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            streamer.stream_files(files, device="cpu", is_distributed=True, owned=True)
            return dict(streamer.get_tensors())
    if loader == "fastsafetensors":
        from fastsafetensors import ParallelLoader

        fast = ParallelLoader(dist.group.WORLD, files, device="cpu", nogds=True)
        try:
            return dict(fast.iterate_weights())
        finally:
            fast.close()
    import tensorizer

    device = "cuda" if loader == "device" else "cpu"
    # Ranks of one machine read local files by themselves, unless a device is the target.
    from tensorizer.group.members import FreeGroup

    together: Any = None if loader == "alone" else dist.group.WORLD
    if loader == "device":
        together = FreeGroup(dist.group.WORLD, shares_local_files=True)
    return tensorizer.load(index, device, group=together)


def copied_to_devices() -> int | None:
    """Return the bytes that went over the bus of the emulated CUDA; None if it is not there."""
    stat = getattr(ctypes.CDLL(None), "fake_cuda_stat", None)
    if stat is None:
        return None
    stat.restype, stat.argtypes = ctypes.c_uint64, [ctypes.c_char_p]
    return int(stat(b"bytes copied"))


def bytes_read() -> int:
    """Return the bytes that this process has read by calls."""
    (line,) = [line for line in Path("/proc/self/io").read_text().splitlines() if "rchar" in line]
    return int(line.split()[1])


def rank(number: int, world: int, port: int, what: tuple[str, list[str], str], to: Any) -> None:
    """Load once, and say how long all of them took, and whether all bytes are right."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    # run:ai shares a read over gloo only if it is told to.
    os.environ["RUNAI_STREAMER_DIST"] = "1"
    peers.import_for(what[0])
    import tensorizer  # noqa: F401
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=number, world_size=world)
    if what[0] == "device":
        torch.cuda.init()
    dist.barrier()
    begun, cpu, read, bus = (
        time.perf_counter(),
        time.process_time(),
        bytes_read(),
        copied_to_devices(),
    )
    found = load_by(*what)
    if what[0] == "device":
        torch.cuda.synchronize()
    cpu, read = time.process_time() - cpu, bytes_read() - read
    now = copied_to_devices()
    dist.barrier()
    took = time.perf_counter() - begun
    right = all(bool((tensor.cpu() == int(name)).all()) for name, tensor in found.items())
    size = sum(tensor.nbytes for tensor in found.values())
    to.put((took, cpu, read, None if now is None or bus is None else now - bus, right, size))
    to.close()
    to.join_thread()
    os._exit(0)


def measure(
    world: int, what: tuple[str, list[str], str], size: int
) -> tuple[float, float, float, float | None]:
    """Return what one load by all ranks took, as :class:`Figures` has it, without the server."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    answers = context.Queue()
    started = [
        context.Process(target=rank, args=(number, world, port, what, answers))
        for number in range(world)
    ]
    for process in started:
        process.start()
    try:
        found = [answers.get(timeout=240) for _ in started]
    finally:
        for process in started:
            process.join(20)
            process.kill()
    if any(not right or nbytes != size for *_, right, nbytes in found):
        raise RuntimeError("other bytes were loaded than were written")
    took, cpu, read, bus = zip(*(one[:4] for one in found), strict=True)
    over = None if None in bus else max(bus) / size
    return max(took), sum(cpu) / world / (size / 1e9), max(read) / size, over


def table(world: int, size: int, found: dict[str, list[Figures]]) -> str:
    """Return the figures as a page."""
    rows = []
    for name, figures in found.items():
        columns = list(zip(*figures, strict=True))
        seconds, cpu, served, read, bus = (
            None if None in column else statistics.median(column) for column in columns
        )
        each = "  ".join(f"{one.seconds:.2f}" for one in figures)
        of_copy = "" if served is None else f"{seconds / (size / RATE):.2f}"
        texts = ["" if value is None else f"{value:.3f}" for value in (served, read, bus)]
        # Sockets are not counted as files.
        texts[1] = texts[1] if LOADS[name].source == "local" else ""
        rows.append(
            f"| {LOADS[name].text} | {seconds:.2f} | {each} | {of_copy} | "
            f"{' | '.join(texts)} | {cpu:.2f} |"
        )
    rounds = max(len(figures) for figures in found.values())
    return f"""# One download for {world} ranks

{os.cpu_count()} cores, torch {version("torch")}, commit {commit()}.
{size / 1e9:.3g} GB of tensors in shards; the server is nginx behind a relay that lets
{RATE // 10**6} MB/s pass over all connections together; {world} ranks of gloo on the same machine,
in turns, {rounds} rounds, medians. All bytes were compared. One copy of the file at that rate takes
{size / RATE:.2f} s. The columns before the last are shares of the file: what the server sent, what
a rank read of files, and what went over its bus.

    python benchmarks/ranks.py --rounds {rounds} --ranks {world} {" ".join(found)}

| | seconds | each | of one copy | served | read | bus | CPU s/GB/rank |
|---|---|---|---|---|---|---|---|
{chr(10).join(rows)}
"""


def measured(
    chosen: argparse.Namespace, places: dict[str, tuple[list[str], str]], served: Any, size: int
) -> dict[str, list[Figures]]:
    """Measure the chosen loads in turns."""
    found: dict[str, list[Figures]] = {name: [] for name in chosen.names}
    for _ in range(chosen.rounds):
        for name, figures in found.items():
            load, before = LOADS[name], served.value
            took, cpu, read, bus = measure(chosen.ranks, (load.loader, *places[load.source]), size)
            sent = None if load.source == "local" else (served.value - before) / size
            figures.append(Figures(took, cpu, sent, read, bus))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="64 MB, one round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--record", action="store_true", help="keep the figures")
    usual = [name for name in LOADS if name != "device"]
    parser.add_argument("names", nargs="*", default=usual, help=", ".join(LOADS))
    chosen = parser.parse_args()
    count = 16 if chosen.quick else 500
    chosen.rounds = 1 if chosen.quick else chosen.rounds
    import tensorizer
    import torch

    with tempfile.TemporaryDirectory() as name, server("nginx", Path(name)) as host:
        if host is None:
            raise SystemExit("nginx is not installed")
        made = {str(n): torch.full((1000, 1000), float(n)) for n in range(count)}
        index = "model.safetensors.index.json"
        tensorizer.save(made, Path(name) / "model.safetensors", max_shard_size=count * 10**6)
        size = sum(tensor.nbytes for tensor in made.values())
        del made
        listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        context = multiprocessing.get_context("fork")
        served = context.Value("q", 0)
        between = context.Process(target=relay, args=(listener, int(host.split(":")[1]), served))
        between.start()
        front = f"127.0.0.1:{listener.getsockname()[1]}"
        os.environ |= peers.s3_environment(front)
        shards = sorted(path.name for path in Path(name).glob("*.safetensors"))
        bases = {"http": f"http://{front}", "s3": "s3://bucket", "local": name}
        places = {
            source: ([f"{base}/{shard}" for shard in shards], f"{base}/{index}")
            for source, base in bases.items()
        }
        try:
            found = measured(chosen, places, served, size)
        finally:
            between.terminate()
            between.join()
    page = table(chosen.ranks, size, found)
    print(page)
    if chosen.record:
        folder = HERE / "records" / f"{os.cpu_count()}-core-{os.uname().machine}"
        day = datetime.datetime.now(datetime.timezone.utc).date()
        kind = "-device" if "device" in found else ""
        (folder / f"ranks{kind}-{chosen.ranks}-{day}.md").write_text(page)


if __name__ == "__main__":
    main()
