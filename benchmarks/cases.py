"""Cases of the benchmarks: models as shapes, and the engines that load or save them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True)
class Model:
    """Tensors of one dtype and size; bytes come from a seed."""

    #: Rows of each tensor.
    rows: ClassVar[int] = 32

    name: str
    count: int
    total_bytes: int

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return tensors of random bits, 3% of them NaN or infinite; the same on every call."""
        generator = torch.Generator().manual_seed(17)
        each = self.total_bytes // self.count // 2 // 32 * 32
        block = torch.randint(-(2**62), 2**62, (self.count * each // 4,), generator=generator)
        flat = block.view(torch.float16)
        return {
            f"model.layers.{i}.mlp.down_proj.weight": flat[i * each : (i + 1) * each].view(
                self.rows, -1
            )
            for i in range(self.count)
        }


#: The sizes that the goals of the project name, and smaller ones to try the programs.
FULL = {
    "large": Model("large", 201, 2_200_000_000),
    "3k": Model("3k", 3_000, 254_000_000),
    "20k": Model("20k", 20_000, 256_000_000),
    "tiny": Model("tiny", 200_000, 12_800_000),
    "adam": Model("adam", 300, 1_000_000_000),
}
QUICK = {
    "large": Model("large", 21, 42_000_000),
    "3k": Model("3k", 300, 5_000_000),
    "20k": Model("20k", 1_000, 6_000_000),
    "tiny": Model("tiny", 2_000, 128_000),
    "adam": Model("adam", 30, 10_000_000),
}


@dataclass(frozen=True)
class Case:
    """One comparison. The first engine is ours; baselines are measurements of the machine."""

    name: str
    title: str
    model: str
    engines: tuple[str, ...]
    baselines: tuple[str, ...] = ()
    cold: bool = False
    server: str | None = None


#: Loaders that copy the bytes into private memory, as ours does by default.
PRIVATE = ("tensorizer 2.12.1", "torch.load", "run:ai", "fastsafetensors")
#: Loaders whose tensors are views of a mapping of the file.
MAPPED = ("safetensors", "torch.load mmap")
LOADERS = (*PRIVATE, *MAPPED)

CASES = [
    Case("read", "load into memory of their own, every byte touched", "large",
         ("ours", *PRIVATE), ("read",)),
    Case("mapped", "use in place in a mapping, every byte touched", "large",
         ("ours mmap", *MAPPED)),
    Case("open", "open a mapping, nothing touched", "large",
         ("ours mmap open", "safetensors open")),
    Case("verify", "load and verify SHA-256", "large",
         ("ours verify", "2.12.1 verify"), ("sha256",)),
    Case("verify-crc32", "load and verify CRC-32", "large",
         ("ours verify-crc32", "ours")),
    Case("decrypt", "load an encrypted file, touched", "large",
         ("ours decrypt", "2.12.1 decrypt"), ("secretbox", "read-secretbox")),
    Case("decrypt-verify", "load an encrypted file and verify SHA-256", "large",
         ("ours decrypt-verify", "2.12.1 decrypt-verify")),
    Case("encrypt", "save encrypted, with fsync", "large",
         ("ours encrypt", "2.12.1 encrypt")),
    Case("load-3k", "3,000 tensors, touched", "3k", ("ours", "ours mmap", *LOADERS), ("read",)),
    Case("load-20k", "20,000 tensors, touched", "20k", ("ours", "ours mmap", *LOADERS), ("read",)),
    Case("tiny-open", "open a file of 200,000 tensors of 64 bytes", "tiny", ("ours index",)),
    Case("tiny", "load 200,000 tensors of 64 bytes, nothing touched", "tiny",
         ("ours plain", "ours parameters", "safetensors open")),
    Case("cold", "load, nothing in the page cache", "large",
         ("ours", "ours mmap", "tensorizer 2.12.1", "safetensors", "torch.load", "run:ai",
          "fastsafetensors"),
         ("direct",), cold=True),
    Case("http", "load from nginx on this machine, touched", "large",
         ("ours http", "2.12.1 http", "requests, then safetensors"), ("curl", "receive"),
         server="nginx"),
    Case("http-3k", "3,000 tensors from nginx, touched", "3k",
         ("ours http", "2.12.1 http", "requests, then safetensors"), ("curl", "receive"),
         server="nginx"),
    Case("s3", "load from S3 on this machine, touched", "large",
         ("ours s3", "2.12.1 s3", "run:ai s3", "run:ai tuned s3", "boto3, then safetensors"),
         ("curl", "receive"), server="nginx"),
    Case("slow", "load from a server 50 ms away that gives each connection 100 MB/s", "large",
         ("ours http", "2.12.1 http", "requests, then safetensors"), ("ideal",), server="slow"),
    Case("faulty", "load from a server that breaks off every 50th answer", "large",
         ("ours http",), ("clean",), server="faulty"),
    Case("upload", "upload to S3 on this machine", "large",
         ("ours upload", "2.12.1 upload", "boto3 upload of safetensors"), server="s3"),
    Case("redis", "load from Redis on this machine, touched", "large",
         ("ours redis", "2.12.1 redis"), server="redis"),
    Case("to-redis", "copy a file to Redis on this machine", "large",
         ("ours to_redis", "2.12.1 to_redis"), server="redis"),
    Case("save", "save with fsync", "large",
         ("ours save", "2.12.1 save", "safetensors save", "torch.save")),
    Case("write-tensor", "save 3,000 tensors one by one, with fsync", "3k",
         ("ours write-tensor", "2.12.1 write-tensor")),
    Case("write-tensor-file", "save 200,000 tensors of 64 bytes one by one, into an open file",
         "tiny", ("ours write-tensor file",)),
    Case("checkpoint-load", "torch.load of the state of Adam, touched", "adam",
         ("ours checkpoint", "torch.load checkpoint", "2.12.1 checkpoint")),
    Case("checkpoint-save", "torch.save of the state of Adam; ours with fsync", "adam",
         ("ours checkpoint save", "torch.save checkpoint save, synced",
          "torch.save checkpoint save", "2.12.1 checkpoint save")),
    Case("import", "import, after torch", "3k",
         ("ours import", "2.12.1 import", "safetensors import")),
]  # fmt: skip
#: Baselines of the machine itself that are measured: see baselines.py.
BASELINES = {baseline for case in CASES for baseline in case.baselines}
