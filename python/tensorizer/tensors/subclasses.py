"""Tells tensors that consist of their bytes alone from those of subclasses that need more.

A file holds the bytes, the dtype and the shape of a tensor. A class of a library may need more:
other tensors that it is made of, or that it carries along. Such tensors are refused. Otherwise, a
load would return something else; and loading a class that a file names would run code that the file
chooses.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .._types import Name
from . import fake_mode
from .sharding import is_sharded

#: Attributes that trainers attach to parameters and make anew: gradients, and cast copies.
_OF_TRAINERS = ("main_grad", "main_param", "grad_added_to_main_grad")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NESTED = "nested tensor, which has no single shape: save the tensors of its unbind()"
_INSTEAD = "with torch.save inside tensorizer_saving(), which keeps it as it is"


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is of torch's own classes, and its bytes are all of it."""
    return type(tensor) in _PLAIN and not tensor.is_nested


def reason(tensor: torch.Tensor) -> str | None:
    """Return the reason why a tensor is more than its bytes; None if it is not.

    The text continues ``"'name' is a "``.
    """
    kind = type(tensor)
    if kind in _PLAIN:
        return _NESTED if tensor.is_nested else None
    if fake_mode.is_fake(tensor):
        return (
            "FakeTensor, which has a form and no data: save the tensors of a model that was made "
            "outside of FakeTensorMode"
        )
    if is_sharded(tensor):
        return (
            f"{kind.__name__}, of which this process has a part: tensorizer.save and "
            "TensorSerializer write it, where all ranks call them"
        )
    if is_traceable_wrapper_subclass(tensor):
        return (
            f"{kind.__name__}, which is made of other tensors{_parts(tensor)}: a .tensors file "
            "cannot say how they belong together; save these as tensors of their own, or the whole "
            + _INSTEAD
        )
    if kind.__name__ == "ShardedTensor":
        return (
            "ShardedTensor, of which this process has a part: save it by torch.distributed."
            "checkpoint and tensorizer.distributed.Writer, or a state dict of FSDP's "
            "StateDictType.FULL_STATE_DICT"
        )
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            f"{kind.__name__}: tensor subclasses that implement __torch_dispatch__ are not "
            f"supported; save the plain tensors that it consists of, or the whole {_INSTEAD}"
        )
    with torch._C.DisableTorchFunctionSubclass():
        carried = next(_carried(tensor), None)
    if carried is None:
        return None
    return (
        f"{kind.__name__} that needs other tensors (its attribute {carried}), for which a .tensors "
        "file has no place; save the state_dict() of its module if that lists them, or the whole "
        + _INSTEAD
    )


def refuse(name: Name, tensor: torch.Tensor) -> None:
    """Refuse to save a tensor that is more than its bytes.

    Raises:
        NotImplementedError: It is such a tensor; the message has the :func:`reason`.

    """
    if why := reason(tensor):
        raise NotImplementedError(f"{name!r} is a {why}")


def reason_in(module: torch.nn.Module, tensor: torch.Tensor) -> str | None:
    """Return the reason for a tensor of a module, whose state dict may hold more of it."""
    if type(tensor) in _PLAIN:
        return reason(tensor)
    return reason(tensor) or _kept_by(module, tensor)


def _parts(tensor: Any) -> str:
    try:
        names, _ = tensor.__tensor_flatten__()
        return f" ({', '.join(names)})"
    except Exception:  # of any library; the message is good without names
        return ""


def _carried(tensor: torch.Tensor) -> Iterator[str]:
    """Yield the names of attributes that hold tensors with memory of their own."""
    for name, value in vars(tensor).items():
        if name in _OF_TRAINERS:
            continue
        for inner, found in _tensors_of(value):
            # Memory that is not that of the tensor itself.
            if not found.is_meta and _storage_of(found) not in (0, _storage_of(tensor)):
                yield name + inner


def _tensors_of(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that are the value of an attribute, or directly held by it."""
    if isinstance(value, torch.Tensor):
        yield "", value
        return
    held: Mapping[Any, Any] = {}
    if isinstance(value, Mapping):
        held = value
    elif isinstance(value, (list, tuple, set, frozenset)):
        held = dict(enumerate(value))
    elif not isinstance(value, (torch.nn.Module, type, types.ModuleType)) and not callable(value):
        held = {f".{name}": inner for name, inner in getattr(value, "__dict__", {}).items()}
    for key, inner in held.items():
        if isinstance(inner, torch.Tensor):
            yield key if isinstance(key, str) and key[:1] == "." else f"[{key!r}]", inner


def _storage_of(value: torch.Tensor) -> int | None:
    """Return a key of a tensor's storage; 0 without bytes, None if it is made of other tensors."""
    try:
        storage = value.untyped_storage()
    except (RuntimeError, NotImplementedError, ValueError):
        return None
    return storage._cdata if storage.nbytes() > 0 else 0


def _kept_by(module: torch.nn.Module, tensor: torch.Tensor) -> str | None:
    """Return the reason if a module's state dict has more than its parameters and buffers."""
    kind = type(module)
    if kind._save_to_state_dict is torch.nn.Module._save_to_state_dict:
        return None
    state: dict[str, Any] = {}
    try:
        module._save_to_state_dict(state, "", True)
    except Exception:  # of any library, which raises it again when asked for a state dict
        return None
    groups = (module._parameters, module._buffers)
    own = [value for group in groups for value in group.values() if value is not None]
    places = {_storage_of(value) for value in own} - {0, None}
    beyond = [
        name
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
        and name not in module._parameters
        and name not in module._buffers
        and not any(value is one for one in own)
        and _storage_of(value) not in places
    ]
    if not beyond:
        return None
    return (
        f"{type(tensor).__name__} of a {kind.__name__}, whose state_dict() has more than its "
        f"parameters and buffers ({', '.join(beyond)}): save that instead, or the whole {_INSTEAD}"
    )
