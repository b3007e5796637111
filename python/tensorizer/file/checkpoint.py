"""Checkpoints of ``torch.save``: the tensors in their pickles, loaded storage by storage.

Pickles are read by torch's restricted unpickler and by nothing else. It is given storages of the
``meta`` device, which have a size and no bytes, so that no data is read before a tensor is
requested.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .._errors import FormatError
from .._native import Reader
from .._types import Name, Slice
from ..tensors import devices, fake_mode
from ..tensors.handles import copied, take
from .pickles import MetaStorages, unpickled
from .unpickled_tensors import named_tensors, shown

#: Bytes of the longest element. Storages that are not aligned to it are copied.
_ALIGNMENT = 16
_PICKLE = "data.pkl"
#: Records that hold one word, the words allowed, and the most bytes of such a record. Other
#: versions are of archives of newer releases of torch.
_ONE_WORD_RECORDS = {
    "byteorder": (b"little",),
    "version": tuple(str(version).encode() for version in range(1, 11)),
}
_MAX_WORD_BYTES = 64


@dataclass(slots=True)
class _PickledTensor:
    """A tensor of a pickle.

    Attributes:
        like: The tensor on the ``meta`` device.
        record: The number of the record with its storage; None if it has no storage.
        position: The position of its first element in its storage, in bytes; 0 if it has none.
        strided: True if its data is not just the contiguous bytes from its position on.
        direct: True if it is the only tensor of its storage and all of it, so that it can be
            loaded by itself.

    """

    like: torch.Tensor
    record: int | None
    position: int
    strided: bool
    direct: bool

    @staticmethod
    def of(like: torch.Tensor, record: int | None) -> _PickledTensor:
        position = int(like.storage_offset()) * like.element_size() if like.numel() else 0
        strided = not like.is_contiguous() or like.is_conj() or like.is_neg()
        return _PickledTensor(like, record, position, strided, False)


class Checkpoint:
    """The tensors of one checkpoint, or of its shards.

    A storage is loaded once for all tensors of a call, and not again while anything uses it, so
    that tensors that shared a storage share it again, with their strides.

    Args:
        records: The open files, whose entries are the records of the archives.

    Raises:
        FormatError: A file is not as ``torch.save`` writes them, or damaged.
        pickle.UnpicklingError: A pickle has something that the restricted unpickler refuses.
        NotImplementedError: A tensor is not plain and strided, no tensor has a path that can be its
            name, or the file is big-endian.

    Attributes:
        reader: A reader of the tensors, which can load those that are contiguous.
        left_out: Descriptions of the tensors that no name reaches, for each file that has some.

    """

    def __init__(self, records: Reader) -> None:
        self._records = records
        self._lens = records.data_lens()
        names = (str(name) for name in records.names(range(len(records))))
        self._numbers = {name: number for number, name in enumerate(names)}
        self._tensors: list[_PickledTensor] = []
        self.left_out: list[str] = []
        #: For each record and device: a weak reference to the storage, and where its bytes begin in
        #: it.
        self._storages: dict[tuple[int, torch.device], tuple[StorageWeakRef, int]] = {}
        with _without_garbage_collection(), fake_mode.suspended():
            described = []
            users: Counter[int | None] = Counter()
            for name, tensor in self._named_in_files():
                dtype = str(tensor.like.dtype).removeprefix("torch.")
                storage = None if tensor.record is None else (tensor.record, tensor.position)
                described.append((name, dtype, tensor.like.shape, storage, tensor.strided))
                self._tensors.append(tensor)
                users[tensor.record] += 1
            for tensor in self._tensors:
                if tensor.record is not None and users[tensor.record] == 1 and not tensor.strided:
                    tensor.direct = _is_all_of(tensor.like, self._lens[tensor.record])
            self.reader = records.tensors(described)

    def stop(self) -> None:
        """End loads that are under way on other threads, and refuse more."""
        self._records.stop()

    def close(self) -> None:
        """Close the files."""
        self.reader.close()
        self._records.close()

    # Reading the pickles

    def _named_in_files(self) -> Iterable[tuple[Name, _PickledTensor]]:
        """Yield the tensors of all files; raise if one that the index lists is missing."""
        uris = self._records.files()
        indexed_files = self._records.indexed_files()
        missing = set(indexed_files)
        found = self._read(len(uris))
        for file, uri in enumerate(uris):
            _check_versions(found, file, uri)
            pickled = found[f"{file}/{_PICKLE}"]
            meta_storages = MetaStorages(file, uri, self._numbers, self._lens)
            tree = unpickled(pickled, uri, meta_storages.persistent_load)
            named, unnamed = named_tensors(tree, uri, len(pickled))
            used = {like.untyped_storage()._cdata for _, like in named}
            unnamed.records = meta_storages.unused(used | unnamed.storages)
            if unnamed:
                if not named:
                    raise NotImplementedError(f"{uri} has only {unnamed}; torch.load it")
                self.left_out.append(str(unnamed))
                warnings.warn(
                    f"{uri} is loaded without {unnamed}; torch.load returns them", stacklevel=6
                )
            for name, like in named:
                if isinstance(name, str):
                    if indexed_files.get(name, file) != file:
                        continue
                    missing.discard(name)
                yield name, _PickledTensor.of(like, meta_storages.record_of(like, name))
        if missing:
            name = min(missing)
            raise FormatError(
                f"expected tensor {shown(name)} in {uris[indexed_files[name]]}, which does not "
                f"hold it ({self._records.uri})"
            )

    def _read(self, files: int) -> dict[str, bytes]:
        """Return the contents of the records that are no storages, of all files at once."""
        names = [
            f"{file}/{name}" for file in range(files) for name in (_PICKLE, *_ONE_WORD_RECORDS)
        ]
        numbers = {name: self._numbers[name] for name in names if name in self._numbers}
        for name, number in numbers.items():
            if not name.endswith(_PICKLE) and self._lens[number] > _MAX_WORD_BYTES:
                uri = self._records.files()[int(name.split("/")[0])]
                raise FormatError(f"record {name!r} has {self._lens[number]} bytes ({uri})")
        found = self._records.read(list(numbers.values()))
        return dict(zip(numbers, found, strict=True))

    # Loading

    def load(
        self,
        numbers: Sequence[int],
        device: torch.device,
        *,
        verify: str,
        readers: int | None,
        map: bool,
        separate_memory: bool,
        shared: bool = True,
    ) -> tuple[list[torch.Tensor], int]:
        """Return tensors on a device, and the number of bytes that were read for them.

        Without ``shared``, contiguous tensors have memory of their own.

        Raises:
            NotImplementedError: A tensor was saved without data, on the ``meta`` device.

        """
        place = devices.number(device)
        tensors = [self._tensors[number] for number in numbers]
        self.refuse_without_data(numbers)
        alone = [t.direct or (not shared and not t.strided) for t in tensors]
        by_storage = {
            t.record
            for t, is_alone in zip(tensors, alone, strict=True)
            if t.record is not None and not is_alone
        }
        storages: dict[int, torch.Tensor] = {}
        for record in by_storage:
            found = self._live_storage(record, device)
            if found is not None:
                storages[record] = found
        missing = sorted(by_storage - storages.keys())
        if missing:
            handle, _ = self._records.load(
                missing,
                verify=verify,
                readers=readers,
                map=map,
                devices=[place],
                separate_memory=separate_memory,
            )
            for record, loaded in zip(missing, take(handle), strict=True):
                storages[record] = self._remember_storage(record, loaded, device)
        direct = [number for number, is_alone in zip(numbers, alone, strict=True) if is_alone]
        handle, _ = self.reader.load(
            direct,
            verify=verify,
            readers=readers,
            map=map,
            devices=[place],
            separate_memory=separate_memory,
        )
        loaded_directly = iter(take(handle))
        made = [
            next(loaded_directly) if is_alone or t.record is None else _view(storages[t.record], t)
            for t, is_alone in zip(tensors, alone, strict=True)
        ]
        read = sum(self._lens[record] for record in missing)
        return made, read + self.reader.data_len(direct)

    def without_data(self, numbers: Sequence[int], device: torch.device) -> list[torch.Tensor]:
        """Return tensors of ``FakeTensorMode``, which share storages as in the file.

        Raises:
            NotImplementedError: See :meth:`load`.

        """
        self.refuse_without_data(numbers)
        tensors = [self._tensors[number] for number in numbers]
        records = {tensor.record for tensor in tensors if tensor.record is not None}
        storages = {
            record: torch.empty(self._lens[record], dtype=torch.uint8, device=device)
            for record in records
        }
        return [_view(storages[t.record], t) for t in tensors if t.record is not None]

    def refuse_without_data(self, numbers: Sequence[int]) -> None:
        """Refuse tensors that were saved without data.

        Raises:
            NotImplementedError: A tensor was saved on the ``meta`` device.

        """
        for number in numbers:
            if self._tensors[number].record is None:
                raise NotImplementedError(
                    f"tensor {shown(self.reader.name(number))} was saved on the meta device, and "
                    f"has no data ({self.reader.uri})"
                )

    def _live_storage(self, record: int, device: torch.device) -> torch.Tensor | None:
        """Return the bytes of a storage that is still in use; None if it is not."""
        reference, start = self._storages.get((record, device), (None, 0))
        if reference is None:
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        # Code that uses the storage may have resized it.
        if storage is None or storage.nbytes() < start + self._lens[record]:
            del self._storages[record, device]
            return None
        return _bytes_of(storage, start, self._lens[record])

    def _remember_storage(
        self, record: int, loaded: torch.Tensor, device: torch.device
    ) -> torch.Tensor:
        """Keep a weak reference to a storage; return its bytes on a device."""
        if loaded.device != device:
            loaded = loaded.to(device)
        if loaded.storage_offset() % _ALIGNMENT or loaded.data_ptr() % _ALIGNMENT:
            loaded = loaded.clone()
        storage = loaded.untyped_storage()
        start = int(loaded.storage_offset())
        self._storages[record, device] = StorageWeakRef(storage), start
        return loaded

    def strided(self, number: int) -> bool:
        """Tell whether a tensor is strided, so that this can load it, but the reader cannot."""
        return self._tensors[number].strided


class SlicedCheckpoint:
    """Slices of tensors of a checkpoint, with the methods of :class:`Checkpoint`.

    For a slice of a contiguous tensor only its bytes are read, for another the whole storage.

    Args:
        whole: The checkpoint.
        slices: For each slice the number of its tensor, and the first index and the end in each
            dimension, or None for the whole tensor.

    Attributes:
        reader: A reader of the slices of contiguous tensors, which describes the others too.

    """

    def __init__(self, whole: Checkpoint, slices: Sequence[Slice]) -> None:
        self.reader = whole.reader.sliced(slices)
        self._whole, self._slices = whole, slices

    def stop(self) -> None:
        """End loads that are under way on other threads, and refuse more."""
        self._whole.stop()

    def close(self) -> None:
        """Do nothing: the files belong to the whole checkpoint."""

    def load(
        self,
        numbers: Sequence[int],
        device: torch.device,
        *,
        verify: str,
        shared: bool = True,
        **options: Any,
    ) -> tuple[list[torch.Tensor], int]:
        """Return tensors on a device, slices in memory of their own, and the number of bytes read.

        Whole tensors that shared a storage share it again, as :meth:`Checkpoint.load` says.
        """
        wholes = [number for number in numbers if self._slices[number][1] is None]
        of = [self._slices[number][0] for number in wholes]
        tensors, read = self._whole.load(of, device, verify=verify, shared=shared, **options)
        loaded = dict(zip(wholes, tensors, strict=True))
        parts = [number for number in numbers if number not in loaded]
        direct = [number for number in parts if not self.strided(number)]
        place = devices.number(device)
        handle, _ = self.reader.load(direct, verify=verify, devices=[place], **options)
        cut = dict(zip(direct, take(handle), strict=True))
        read += sum(tensor.nbytes for tensor in cut.values())
        for number in parts:
            if number not in cut:
                whole = [self._slices[number][0]]
                (tensor,), more = self._whole.load(whole, device, verify=verify, **options)
                cut[number] = self._cut(number, tensor)
                read += more
        loaded |= cut
        return [loaded[number] for number in numbers], read

    def _cut(self, number: int, whole: torch.Tensor) -> torch.Tensor:
        _, ranges = self._slices[number]
        if ranges is None:
            return whole
        return copied(whole[tuple(slice(*ends) for ends in ranges)])

    def without_data(self, numbers: Sequence[int], device: torch.device) -> list[torch.Tensor]:
        """Return slices of ``FakeTensorMode``."""
        whole = self._whole.without_data([self._slices[number][0] for number in numbers], device)
        return list(map(self._cut, numbers, whole))

    def refuse_without_data(self, numbers: Sequence[int]) -> None:
        """Refuse slices of tensors that were saved without data.

        Raises:
            NotImplementedError: One of them was saved on the ``meta`` device.

        """
        self._whole.refuse_without_data([self._slices[number][0] for number in numbers])

    def strided(self, number: int) -> bool:
        """Tell whether a slice is strided, so that this can load it, but the reader cannot."""
        return self._whole.strided(self._slices[number][0])


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Switch off garbage collection while many objects are made, none of which is garbage.

    Scanning some ten thousand new objects again and again takes a third of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _check_versions(records: dict[str, bytes], file: int, uri: str) -> None:
    """Refuse big-endian files, and unknown versions."""
    for word, known in _ONE_WORD_RECORDS.items():
        found = records.get(f"{file}/{word}", known[0])
        if word == "byteorder" and found == b"big":
            raise NotImplementedError(
                f"{uri} was saved on a big-endian machine, and tensorizer is for little-endian "
                "ones: torch.load it and torch.save it again"
            )
        if found.strip() not in known:
            raise FormatError(f"record {word!r} says {found!r}, which is unknown ({uri})")


def _bytes_of(storage: torch.UntypedStorage, start: int, length: int) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, start, (length,), (1,))


def _is_all_of(like: torch.Tensor, length: int) -> bool:
    """Tell whether a contiguous tensor with usual strides is all of a storage of that length."""
    usual = 1
    for size, stride in zip(reversed(like.shape), reversed(like.stride()), strict=True):
        if stride != usual:
            return False
        usual *= max(size, 1)
    return like.storage_offset() == 0 and like.numel() * like.element_size() == length


def _view(storage: torch.Tensor, tensor: _PickledTensor) -> torch.Tensor:
    """Return a tensor as a view of the bytes of its storage."""
    like = tensor.like
    # The storage's bytes begin at a multiple of the longest element.
    start = storage.storage_offset() // like.element_size() + like.storage_offset()
    view = torch.empty(0, dtype=like.dtype, device=storage.device)
    view.set_(storage.untyped_storage(), start, like.shape, like.stride())
    view = torch._conj(view) if like.is_conj() else view
    return torch._neg_view(view) if like.is_neg() else view
