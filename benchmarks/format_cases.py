"""Cases for safetensors files and torch checkpoints, and the goals of each."""

from __future__ import annotations

from dataclasses import dataclass

from cases import FULL


@dataclass(frozen=True)
class Asked:
    """A goal for an engine of ours.

    ``time``: at most so many times the time of another engine; ``speed``: at least so many times
    as fast; ``rate``: at least this part of a baseline's rate; ``memory``: at most so many bytes
    beyond what the caller keeps.
    """

    kind: str
    bound: float
    engine: str
    beside: str = ""


@dataclass(frozen=True)
class Case:
    """One comparison. The first engine is ours; baselines are measurements of the machine."""

    name: str
    title: str
    model: str
    #: ``shards`` (four, with an index), or the suffix of one file; ``made`` has none to be read.
    form: str
    engines: tuple[str, ...]
    baselines: tuple[str, ...] = ()
    asked: tuple[Asked, ...] = ()
    cold: bool = False
    #: Scheme of addresses: ``http`` or ``s3``, both from nginx; ``upload`` to the server of
    #: ``stores.py``; None for local files.
    scheme: str | None = None
    #: The module whose ``once`` measures an engine.
    work: str = "format_engines"


#: Buffer of the iterators: of ``iterate``, and the memory that others are limited to.
BUFFER = 256 << 20
QUICK_BUFFER = 8 << 20

FORMS = {"large": "shards", "3k": "safetensors", "20k": "safetensors"}
WORDS = {
    "shards": "four safetensors shards",
    "safetensors": "one safetensors file",
    "pt": "one file of torch.save",
    "tensors": "one .tensors file",
}
#: Other engines by form: those that copy the bytes into private memory, and those that map.
PRIVATE = {
    "safetensors": ("safetensors cloned", "run:ai", "run:ai tuned",
                    "fastsafetensors", "fastsafetensors tuned"),
    "pt": ("torch.load",),
}  # fmt: skip
MAPPED = {"safetensors": "safetensors mapped", "pt": "torch.load mmap"}
#: Engines that download a file and load it then: their packages cannot read addresses.
FETCHED = {"safetensors": "curl, then safetensors", "pt": "curl, then torch.load"}


def goals(model: str, kind: str) -> tuple[Asked, ...]:
    """Return the goals of a model in the page cache."""
    mapped = Asked("time", 1.05, "ours mmap", MAPPED[kind])
    if kind == "pt":
        return (Asked("speed", 2, "ours", "torch.load"), mapped)
    if model == "large":
        return (mapped, Asked("rate", 0.9, "ours", "read"))
    if model == "3k":
        return (mapped,)
    # Like is compared with like: mapped files with mapped ones, private memory with private memory.
    return (
        Asked("speed", 1.5, "ours mmap", "safetensors mapped"),
        Asked("speed", 1.5, "ours", "safetensors cloned"),
    )


def cases_of(model: str, form: str) -> list[Case]:
    """Return the cases of a model in one form: local files, warm and cold; servers."""
    kind = "pt" if form == "pt" else "safetensors"
    name = f"{model}-pt" if form == "pt" else model
    size = FULL[model]
    what = f"{size.count:,} tensors, {size.total_bytes / 1e9:.2f} GB, in {WORDS[form]}"
    local = ("ours", "ours mmap", *PRIVATE[kind], MAPPED[kind])
    s3 = ("ours",) if kind == "pt" else ("ours", "run:ai", "run:ai tuned")
    beside = tuple(Asked("speed", 2, "ours", engine) for engine in s3[1:])
    return [
        Case(name, what, model, form, local, ("read",), goals(model, kind)),
        Case(f"{name}-cold", f"{what}, not in the page cache", model, form, local, ("direct",),
             cold=True),
        Case(f"{name}-http", f"{what}, from nginx on this machine", model, form,
             ("ours", FETCHED[kind]), ("curl", "receive"), scheme="http"),
        Case(f"{name}-s3", f"{what}, from S3 on this machine", model, form, s3,
             ("curl", "receive"), beside, scheme="s3"),
    ]  # fmt: skip


