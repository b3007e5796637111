"""Builds models of diffusers from a configuration, and then puts the weights in."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .._locks import ForkSafeLock
from ..file.arguments import checked_dtype
from ..file.open_file import OpenFile
from ..modules.uninitialised import no_init_or_tensor
from ..tensors.handles import cast_dtype
from .libraries import library
from .model_spec import ModelSpec
from .weights import TensorFileOptions, Weights

logger = logging.getLogger("tensorizer")

#: Held while a model is built, because torch's default dtype is global to the process.
_building = ForkSafeLock()
#: Arguments that only the library's own loader supports, unless they are None or False.
_UNSUPPORTED = {
    *("quantization_config", "device_map", "parallel_config", "max_memory", "offload_folder"),
    *("offload_state_dict", "use_flashpack", "flashpack_kwargs", "ignore_mismatched_sizes"),
}
#: Arguments of that loader that are ignored, because they always hold here.
_IMPLIED = ("low_cpu_mem_usage", "disable_mmap")


def build(spec: ModelSpec, file: OpenFile, options: TensorFileOptions) -> Any:
    """Return the model of :func:`from_pretrained`, with the tensors of an open file.

    Raises:
        NotImplementedError: The model is quantized, or is to be on several devices, or another
            argument is for the library's own loader.
        ValueError: The library has no class of the name.
        RuntimeError: Weights do not fit the model, or one is missing.
        Exception: The errors of the library, and of :func:`tensorizer.load`.

    """
    cls = _class(spec)
    config = dict(spec.configuration)
    config_changes = _config_changes(config, spec)
    returns_loading_info = config_changes.pop("output_loading_info", False)
    weights = Weights(file, options, spec.device)
    dtype = checked_dtype(None if spec.dtype == "auto" else spec.dtype)
    dtype = dtype or weights.floating_dtype or torch.get_default_dtype()
    with torch.device("cpu"), _default_dtype(dtype), no_init_or_tensor():
        model = cls.from_config(config, **config_changes)
    tensors = dict(weights)
    fix = getattr(model, "_fix_state_dict_keys_on_load", None)
    if fix is not None:
        # Renames the weights of attention in old files.
        fix(tensors)
    _cast(tensors, dtype, getattr(cls, "_keep_in_fp32_modules", None))
    found = model.load_state_dict(tensors, strict=False, assign=True)
    del tensors
    _report(spec, cls, model, found)
    model.to(weights.device)  # buffers that no file has
    model.register_to_config(_name_or_path=spec.files.folder.shown)
    model.eval()
    if not returns_loading_info:
        return model
    # There are no mismatched shapes, because these are errors here.
    return model, {
        "missing_keys": list(found.missing_keys),
        "unexpected_keys": list(found.unexpected_keys),
        "mismatched_keys": [],
        "error_msgs": [],
    }


def _class(spec: ModelSpec) -> Any:
    """Return the class that the call names, or else the configuration.

    Raises:
        ValueError: The library has none of this name.

    """
    diffusers = library("diffusers")
    if spec.cls is not None and spec.cls is not getattr(diffusers, "AutoModel", None):
        return spec.cls
    name = spec.configuration.get("_class_name")
    cls = getattr(diffusers, name, None) if isinstance(name, str) else None
    if not isinstance(cls, type) or not issubclass(cls, torch.nn.Module):
        raise ValueError(
            f"the configuration of {spec.files.folder.shown} names {name!r}: expected a model of "
            "diffusers, or pass a class"
        )
    return cls


def _config_changes(config: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """Return the arguments that change the configuration.

    Raises:
        NotImplementedError: The configuration or the call needs the library's own loader.

    """
    unsupported_entries = {
        name: config.get(name) for name in ("quantization_config", "parallel_config")
    }
    for name, value in (*unsupported_entries.items(), *spec.kwargs.items()):
        if name in _UNSUPPORTED and value is not None and value is not False:
            raise NotImplementedError(
                f"{name} is for from_pretrained of diffusers itself, inside a block of "
                "tensorizer.safetensors.tensorizer_safetensors()"
            )
    left_out = (*_UNSUPPORTED, *_IMPLIED)
    return {name: value for name, value in spec.kwargs.items() if name not in left_out}


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    with _building.current():
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
        is_single = any(part in single for part in name.split("."))
        tensors[name] = tensor.to(cast_dtype(tensor.dtype, torch.float32 if is_single else dtype))


def _report(spec: ModelSpec, cls: Any, model: Any, found: Any) -> None:
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
            "%s: not used by %s: %s", spec.files.folder.shown, cls.__name__, ", ".join(unknown)
        )
    empty = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if empty:
        raise RuntimeError(
            f"{spec.files.folder.shown} lacks weights of {cls.__name__}: {', '.join(empty)}"
        )
    if found.missing_keys:
        logger.warning(
            "%s: missing, so that they have the initial values of %s: %s",
            spec.files.folder.shown,
            cls.__name__,
            ", ".join(found.missing_keys),
        )
