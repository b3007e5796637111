"""One engine that saves safetensors files, one run: to the disk, or to S3.

``formats.py`` calls :func:`once` in a process of its own.
"""

from __future__ import annotations

import importlib
import os
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import baselines
import peers
from cases import FULL, QUICK
from engines import checksum, reset_peak, status
from format_cases import Case
from format_files import SHARDS, one_file
from machine import have_memory
from peers import Tensors

NAME = "model.safetensors"


def synced(out: Path) -> None:
    """Wait until the disk has the files of a folder, and the folder."""
    for path in (*out.iterdir(), out):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def ours(tensors: Tensors, out: Path, name: str = NAME, **options) -> None:
    import tensorizer

    tensorizer.save(tensors, out / name, **options)


def ours_shards(tensors: Tensors, out: Path) -> None:
    ours(tensors, out, max_shard_size=shard_size(tensors))


def ours_upload(tensors: Tensors, out: Path) -> None:
    import tensorizer

    tensorizer.save(tensors, f"s3://bucket/{NAME}")


def shard_size(tensors: Tensors) -> int:
    """Return the most bytes of a shard, so that there are as many as in what is read."""
    sizes = [tensor.nbytes for tensor in tensors.values()]
    return sum(sizes) // SHARDS + max(sizes)


def safetensors(tensors: Tensors, out: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, out / NAME)


def safetensors_synced(tensors: Tensors, out: Path) -> None:
    safetensors(tensors, out)
    synced(out)


def hugging_face_shards(tensors: Tensors, out: Path) -> None:
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(tensors, out, max_shard_size=shard_size(tensors))
    synced(out)


def boto3_upload(tensors: Tensors, out: Path, tuned: bool = False) -> None:
    """Upload in the usual way: save a file first, without waiting for the disk, then send it."""
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    safetensors(tensors, out)
    if tuned:
        # Fewer and longer requests, one per core at a time, and no checksums that are not required.
        config = Config(request_checksum_calculation="when_required")
        part = 64 << 20
        transfer = TransferConfig(multipart_chunksize=part, max_concurrency=os.cpu_count() or 1)
    else:
        config, transfer = Config(), TransferConfig()
    client = boto3.client("s3", config=config)
    client.upload_file(str(out / NAME), "bucket", NAME, Config=transfer)


SAVERS: dict[str, Callable[[Tensors, Path], None]] = {
    "ours save": ours,
    "ours save .tensors": lambda tensors, out: ours(tensors, out, "model.tensors"),
    "ours save shards": ours_shards,
    "ours upload": ours_upload,
    "safetensors save, synced": safetensors_synced,
    "safetensors save": safetensors,
    "huggingface_hub shards, synced": hugging_face_shards,
    "save_file, then boto3": boto3_upload,
    "save_file, then boto3 tuned": lambda tensors, out: boto3_upload(tensors, out, tuned=True),
}
#: The modules that engines import besides those of ``peers.py``, by a part of the engine's name.
MODULES = {
    "ours": "tensorizer",
    "huggingface_hub": "huggingface_hub",
    "save_file": "safetensors.torch",
}


def saved(out: Path) -> Iterator[Tensors]:
    """Load what was written, with the library that others will read it with, file by file."""
    for path in out.iterdir():
        if path.suffix == ".safetensors":
            yield peers.safetensors([str(path)])
        elif path.suffix == ".tensors":
            import tensorizer

            yield tensorizer.load(path, "cpu", verify_hash=True)


def fetch_upload(server: str) -> Path:
    """Have the server write the last upload into a file; return the folder of that file."""
    with urllib.request.urlopen(f"http://{server}/bucket/{NAME}") as answer:
        return Path(answer.read().decode()).parent


def once(engine: str, case: Case, folder: Path, server: str, quick: bool) -> Mapping[str, object]:
    """Measure one engine, or a baseline, once."""
    os.environ["BENCHMARK_SERVER"] = server
    if engine in case.baselines:
        return baselines.measure(engine, one_file(folder, case))
    if case.scheme:
        os.environ.update(peers.s3_environment(server))
    peers.import_for(engine)
    for part, module in MODULES.items():
        if part in engine:
            importlib.import_module(module)
    # Each with memory of its own, as safetensors wants it.
    given = (QUICK if quick else FULL)[case.model].tensors()
    tensors = {name: tensor.clone() for name, tensor in given.items()}
    del given
    expected = checksum(tensors)
    out = folder / "saved"
    out.mkdir()
    try:
        os.sync()
        have_memory(sum(tensor.nbytes for tensor in tensors.values()))
        reset_peak()
        before = status("VmHWM")
        cpu = sum(os.times()[:4])
        start = time.perf_counter()
        SAVERS[engine](tensors, out)
        seconds = time.perf_counter() - start
        cpu = sum(os.times()[:4]) - cpu
        extra = status("VmHWM") - before
        found: dict[str, int] = {}
        for loaded in saved(fetch_upload(server) if case.scheme else out):
            found |= checksum(loaded)
    finally:
        shutil.rmtree(out)
    total = sum(tensor.nbytes for tensor in tensors.values())
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "bytes": total,
        "extra_bytes": extra,
        "verified": found == expected,
    }