HALF = (Asked("time", 0.6, "ours half", "ours"),)
WITHIN = (Asked("memory", 300e6, "ours iterate"),)
ITERATORS = ("ours iterate", "ours mmap iterate", "run:ai iterate", "run:ai tuned iterate",
             "fastsafetensors iterate", "fastsafetensors tuned iterate",
             "safetensors iterate")  # fmt: skip

SAVING = [
    Case("save-safetensors", "save one safetensors file, synced to the disk", "large", "made",
         ("ours save", "safetensors save, synced", "safetensors save", "ours save .tensors"),
         ("write",), (Asked("time", 1, "ours save", "safetensors save, synced"),),
         work="format_saving"),
    Case("save-shards", "save four shards and their index, synced to the disk", "large", "made",
         ("ours save shards", "huggingface_hub shards, synced"), ("write",),
         (Asked("time", 1, "ours save shards", "huggingface_hub shards, synced"),),
         work="format_saving"),
    Case("upload-safetensors", "save one safetensors file to S3 on this machine", "large", "made",
         ("ours upload", "save_file, then boto3", "save_file, then boto3 tuned"), ("send",),
         (Asked("speed", 2, "ours upload", "save_file, then boto3"),
          Asked("speed", 2, "ours upload", "save_file, then boto3 tuned")),
         scheme="upload", work="format_saving"),
]  # fmt: skip

BYTES = [
    Case(f"{model}-bytes", f"load bytes in memory, {FULL[model].count:,} tensors", model,
         "safetensors", ("ours bytes", "safetensors bytes"),
         asked=(Asked("time", 1, "ours bytes", "safetensors bytes"),))
    for model in FORMS
]  # fmt: skip

#: The folder of a model of transformers, made from a config.
PRETRAINED = "llama"
WHAT = "from_pretrained of a Llama of 1.08 GB in four shards"
BESIDE = ("ours from_pretrained", "from_pretrained")
WAYS = ("ours from_pretrained", "ours tensorizer.transformers",
        "ours tensorizer.transformers mmap", "from_pretrained")  # fmt: skip
MODELS = [
    Case("pretrained", WHAT, PRETRAINED, "shards", WAYS, (), (Asked("time", 1.05, *BESIDE),),
         work="format_models"),
    Case("pretrained-cold", f"{WHAT}, not in the page cache", PRETRAINED, "shards", BESIDE, (),
         (Asked("speed", 1, *BESIDE),), cold=True, work="format_models"),
    Case("pretrained-http", f"{WHAT}, from nginx on this machine", PRETRAINED, "shards",
         ("ours tensorizer.transformers", "ours load, then from_pretrained",
          "curl, then from_pretrained"), (),
         (Asked("speed", 1, "ours tensorizer.transformers", "curl, then from_pretrained"),),
         scheme="http", work="format_models"),
]  # fmt: skip

CASES = [
    *(case for model, form in FORMS.items() for case in cases_of(model, form)),
    *(case for model in FORMS for case in cases_of(model, "pt")),
    Case("half", "half of the rows of every tensor, shards", "large", "shards",
         ("ours half", "ours mmap half", "ours", "safetensors half", "safetensors cloned"),
         asked=HALF),
    Case("half-cold", "half of the rows, shards, not in the page cache", "large", "shards",
         ("ours half", "ours", "safetensors half"), asked=HALF, cold=True),
    Case("half-s3", "half of the rows, shards, from S3 on this machine", "large", "shards",
         ("ours half", "ours"), asked=HALF, scheme="s3"),
    Case("half-pt", "half of the rows, a file of torch.save", "large", "pt",
         ("ours half", "ours", "torch.load mmap half"), asked=HALF),
    Case("half-tensors", "half of the rows, a .tensors file", "large", "tensors",
         ("ours half", "ours"), asked=HALF),
    Case("iterate", "one tensor after another, none kept, shards", "large", "shards",
         ITERATORS, asked=WITHIN),
    Case("iterate-s3", "one tensor after another, none kept, from S3 on this machine", "large",
         "shards", ("ours iterate", "run:ai iterate", "run:ai tuned iterate"),
         asked=WITHIN, scheme="s3"),
    *SAVING,
    *BYTES,
    *MODELS,
]  # fmt: skip
