"""Loads a model from an address by one call."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..file import hints
from ..file.arguments import checked_dtype
from ..file.options import LoadOptions, split_options, takes
from ..file.progress import ProgressType
from . import diffusers_models, transformers_models
from .configs import CONFIG, address_in_errors, read_config, refuse_hub_arguments
from .fetching import fetched_files
from .folders import ModelFolder
from .libraries import is_of, library
from .model_spec import GENERATION_CONFIG, ModelSpec
from .remote_code import entry, fetch_code
from .weights import TensorFileOptions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger("tensorizer")


@takes(LoadOptions)
def from_pretrained(
    uri: str | os.PathLike[Any],
    cls: type | None = None,
    *,
    device: torch.device | str | None = None,
    group: ProcessGroup | None = None,
    dtype: torch.dtype | str | None = None,
    progress: ProgressType = False,
    config: Any = None,
    variant: str | None = None,
    trust_remote_code: bool = False,
    **kwargs: Any,
) -> Any:
    """Load a model of transformers or diffusers.

    The library builds the model from its configuration; :func:`tensorizer.load` reads the weights
    straight to the device, and the model takes these tensors as they are. Buffers that no file has,
    such as the frequencies of rotary embeddings, are computed by the library.

    Args:
        uri: A folder with ``config.json`` and weights: a local path, or an ``http(s)://``,
            ``s3://``, ``gs://``, ``az://`` or ``hf://org/repo[@revision][/folder]`` address. Or a
            file of weights in such a folder. Weights are safetensors files or their shards,
            ``model.tensors``, or a checkpoint of ``torch.save``.
        cls: The class of the model: an auto class, a model of transformers, or one of diffusers.
            None for the class that ``config.json`` names.
        device: The device of the model; None for torch's default device.
        group: A process group whose members all make this call: they read the weights once, and
            give them to each other.
        dtype: The dtype of floating-point weights. None for that of the configuration, or of the
            first such tensor of the file. ``torch_dtype`` is another name of this argument.
        progress: Called with the bytes that are loaded, or True for a bar.
        config: A configuration to use instead of ``config.json``: an object of transformers, or a
            dictionary of diffusers.
        variant: The infix of the names of the weights, as in ``model.fp16.safetensors``.
        trust_remote_code: Run Python files of the folder, for models whose code is not part of the
            library.
        kwargs: How the weights are read: see :class:`tensorizer.LoadOptions`. ``headers`` and
            ``timeout`` are for the other files, too. And further arguments of ``from_pretrained``
            of the class, such as ``attn_implementation`` and ``device_map``; with diffusers,
            changes to the configuration.

    Returns:
        The model, in evaluation mode, or the library's result for ``output_loading_info=True``.

    Raises:
        FileNotFoundError: ``config.json`` or the weights are missing.
        ImportError: The library is not installed, or transformers is older than release 5.
        TypeError: An argument is for the hub only, or the class belongs to neither library.
        NotImplementedError: A model of diffusers is quantized, or an argument is for its own loader
            only.
        RuntimeError: torch's default device is ``meta``, or weights do not fit the model. Missing
            and unknown names only warn with transformers; a missing name raises with diffusers.
        FormatError: A configuration is larger than 10 MiB.
        GroupError: Another member of the group was lost or has failed.
        OSError, ValueError, HashMismatchError, CryptographyError: See
            :class:`tensorizer.TensorDeserializer`; or the library refuses the configuration.

    """
    if device is None and torch.get_default_device().type == "meta":
        # The library refuses this, too.
        raise RuntimeError(
            "from_pretrained loads weights, and torch's default device is 'meta': call it outside "
            "of torch.device('meta'), or pass device="
        )
    old_name = kwargs.pop("torch_dtype", None)
    dtype = old_name if dtype is None else dtype
    dtype = checked_dtype(dtype) if isinstance(dtype, torch.dtype) else dtype
    folder = ModelFolder(uri)
    refuse_hub_arguments(folder, kwargs)
    options = TensorFileOptions(progress, group, split_options(LoadOptions, kwargs))
    with fetched_files(folder, options.headers) as files, options.members:
        files.fetch([CONFIG, GENERATION_CONFIG] if config is None else [GENERATION_CONFIG])
        config_json = read_config(files) if config is None else None
        if trust_remote_code:
            fetch_code(files, [CONFIG] if config is None else [], config)
        cls = _resolve_auto_model(cls, config if config_json is None else config_json)
        trusted = trust_remote_code is True
        spec = ModelSpec(files, config_json, cls, config, device, dtype, trusted, kwargs)
        _refuse_names_of_others(kwargs, spec.configuration)
        kind = _library_of(spec)
        is_diffusers = kind == "diffusers"
        explicit = None if is_diffusers else entry(spec.configuration, "transformers_weights")
        build = diffusers_models.build if is_diffusers else transformers_models.build
        file = options.open(folder, kind, variant, explicit)
        adapter = folder.path and folder.path / "adapter_config.json"
        if not is_diffusers and adapter is not None and adapter.is_file():
            # The library would attach it.
            logger.warning(
                "%s has an adapter too, which is not attached: use load_adapter(model, uri)",
                folder.shown,
            )
        try:
            with address_in_errors(files):
                return build(spec, file, options)
        finally:
            file.close()


def _refuse_names_of_others(kwargs: Mapping[str, Any], configuration: Any) -> None:
    """Refuse arguments that have another name here, unless the model's configuration has them.

    Raises:
        TypeError: There is one.

    """
    known = inspect.signature(from_pretrained).parameters
    for name in kwargs:
        hint = hints.of_other_library(name, known)
        if hint and entry(configuration, name) is None:
            raise TypeError(f"from_pretrained() got an unexpected keyword argument {name!r}{hint}")


def _resolve_auto_model(cls: Any, config_json: Any) -> Any:
    """Return transformers' ``AutoModel`` for diffusers' own, if the model is of transformers."""
    if not (isinstance(cls, type) and cls.__name__ == "AutoModel" and is_of(cls, "diffusers")):
        return cls
    is_transformers = (
        entry(config_json, "_class_name") is None and entry(config_json, "model_type") is not None
    )
    return library("transformers").AutoModel if is_transformers else cls


def _library_of(spec: ModelSpec) -> str:
    """Return the library that has the model: ``"transformers"`` or ``"diffusers"``.

    Raises:
        TypeError: The class belongs to neither.

    """
    if spec.cls is not None:
        for name in ("diffusers", "transformers"):
            if isinstance(spec.cls, type) and is_of(spec.cls, name):
                return name
        raise TypeError(f"expected a class of transformers or diffusers, found {spec.cls!r}")
    config_json = spec.configuration
    is_diffusers = isinstance(config_json, Mapping) and "_class_name" in config_json
    return "diffusers" if is_diffusers else "transformers"
