"""The host's share of a load to a device: copies of the emulated CUDA that cost nothing.

    FAKE_CUDA_FREE_COPIES=1 sh tests/cuda/emulator/run.sh python benchmarks/gpu/host_share.py

The same file, in the page cache, in turns: threads that read it into pinned memory with bare
``pread`` calls, one for each core, and ``tensorizer.load`` to the device. What the device has
afterwards is nothing; that the bytes arrive is what ``tests/cuda`` shows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import tensorizer
import torch

#: Bytes that one call reads: a staging buffer.
STEP = 4 << 20
#: Staging buffers that a loop goes round in.
BUFFERS = 4


def write(path: Path, count: int, total: int) -> None:
    each = total // count // 2 // 64 * 64
    tensors = {f"t.{i}": torch.full((each,), i % 100, dtype=torch.float16) for i in range(count)}
    tensorizer.save(tensors, path, hashes="crc32")


def bare(path: Path, threads: int, staging: list[memoryview]) -> float:
    """Read a file with preadv into pinned memory; return seconds."""
    size = path.stat().st_size
    descriptor = os.open(path, os.O_RDONLY)

    def loop(number: int) -> None:
        mine = staging[number]
        for turn, at in enumerate(range(number * STEP, size, threads * STEP)):
            start = turn % BUFFERS * STEP
            os.preadv(descriptor, [mine[start : start + STEP]], at)

    crew = [threading.Thread(target=loop, args=(n,)) for n in range(threads)]
    begun = time.perf_counter()
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    took = time.perf_counter() - begun
    os.close(descriptor)
    return took


def ours(path: Path) -> float:
    begun = time.perf_counter()
    tensors = tensorizer.load(path, "cuda")
    torch.cuda.synchronize()
    took = time.perf_counter() - begun
    del tensors
    torch.cuda.empty_cache()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tensors", type=int, nargs="*", default=[201, 20_000])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    if os.environ.get("FAKE_CUDA_FREE_COPIES") != "1" or not torch.cuda.is_available():
        sys.exit(f"usage: {__doc__.splitlines()[2].strip()}")
    threads = os.cpu_count() or 2
    pinned = [
        torch.ones(BUFFERS * STEP, dtype=torch.uint8, pin_memory=True) for _ in range(threads)
    ]
    staging = [memoryview(tensor.numpy()) for tensor in pinned]
    for count in options.tensors:
        path = options.folder / f"host-share-{count}.tensors"
        try:
            write(path, count, int(options.gigabytes * 1e9))
            size = path.stat().st_size
            rows: dict[str, list[float]] = {"bare": [], "ours": []}
            ours(path)
            for _ in range(options.rounds):
                rows["bare"].append(size / bare(path, threads, staging) / 1e9)
                rows["ours"].append(size / ours(path) / 1e9)
            ratios = [b / a for a, b in zip(rows["bare"], rows["ours"], strict=True)]
            result = {
                "tensors": count,
                "bytes": size,
                **{f"{name} GB/s": round(statistics.median(v), 2) for name, v in rows.items()},
                **{f"best {name} GB/s": round(max(v), 2) for name, v in rows.items()},
                "ours / bare": round(statistics.median(ratios), 3),
            }
            print(json.dumps(result), flush=True)
        finally:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
