"""One engine that brings up a model of transformers, one run; and the model that they load.

``formats.py`` calls :func:`once` in a process of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from engines import checksum, reset_peak, status
from format_cases import PRETRAINED, Case
from format_files import INDEX, shards
from machine import have_memory

#: A Llama of 1.08 GB, and a small one to try the programs.
FULL = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8,
        "num_attention_heads": 16, "vocab_size": 32_000}  # fmt: skip
QUICK = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
         "num_attention_heads": 4, "vocab_size": 4_000}  # fmt: skip
SHARD_BYTES = {False: 290_000_000, True: 2_600_000}
CLASS = "transformers.models.llama.modeling_llama"


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def logits(model: torch.nn.Module) -> list[float]:
    """Return the logits of the model for some tokens."""
    with torch.no_grad():
        found = model.eval()(torch.arange(8)[None]).logits[0, -1]
    return [float(value) for value in found.float()]


def prepare(folder: Path, quick: bool) -> None:
    """Write the model, with the sums and logits that verify what is loaded."""
    if (folder / f"{PRETRAINED}.json").exists():
        return
    from transformers import LlamaConfig, LlamaForCausalLM

    print(f"making {PRETRAINED}")
    torch.manual_seed(17)
    config = LlamaConfig(**(QUICK if quick else FULL), dtype=torch.bfloat16)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder / PRETRAINED, max_shard_size=SHARD_BYTES[quick])
    missing = [path for path in shards(folder, PRETRAINED) if not path.exists()]
    assert not missing, f"not as many shards as are read: {missing}"
    known = {
        "sums": checksum(parameters(model)),
        # Of the model as transformers loads it, which makes some buffers anew, in another dtype.
        "logits": logits(plain(str(folder / PRETRAINED))),
    }
    (folder / f"{PRETRAINED}.json").write_text(json.dumps(known))


def plain(where: str) -> torch.nn.Module:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(where)


def ours(where: str) -> torch.nn.Module:
    from tensorizer.safetensors import tensorizer_safetensors

    with tensorizer_safetensors():
        return plain(where)


def ours_transformers(where: str, **options) -> torch.nn.Module:
    from tensorizer.transformers import from_pretrained

    return from_pretrained(f"{where}/", device="cpu", **options)


def ours_address(where: str) -> torch.nn.Module:
    """Bring up a model from a server: transformers knows no addresses, but takes a state."""
    import tensorizer
    from tensorizer.stream_io import open_stream
    from transformers import LlamaConfig, LlamaForCausalLM

    with open_stream(f"{where}/config.json") as file:
        config = LlamaConfig.from_dict(json.load(file))
    state = tensorizer.load(f"{where}/", "cpu")
    return LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state)


def fetched(where: str) -> torch.nn.Module:
    """Download a model to the disk as hubs do, a connection for each file, and load it there."""
    folder = os.environ["BENCHMARK_FOLDER"]
    names = ["config.json", INDEX, *(path.name for path in shards(Path(), PRETRAINED))]
    with tempfile.TemporaryDirectory(dir=folder) as kept:
        pairs = [("--output", f"{kept}/{name}", f"{where}/{name}") for name in names]
        command = ["curl", "--fail", "--parallel", "--parallel-immediate"]
        arguments = [part for pair in pairs for part in pair]
        subprocess.run([*command, *arguments], check=True, capture_output=True)
        return plain(kept)


LOADERS: dict[str, Callable[[str], torch.nn.Module]] = {
    "ours from_pretrained": ours,
    "ours tensorizer.transformers": ours_transformers,
    "ours tensorizer.transformers mmap": lambda where: ours_transformers(where, mmap=True),
    "ours load, then from_pretrained": ours_address,
    "from_pretrained": plain,
    "curl, then from_pretrained": fetched,
}


def once(engine: str, case: Case, folder: Path, server: str, quick: bool) -> Mapping[str, object]:
    """Measure one engine once."""
    os.environ["BENCHMARK_FOLDER"] = str(folder)
    importlib.import_module(CLASS)
    importlib.import_module("tensorizer" if engine.startswith("ours") else "safetensors.torch")
    from transformers.utils import logging

    logging.disable_progress_bar()
    known = json.loads((folder / f"{PRETRAINED}.json").read_text())
    where = f"http://{server}/{PRETRAINED}" if case.scheme else str(folder / PRETRAINED)
    checksum({"": torch.ones(1 << 20, dtype=torch.int64)})
    have_memory(sum(path.stat().st_size for path in shards(folder, PRETRAINED)))
    reset_peak()
    before = status("VmHWM")
    cpu = sum(os.times()[:4])
    start = time.perf_counter()
    model = LOADERS[engine](where)
    loaded = time.perf_counter() - start
    found = checksum(parameters(model))
    seconds = time.perf_counter() - start
    cpu = sum(os.times()[:4]) - cpu
    total = sum(tensor.nbytes for tensor in parameters(model).values())
    extra = status("VmHWM") - before - total
    return {
        "seconds": seconds,
        "load_seconds": loaded,
        "cpu_seconds": cpu,
        "bytes": total,
        "extra_bytes": extra,
        "verified": found == known["sums"] and logits(model) == known["logits"],
    }
