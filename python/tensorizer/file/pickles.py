"""Pickles of ``torch.save``, read by torch's restricted unpickler."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import _weights_only_unpickler as restricted

from .._errors import FormatError
from .._types import Name
from .placeholders import SPECIAL_TENSORS, Placeholder, Unpickler, is_blocked, missing_names
from .unpickled_tensors import shown

#: The most classes that a message names.
_MAX_SHOWN_CLASSES = 20
#: The tag of storages' ids in pickles of :func:`tensorizer.torch_compat.tensorizer_saving`.
PAIR_TAG = "TensorizerPickler"


def unpickled(
    data: bytes, uri: str, persistent_load: Callable[[object], Any], *, skip_objects: bool = False
) -> Any:
    """Return the object of a pickle, whose storages ``persistent_load`` makes.

    With ``skip_objects``, there are placeholders for objects of classes that are not allowed.

    Raises:
        pickle.UnpicklingError: The restricted unpickler refuses it.
        NotImplementedError: It has tensors that only ``torch.load`` can rebuild.
        FormatError: It is damaged.

    """

    def load(unpickler: Any) -> Any:
        unpickler.persistent_load = persistent_load
        return unpickler.load()

    # The list of sparse tensors that torch.load is to validate, in this thread or another.
    of_thread = getattr(torch._utils, "_get_sparse_tensors_to_validate", None)  # since torch 2.15
    waiting: list[torch.Tensor] = (
        torch._utils._sparse_tensors_to_validate if of_thread is None else of_thread()
    )
    earlier_ids = {id(tensor) for tensor in waiting}
    skipped = False
    try:
        try:
            return load(restricted.Unpickler(io.BytesIO(data), encoding="utf-8"))
        except Exception:  # of any function that the pickle names
            if not skip_objects or PAIR_TAG.encode() in data:
                raise
            skipped = True
            return load(Unpickler(data, encoding="utf-8"))
    except pickle.UnpicklingError as error:
        if PAIR_TAG.encode() in data:
            raise FormatError(
                f"{uri} is one half of an object whose storages are in another file, as a rule "
                f"{uri}.tensors: torch.load it inside tensorizer_loading()"
            ) from None
        raise pickle.UnpicklingError(f"{uri}: {_refusal(data, error, skipped)}") from error
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


def _refusal(data: bytes, error: pickle.UnpicklingError, skipped: bool) -> str:
    """Return why the restricted unpickler refuses a pickle, and how to read it nevertheless."""
    try:
        missing = missing_names(data)
    except Exception:  # it is damaged besides
        missing = []
    blocked = [name for name in missing if is_blocked(name)]
    if blocked:
        return f"it names {', '.join(blocked)}, which could run any program: they are blocked"
    if skipped or not missing:
        return _first_line(error)
    names = ", ".join(missing[:_MAX_SHOWN_CLASSES]) + ", ..." * (len(missing) > _MAX_SHOWN_CLASSES)
    return (
        f"torch's restricted unpickler does not allow {names}: skip_objects=True (--skip-objects) "
        "leaves such objects out, and torch.serialization.add_safe_globals (--allow-class NAME) "
        "allows classes that you trust"
    )


def _unsupported_kind(data: bytes) -> str | None:
    try:
        names = restricted.get_globals_in_pkl(io.BytesIO(data))
    except Exception:  # it is damaged besides
        return None
    found = sorted(SPECIAL_TENSORS.keys() & {name.rpartition(".")[2] for name in names})
    return SPECIAL_TENSORS[found[0]] if found else None


def _first_line(error: Exception) -> str:
    """Return the first line of torch's message, which goes on with stack traces."""
    return str(error).split("\n", 1)[0][:300]


