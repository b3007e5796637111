"""Pickles of ``torch.save``, read by torch's restricted unpickler."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import _weights_only_unpickler as restricted

from .._errors import FormatError

#: Kinds of tensors that only ``torch.load`` can rebuild, by the function that a pickle names.
_UNSUPPORTED_KINDS = {
    "_rebuild_qtensor": "a quantized tensor",
    "_rebuild_nested_tensor": "a nested tensor",
    "_rebuild_njt": "a nested tensor",
    "_rebuild_sparse_tensor": "a sparse tensor",
    "_rebuild_wrapper_subclass": "a tensor of a subclass",
    "_rebuild_device_tensor_from_numpy": "a tensor of a device that torch saves as an array",
    "_rebuild_device_tensor_from_cpu_tensor": "a tensor of a device that torch saves as another",
}
#: The tag of storages' ids in pickles of :func:`tensorizer.torch_compat.tensorizer_saving`.
_PAIR_TAG = b"TensorizerPickler"


def unpickled(
    data: bytes, uri: str, persistent_load: Callable[[object], torch.storage.TypedStorage]
) -> Any:
    """Return the object of a pickle, whose storages ``persistent_load`` makes.

    Raises:
        pickle.UnpicklingError: The restricted unpickler refuses it.
        NotImplementedError: It has tensors that only ``torch.load`` can rebuild.
        FormatError: It is damaged.

    """
    unpickler = restricted.Unpickler(io.BytesIO(data), encoding="utf-8")
    unpickler.persistent_load = persistent_load  # type: ignore[method-assign]
    # Sparse tensors that torch.load is to validate, in this thread or another.
    waiting = _sparse_tensors_to_validate()
    earlier_ids = {id(tensor) for tensor in waiting}
    try:
        return unpickler.load()
    except pickle.UnpicklingError as error:
        if _PAIR_TAG in data:
            raise FormatError(
                f"{uri} is one half of an object whose storages are in another file: torch.load it "
                "inside tensorizer_loading()"
            ) from None
        raise pickle.UnpicklingError(f"{uri}: {error}") from error
    except (FormatError, MemoryError):
        raise
    except Exception as error:  # of any function that the pickle names
        kind = _unsupported_kind(data)
        if kind is not None:
            raise NotImplementedError(
                f"{uri} holds {kind}, which only torch.load rebuilds: {_first_line(error)}"
            ) from error
        raise FormatError(
            f"{uri}: its pickle is damaged: {type(error).__name__}: {_first_line(error)}"
        ) from error
    finally:
        waiting[:] = [t for t in waiting if id(t) in earlier_ids or t.device.type != "meta"]


def _sparse_tensors_to_validate() -> list[torch.Tensor]:
    """Return the list in which torch keeps sparse tensors until a load has ended."""
    of_thread = getattr(torch._utils, "_get_sparse_tensors_to_validate", None)
    if of_thread is not None:  # since torch 2.15
        found: list[torch.Tensor] = of_thread()
        return found
    everywhere: list[torch.Tensor] = torch._utils._sparse_tensors_to_validate
    return everywhere


def _unsupported_kind(data: bytes) -> str | None:
    try:
        names = restricted.get_globals_in_pkl(io.BytesIO(data))
    except Exception:  # it is damaged besides
        return None
    found = sorted(_UNSUPPORTED_KINDS.keys() & {name.rpartition(".")[2] for name in names})
    return _UNSUPPORTED_KINDS[found[0]] if found else None


def _first_line(error: Exception) -> str:
    """Return the first line of torch's message, which goes on with stack traces."""
    return str(error).split("\n", 1)[0][:300]
