"""Measures how fast a file is loaded with one reader, two, and so on.

python examples/benchmark_buffer_size.py ADDRESS [--num-readers 1 2 4 8 0] [--iterations 5]
    [--device DEVICE] [--verify-hash] [--json]

ADDRESS is a path, or any address that can be read. There is no size of a buffer to find any more:
a reader moves bytes straight into the tensors' memory. What is left to choose is how many readers
there are, threads for a local file and connections for a server; 0 leaves it to the package, and
no file gets more than its size is worth. A local file comes from the page cache, not from the disk.
Every load is compared with the first one.
"""

import argparse
import json
import statistics
import time

import tensorizer
import torch
from tensorizer import TensorDeserializer
from tensorizer.utils import convert_bytes, get_device


def load(args: argparse.Namespace, readers: int) -> tuple[dict[str, torch.Tensor], float]:
    """Return the tensors and the seconds that they took."""
    start = time.perf_counter()
    with TensorDeserializer(
        args.address, args.device, num_readers=readers or None, verify_hash=args.verify_hash
    ) as file:
        tensors = dict(file.items())
    if args.device.type == "cuda":
        torch.cuda.synchronize(args.device)
    return tensors, time.perf_counter() - start


def measure(args: argparse.Namespace, readers: int, expected: dict[str, torch.Tensor]) -> dict:
    """Return what was found out about a number of readers."""
    seconds = []
    for _ in range(args.iterations):
        tensors, took = load(args, readers)
        seconds.append(took)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
        del tensors
    report = tensorizer.stats()
    median = statistics.median(seconds)
    return {
        "readers": readers,
        "used": report["threads"],
        "bytes": report["bytes"],
        "seconds": seconds,
        "bytes_per_second": report["bytes"] / median,
        "reading": report["reading"],
        "fallbacks": report["fallbacks"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure loads with several numbers of readers.")
    parser.add_argument("address")
    parser.add_argument("--num-readers", type=int, nargs="+", default=[1, 2, 4, 8, 0])
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--device", type=torch.device, default=get_device())
    parser.add_argument("--verify-hash", action="store_true", help="compare hashes; takes time")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each number")
    args = parser.parse_args()

    # This one also brings a local file into the page cache.
    expected, _ = load(args, 0)
    for readers in args.num_readers:
        found = measure(args, readers, expected)
        if args.json:
            print(json.dumps(found))
            continue
        fastest, slowest = min(found["seconds"]), max(found["seconds"])
        print(
            f"{readers or 'as many as help':>15}: {found['used']} at work,"
            f" {convert_bytes(found['bytes_per_second'])}/s,"
            f" {fastest:.4f} to {slowest:.4f} s for {convert_bytes(found['bytes'])}"
        )


if __name__ == "__main__":
    main()
