"""The functions of ``safetensors.torch``."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any

import torch

from .._calls import limited, limited_save
from ..file.to_safetensors import write_one
from ..modules import held_elsewhere
from ..tensors import subclasses
from .errors import as_safetensor_errors
from .reading import safe_open
from .safetensors_file import SafetensorsFile, check_filename
from .sharing import _find_shared_tensors, _remove_duplicate_names, storage_ptr, storage_size

__all__ = [
    "load",
    "load_file",
    "load_model",
    "save",
    "save_file",
    "save_model",
    "storage_ptr",
    "storage_size",
]


@limited
def load_file(
    filename: str | os.PathLike[str],
    device: torch.device | str | int = "cpu",
    *,
    backend: str = "mmap",
    timeout: float | None = None,
) -> dict[str, torch.Tensor]:
    """Load the tensors of a safetensors file.

    Local files are mapped; :class:`safe_open` describes the risks of this, the arguments and the
    errors. ``timeout`` is for the whole call.

    Returns:
        The tensors by name, in the order of the file. Changes to them do not change the file.

    """
    with safe_open(filename, "pt", device, backend=backend) as file:
        tensors: dict[str, torch.Tensor] = file.get_tensors()
    return tensors


def load(data: bytes) -> dict[str, torch.Tensor]:
    """Load the tensors of a safetensors file in memory, as copies on the CPU.

    Raises:
        SafetensorError: These are not the bytes of a safetensors file.
        TypeError: The argument is not ``bytes``.

    """
    return SafetensorsFile.of_bytes(data).load_all()


@limited_save
def save_file(
    tensors: dict[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    *,
    timeout: float | None = None,
) -> None:
    """Save tensors as a safetensors file, which appears when it is complete.

    Args:
        tensors: Dense, contiguous tensors by name, which share no memory.
        filename: A path, or an address that :class:`tensorizer.TensorSerializer` opens.
        metadata: Strings by name.
        timeout: The seconds that the call may take; then it is a ``TimeoutError``.

    Raises:
        ValueError: A tensor is sparse or not contiguous, or a value is not a tensor; or the format
            cannot hold it.
        RuntimeError: Tensors share memory; use :func:`save_model`, which saves them once.
        SafetensorError: The file cannot be written.
        TypeError: Names, metadata or the file name are of another type.
        NotImplementedError: A tensor is nested, on the meta device, or of a subclass.

    """
    check_filename(filename)
    _check(tensors)
    with as_safetensor_errors("serializing", OSError):
        write_one(filename, tensors, metadata=metadata)


def save(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Return the bytes of a safetensors file. Arguments and errors: see :func:`save_file`."""
    _check(tensors)
    memory = io.BytesIO()
    write_one(memory, tensors, metadata=metadata)
    return memory.getvalue()


@limited_save
def save_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    force_contiguous: bool = True,
    *,
    timeout: float | None = None,
) -> None:
    """Save a module as a safetensors file, where tensors that share memory are saved once.

    If a storage has several names, the first one whose tensor covers the whole storage is saved.
    For each other name, ``metadata`` gets an entry with the saved name, unless it has one.

    Args:
        model: The module whose state is saved.
        filename: See :func:`save_file`.
        metadata: Strings by name; this dict is not changed.
        force_contiguous: True to copy tensors that are not contiguous, False to refuse them.
        timeout: The seconds that the call may take; then it is a ``TimeoutError``.

    Raises:
        RuntimeError: None of the tensors that share memory covers the whole storage.
        Exception: The errors of :func:`save_file`.

    """
    held_elsewhere.refuse_offloaded(model, to_load=False)
    state = model.state_dict()
    notes: dict[str, str] = {}
    for kept, names in _remove_duplicate_names(state).items():
        for name in names:
            notes[name] = kept
            del state[name]
    if force_contiguous:
        state = {name: tensor.contiguous() for name, tensor in state.items()}
    if notes:
        metadata = {**notes, **(metadata or {})}
    try:
        save_file(state, filename, metadata)
    except ValueError as error:
        if force_contiguous or all(tensor.is_contiguous() for tensor in state.values()):
            raise
        advice = "Or use save_model(..., force_contiguous=True), which copies such tensors."
        raise ValueError(f"{error} {advice}") from error


@limited
def load_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    strict: bool = True,
    device: torch.device | str | int = "cpu",
    *,
    backend: str = "mmap",
    timeout: float | None = None,
) -> tuple[set[str], list[str]]:
    """Load a safetensors file into a module, whose tensors may share memory.

    Args:
        model: The module whose tensors are overwritten.
        filename: See :func:`load_file`, as for ``device`` and ``backend``.
        strict: Raise if a name is only in the module or only in the file. The tensors that are in
            both are loaded before.
        device: The device that tensors are loaded to before they are copied into the module.
        backend: ``"mmap"`` or ``"pread"``.
        timeout: The seconds that the call may take; then it is a ``TimeoutError``.

    Returns:
        The missing names, which only the module has, and the unexpected names, which only the file
        has. A tensor of the module that shares memory with one in the file is not missing. If the
        file has several names of such tensors, all but one are unexpected.

    Raises:
        RuntimeError: Shapes differ; or, with ``strict``, names are missing or unexpected.
        Exception: The errors of :func:`load_file`.

    """
    held_elsewhere.refuse_offloaded(model, to_load=True)
    tensors = load_file(filename, device, backend=backend)
    removed = _remove_duplicate_names(model.state_dict(), preferred_names=tensors)
    names, unexpected = model.load_state_dict(tensors, strict=False)
    missing = set(names)
    for name in (name for group in removed.values() for name in group):
        if name in missing:
            missing.remove(name)
        else:
            unexpected.append(name)
    if strict and (missing or unexpected):
        lines = [f"Error(s) in loading state_dict for {type(model).__name__}:"]
        for what, found in (("Missing", missing), ("Unexpected", unexpected)):
            if found:
                keys = ", ".join(f'"{name}"' for name in sorted(found))
                lines.append(f"{what} key(s) in state_dict: {keys}")
        raise RuntimeError("\n    ".join(lines))
    return missing, unexpected


def _check(tensors: Mapping[str, Any]) -> None:
    """Refuse tensors that safetensors refuses, with its checks in the same order."""
    if not isinstance(tensors, dict):
        raise ValueError(f"Expected a dict of [str, torch.Tensor] but received {type(tensors)}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"Key `{name}` is invalid, expected torch.Tensor but received {type(tensor)}"
            )
    sparse = [name for name, tensor in tensors.items() if tensor.layout != torch.strided]
    if sparse:
        raise ValueError(
            f"You are trying to save a sparse tensors: `{sparse}` which this library does not "
            "support. You can make it a dense tensor before saving with `.to_dense()` but be aware "
            "this might make a much larger file than needed."
        )
    for name, tensor in tensors.items():
        if tensor.is_nested:
            subclasses.refuse(name, tensor)
    shared = [names for names in _find_shared_tensors(tensors) if len(names) > 1]
    if shared:
        raise RuntimeError(
            f"Some tensors share memory, and would be in the file several times: {shared}. "
            "`save_model` saves one of each"
        )
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"names must be str, not {type(name).__name__}: {name!r}")
        if not tensor.is_contiguous():
            raise ValueError(
                f"You are trying to save a non contiguous tensor: `{name}` which is not allowed. "
                "Call `.contiguous()` on it; of parts of one tensor, rather save the whole."
            )
        if tensor.is_meta:
            tensor.to("cpu")  # raises torch's own error
