"""Files of safetensors and of torch.save: loaded, saved, and loaded by transformers."""

from __future__ import annotations

from dataclasses import replace

import ours
import peers
from harness import baselines
from harness.case import Case, Engine
from ours import HALF, HALF_MMAP, ITERATE, ITERATE_MMAP, LOAD, LOAD_MMAP


def in_form(form: str, *engines: Engine) -> tuple[Engine, ...]:
    """Return engines that read another form of the files; baselines read one file."""
    return tuple(one if one.baseline else replace(one, form=form) for one in engines)


LOCAL = (LOAD, LOAD_MMAP, peers.CLONED, peers.RUN_AI, peers.RUN_AI_FAST, peers.FAST,
         peers.FAST_FAST, replace(peers.SAFETENSORS, name="safetensors mapped"))  # fmt: skip
TORCH = in_form("pt", LOAD, LOAD_MMAP, peers.TORCH, peers.TORCH_MMAP, baselines.READ)
HALVES = (HALF, HALF_MMAP, LOAD, peers.SAFETENSORS_HALF, peers.CLONED)
ITERATORS = (ITERATE, ITERATE_MMAP, peers.RUN_AI_ITERATE, peers.RUN_AI_ITERATE_TUNED,
             peers.FAST_ITERATE, peers.FAST_ITERATE_TUNED, peers.SAFETENSORS_ITERATE)  # fmt: skip
SAVE = Engine("tensorizer", ours.saving("f.safetensors"), "", before=peers.owned,
              saved=ours.saved_as("f.safetensors"))  # fmt: skip
SAVES = (SAVE, peers.SAVE, peers.SAVE_UNSYNCED,
         replace(SAVE, name="tensorizer .tensors", run=ours.saving("f.tensors"),
                 saved=ours.saved_as("f.tensors")), baselines.WRITE)  # fmt: skip
SHARDED = replace(SAVE, run=ours.saving("model.safetensors", sharded=True),
                  saved=ours.saved_as("model.safetensors.index.json"))  # fmt: skip
LLAMA = ("tensorizer.transformers", "transformers.models.llama.modeling_llama")
CONTEXT = Engine("tensorizer", ours.from_pretrained, "llama", LLAMA)
MODEL = replace(CONTEXT, name="tensorizer.transformers", run=ours.transformers_model())
STATE = replace(CONTEXT, name="tensorizer.load", run=ours.state_then_transformers)
FROM_SERVER = {"server": "nginx", "scheme": "http"}
FROM_S3 = {"server": "nginx", "scheme": "s3"}

CASES = [
    Case("formats/large", "load four safetensors shards in the page cache",
         in_form("shards", *LOCAL, baselines.READ)),
    Case("formats/large-cold", "load four safetensors shards, nothing in the page cache",
         in_form("shards", *LOCAL, baselines.DIRECT), cold=True,
         quick=("tensorizer", "safetensors mapped")),
    Case("formats/large-http", "load four safetensors shards from nginx on this machine",
         in_form("shards", LOAD, peers.CURL, baselines.CURL, baselines.RECEIVE), **FROM_SERVER),
    Case("formats/large-s3", "load four safetensors shards from S3 on this machine",
         in_form("shards", LOAD, peers.RUN_AI, peers.RUN_AI_FAST_S3, baselines.CURL,
                 baselines.RECEIVE), **FROM_S3, quick=("tensorizer", "run:ai")),
    Case("formats/3k", "load 3,000 tensors of a safetensors file",
         in_form("safetensors", *LOCAL, baselines.READ), "3k", quick=None),
    Case("formats/20k", "load 20,000 tensors of a safetensors file",
         in_form("safetensors", *LOCAL, baselines.READ), "20k", quick=None),
    Case("formats/torch", "load a file of torch.save in the page cache", TORCH),
    Case("formats/half", "load half of the rows of every tensor, shards",
         in_form("shards", *HALVES)),
    Case("formats/half-cold", "load half of the rows, nothing in the page cache",
         in_form("shards", HALF, LOAD, peers.SAFETENSORS_HALF), cold=True, quick=None),
    Case("formats/iterate", "one tensor after another, none kept, shards",
         in_form("shards", *ITERATORS)),
    Case("formats/iterate-s3", "one tensor after another, none kept, from S3 on this machine",
         in_form("shards", ITERATE, peers.RUN_AI_ITERATE,
                 replace(peers.RUN_AI_ITERATE_TUNED, env=peers.RUN_AI_S3)), **FROM_S3,
         quick=("tensorizer",)),
    Case("formats/save", "save one safetensors file, synced", SAVES),
    Case("formats/save-shards", "save four safetensors shards and their index, synced",
         (SHARDED, peers.SAVE_HUB, baselines.WRITE)),
    Case("formats/upload", "save one safetensors file to S3 on this machine",
         (SAVE, peers.UPLOAD_FILE, peers.UPLOAD_TUNED, baselines.SEND), server="objects"),
    Case("formats/adam-load", "torch.load of the state of Adam",
         (ours.ADAM_LOAD, peers.ADAM_LOAD, ours.old(ours.ADAM_LOAD)), "adam"),
    Case("formats/adam-save", "torch.save of the state of Adam, synced",
         (ours.ADAM_SAVE, peers.ADAM_SAVE, peers.ADAM_SAVE_UNSYNCED, ours.old(ours.ADAM_SAVE)),
         "adam"),
    Case("formats/pretrained", "from_pretrained of a Llama in four shards",
         (CONTEXT, MODEL, replace(MODEL, name="tensorizer.transformers mmap",
                                  run=ours.transformers_model(mmap=True)), peers.PRETRAINED),
         "llama"),
    Case("formats/pretrained-cold", "from_pretrained, nothing in the page cache",
         (CONTEXT, peers.PRETRAINED), "llama", cold=True, quick=None),
    Case("formats/pretrained-http", "from_pretrained from nginx on this machine",
         (MODEL, STATE, peers.CURL_PRETRAINED), "llama", **FROM_SERVER),
]  # fmt: skip
