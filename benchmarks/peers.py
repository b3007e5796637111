"""Engines of other packages, and their settings."""

from __future__ import annotations

import io
import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness.case import INDEX, Engine, Given, Pairs, Tensors, program
from harness.files import as_adam, from_adam, named, own, sync

CORES = str(os.cpu_count())
#: By default run:ai and fastsafetensors read files with O_DIRECT, past the page cache. These
#: settings were the fastest on two cores.
RUN_AI_TUNED = {"RUNAI_STREAMER_FS_STRATEGY": "sync_buffered", "RUNAI_STREAMER_CONCURRENCY": CORES}
#: The same for S3, where the default is 8 connections and pieces of 8 MiB.
RUN_AI_S3 = {"RUNAI_STREAMER_CONCURRENCY": CORES, "RUNAI_STREAMER_CHUNK_BYTESIZE": str(32 << 20)}
FAST_TUNED = {"FASTSAFETENSORS_ODIRECT": "0"}
#: Memory that iterators may take at full size.
BUFFER = 256 << 20


def load_files(files: list[str]) -> Tensors:
    """Map safetensors files."""
    from safetensors.torch import load_file

    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def half_of_files(given: Given) -> Tensors:
    """Load the first half of the rows of each tensor."""
    from safetensors import safe_open

    loaded = {}
    for path in given.files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                loaded[name] = file.get_slice(name)[:16]
    return loaded


def iterate_files(given: Given) -> Pairs:
    """Iterate with safe_open."""
    from safetensors import safe_open

    for path in given.files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def requests_get(given: Given) -> Tensors:
    """Download a file into memory, and load these bytes."""
    import requests
    from safetensors.torch import load

    answer = requests.get(given.where)
    answer.raise_for_status()
    return load(answer.content)


def boto3_download(given: Given, target: str = "") -> Tensors:
    """Download an object into memory with boto3's own threads, and load these bytes."""
    import boto3
    from safetensors.torch import load

    bucket, _, key = (target or given.where).removeprefix("s3://").partition("/")
    kept = io.BytesIO()
    boto3.client("s3").download_fileobj(bucket, key, kept)
    return load(kept.getvalue())


def boto3_upload(given: Given) -> None:
    """Make a safetensors file in memory, and upload it with boto3's own threads."""
    import boto3
    from safetensors.torch import save

    key = f"{given.target.removeprefix('s3://bucket/')}/f.safetensors"
    boto3.client("s3").upload_fileobj(io.BytesIO(save(own(given.ready))), "bucket", key)


def boto3_upload_file(tuned: bool) -> Callable[[Given], None]:
    """Return an upload of a file that is saved first, without waiting for the disk."""

    def call(given: Given) -> None:
        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config
        from safetensors.torch import save_file

        path = str(given.out / "f.safetensors")
        save_file(given.ready, path)
        config, transfer = Config(), TransferConfig()
        if tuned:
            # Longer requests, one per core at a time, and no checksums that are not required.
            config = Config(request_checksum_calculation="when_required")
            transfer = TransferConfig(multipart_chunksize=64 << 20, max_concurrency=int(CORES))
        key = f"{given.target.removeprefix('s3://bucket/')}/f.safetensors"
        boto3.client("s3", config=config).upload_file(path, "bucket", key, Config=transfer)

    return call


def torch_load(mmap: bool) -> Callable[[Given], Tensors]:
    """Return a call of ``torch.load``."""
    return lambda given: torch.load(given.where, weights_only=True, mmap=mmap)


def run_ai(owned: bool = True) -> Callable[[Given], Pairs]:
    """Return an iteration by run:ai; tensors that are not owned are overwritten later."""

    def call(given: Given) -> Pairs:
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            streamer.stream_files(given.files, owned=owned)
            yield from streamer.get_tensors()

    return call


def fast_load(given: Given) -> Tensors:
    """Load with fastsafetensors."""
    from fastsafetensors import fastsafe_open

    with fastsafe_open(filenames=given.files, nogds=True, device="cpu") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def fast_iterate(given: Given) -> Pairs:
    """Iterate over pieces of the files, two of which are in memory at once."""
    from fastsafetensors import ParallelLoader

    loader = ParallelLoader(
        None, given.files, device="cpu", nogds=True, use_tqdm_on_load=False,
        max_batch_bytes=(8 << 20 if given.quick else BUFFER) // 2, accumulate_resident=False,
    )  # fmt: skip
    try:
        yield from loader.iterate_weights()
    finally:
        loader.close()


def fetched(load: Callable[[list[str]], Tensors], *more: str) -> Callable[[Given], Tensors]:
    """Return a download of the files by curl, one connection each, and a load of them."""

    def call(given: Given) -> Tensors:
        folder = given.files[0].rpartition("/")[0]
        with tempfile.TemporaryDirectory(dir=given.out) as kept:
            urls = [*given.files, *(f"{folder}/{name}" for name in more)]
            paths = [f"{kept}/{url.rpartition('/')[2]}" for url in urls]
            pairs = zip(paths, urls, strict=True)
            arguments = [part for path, url in pairs for part in ("--output", path, url)]
            command = [program("curl"), "--fail", "--parallel", "--parallel-immediate"]
            subprocess.run([*command, *arguments], check=True, capture_output=True)
            return load(paths[: len(given.files)])

    return call


