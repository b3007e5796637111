"""Builds models of transformers by the library, from a configuration and tensors by name."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ..file.open_file import OpenFile
from .libraries import library
from .model_spec import GENERATION_CONFIG, ModelSpec
from .remote_code import entry
from .torchao import metadata_of
from .weights import TensorFileOptions, Weights

#: Arguments with which the library accesses a tensor more than once.
_REUSE_TENSORS = ("quantization_config", "tp_plan", "tp_size", "distributed_config", "device_mesh")


def build(spec: ModelSpec, file: OpenFile, options: TensorFileOptions) -> Any:
    """Return the model of :func:`from_pretrained`, with the tensors of an open file.

    The library gets no folder, and reads none: the generation configuration is passed to it.

    Raises:
        ValueError: Neither the call nor the configuration names a class, or two arguments name a
            device.
        Exception: The errors of the library, and of :func:`tensorizer.load`.

    """
    cls, config, kwargs = _with_config(spec, _class(spec), dict(spec.kwargs))
    device, device_map = _devices(spec.device, kwargs.pop("device_map", None))
    quantized = getattr(config, "quantization_config", None) is not None
    reused = quantized or any(kwargs.get(name) is not None for name in _REUSE_TENSORS)
    weights = Weights(file, options, device, single_use=not reused)
    dtype = spec.dtype
    if dtype in (None, "auto"):
        known = getattr(config, "dtype", None) is not None
        dtype = "auto" if known else weights.floating_dtype
    if "generation_config" not in kwargs and (found := _generation_config(spec)) is not None:
        kwargs["generation_config"] = found
    with metadata_of(file, config, options.headers):
        result = cls.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=dtype,
            device_map=device_map,
            trust_remote_code=spec.trust_remote_code,
            **kwargs,
        )
    model = result[0] if isinstance(result, tuple) else result
    model.name_or_path = model.config.name_or_path = spec.files.folder.shown
    return result


def _class(spec: ModelSpec) -> Any:
    """Return the class that the call names, or else the configuration.

    Raises:
        ValueError: There is none, or its code is in the folder and must not be run.

    """
    transformers = library("transformers")
    if spec.cls is not None and not hasattr(spec.cls, "_model_mapping"):
        return spec.cls
    code = _remote_class(spec)
    if code is not None or spec.cls is not None:
        return code or spec.cls
    names = _architectures(spec)
    cls = getattr(transformers, names[0], None) if names else None
    is_model = isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
    if not is_model and not hasattr(cls, "_model_mapping"):
        named = "names no class"
        if names:
            what = "transformers lacks" if cls is None else "is no model of transformers"
            named = f"names {names[0]!r}, which {what}"
        raise ValueError(
            f"the configuration of {spec.files.folder.shown} {named}: pass a class, such as "
            "transformers.AutoModel, or trust_remote_code=True if the folder has its code"
        )
    return cls


def _architectures(spec: ModelSpec) -> list[str]:
    """Return the names of classes in the configuration.

    Raises:
        ValueError: They are not a list of strings.

    """
    names = entry(spec.configuration, "architectures")
    if names is None:
        return []
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"architectures in the configuration of {spec.files.folder.shown} is {names!r}: "
            "expected a list of names of classes"
        )
    return list(names)


def _remote_class(spec: ModelSpec) -> Any:
    """Return the class whose code is in the folder, if that may be run, or None."""
    auto_map = entry(spec.configuration, "auto_map")
    if not spec.trust_remote_code or not isinstance(auto_map, dict):
        return None
    references = {name: value for name, value in auto_map.items() if isinstance(value, str)}
    if spec.cls is not None:
        auto = spec.cls.__name__
    else:
        names = _architectures(spec)
        found = (name for name, at in references.items() if at.rpartition(".")[2] in names)
        auto = next(found, "")
    reference = references.get(auto)
    if reference is None:
        return None
    library("transformers")
    cls = library("transformers.dynamic_module_utils").get_class_from_dynamic_module(
        reference, spec.files.path
    )
    if hasattr(cls, "register_for_auto_class"):
        # As auto classes do, so that save_pretrained writes the code too.
        cls.register_for_auto_class(auto)
    return library("transformers.models.auto.auto_factory").add_generation_mixin_to_remote_model(
        cls
    )


def _with_config(
    spec: ModelSpec, cls: Any, kwargs: dict[str, Any]
) -> tuple[Any, Any, dict[str, Any]]:
    """Return the class, the configuration, and the arguments that remain for the class.

    Arguments that are attributes of the configuration change it, as in the library.
    """
    config = spec.config
    is_auto = hasattr(cls, "_model_mapping")
    if config is None:
        own = None if is_auto else getattr(cls, "config_class", None)
        kind = own or library("transformers").AutoConfig
        # These are for the model only, as in the library's auto classes.
        of_model = ("quantization_config", "device_map")
        kept: dict[str, Any] = {name: kwargs.pop(name) for name in of_model if name in kwargs}
        if own is None:
            kwargs["trust_remote_code"] = spec.trust_remote_code
        config, kwargs = kind.from_pretrained(spec.files.path, return_unused_kwargs=True, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name != "trust_remote_code"}
        kwargs.update(kept)
    if is_auto:
        cls, config = _concrete(cls, config)
    return cls, config, kwargs


def _concrete(cls: Any, config: Any) -> tuple[Any, Any]:
    """Return the class that an auto class has for a configuration, and the part for that class.

    The auto class itself would ask for a folder.

    Raises:
        ValueError: It has no such class.

    """
    if type(config) not in cls._model_mapping:
        raise ValueError(f"{cls.__name__} has no model for {type(config).__name__}")
    found = library("transformers.models.auto.auto_factory")._get_model_class(
        config, cls._model_mapping
    )
    text = getattr(type(config), "sub_configs", {}).get("text_config")
    if text is None or getattr(found, "config_class", None) is not text:
        return found, config
    part = config.get_text_config()
    if getattr(config, "quantization_config", None) is not None:
        part.quantization_config = config.quantization_config
    return found, part


def _devices(device: torch.device | str | None, device_map: Any) -> tuple[Any, Any]:
    """Return the device to load tensors to, and the ``device_map`` of the library.

    Raises:
        ValueError: Both arguments are given.

    """
    default = torch.get_default_device()
    if device_map is not None:
        if device is not None:
            raise ValueError("device= and device_map= exclude each other")
        return "cpu", device_map
    spec = torch.device(default if device is None else device)
    if spec.type == default.type == "cpu":
        # The library's own default, which does not need accelerate.
        return spec, None
    if spec.type == "cuda" and spec.index is None:
        spec = torch.device("cuda", torch.cuda.current_device())
    return spec, {"": spec}


def _generation_config(spec: ModelSpec) -> Any:
    """Return the generation configuration of the folder, or None.

    If it has no file of its own, or if that is damaged, it is in ``config.json``, as in the
    library.
    """
    cls = library("transformers").GenerationConfig
    if spec.files.has(GENERATION_CONFIG):
        with contextlib.suppress(OSError):
            return cls.from_pretrained(spec.files.path)
    if spec.config_json is None:
        return None
    return cls.from_pretrained(
        spec.files.path, config_file_name="config.json", _from_model_config=True
    )