class MetaStorages:
    """The storages of one file while its pickle is read: they have sizes, but no bytes.

    Args:
        file: The file's number.
        uri: Its path or address.
        numbers: The numbers of all records, by name.
        lens: The bytes of each record, by number.
        legacy: True for a file of torch before 1.6, whose storages become records here.

    """

    def __init__(
        self, file: int, uri: str, numbers: dict[str, int], lens: list[int], *, legacy: bool
    ) -> None:
        self._file, self._uri, self._all, self._lens = file, uri, numbers, lens
        self._legacy = legacy
        #: Legacy files: the number of elements of each storage.
        self.counts: dict[str, int] = {}
        self._by_key: dict[str, torch.storage.TypedStorage] = {}
        #: By the storage's address: the number of the record, and the bytes that tensors may use.
        self._known: dict[int, tuple[int, int]] = {}

    def persistent_load(self, pid: object) -> Any:
        """Return the storage of a persistent id of ``torch.save``."""
        if isinstance(pid, tuple) and len(pid) == 4 and isinstance(pid[1], Placeholder):
            return pid[1]  # the class of a module, with its source
        if not isinstance(pid, tuple) or len(pid) != 5 + self._legacy:
            raise FormatError(f"expected the id of a storage, found {shown(pid)} ({self._uri})")
        _, kind, key, _, count, *parts = pid
        if parts not in ([], [None]):
            raise FormatError(
                f"storage {shown(key)} is a part of another one, which only torch.load reads "
                f"({self._uri})"
            )
        dtype = torch.uint8 if kind is torch.UntypedStorage else getattr(kind, "dtype", None)
        if not (isinstance(dtype, torch.dtype) and isinstance(key, str) and type(count) is int):
            raise FormatError(f"damaged id of a storage: {shown(pid)} ({self._uri})")
        found = self._by_key.get(key)
        if found is not None:
            return found
        length, name = count * dtype.itemsize, f"{self._file}/data/{key}"
        if self._legacy:
            self._all[name] = len(self._lens)
            self._lens.append(length)
            self.counts[key] = count
        number = self._all.get(name)
        if number is None:
            raise FormatError(f"storage {shown(key)} has no record in {self._uri}")
        # A record may have a few bytes after the last element of its storage.
        if not 0 <= length <= self._lens[number] < length + dtype.itemsize:
            raise FormatError(
                f"storage {shown(key)}: expected {length} bytes for {count} elements of {dtype}, "
                f"found {self._lens[number]} ({self._uri})"
            )
        storage = torch.UntypedStorage(length, device="meta")
        typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
        self._known[storage._cdata] = number, length
        self._by_key[key] = typed
        return typed

    def record_of(self, tensor: torch.Tensor, name: Name) -> int | None:
        """Return the number of the record with a tensor's bytes, after checking its bounds.

        None for a tensor that was on the ``meta`` device.
        """
        known = self._known.get(tensor.untyped_storage()._cdata)
        if known is None:
            return None
        record, length = known
        start = tensor.storage_offset()
        if tensor.is_contiguous():
            count, in_bounds = tensor.numel(), start >= 0
        else:
            steps = list(zip(tensor.shape, tensor.stride(), strict=True))
            count = 1 + sum((size - 1) * stride for size, stride in steps)
            in_bounds = start >= 0 and all(stride >= 0 for _, stride in steps)
        if not in_bounds or (tensor.numel() and (start + count) * tensor.element_size() > length):
            raise FormatError(
                f"tensor {shown(name)} of shape {list(tensor.shape)} and strides "
                f"{list(tensor.stride())} from element {start} on does not lie in its storage of "
                f"{length} bytes ({self._uri})"
            )
        return record

    def unused(self, tensors: Iterable[torch.Tensor]) -> list[str]:
        """Return the records of the storages that have data, and that none of the tensors uses."""
        used = {
            tensor.untyped_storage()._cdata
            for tensor in tensors
            if tensor.layout == torch.strided and not tensor.is_nested
        }
        storages = {key: typed._untyped_storage for key, typed in self._by_key.items()}
        return [
            f"data/{key} ({storage.nbytes():,} bytes)"
            for key, storage in storages.items()
            if storage.nbytes() and storage._cdata not in used
        ]