def pretrained(folder: str) -> Tensors:
    """Have transformers load a model."""
    from transformers import LlamaForCausalLM

    return named(LlamaForCausalLM.from_pretrained(folder))


def save_file(given: Given) -> None:
    """Save one safetensors file."""
    from safetensors.torch import save_file as save

    save(given.ready, given.out / "f.safetensors")


def save_torch(given: Given) -> None:
    """Save with ``torch.save``."""
    torch.save(given.ready, given.out / "f.pt")


def save_hub(given: Given) -> None:
    """Save shards with huggingface_hub."""
    from huggingface_hub import save_torch_state_dict

    sizes = [tensor.nbytes for tensor in given.ready.values()]
    save_torch_state_dict(given.ready, given.out, max_shard_size=sum(sizes) // 4 + max(sizes))


def synced(run: Callable[[Given], Any]) -> Callable[[Given], None]:
    """Return a save that waits until the disk has the files."""

    def call(given: Given) -> None:
        run(given)
        sync(given.out)

    return call


def files_in(given: Given) -> Tensors:
    """Load the safetensors files that were saved."""
    return load_files([str(path) for path in given.out.glob("*.safetensors")])


def owned(given: Given) -> Tensors:
    """Return tensors with memory of their own, to be saved."""
    return own(given.model.tensors())


OF_SAFETENSORS = ("safetensors.torch",)
OF_RUN_AI = ("runai_model_streamer",)
OF_BOTO3 = ("boto3.s3.transfer", "safetensors.torch")
SAFETENSORS = Engine(
    "safetensors", lambda given: load_files(given.files), "safetensors", OF_SAFETENSORS
)
CLONED = replace(
    SAFETENSORS, name="safetensors cloned", run=lambda given: own(load_files(given.files))
)
SAFETENSORS_HALF = replace(SAFETENSORS, name="safetensors half", run=half_of_files, part="half")
SAFETENSORS_ITERATE = replace(SAFETENSORS, run=iterate_files)
TORCH = Engine("torch.load", torch_load(mmap=False), "pt", ())
TORCH_MMAP = Engine("torch.load mmap", torch_load(mmap=True), "pt", ())
RUN_AI_ITERATE = Engine("run:ai", run_ai(), "safetensors", OF_RUN_AI)
RUN_AI_ITERATE_TUNED = replace(
    RUN_AI_ITERATE, name="run:ai tuned", run=run_ai(owned=False), env=RUN_AI_TUNED
)
RUN_AI = replace(RUN_AI_ITERATE, run=lambda given: dict(run_ai()(given)))
RUN_AI_FAST = replace(RUN_AI, name="run:ai tuned", env=RUN_AI_TUNED)
RUN_AI_FAST_S3 = replace(RUN_AI, name="run:ai tuned", env=RUN_AI_S3)
FAST = Engine("fastsafetensors", fast_load, "safetensors", ("fastsafetensors",))
FAST_FAST = replace(FAST, name="fastsafetensors tuned", env=FAST_TUNED)
FAST_ITERATE = replace(FAST, run=fast_iterate)
FAST_ITERATE_TUNED = replace(FAST_FAST, run=fast_iterate)
REQUESTS = Engine(
    "requests, then safetensors", requests_get, "safetensors", ("requests", "safetensors.torch")
)
BOTO3 = Engine("boto3, then safetensors", boto3_download, "safetensors", OF_BOTO3)
CURL = replace(SAFETENSORS, name="curl, then safetensors", run=fetched(load_files))
PRETRAINED = Engine(
    "from_pretrained", lambda given: pretrained(given.where), "llama",
    ("transformers.models.llama.modeling_llama",),
)  # fmt: skip
CURL_PRETRAINED = replace(
    PRETRAINED,
    name="curl, then from_pretrained",
    run=fetched(lambda files: pretrained(str(Path(files[0]).parent)), INDEX, "config.json"),
)
ADAM_LOAD = Engine(
    "torch.load", lambda given: from_adam(torch.load(given.file, weights_only=True)), "adam", ()
)
ADAM_SAVE = Engine(
    "torch.save", synced(save_torch), "", (),
    before=lambda given: as_adam(given.model.tensors()),
    saved=lambda given: from_adam(torch.load(given.out / "f.pt", weights_only=True)),
)  # fmt: skip
ADAM_SAVE_UNSYNCED = replace(ADAM_SAVE, name="torch.save, not synced", run=save_torch)
SAVE = Engine("safetensors", synced(save_file), "", OF_SAFETENSORS, before=owned, saved=files_in)
SAVE_UNSYNCED = replace(SAVE, name="safetensors, not synced", run=save_file)
SAVE_TORCH = Engine(
    "torch.save", synced(save_torch), "", (), before=owned,
    saved=lambda given: torch.load(given.out / "f.pt", weights_only=True),
)  # fmt: skip
SAVE_HUB = replace(SAVE, name="huggingface_hub", run=synced(save_hub), imports=("huggingface_hub",))
UPLOAD = Engine(
    "boto3 upload of safetensors", boto3_upload, "", OF_BOTO3,
    saved=lambda given: boto3_download(given, f"{given.target}/f.safetensors"),
)  # fmt: skip
UPLOAD_FILE = replace(
    UPLOAD, name="save_file, then boto3", run=boto3_upload_file(tuned=False), before=owned
)
UPLOAD_TUNED = replace(
    UPLOAD_FILE, name="save_file, then boto3 tuned", run=boto3_upload_file(tuned=True)
)
