"""What a cache costs the first load, and what it gives the second: from HTTP, with and without.

And a new version of a model whose older one a module holds, of which 1 % of the bytes have changed.

The server is nginx, limited to a number of bytes a second or not at all. Each load is made in a
process of its own, and verified.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/python"))

import tensorizer
import torch
from servers import free_port, need, wait_for

CONNECTIONS = 4
CONF = """{user}daemon off; pid {folder}/pid; error_log {folder}/error; worker_processes 1;
events {{ worker_connections 64; }}
http {{
  access_log off; sendfile on;
  client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c;
  uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
  server {{
    listen 127.0.0.1:{port}; root {folder}/root;
    location /limited/ {{ alias {folder}/root/; limit_rate {rate}; }}
  }}
}}
"""
LOAD = """
import json, sys, time, torch, tensorizer
tensorizer.load(sys.argv[2])  # code, threads, and memory of a small file
begun = time.perf_counter()
found = tensorizer.load(sys.argv[1])
seconds = time.perf_counter() - begun
sums = [int(t.view(torch.int64).sum()) for t in found.values()]
print(json.dumps([seconds, sums]))
"""
RELOAD = """
import json, sys, time, torch, tensorizer
module = torch.nn.Module()
for name, tensor in tensorizer.load(sys.argv[2]).items():
    module.register_buffer(name, torch.empty_like(tensor))
def load(uri):
    with tensorizer.TensorDeserializer(uri, "cpu", lazy_load=True) as file:
        file.load_into_module(module, only_changed=True)
load(sys.argv[2])
begun = time.perf_counter()
load(sys.argv[1])
seconds = time.perf_counter() - begun
print(json.dumps([seconds, [int(t.sum()) for t in module.buffers()]]))
"""


def loaded(
    uri: str, before: Path, expected: list[int], cache: Path | None, code: str = LOAD
) -> float:
    """Return the seconds of a load in a process of its own, after comparing what it has loaded.

    The process loads the file ``before`` first.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TENSORIZER_CACHE"}
    environment["TENSORIZER_CONNECTIONS"] = str(CONNECTIONS)
    if cache is not None:
        environment |= {"TENSORIZER_CACHE": str(cache), "TENSORIZER_CACHE_GB": "100"}
    command = [sys.executable, "-c", code, uri, str(before)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    seconds, sums = json.loads(done.stdout)
    assert sums == expected, "other bytes were loaded"
    return seconds


def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Return the seconds of every case."""
    root = folder / "root"
    root.mkdir()
    count = max(1, int(options.gb * 1e9) // (64 << 20))
    torch.manual_seed(0)
    tensors = {f"t{n}": torch.randint(2**62, (8 << 20,)) for n in range(count)}
    expected = [int(tensor.sum()) for tensor in tensors.values()]
    tensorizer.save(tensors, root / "f.tensors")
    tensorizer.save({"a": torch.ones(8)}, folder / "small.tensors")
    length = max(1, int(options.gb * 1e9) // 800)
    versions = {f"t{n}": torch.randint(2**32, (length,)) for n in range(100)}
    tensorizer.save(versions, folder / "older.tensors")
    versions["t50"] += 1
    tensorizer.save(versions, root / "newer.tensors")
    newer = [int(tensor.sum()) for tensor in versions.values()]
    port = free_port()
    # Workers run as root too: another user could not read the folder.
    user = "user root; " if os.getuid() == 0 else ""
    rate = int(options.rate * 1e6 / CONNECTIONS)
    (folder / "conf").write_text(CONF.format(folder=folder, port=port, rate=rate, user=user))
    server = subprocess.Popen([need("nginx"), "-c", folder / "conf", "-p", folder])
    found: dict[str, list[float]] = {}
    try:
        wait_for(port, server)
        for number in range(options.rounds):
            for place in ("limited/", ""):
                uri = f"http://127.0.0.1:{port}/{place}f.tensors"
                cache = folder / f"cache{number}{bool(place)}"
                ways = {
                    "without": (uri, None),
                    "first": (uri, cache),
                    "second": (uri, cache),
                    "local file": (str(root / "f.tensors"), None),
                }
                for way, (address, kept) in ways.items():
                    seconds = loaded(address, folder / "small.tensors", expected, kept)
                    found.setdefault(f"{place or 'loopback/'}{way}", []).append(seconds)
                new = f"http://127.0.0.1:{port}/{place}newer.tensors"
                seconds = loaded(new, folder / "older.tensors", newer, None, RELOAD)
                found.setdefault(f"{place or 'loopback/'}1 % changed", []).append(seconds)
                shutil.rmtree(cache)
                time.sleep(1)
    finally:
        server.terminate()
        server.wait()
    return found


def main() -> None:
    """Measure, and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rate", type=float, default=300, help="MB/s of the limited server")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = measure(options, Path(folder))
    medians = {name: statistics.median(times) for name, times in found.items()}
    print("| case | seconds | of the speed without | of a local file's speed |\n|---|---|---|---|")
    for name, seconds in medians.items():
        place = name.split("/", maxsplit=1)[0]
        ratios = (medians[f"{place}/{other}"] / seconds for other in ("without", "local file"))
        print(
            f"| {name} | {seconds:.3f} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |"
        )


if __name__ == "__main__":
    main()
