"""Other loaders and their settings. Files are paths or addresses."""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Iterator
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
Pairs = Iterator[tuple[str, torch.Tensor]]

CORES = str(os.cpu_count())
#: By default both read files with O_DIRECT, which bypasses the page cache. These settings were the
#: fastest on two cores.
SETTINGS = {
    "run:ai tuned": {
        "RUNAI_STREAMER_FS_STRATEGY": "sync_buffered",
        "RUNAI_STREAMER_CONCURRENCY": CORES,
    },
    "fastsafetensors tuned": {"FASTSAFETENSORS_ODIRECT": "0"},
}
#: The same for addresses, where the default is 8 connections and pieces of 8 MiB.
S3_SETTINGS = {
    "run:ai tuned": {
        "RUNAI_STREAMER_CONCURRENCY": CORES,
        "RUNAI_STREAMER_CHUNK_BYTESIZE": str(32 << 20),
    },
}
#: The module that each engine imports, by a part of the engine's name.
MODULES = {
    "run:ai": "runai_model_streamer",
    "fastsafetensors": "fastsafetensors",
    "safetensors": "safetensors.torch",
    "boto3": "boto3.s3.transfer",
    "requests": "requests",
}


def import_for(engine: str) -> None:
    """Import what an engine needs, before clocks start."""
    for part, module in MODULES.items():
        if part in engine:
            importlib.import_module(module)


def s3_environment(server: str) -> dict[str, str]:
    """Return the variables by which AWS's clients, and ours, find a server that is not Amazon's."""
    return {
        "AWS_ENDPOINT_URL": f"http://{server}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        # Without this run:ai first waits seconds for a service that only machines of Amazon have.
        "AWS_EC2_METADATA_DISABLED": "true",
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
    }


def safetensors(files: list[str]) -> Tensors:
    from safetensors.torch import load_file

    first, *others = files
    loaded = load_file(first)
    for path in others:
        loaded.update(load_file(path))
    return loaded


def safetensors_cloned(files: list[str]) -> Tensors:
    return {name: tensor.clone() for name, tensor in safetensors(files).items()}


def safetensors_rows(files: list[str], rows: int) -> Tensors:
    """Load the first rows of every tensor."""
    from safetensors import safe_open

    loaded = {}
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                loaded[name] = file.get_slice(name)[:rows]
    return loaded


def safetensors_iterate(files: list[str]) -> Pairs:
    """Iterate with safe_open, like engines without a loader of their own."""
    from safetensors import safe_open

    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def requests_get(url: str) -> Tensors:
    """Download a file into memory, and load these bytes."""
    import requests
    from safetensors.torch import load

    answer = requests.get(url)
    answer.raise_for_status()
    return load(answer.content)


def boto3_client() -> Any:
    """Return a client of the server that :func:`s3_environment` names."""
    import boto3

    return boto3.client("s3")


def boto3_download(bucket: str, key: str) -> Tensors:
    """Download an object into memory with boto3's own threads, and load these bytes."""
    from safetensors.torch import load

    kept = io.BytesIO()
    boto3_client().download_fileobj(bucket, key, kept)
    return load(kept.getvalue())


def boto3_upload(tensors: Tensors, bucket: str, key: str) -> None:
    """Make a safetensors file in memory, and upload it with boto3's own threads."""
    from safetensors.torch import save

    boto3_client().upload_fileobj(io.BytesIO(save(tensors)), bucket, key)


def torch_load(files: list[str], mmap: bool = False) -> Tensors:
    (path,) = files
    return torch.load(path, weights_only=True, mmap=mmap)


def run_ai(files: list[str]) -> Tensors:
    return dict(run_ai_iterate(files))


def run_ai_iterate(files: list[str], owned: bool = True) -> Pairs:
    """Iterate; tensors that are not owned are overwritten later."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files, owned=owned)
        yield from streamer.get_tensors()


def fastsafetensors(files: list[str]) -> Tensors:
    from fastsafetensors import fastsafe_open

    with fastsafe_open(filenames=files, nogds=True, device="cpu") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def fastsafetensors_iterate(files: list[str], memory: int) -> Pairs:
    """Iterate over pieces of the files, two of which are in memory at once."""
    from fastsafetensors import ParallelLoader

    loader = ParallelLoader(
        None,
        files,
        device="cpu",
        nogds=True,
        use_tqdm_on_load=False,
        max_batch_bytes=memory // 2,
        accumulate_resident=False,
    )
    try:
        yield from loader.iterate_weights()
    finally:
        loader.close()
