"""Checkpoints of ``torch.save``: the tensors in their pickles, loaded storage by storage.

Pickles are read by torch's restricted unpickler and by nothing else. It is given storages of the
``meta`` device, which have a size and no bytes, so that no data is read before a tensor is
requested.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field

import torch

from .._errors import FormatError
from .._native import Reader
from .._types import Name, Slice
from ..tensors import devices, fake_mode
from ..tensors.handles import copied, take
from .legacy_storages import KEYS, MACHINE, STORAGES, LegacyStorages, big_endian
from .pickles import MetaStorages, unpickled
from .unpickled_tensors import description_of_left_out, named_tensors, shown

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
    """A tensor of a pickle, or a slice of one.

    Attributes:
        like: The whole tensor on the ``meta`` device.
        record: The number of the record with its storage; None if it has no storage.
        strided: True if its data is not just contiguous bytes of its storage.
        direct: True if the reader can load it by itself.
        ranges: The first index and the end in each dimension; None for the whole tensor.

    """

    like: torch.Tensor
    record: int | None
    strided: bool = field(init=False)
    direct: bool = False
    ranges: Sequence[tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        like = self.like
        self.strided = not like.is_contiguous() or like.is_conj() or like.is_neg()

    def description(self) -> tuple[str, torch.Size, tuple[int, int] | None, bool]:
        """Describe it to the reader: with its record, if any, and where its first element is."""
        like, place = self.like, None
        if self.record is not None:
            start = int(like.storage_offset()) * like.element_size()
            place = self.record, start if like.numel() else 0
        return str(like.dtype).removeprefix("torch."), like.shape, place, self.strided

    def sliced(self, ranges: Sequence[tuple[int, int]] | None) -> _PickledTensor:
        """Return a slice, which has memory of its own; None for the tensor itself."""
        if ranges is None:
            return self
        return dataclasses.replace(self, ranges=ranges, direct=not self.strided)


class Checkpoint:
    """The tensors of one checkpoint, or of its shards.

    A storage is loaded once for all tensors of a call, and not again while anything uses it, so
    that tensors that shared a storage share it again, with their strides.

    Args:
        records: The open files, whose entries are the records of the archives.
        skip_objects: Leave out objects of classes that the restricted unpickler does not allow.

    Raises:
        FormatError: A file is not as ``torch.save`` writes them, or damaged.
        pickle.UnpicklingError: A pickle has something that the restricted unpickler refuses.
        NotImplementedError: A tensor is not plain and strided, no tensor has a path that can be its
            name, or the file is big-endian.

    Attributes:
        reader: A reader of the tensors, which can load those that are contiguous.
        left_out: Descriptions of the tensors that no name reaches, for each file that has some.

    """

    def __init__(self, records: Reader, *, skip_objects: bool) -> None:
        self._skip_objects = skip_objects
        self._opened = self._records = records
        self._lens = records.data_lens()
        names = (str(name) for name in records.names(range(len(records))))
        self._numbers = {name: number for number, name in enumerate(names)}
        self._owns_files = True
        self.left_out: list[str] = []
        #: For each record and device: a weak reference to the storage, and where its bytes begin in
        #: it.
        self._storages: dict[
            tuple[int, torch.device], tuple[weakref.ref[torch.UntypedStorage], int]
        ] = {}
        with _without_garbage_collection(), fake_mode.suspended():
            named = list(self._named_in_files())
            self._tensors = [tensor for _, tensor in named]
            users = Counter(tensor.record for tensor in self._tensors)
            for tensor in self._tensors:
                if tensor.record is not None and users[tensor.record] == 1 and not tensor.strided:
                    tensor.direct = _is_all_of(tensor.like, self._lens[tensor.record])
            self.reader = self._records.tensors([(name, *one.description()) for name, one in named])

    def sliced(self, slices: Sequence[Slice]) -> Checkpoint:
        """Return slices of some of the tensors; closing them leaves the files open.

        Of a contiguous tensor only the bytes of a slice are read, of another the whole storage.

        Args:
            slices: For each slice the number of its tensor, and the first index and the end in each
                dimension, or None for the whole tensor.

        """
        part = copy.copy(self)
        part.reader = self.reader.sliced(slices)
        part._tensors = [self._tensors[number].sliced(ranges) for number, ranges in slices]
        part._owns_files = False
        return part

    @property
    def records_in_order(self) -> Reader | None:
        """The storages of files of torch before 1.6; None for archives, which end otherwise."""
        return None if self._records is self._opened else self._records

    def close(self) -> None:
        """Close the files."""
        if self._owns_files:
            for reader in (self.reader, self._records, self._opened):
                reader.close()

    # Reading the pickles

    def _named_in_files(self) -> Iterable[tuple[Name, _PickledTensor]]:
        """Yield the tensors of all files; raise if one that the index lists is missing."""
        uris = self._records.files()
        indexed_files = self._records.indexed_files()
        missing = set(indexed_files)
        found = self._read(len(uris))
        legacy = LegacyStorages(self._records, self._numbers, self._lens)
        for file, uri in enumerate(uris):
            named, storages = self._read_pickle(file, uri, found, legacy)
            for name, like in named:
                if isinstance(name, str):
                    if indexed_files.get(name, file) != file:
                        continue
                    missing.discard(name)
                yield name, _PickledTensor(like, storages.record_of(like, name))
        self._records = legacy.with_records()
        if missing:
            name = min(missing)
            raise FormatError(
                f"expected tensor {shown(name)} in {uris[indexed_files[name]]}, which does not "
                f"hold it ({self._records.uri})"
            )

    def _read_pickle(
        self, file: int, uri: str, found: dict[str, bytes], legacy: LegacyStorages
    ) -> tuple[list[tuple[Name, torch.Tensor]], MetaStorages]:
        """Return the tensors of a file by name, and its storages; warn of those without a name."""
        data, skips = found[f"{file}/{_PICKLE}"], self._skip_objects
        is_legacy = f"{file}/{STORAGES}" in self._numbers
        storages = MetaStorages(file, uri, self._numbers, self._lens, legacy=is_legacy)
        load = functools.partial(unpickled, uri=uri, persistent_load=storages.persistent_load)
        _check_versions(found, file, uri)
        tree = load(data, skip_objects=skips)
        if is_legacy:
            machine, keys = load(found[f"{file}/{MACHINE}"]), load(found[f"{file}/{KEYS}"])
            legacy.place(machine, keys, file, uri, storages.counts)
        tensors = named, unnamed, special = named_tensors(tree, uri, len(data), skip_objects=skips)
        every = (like for part in tensors for _, like in part if like is not None)
        left_out = description_of_left_out(unnamed, special, storages.unused(every))
        if left_out:
            if not named and not skips:
                raise NotImplementedError(f"{uri} has only {left_out}; torch.load it")
            self.left_out.append(left_out)
            warnings.warn(
                f"{uri} is loaded without {left_out}; torch.load returns them", stacklevel=7
            )
        return named, storages

    def _read(self, files: int) -> dict[str, bytes]:
        """Return the contents of the records that are no storages, of all files at once."""
        wanted = (_PICKLE, MACHINE, KEYS, *_ONE_WORD_RECORDS)
        names = [f"{file}/{name}" for file in range(files) for name in wanted]
        numbers = {name: self._numbers[name] for name in names if name in self._numbers}
        for name, number in numbers.items():
            is_word = name.rpartition("/")[2] in _ONE_WORD_RECORDS
            if is_word and self._lens[number] > _MAX_WORD_BYTES:
                uri = self._records.files()[int(name.split("/")[0])]
                raise FormatError(f"record {name!r} has {self._lens[number]} bytes ({uri})")
        found = self._records.read(list(numbers.values()))
        return dict(zip(numbers, found, strict=True))

    # Loading

    def load(
        self, numbers: Sequence[int], device: torch.device, verify: str | None, *, shared: bool
    ) -> tuple[list[torch.Tensor], int]:
        """Return tensors on a device, and the number of bytes that were read for them.

        Without ``shared``, contiguous tensors have memory of their own, as slices always have.
        Tensors of ``FakeTensorMode`` share storages as in the file, and nothing is read.

        Raises:
            NotImplementedError: A tensor was saved without data, on the ``meta`` device.

        """
        self.refuse_without_data(numbers)
        direct, views, cuts = [], dict[int, int](), dict[int, int]()
        for number in numbers:
            tensor = self._tensors[number]
            alone = tensor.direct or not (shared or tensor.strided)
            if alone and not fake_mode.is_active():
                direct.append(number)
            elif tensor.record is not None:
                (views if tensor.ranges is None else cuts)[number] = tensor.record
        storages, read = self._load_storages(set(views.values()), device, verify)
        handle, _ = self.reader.load(direct, devices=[devices.number(device)], verify=verify)
        loaded = dict(zip(direct, take(handle), strict=True))
        read += sum(tensor.nbytes for tensor in loaded.values())
        for number, record in views.items():
            loaded[number] = _view(storages[record], self._tensors[number])
        for number, record in cuts.items():
            # One after another, as such slices are copies of parts of storages.
            storages, more = self._load_storages({record}, device, verify)
            loaded[number] = _view(storages[record], self._tensors[number])
            read += more
        return [loaded[number] for number in numbers], read

    def _load_storages(
        self, records: Set[int], device: torch.device, verify: str | None
    ) -> tuple[dict[int, torch.Tensor], int]:
        """Return the bytes of storages on a device, and the number of bytes read for them."""
        if fake_mode.is_active():
            empty = {
                record: torch.empty(self._lens[record], dtype=torch.uint8, device=device)
                for record in records
            }
            return empty, 0
        live = {record: self._live_storage(record, device) for record in records}
        storages = {record: found for record, found in live.items() if found is not None}
        missing = sorted(records - storages.keys())
        if missing:
            handle, _ = self._records.load(missing, devices=[devices.number(device)], verify=verify)
            for record, loaded in zip(missing, take(handle), strict=True):
                storages[record] = self._remember_storage(record, loaded, device)
        return storages, sum(self._lens[record] for record in missing)

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
        storage = None if reference is None else reference()
        # Code that uses the storage may have resized it.
        if storage is None or storage.nbytes() < start + self._lens[record]:
            return None
        empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return empty.set_(storage, start, (self._lens[record],), (1,))

    def _remember_storage(
        self, record: int, loaded: torch.Tensor, device: torch.device
    ) -> torch.Tensor:
        """Keep a weak reference to a storage; return its bytes on a device."""
        if loaded.device != device:
            loaded = loaded.to(device)
        if loaded.storage_offset() % _ALIGNMENT or loaded.data_ptr() % _ALIGNMENT:
            loaded = loaded.clone()
        reference = weakref.ref(loaded.untyped_storage())
        self._storages[record, device] = reference, int(loaded.storage_offset())
        return loaded

    def strided(self, numbers: Iterable[int]) -> list[int]:
        """Return those tensors that are strided, so that this can load them, but no reader can."""
        return [number for number in numbers if self._tensors[number].strided]


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
            raise big_endian(uri)
        if found.strip() not in known:
            raise FormatError(f"record {word!r} says {found!r}, which is unknown ({uri})")


def _is_all_of(like: torch.Tensor, length: int) -> bool:
    """Tell whether a contiguous tensor with usual strides is all of a storage of that length."""
    if like.stride() != torch.empty(like.shape, device="meta").stride():
        return False
    return like.storage_offset() == 0 and like.numel() * like.element_size() == length


def _view(storage: torch.Tensor, tensor: _PickledTensor) -> torch.Tensor:
    """Return a tensor as a view of the bytes of its storage; a slice as a copy."""
    like = tensor.like
    # The storage's bytes begin at a multiple of the longest element.
    start = storage.storage_offset() // like.element_size() + like.storage_offset()
    view = torch.empty(0, dtype=like.dtype, device=storage.device)
    view.set_(storage.untyped_storage(), start, like.shape, like.stride())
    view = torch._conj(view) if like.is_conj() else view
    view = torch._neg_view(view) if like.is_neg() else view
    if tensor.ranges is None:
        return view
    return copied(view[tuple(slice(*ends) for ends in tensor.ranges)])
