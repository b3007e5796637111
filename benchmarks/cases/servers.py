"""Loads from Redis, from Hugging Face's hub, and through this package's cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from harness.case import Case, Engine, Given, Model, Tensors
from ours import LOAD, REDIS, TO_REDIS, deserializing, old

HUB = ("huggingface_hub", "safetensors.torch")


def download(given: Given) -> str:
    """Have huggingface_hub download the file into its cache, or find it there."""
    from huggingface_hub import hf_hub_download

    return hf_hub_download(
        "org/repo", "model.safetensors", revision=os.environ["REVISION"],
        endpoint=os.environ["HF_ENDPOINT"], cache_dir=f"{given.out}/hub",
    )  # fmt: skip


def hub_load(given: Given) -> Tensors:
    """Download with huggingface_hub, and map the file."""
    from safetensors.torch import load_file

    return load_file(download(given))


def hf(kept: bool = False, **options: Any) -> Callable[[Given], Tensors]:
    """Return a load of an ``hf://`` address; ``kept`` uses this package's cache."""

    def load(given: Given) -> Tensors:
        import tensorizer

        os.environ["HF_HOME"] = str(given.out)
        os.environ["TENSORIZER_CACHE_GB"] = "100"
        address = f"hf://org/repo@{os.environ['REVISION']}/model.safetensors"
        more = {"cache_dir": f"{given.out}/kept"} if kept else {}
        return tensorizer.load(address, "cpu", **more, **options)

    return load


def cached(given: Given) -> Tensors:
    """Load through a cache in the engine's own folder."""
    import tensorizer

    os.environ["TENSORIZER_CACHE_GB"] = "100"
    return tensorizer.load(given.where, "cpu", cache_dir=str(given.out))


def local_file(given: Given) -> Tensors:
    """Load the same file from the disk."""
    import tensorizer

    return tensorizer.load(given.file, "cpu")


def skeleton(model: Model, parameters: bool = False) -> torch.nn.Module:
    """Return a module with an empty tensor for each of a model."""
    rows = torch.Size((32, model.total // model.count // 64))
    layers = torch.nn.Module()
    for number in range(model.count):
        layer = torch.nn.Module()
        empty = torch.zeros(rows, dtype=torch.float16)
        if parameters:
            layer.weight = torch.nn.Parameter(empty, requires_grad=False)
        else:
            layer.register_buffer("weight", empty)
        layers.add_module(str(number), layer)
    root = torch.nn.Module()
    root.layers = layers
    return root


def fill(module: torch.nn.Module, path: str) -> None:
    """Load what has changed into a module."""
    import tensorizer

    with tensorizer.TensorDeserializer(path, "cpu", lazy_load=True) as file:
        file.load_into_module(module, only_changed=True)


def older_version(given: Given) -> torch.nn.Module:
    """Return a module that holds the model, but for one tensor."""
    import tensorizer

    tensors = given.model.tensors()
    tensors["layers.5.weight"] = tensors["layers.5.weight"].clone().zero_()
    path = str(given.out / "older.tensors")
    tensorizer.save(tensors, path)
    module = skeleton(given.model)
    fill(module, path)
    return module


def newer_version(given: Given) -> Tensors:
    """Load the new version into the module."""
    fill(given.ready, given.where)
    return dict(given.ready.named_buffers())


FIRST = Engine("tensorizer", hf(), "safetensors")
PEER = Engine("huggingface_hub, then safetensors", hub_load, "safetensors", HUB)
CACHE = (
    LOAD, replace(LOAD, name="tensorizer, filling the cache", run=cached),
    replace(LOAD, name="tensorizer, from the cache", run=cached, make=cached),
    replace(LOAD, name="tensorizer, local file", run=local_file),
)  # fmt: skip
CHANGED = replace(LOAD, name="tensorizer, 1 % changed", run=newer_version, before=older_version)
LOADED = replace(LOAD, run=deserializing())
#: Loads of what huggingface_hub has downloaded.
FOUND = {"make": download, "imports": ("tensorizer", "huggingface_hub")}

CASES = [
    Case("servers/redis", "load from Redis on this machine", (REDIS, old(REDIS)), server="redis"),
    Case("servers/to-redis", "copy a file to Redis on this machine", (TO_REDIS, old(TO_REDIS)),
         server="redis"),
    Case("servers/hub", "load from a stand-in of Hugging Face's hub, the first time",
         (FIRST, replace(FIRST, name="tensorizer verify", run=hf(verify_hash=True)),
          replace(FIRST, name="tensorizer, filling the cache", run=hf(kept=True)), PEER),
         "gigabyte", server="hub"),
    Case("servers/hub-again", "load from the hub what was downloaded before",
         (replace(FIRST, **FOUND),
          replace(FIRST, name="tensorizer mmap", run=hf(mmap=True), **FOUND),
          replace(FIRST, name="tensorizer, own cache", run=hf(kept=True), make=hf(kept=True)),
          replace(PEER, make=download)), "gigabyte", server="hub"),
    Case("servers/hub-verified", "load and verify what huggingface_hub has downloaded",
         (replace(FIRST, run=hf(verify_hash=True), **FOUND), replace(PEER, make=download)),
         "gigabyte", server="hub"),
    Case("servers/cache", "load through a cache, from a server of 300 MB/s", CACHE, "versions",
         server="300 MB/s", scheme="http"),
    Case("servers/cache-fast", "load through a cache, from a server on this machine", CACHE,
         "versions", server="nginx", scheme="http", quick=None),
    Case("servers/changed", "load a new version into a module, from a server of 300 MB/s",
         (LOADED, CHANGED), "versions", server="300 MB/s", scheme="http"),
]  # fmt: skip
