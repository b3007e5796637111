"""Loading a model from Hugging Face's hub: its own client and safetensors, and `hf://` addresses.

The hub is the stand-in of the tests, on the same machine: what it sends comes from memory. Each
load is made in a process of its own, and its bytes are compared.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/python"))

import torch
from hub import Hub
from safetensors.torch import save

THEIRS = """
import huggingface_hub, safetensors.torch
def run(revision, options):
    path = huggingface_hub.hf_hub_download("org/repo", "model.safetensors", revision=revision)
    return safetensors.torch.load_file(path)
"""
OURS = """
import tensorizer
def run(revision, options):
    return tensorizer.load(f"hf://org/repo@{revision}/model.safetensors", **options)
"""
TIMED = """
import json, sys, time, torch
begun = time.perf_counter()
found = run(sys.argv[1], json.loads(sys.argv[2]))
# The sums touch what is only mapped.
sums = {name: int(tensor.view(torch.int64).sum()) for name, tensor in found.items()}
print(json.dumps([time.perf_counter() - begun, sums]))
"""


class Loads:
    """The loads of a measurement, each in a process of its own."""

    def __init__(self, endpoint: str, folder: Path, revision: str, sums: dict[str, int]) -> None:
        self.home, self.kept = folder / "hf", folder / "kept"
        self.revision, self.sums = revision, sums
        self.found: dict[str, list[float]] = {}
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TENSORIZER_"))}
        settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(self.home), "HF_HUB_DISABLE_XET": "1"}
        self.environment = plain | settings | {"TENSORIZER_CACHE_GB": "100"}

    def run(self, name: str, code: str, **options: object) -> None:
        """Load, and note the seconds, the sums included."""
        command = [sys.executable, "-c", code + TIMED, self.revision, json.dumps(options)]
        environment = self.environment
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        seconds, sums = json.loads(done.stdout.splitlines()[-1])
        assert sums == self.sums, "other bytes were loaded"
        self.found.setdefault(name, []).append(seconds)

    def round(self) -> None:
        """Run every case once, from nothing."""
        verified = {"device": "cpu", "verify_hash": True}
        self.run("hf://", OURS, device="cpu")
        self.run("hf://, verified", OURS, **verified)
        self.run("hf://, kept by cache_dir", OURS, device="cpu", cache_dir=str(self.kept))
        self.run("hf://, kept, again", OURS, device="cpu", cache_dir=str(self.kept))
        self.run("huggingface_hub + safetensors", THEIRS)
        self.run("huggingface_hub + safetensors, again", THEIRS)
        self.run("hf:// from that cache", OURS, device="cpu")
        self.run("hf:// from that cache, mapped", OURS, device="cpu", mmap=True)
        self.run("hf:// from that cache, verified", OURS, **verified)
        for folder in (self.home, self.kept):
            shutil.rmtree(folder)


def main() -> None:
    """Measure, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    count = max(1, int(options.gb * 1e9) // (64 << 20))
    torch.manual_seed(0)
    tensors = {f"t{n}": torch.randint(2**62, (8 << 20,)) for n in range(count)}
    sums = {name: int(tensor.sum()) for name, tensor in tensors.items()}
    data = save(tensors)
    del tensors
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, Hub() as hub:
        repo = hub.repo("org/repo", {"model.safetensors": data})
        loads = Loads(hub.endpoint, Path(folder), repo.refs["main"], sums)
        for _ in range(options.rounds):
            loads.round()
    print(f"{len(data) / 1e9:.2f} GB, {options.rounds} rounds\n")
    print("| case | seconds (median) | least | most | GB/s |\n|---|---|---|---|---|")
    for name, times in loads.found.items():
        median = statistics.median(times)
        speed = len(data) / 1e9 / median
        print(f"| {name} | {median:.2f} | {min(times):.2f} | {max(times):.2f} | {speed:.2f} |")


if __name__ == "__main__":
    main()
