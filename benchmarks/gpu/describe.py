"""Print, as a line of JSON, which device, machine and packages are measured."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
from checks import EMULATED
from machine import version

PACKAGES = (
    "tensorizer", "torch", "safetensors", "instanttensor", "fastsafetensors",
    "runai-model-streamer",
)  # fmt: skip


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def main() -> dict[str, object]:
    there = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if there else None,
        "emulated": EMULATED,
        "device_bytes": torch.cuda.get_device_properties(0).total_memory if there else 0,
        "driver": "none" if EMULATED else driver(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
    }


if __name__ == "__main__":
    print(json.dumps(main()))
