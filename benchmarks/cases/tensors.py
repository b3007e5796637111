"""Files of the format `.tensors`: loaded and saved, beside the predecessor and other packages."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import replace

import peers
from harness import baselines
from harness.case import Case, Engine, Given, Measured
from ours import (
    DECRYPT,
    DECRYPT_VERIFY,
    LOAD,
    MMAP,
    SAVE,
    SAVE_ENCRYPTED,
    SAVE_ONE_BY_ONE,
    TENSORIZER,
    VERIFY,
    VERIFY_CRC32,
    old,
)  # fmt: skip

OLD = old(TENSORIZER)
PRIVATE = (OLD, peers.TORCH, peers.RUN_AI, peers.FAST)
MAPPED = (peers.SAFETENSORS, peers.TORCH_MMAP)
EVERY = (TENSORIZER, MMAP, *PRIVATE, *MAPPED, baselines.READ)


def importing(module: str) -> Callable[[Given], Measured]:
    """Return an import of a module."""

    def run(_: Given) -> Measured:
        start = time.perf_counter()
        importlib.import_module(module)
        return Measured(time.perf_counter() - start)

    return run


IMPORT = Engine("tensorizer", importing("tensorizer"), "", ())
CLASS = replace(TENSORIZER, name="tensorizer, TensorDeserializer")
UNTOUCHED = tuple(replace(one, touch=False) for one in (LOAD, CLASS, peers.SAFETENSORS))

CASES = [
    Case("tensors/read", "load a file in the page cache into memory of its own",
         (TENSORIZER, *PRIVATE, baselines.READ)),
    Case("tensors/mapped", "use a file in the page cache in place", (MMAP, *MAPPED)),
    Case("tensors/idle", "load after the machine's host took back free memory",
         (LOAD, replace(LOAD, name="tensorizer, after 4 s", idle=4)), quick=("tensorizer",)),
    Case("tensors/verify", "load and verify SHA-256", (VERIFY, old(VERIFY), baselines.SHA256)),
    Case("tensors/verify-crc32", "load and verify CRC-32", (VERIFY_CRC32, TENSORIZER)),
    Case("tensors/decrypt", "load an encrypted file",
         (DECRYPT, old(DECRYPT), baselines.SECRETBOX, baselines.READ_SECRETBOX),
         quick=("tensorizer", "tensorizer 2.12.1")),
    Case("tensors/decrypt-verify", "load an encrypted file and verify SHA-256",
         (DECRYPT_VERIFY, old(DECRYPT_VERIFY)), quick=None),
    Case("tensors/3k", "load 3,000 tensors", EVERY, "3k"),
    Case("tensors/20k", "load 20,000 tensors", EVERY, "20k", quick=None),
    Case("tensors/200k", "load 200,000 tensors of 64 bytes, nothing touched", UNTOUCHED, "200k"),
    Case("tensors/cold", "load, nothing in the page cache",
         (TENSORIZER, MMAP, OLD, peers.SAFETENSORS, peers.TORCH, peers.RUN_AI, peers.FAST,
          baselines.DIRECT), cold=True),
    Case("tensors/cold-run-ai", "load, nothing in the page cache, two engines only",
         (TENSORIZER, peers.RUN_AI), cold=True, quick=None),
    Case("tensors/http", "load from nginx on this machine",
         (TENSORIZER, OLD, peers.REQUESTS, baselines.CURL, baselines.RECEIVE),
         server="nginx", scheme="http"),
    Case("tensors/http-3k", "load 3,000 tensors from nginx on this machine",
         (TENSORIZER, OLD, peers.REQUESTS, baselines.CURL, baselines.RECEIVE), "3k",
         server="nginx", scheme="http", quick=None),
    Case("tensors/slow", "load from a server 50 ms away that gives a connection 100 MB/s",
         (TENSORIZER, OLD, peers.REQUESTS), server="50 ms away", scheme="http"),
    Case("tensors/faulty", "load from a server that breaks off every 50th response",
         (TENSORIZER,), server="breaking off", scheme="http"),
    Case("tensors/s3", "load from S3 on this machine",
         (TENSORIZER, OLD, peers.RUN_AI, peers.RUN_AI_FAST_S3, peers.BOTO3, baselines.CURL,
          baselines.RECEIVE), server="nginx", scheme="s3"),
    Case("tensors/upload", "upload to S3 on this machine",
         (SAVE, old(SAVE), peers.UPLOAD), server="objects"),
    Case("tensors/save", "save, synced", (SAVE, old(SAVE), peers.SAVE, peers.SAVE_TORCH)),
    Case("tensors/save-encrypted", "save encrypted, synced",
         (SAVE_ENCRYPTED, old(SAVE_ENCRYPTED))),
    Case("tensors/save-one-by-one", "save 3,000 tensors one by one, synced",
         (SAVE_ONE_BY_ONE, old(SAVE_ONE_BY_ONE)), "3k"),
    Case("tensors/import", "import, after torch",
         (IMPORT, replace(IMPORT, name="tensorizer 2.12.1", site="old"),
          replace(IMPORT, name="safetensors", run=importing("safetensors.torch"))), "few"),
]  # fmt: skip
