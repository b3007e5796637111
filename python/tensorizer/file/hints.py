"""Hints about common mistakes, which messages end with."""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from .._types import Name

#: The hint about passing a key, in messages about encrypted files.
KEY = "pass encryption=DecryptionParams.from_key(key), or DecryptionParams.from_string(passphrase)"
#: Names of dtypes that other libraries use (also with "fp" for "f"), and torch's names for them.
_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "f8": "float8_e4m3fn",
}
#: Names of options in other libraries, and in functions of the old package, and ours for each.
_OPTIONS = {
    "buffer_size": "buffer_bytes",
    "cache": "cache_dir",
    "copy": "clone",
    "destination": "uri",
    "file_obj": "uri",
    "filename": "uri",
    "filter": "filter_func",
    "hashes": "verify_hash",
    "keys": "names",
    "map_location": "device",
    "max_workers": "num_readers",
    "num_threads": "num_readers",
    "num_workers": "num_readers",
    "path": "uri",
    "path_uri": "uri",
    "process_group": "group",
    "progress_bar": "progress",
    "readers": "num_readers",
    "show_progress": "progress",
    "state_dict": "tensors",
    "tensor_names": "names",
    "threads": "num_readers",
    "torch_dtype": "dtype",
    "uri": "uri",
    "use_mmap": "mmap",
    "verify": "verify_hash",
}
#: Other names of these options: in the classes of the old package, and where files are written.
_ALSO = {"uri": "file_obj", "num_readers": "limit_cpu_concurrency"}
_KEY_OPTION = "encryption= takes the key of an encrypted file"
#: What does the same as options of other libraries that have no option here.
_OTHER_WAYS = {
    "framework": "tensors are always those of torch",
    "key": _KEY_OPTION,
    "lazy_load": "TensorDeserializer has it",
    "local_files_only": "with HF_HUB_OFFLINE=1, the hub is not asked",
    "passphrase": _KEY_OPTION,
    "password": _KEY_OPTION,
    "pickle_module": "no pickle of a file is run",
    "plaid_mode": "it is always on",
    "retries": "TENSORIZER_ATTEMPTS sets the tries of a request",
    "revision": "the address says it, as in hf://org/repo@revision",
    "strict": "TensorDeserializer.load_into_module() has strict=",
    "token": "HF_TOKEN is read for hf:// addresses, and headers= goes with requests to others",
    "use_auth_token": "HF_TOKEN is read for hf:// addresses",
    "use_safetensors": "the content of a file says its format",
    "weights_only": "no pickle of a file is run",
}
#: The most names that are compared with a wrong one.
_MOST_NAMES = 20_000
#: Names among which a similar one is looked for, which takes 1 ms for some hundreds.
_MOST_CLOSE = 1000


def of_device(device: object) -> str:
    """Return a hint about the device that may have been meant."""
    if isinstance(device, torch.dtype):
        return f": dtype={device} casts tensors"
    if isinstance(device, str) and device.split(":")[0].lower() in ("gpu", "nvidia", "rocm"):
        _, colon, index = device.partition(":")
        return f": torch calls it {'cuda' + colon + index!r}"
    return ": expected one such as 'cpu', 'cuda' or 'cuda:1'"


def of_dtype(dtype: object) -> str:
    """Return a hint about the dtype that may have been meant, or the usual ones."""
    if isinstance(dtype, str):
        wanted = dtype.removeprefix("torch.").lower()
        known = [name for name in vars(torch) if isinstance(getattr(torch, name), torch.dtype)]
        close = difflib.get_close_matches(wanted, known, 1)
        name = _DTYPES.get(wanted.replace("fp", "f")) or next(iter(close), None)
        if name is not None:
            return f": torch calls it {name!r}"
    return ": expected one such as 'bfloat16', 'float16', 'float32' or 'float64'"


def of_option(name: str, known: Collection[str]) -> str:
    """Return a hint about an option that is not known."""
    close = [] if name in _OPTIONS else difflib.get_close_matches(name, sorted(known), 1, 0.75)
    return of_other_library(name, known) or (f"; did you mean {close[0]!r}?" if close else "")


def of_other_library(name: str, known: Collection[str]) -> str:
    """Return a hint about an option that other libraries have under that name."""
    ours = _OPTIONS.get(name, "")
    ours = ours if ours in known else _ALSO.get(ours, "")
    if ours in known:
        return f"; it is called {ours!r} here"
    return f"; {_OTHER_WAYS[name]}" if name in _OTHER_WAYS else ""


def of_name(name: Name | int, names: Sequence[Name]) -> str:
    """Return a hint about the name in a file that may have been meant by a missing one."""
    texts = [one for one in names[:_MOST_NAMES] if isinstance(one, str)]
    if not isinstance(name, str) or not texts:
        return ""
    found = next((one for one in texts if one.endswith(f".{name}")), None)
    if found is not None:
        prefix = found.removesuffix(name)
        if prefix == ".":
            return (
                f", which has {found!r}, as write_module names the tensors of the module itself: "
                "TensorDeserializer.load_into_module() fills a module from names with or without "
                "the dot, and load_state_dict() from "
                "{name.lstrip('.'): tensor for name, tensor in tensorizer.load(uri).items()}"
            )
        has_each = common_prefix(texts).startswith(prefix)
        begins = "every name begins" if has_each else "its name begins"
        return f", which has {found!r}: {begins} with {prefix!r}"
    found = next((one for one in texts if name.endswith(f".{one}")), None)
    if found is not None:
        return f", which has {found!r}, without {name.removesuffix(found)!r}"
    close = difflib.get_close_matches(name, texts, 1, 0.8) if len(texts) <= _MOST_CLOSE else []
    return f", which has {close[0]!r}" if close else ""


def common_prefix(names: Sequence[str]) -> str:
    """Return the modules that all names begin with, with a dot at the end; empty for none."""
    prefix = os.path.commonprefix(names)  # noqa: RUF071  # not a path
    return prefix[: prefix.rfind(".") + 1]


def of_source(source: Any) -> str:
    """Return a hint about an object that is not a file."""
    if isinstance(source, (bytearray, memoryview)):
        return ": pass io.BytesIO(data)"
    if isinstance(source, torch.nn.Module):
        return ": TensorDeserializer(uri).load_into_module(module) fills a module"
    return ""


def of_prefixes(names: Sequence[Name], module: torch.nn.Module) -> str:
    """Return a hint about an extra prefix of all names of a file, or of all names of a module."""
    of_file = [name for name in names if isinstance(name, str)]
    of_module = [name for name, _ in module.named_parameters()]
    known = {*of_module, *(name for name, _ in module.named_buffers())}
    for prefix in _prefixes(of_file):
        if any(name.removeprefix(prefix) in known for name in of_file):
            return (
                f": every name of the file begins with {prefix!r}; load it into the parent that "
                "has this "
                f"module as {prefix[:-1]!r}, or rename the tensors and use load_state_dict()"
            )
    for prefix in _prefixes(of_module):
        if any(prefix + name in known for name in of_file):
            return (
                f": every name of the module begins with {prefix!r}; load the file into its "
                f"submodule {prefix[:-1]!r}"
            )
    return ""


def _prefixes(names: Sequence[str]) -> Iterator[str]:
    """Return the prefixes that all names share: one module, then two, and so on."""
    steps = common_prefix(names).split(".")[:-1]
    return itertools.accumulate(f"{step}." for step in steps)
