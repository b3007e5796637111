"""Adapters of PEFT, put on a model."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

from ..file.encryption import DecryptionParams
from ..file.progress import ProgressType
from .configs import refuse_hub_arguments
from .fetching import fetched
from .folders import Folder
from .libraries import library
from .weights import Options, Weights, open_weights

_CONFIG = "adapter_config.json"


def load_adapter(
    model: torch.nn.Module,
    address: str | os.PathLike[Any],
    *,
    adapter_name: str = "default",
    is_trainable: bool = False,
    config: Any = None,
    num_readers: int | None = None,
    verify_hash: bool | str = False,
    encryption: DecryptionParams | None = None,
    cache_dir: str | os.PathLike[Any] | None = None,
    memory_limit: int | None = None,
    progress: ProgressType = False,
    **kwargs: Any,
) -> Any:
    """Put an adapter of PEFT on a model, as ``PeftModel.from_pretrained`` does.

    Args:
        model: The model that the adapter was trained on, or a ``PeftModel`` that gets one more.
        address: A folder with ``adapter_config.json`` and ``adapter_model.safetensors``; see
            :func:`from_pretrained`.
        adapter_name: The name of the adapter in the model.
        is_trainable: Have the adapter trained further.
        config: A ``PeftConfig`` to use in the place of ``adapter_config.json``.
        num_readers: See :func:`tensorizer.load`, as for the next five.
        verify_hash: Compare tensors with their hashes.
        encryption: What an encrypted file is decrypted with.
        cache_dir: A folder that keeps what a server sends of the weights.
        memory_limit: The most bytes that the load has in flight beside the tensors.
        progress: Called with the bytes that are loaded, or True for a bar.
        kwargs: ``autocast_adapter_dtype`` and ``low_cpu_mem_usage`` of PEFT, and
            ``ignore_mismatched_sizes``.

    Returns:
        The ``PeftModel``, in evaluation mode unless the adapter is trained further.

    Raises:
        FileNotFoundError: The configuration or the weights are missing.
        ImportError: PEFT is not installed.
        TypeError: An argument is for the hub only.
        RuntimeError: Weights do not fit the model.
        FormatError: The configuration is larger than 10 MiB.
        OSError, ValueError, HashMismatchError, CryptographyError: See
            :class:`tensorizer.TensorDeserializer`; or the library refuses the configuration.

    """
    refuse_hub_arguments(kwargs)
    peft = library("peft")
    folder = Folder(address)
    ignores = kwargs.pop("ignore_mismatched_sizes", False)
    options = Options(
        progress,
        num_readers=num_readers,
        verify_hash=verify_hash,
        encryption=encryption,
        cache_dir=cache_dir,
        memory_limit=memory_limit,
    )
    if config is None:
        config = _configuration(peft, folder)
    config.inference_mode = not is_trainable
    device = next((parameter.device for parameter in model.parameters()), None)
    with open_weights(folder, "peft", None, options.open) as file:
        weights = dict(Weights(file, options, device))
    adapted = _adapted(peft, model, config, adapter_name, kwargs)
    found = peft.set_peft_model_state_dict(
        adapted,
        weights,
        adapter_name=adapter_name,
        ignore_mismatched_sizes=ignores,
        low_cpu_mem_usage=kwargs.get("low_cpu_mem_usage", False),
    )
    _warn(folder, adapter_name, found)
    return adapted if is_trainable else adapted.eval()


def _configuration(peft: Any, folder: Folder) -> Any:
    """Return the configuration of an adapter's folder."""
    with fetched(folder) as files:
        files.fetch([_CONFIG])
        if not files.has(_CONFIG):
            if _CONFIG in files.refused:
                raise files.refused[_CONFIG]
            raise FileNotFoundError(f"no {_CONFIG} at {folder.shown}: expected an adapter of PEFT")
        return peft.PeftConfig.from_pretrained(str(files.path))


def _adapted(
    peft: Any, model: torch.nn.Module, config: Any, name: str, kwargs: dict[str, Any]
) -> Any:
    """Return a model with the modules of an adapter, whose weights are to be set."""
    if isinstance(model, peft.PeftModel):
        model.add_adapter(name, config, **kwargs)
        return model
    cls = peft.MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(config.task_type, peft.PeftModel)
    return cls(model, config, adapter_name=name, **kwargs)


def _warn(folder: Folder, name: str, found: Any) -> None:
    """Warn of weights of the adapter that the file lacks, and of those that nothing takes."""
    missing = [key for key in found.missing_keys if f".{name}." in key or key.endswith(f".{name}")]
    for what, keys in (("lacks", missing), ("has, and nothing takes", found.unexpected_keys)):
        if keys:
            warnings.warn(f"{folder.shown} {what}: {', '.join(keys)}", stacklevel=3)
