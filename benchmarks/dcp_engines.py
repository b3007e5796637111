"""One rank that saves or loads with one of the writers and readers of distributed checkpoints."""

from __future__ import annotations

import importlib
import logging
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import dcp_state
import tensorizer.distributed
import torch
import torch._dynamo  # which DTensor imports when it is first used
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.device_mesh import init_device_mesh

#: Folder of s3fs, for torch's FsspecWriter: it may need another botocore than boto3 does.
S3FS = os.environ.get("BENCHMARK_S3FS")
THREADS = 2


def imported(engine: str) -> None:
    """Import what an engine needs besides."""
    if engine == "Fsspec":
        if S3FS is not None:
            sys.path.insert(0, S3FS)
        importlib.import_module("s3fs")


def _fsspec(kind: str, folder: str) -> object:
    from torch.distributed.checkpoint import _fsspec_filesystem as found

    return getattr(found, kind)(folder)


#: Constructors of the writer and of the reader of each engine.
ENGINES: dict[str, tuple[Callable[[str], object], Callable[[str], object]]] = {
    "ours": (tensorizer.distributed.Writer, tensorizer.distributed.Reader),
    # CRC-32 is in files of torch.save too, but torch does not compare it.
    "ours crc32": (
        lambda folder: tensorizer.distributed.Writer(folder, hashes="crc32"),
        lambda folder: tensorizer.distributed.Reader(folder, verify_hash="crc32"),
    ),
    "FileSystem": (
        lambda folder: dcp.FileSystemWriter(folder, sync_files=True),
        dcp.FileSystemReader,
    ),
    "FileSystem tuned": (
        lambda folder: dcp.FileSystemWriter(
            folder, sync_files=True, single_file_per_rank=False, thread_count=THREADS
        ),
        dcp.FileSystemReader,
    ),
    "HuggingFace": (
        lambda folder: HuggingFaceStorageWriter(folder, save_distributed=True),
        HuggingFaceStorageReader,
    ),
    "Fsspec": (
        lambda folder: _fsspec("FsspecWriter", folder),
        lambda folder: _fsspec("FsspecReader", folder),
    ),
}


def peak() -> int:
    """Return the peak of resident memory since it was reset, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def once(engine: str, saves: bool, folder: str, size: tuple[int, int, int]) -> dict[str, object]:
    """Save, or load and compare, as a rank of a group that is there; return what rank 0 reports."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = dcp_state.State(size, mesh)
    imported(engine)
    tensors = state.make(filled=saves)
    Path("/proc/self/clear_refs").write_text("5")
    memory, cpu = peak(), cpu_seconds()
    dist.barrier()
    start = time.perf_counter()
    made = ENGINES[engine][0 if saves else 1](folder)
    if saves:
        dcp.save(tensors, storage_writer=made)
    else:
        dcp.load(tensors, storage_reader=made)
    dist.barrier()
    seconds = time.perf_counter() - start
    mine = (cpu_seconds() - cpu, peak() - memory, state.verify(tensors))
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return {
        "seconds": seconds,
        "bytes": dcp_state.total_bytes(size),
        "cpu_seconds": sum(one[0] for one in found),
        "extra_bytes": sum(one[1] for one in found),
        "verified": all(one[2] for one in found),
    }


def run(rank: int, world: int, arguments: tuple) -> dict[str, object]:
    """Join the group and do it."""
    warnings.simplefilter("ignore")
    logging.disable()
    # As with torchrun.
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    found = once(*arguments)
    dist.destroy_process_group()
    return found
