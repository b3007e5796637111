"""Builds models of diffusers from a configuration, and then puts the weights in."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .._locks import OwnLock
from ..file.arguments import checked_dtype
from ..file.tensor_file import TensorFile
from ..modules.uninitialised import no_init_or_tensor
from .libraries import library
from .wanted import Wanted
from .weights import Options, Weights

logger = logging.getLogger("tensorizer")

#: Held while a model is built, because torch's default dtype is global to the process.
_building = OwnLock()
#: Arguments that only the library's own loader supports, unless they are None or False.
_NOT_HERE = frozenset(
    {
        *("quantization_config", "device_map", "parallel_config", "max_memory", "offload_folder"),
        *("offload_state_dict", "use_flashpack", "flashpack_kwargs", "ignore_mismatched_sizes"),
    }
)
#: Arguments of that loader that are ignored, because they always hold here.
_IMPLIED = ("low_cpu_mem_usage", "disable_mmap")


def build(wanted: Wanted, file: TensorFile, options: Options) -> Any:
    """Return the model of :func:`from_pretrained`, with the tensors of an open file.

    Raises:
        NotImplementedError: The model is quantized, or is to be on several devices, or another
            argument is for the library's own loader.
        ValueError: The library has no class of the name.
        RuntimeError: Weights do not fit the model, or one is missing.
        Exception: The errors of the library, and of :func:`tensorizer.load`.

    """
    cls = _class(wanted)
    config = dict(wanted.configuration)
    changes = _changes(config, wanted)
    says_names = changes.pop("output_loading_info", False)
    weights = Weights(file, options, wanted.device)
    dtype = checked_dtype(None if wanted.dtype == "auto" else wanted.dtype)
    dtype = dtype or weights.floating_dtype or torch.get_default_dtype()
    with torch.device("cpu"), _default_dtype(dtype), no_init_or_tensor():
        model = cls.from_config(config, **changes)
    tensors = dict(weights)
    fix = getattr(model, "_fix_state_dict_keys_on_load", None)
    if fix is not None:
        # Renames the weights of attention in old files.
        fix(tensors)
    _cast(tensors, dtype, getattr(cls, "_keep_in_fp32_modules", None))
    found = model.load_state_dict(tensors, strict=False, assign=True)
    del tensors
    _report(wanted, cls, model, found)
    model.to(weights.device)  # buffers that no file has
    model.register_to_config(_name_or_path=wanted.folder.shown)
    model.eval()
    return (model, _names(found)) if says_names else model


def _names(found: Any) -> dict[str, Any]:
    """Return the library's result for ``output_loading_info=True``.

    There are no mismatched shapes, because these are errors here.
    """
    return {
        "missing_keys": list(found.missing_keys),
        "unexpected_keys": list(found.unexpected_keys),
        "mismatched_keys": [],
        "error_msgs": [],
    }


def _class(wanted: Wanted) -> Any:
    """Return the class that the call names, or else the configuration.

    Raises:
        ValueError: The library has none of this name.

    """
    diffusers = library("diffusers")
    if wanted.cls is not None and wanted.cls is not getattr(diffusers, "AutoModel", None):
        return wanted.cls
    name = wanted.configuration.get("_class_name")
    cls = getattr(diffusers, name, None) if isinstance(name, str) else None
    if not isinstance(cls, type) or not issubclass(cls, torch.nn.Module):
        raise ValueError(
            f"the configuration of {wanted.folder.shown} names {name!r}: expected a model of "
            "diffusers, or pass a class"
        )
    return cls


def _changes(config: dict[str, Any], wanted: Wanted) -> dict[str, Any]:
    """Return the arguments that change the configuration.

    Raises:
        NotImplementedError: The configuration or the call needs the library's own loader.

    """
    quantizes = {name: config.get(name) for name in ("quantization_config", "parallel_config")}
    for name, value in (*quantizes.items(), *wanted.kwargs.items()):
        if name in _NOT_HERE and value is not None and value is not False:
            raise NotImplementedError(
                f"{name} is for from_pretrained of diffusers itself, inside a block of "
                "tensorizer.safetensors.tensorizer_safetensors()"
            )
    left_out = (*_NOT_HERE, *_IMPLIED)
    return {name: value for name, value in wanted.kwargs.items() if name not in left_out}


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    with _building.here():
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def _cast(tensors: dict[str, Any], dtype: torch.dtype, kept: list[str] | str | None) -> None:
    """Cast floating-point tensors to ``dtype``, and those of modules that need it to ``float32``.

    Each new tensor replaces the old one at once, so that only one of them is held twice.
    """
    single = [kept] if isinstance(kept, str) else kept or []
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            is_single = any(part in single for part in name.split("."))
            tensors[name] = tensor.to(torch.float32 if is_single else dtype)


def _report(wanted: Wanted, cls: Any, model: Any, found: Any) -> None:
    """Warn of names that the model does not know, and refuse a model with missing weights.

    Raises:
        RuntimeError: A parameter is in no file: it would have no memory.

    """
    ignored = getattr(cls, "_keys_to_ignore_on_load_unexpected", None) or ()
    unknown = [
        name
        for name in found.unexpected_keys
        if not any(re.search(pattern, name) for pattern in ignored)
    ]
    if unknown:
        logger.warning(
            "%s: not used by %s: %s", wanted.folder.shown, cls.__name__, ", ".join(unknown)
        )
    empty = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if empty:
        raise RuntimeError(
            f"{wanted.folder.shown} lacks weights of {cls.__name__}: {', '.join(empty)}"
        )
    if found.missing_keys:
        logger.warning(
            "%s: not there, and as %s makes them: %s",
            wanted.folder.shown,
            cls.__name__,
            ", ".join(found.missing_keys),
        )
