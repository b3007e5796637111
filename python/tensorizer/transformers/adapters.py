"""Loads adapters of PEFT into a model."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

from ..file.options import ReadOptions, split_options, takes
from ..file.progress import ProgressType
from .configs import refusal, refuse_hub_arguments
from .fetching import fetched_files
from .folders import ModelFolder
from .libraries import library
from .weights import TensorFileOptions, Weights

_CONFIG = "adapter_config.json"
#: Arguments that only PEFT's own loader has.
_UNSUPPORTED = (
    *("key_mapping", "ephemeral_gpu_offload", "adapters", "device_map", "max_memory"),
    *("offload_folder", "offload_dir", "offload_index"),
)
#: Parts of the names of weights that an adapter stores once, but has in each layer.
_SHARED = ("vblora_vector_bank", ".tinylora_v.", ".unilora_theta_d.")


@takes(ReadOptions)
def load_adapter(
    model: torch.nn.Module,
    uri: str | os.PathLike[Any],
    *,
    adapter_name: str = "default",
    is_trainable: bool = False,
    config: Any = None,
    progress: ProgressType = False,
    **kwargs: Any,
) -> Any:
    """Put an adapter of PEFT on a model, as ``PeftModel.from_pretrained`` does.

    Args:
        model: The model that the adapter was trained on, or a ``PeftModel`` that gets one more.
        uri: A folder with ``adapter_config.json`` and ``adapter_model.safetensors``; see
            :func:`from_pretrained`.
        adapter_name: The name of the adapter in the model.
        is_trainable: True to train the adapter further.
        config: A ``PeftConfig`` to use instead of ``adapter_config.json``.
        progress: Called with the bytes that are loaded, or True for a bar.
        kwargs: How the weights are read: see :class:`tensorizer.ReadOptions`. And
            ``autocast_adapter_dtype``, ``low_cpu_mem_usage`` and ``torch_device`` of PEFT, and
            ``ignore_mismatched_sizes``.

    Returns:
        The ``PeftModel``, in evaluation mode unless ``is_trainable`` is true.

    Raises:
        FileNotFoundError: The configuration or the weights are missing.
        ImportError: PEFT is not installed.
        TypeError: An argument is for the hub only.
        NotImplementedError: An argument is for PEFT's own loader only, such as ``key_mapping``.
        RuntimeError: Weights do not fit the model.
        FormatError: The configuration is larger than 10 MiB.
        OSError, ValueError, HashMismatchError, CryptographyError: See
            :class:`tensorizer.TensorDeserializer`; or the library refuses the configuration.

    """
    folder = ModelFolder(uri)
    refuse_hub_arguments(folder, kwargs)
    for name in _UNSUPPORTED:
        if kwargs.pop(name, None):
            raise NotImplementedError(
                f"{name} is for PeftModel.from_pretrained itself, inside a block of "
                "tensorizer.safetensors.tensorizer_safetensors()"
            )
    peft = library("peft")
    ignores = kwargs.pop("ignore_mismatched_sizes", False)
    device = kwargs.pop("torch_device", None)
    options = TensorFileOptions(progress, None, split_options(ReadOptions, kwargs))
    if config is None:
        with fetched_files(folder, options.headers) as files:
            files.fetch([_CONFIG])
            if not files.has(_CONFIG):
                advice = ": expected an adapter of PEFT"
                raise refusal(files, _CONFIG, f"no {_CONFIG}", advice)
            config = peft.PeftConfig.from_pretrained(str(files.path))
    if is_trainable and getattr(config, "is_prompt_learning", False):
        raise ValueError(
            "an adapter of learned prompts cannot be trained further: pass is_trainable=False"
        )
    config.inference_mode = not is_trainable
    if device is None:
        device = next((parameter.device for parameter in model.parameters()), None)
    with options.open(folder, "peft") as file:
        weights = dict(Weights(file, options, device))
    adapted: Any = model
    if isinstance(model, peft.PeftModel):
        model.add_adapter(adapter_name, config, **kwargs)
    else:
        cls = peft.MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(config.task_type, peft.PeftModel)
        adapted = cls(model, config, adapter_name=adapter_name, **kwargs)
    if is_trainable and adapted is model and hasattr(model, "set_requires_grad"):
        # An adapter that is added to a ``PeftModel`` is frozen at first.
        model.set_requires_grad(adapter_name)
    found = peft.set_peft_model_state_dict(
        adapted,
        weights,
        adapter_name=adapter_name,
        ignore_mismatched_sizes=ignores,
        low_cpu_mem_usage=kwargs.get("low_cpu_mem_usage", False),
    )
    cast = getattr(getattr(adapted, "base_model", None), "_cast_adapter_dtype", None)
    if cast is not None:
        autocast = kwargs.get("autocast_adapter_dtype", True)
        cast(adapter_name=adapter_name, autocast_adapter_dtype=autocast)
    _warn(peft, folder, config, adapter_name, found)
    return adapted if is_trainable else adapted.eval()


def _warn(peft: Any, folder: ModelFolder, config: Any, name: str, found: Any) -> None:
    """Warn of weights that the file lacks, and of weights in it that the model does not use.

    Weights of learned prompts, and weights that adapters share, have other names in the file.
    """
    missing, unknown = found.missing_keys, found.unexpected_keys
    if getattr(config, "is_prompt_learning", False):
        missing, unknown = [], [key for key in unknown if key != "prompt_embeddings"]
    prefixes = getattr(getattr(peft, "mapping", None), "PEFT_TYPE_TO_PREFIX_MAPPING", {})
    prefix = prefixes.get(getattr(config, "peft_type", None), "")
    missing = [
        key
        for key in missing
        if (f".{name}." in key or key.endswith(f".{name}"))
        and prefix in key
        and not any(part in key for part in _SHARED)
    ]
    for what, keys in (
        ("lacks keys of the model", missing),
        ("has keys that the model does not use", unknown),
    ):
        if keys:
            warnings.warn(f"{folder.shown} {what}: {', '.join(keys)}", stacklevel=4)
