"""Saves and loads objects of ``torch.save`` as two files: the pickle, and a file of storages."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.serialization import default_restore_location

from .._errors import CryptographyError, FormatError, PairMismatchError
from ..file.arguments import resolve_device
from ..file.open_file import OpenFile
from ..file.progress import ProgressReporter
from ..streams.atomic import AtomicWriter
from .pickling import PairRecord, StorageCollector, saving_module
from .save_lock import SaveLock, logger
from .storage_file import (
    FileIdentity,
    StorageFile,
    is_path,
    local_file,
    path_of,
    remove_leftovers,
    retained_storage_file,
    storage_file_of_pair,
    without_link,
)

#: The most attempts to open a storage file that a save replaces meanwhile.
MAX_ATTEMPTS = 5

#: Options of a deserializer that have no effect on storages.
_WITHOUT_EFFECT = ("lazy_load", "plaid_mode", "plaid_mode_buffers", "dtype", "filter_func")

#: ``save_func(file_obj, tensors, options)`` and ``load_func(file_obj, options)``.
SaveFunc = Callable[[Any, list[torch.Tensor], dict[str, Any]], Any]
LoadFunc = Callable[[Any, dict[str, Any]], Any]


def storage_file_for(file_obj: Any, target: Any) -> Any:
    """Return the storage file for what torch reads or writes; None for a ``BytesIO`` without one.

    ``file_obj`` is the argument of the block: None, a file, or a function of ``target`` that
    returns one.

    Raises:
        TypeError: ``target`` has no name from which that of the storage file could be derived.

    """
    if file_obj is None:
        if isinstance(target, io.BytesIO):
            logger.warning("a BytesIO has no name: its storages stay in it, in torch's own format")
            return None
        name = path_of(target)
        if name is None:
            raise TypeError(
                f"{target!r} has no name, so that no name for the file of its storages can be "
                "derived: pass that file as file_obj, or a function that returns it"
            )
        return f"{name}.tensors"
    if callable(file_obj) and not isinstance(file_obj, (str, bytes, os.PathLike)):
        file_obj = file_obj(target)
    return os.fsdecode(file_obj) if isinstance(file_obj, (bytes, os.PathLike)) else file_obj


def save_pair(
    target: Any,
    file: Any,
    save_func: SaveFunc | None,
    options: dict[str, Any],
    torch_save: Callable[[io.BytesIO, ModuleType], None],
) -> None:
    """Save an object as two files: torch's pickle, and a file of its storages.

    Where both are paths, neither file is visible before both are complete, and neither is if
    anything fails. Saves of the same two files wait for each other. ``torch_save`` saves to a file
    with a given pickle module.
    """
    collector = StorageCollector()
    storage_files: list[StorageFile] = []
    target = without_link(target)

    def finish() -> PairRecord | None:
        if not collector.storages:
            return None
        if save_func is not None:
            save_func(file, collector.tensors(), dict(options))
            return PairRecord.of(None, collector.locations())
        storage_file = StorageFile(file, options, target)
        storage_files.append(storage_file)
        return PairRecord.of(storage_file.write(collector.tensors()), collector.locations())

    pickled = io.BytesIO()
    pickle_identity = FileIdentity(None)
    with contextlib.ExitStack() as locks:
        try:
            torch_save(pickled, saving_module(collector, finish))
            lock = locks.enter_context(SaveLock(local_file(file)))
            pickle_identity = FileIdentity(target)
            _publish(target, pickled.getbuffer(), storage_files)
        except BaseException:
            for storage_file in storage_files:
                # If the new pickle is in place already, its storage file must stay.
                if pickle_identity.was_replaced():
                    storage_file.discard_previous()
                else:
                    storage_file.restore_previous()
            raise
        finally:
            collector.forget()
        for storage_file in storage_files:
            storage_file.discard_previous()
        if lock.held:
            remove_leftovers(target, file)


def _publish(target: Any, pickled: memoryview, storage_files: list[StorageFile]) -> None:
    if is_path(target):
        with AtomicWriter(os.fsdecode(target), io.DEFAULT_BUFFER_SIZE) as out:
            out.write(pickled)
            out.flush()
            for storage_file in storage_files:
                storage_file.publish()
        return
    start = None
    with contextlib.suppress(AttributeError, OSError):
        start = target.tell()
    for storage_file in storage_files:
        storage_file.publish()
    try:
        while pickled:
            written = target.write(pickled)
            pickled = pickled[len(pickled) if written is None else written :]
        if hasattr(target, "flush"):
            target.flush()
    except BaseException:
        if start is not None:
            with contextlib.suppress(Exception):
                target.seek(start)
                target.truncate()
        raise


@dataclass(eq=False)
class StorageFileLoader:
    """The storages for one call of ``torch.load``; the first request reads all of them.

    Attributes:
        file_obj: The argument of the block; see :func:`storage_file_for`.
        load_func: A function that reads the storages instead.
        options: The arguments of :class:`TensorDeserializer`.
        target: The file that torch loads.
        map_location: The argument of ``torch.load``.
        mmap: True if ``torch.load`` shall map files.
        record: The record in the pickle; None if it has none, or was not read yet.

    """

    file_obj: Any
    load_func: LoadFunc | None
    options: dict[str, Any]
    target: Any
    map_location: Any
    mmap: bool
    record: PairRecord | None = None
    _loaded: list[torch.UntypedStorage] | None = None
    _saved_locations: Sequence[str] = ()

    def get(self, index: int) -> torch.UntypedStorage:
        """Return a storage.

        Raises:
            FormatError: There is no storage of this index.

        """
        if self._loaded is None:
            self._loaded = self._load()
        if not 0 <= index < len(self._loaded):
            raise FormatError(
                f"{self._name()} asks for storage {index}, found {len(self._loaded)} storages"
            )
        return self._loaded[index]

    def forget(self) -> None:
        """Release the storages.

        The unpickler's class refers to this object until the garbage collector frees the class.
        """
        self._loaded = None

    def _name(self) -> str:
        return repr(path_of(self.target) or self.target)

    def _load(self) -> list[torch.UntypedStorage]:
        file = storage_file_for(self.file_obj, self.target)
        if self.file_obj is None and is_path(self.target) and not Path(file).exists():
            # Beside the file that a link names.
            file = storage_file_for(None, without_link(self.target))
        if file is None:
            raise PairMismatchError(
                f"{self._name()} keeps its storages in another file: expected that file as file_obj"
            )
        if self.load_func is not None:
            tensors = self.load_func(file, dict(self.options))
            loaded = [tensor.untyped_storage() for tensor in tensors]
            self._check_count(len(loaded), "the list that load_func returned")
            return loaded if self.map_location is None else self._restored(loaded)
        options = {name: v for name, v in self.options.items() if name not in _WITHOUT_EFFECT}
        device = options.pop("device", None)
        # As in torch: storages that are not mapped are copies, independent of the file.
        options["mmap"] = True if self.mmap else options.get("mmap", False)
        # Each storage needs memory of its own.
        options["clone"] = True
        options["progress"] = reporter = ProgressReporter(options.pop("progress", False))
        with reporter, self._open(file, options) as opened:
            reporter.total = opened.reader.data_len(range(len(opened)))
            return self._read(opened, self._numbers(opened), device)

    def _open(self, file: Any, options: dict[str, Any]) -> OpenFile:
        """Open the storage file, or the previous one that a killed or running save has kept."""
        expected = None if self.record is None else self.record.pair
        error: Exception | None = None
        for _ in range(MAX_ATTEMPTS):
            identity = FileIdentity(local_file(file))
            try:
                return self._opened(file, options, expected)
            except (OSError, FormatError, CryptographyError, PairMismatchError) as raised:
                error = raised
            by_load_func = self.record is not None and expected is None
            kept = None if by_load_func else retained_storage_file(self.target, file, expected)
            if kept is not None:
                # A save that is under way removes the kept file when it ends.
                with contextlib.suppress(FileNotFoundError):
                    opened = self._opened(kept, options, expected)
                    warnings.warn(
                        f"a save over {self._name()} was killed or is in progress: its storages "
                        f"are read from {kept!r}, where the save has moved them, and not from "
                        f"{file!r}; the next save removes what a killed save has left",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                    return opened
            elif not identity.was_replaced():
                break
        assert error is not None
        is_other = isinstance(error, (FileNotFoundError, PairMismatchError))
        if expected is not None and self.file_obj is None and is_other:
            of_pair = storage_file_of_pair(self.target, expected)
            if of_pair is not None:
                return self._opened(of_pair, options, expected)
        if not isinstance(error, FileNotFoundError):
            raise error
        what = f"{self._name()} keeps its storages in another file, which is missing"
        raise FileNotFoundError(errno.ENOENT, what, file) from error

    def _opened(self, file: Any, options: dict[str, Any], expected: str | None) -> OpenFile:
        opened = OpenFile(file, closes_stream=True, **options)
        try:
            pair = opened.reader.pair_id
            found = None if pair is None else pair.hex()
            by_load_func = self.record is not None and expected is None
            if expected != found and not by_load_func:
                raise PairMismatchError(
                    f"{opened.uri!r} is not the file of storages that was saved with "
                    f"{self._name()}: expected pair "
                    f"{expected or 'without a name (of an older release)'}, found "
                    f"{found or 'one without a name (of an older release, or another kind)'}"
                )
        except BaseException:
            opened.close()
            raise
        return opened

    def _numbers(self, file: OpenFile) -> list[int]:
        """Return the number of the tensor in the file for each storage, in their order."""
        reader = file.reader
        count = len(reader)
        self._check_count(count, repr(reader.uri))
        numbers = reader.find_all([(index,) for index in range(count)])
        known = [number for number in numbers if number is not None]
        if len(known) < count:
            raise FormatError(
                f"expected a list of storages in {reader.uri!r}, found {count} tensors, only "
                f"{len(known)} of them storages"
            )
        for dtype, shape in reader.describe_all(known):
            if dtype != "uint8" or len(shape) != 1:
                raise FormatError(
                    f"expected bytes of a storage in {reader.uri!r}, found {dtype} {list(shape)}"
                )
        return known

    def _read(self, file: OpenFile, numbers: list[int], device: Any) -> list[torch.UntypedStorage]:
        lens = file.reader.memory_lens(numbers)
        locations = [self._location(index, device) for index in range(len(numbers))]
        on_meta = str(self.map_location).partition(":")[0] == "meta"
        if on_meta or torch._guards.detect_fake_mode(None) is not None:
            storages = [torch.UntypedStorage(length, device="meta") for length in lens]
            for storage, location in zip(storages, locations, strict=True):
                if not on_meta:
                    storage._fake_device = location  # type: ignore[assignment]
            return storages
        by_call = callable(self.map_location)
        # torch resolves the locations, and raises its own error if there is no such device.
        probe = torch.UntypedStorage(0)
        resolved = {
            location: default_restore_location(probe, "cpu" if by_call else location).device
            for location in dict.fromkeys(locations)
        }
        places = [resolved[location] for location in locations]
        if torch.serialization._serialization_tls.skip_data:
            tensors = [
                torch.empty(length, dtype=torch.uint8, device=place)
                for length, place in zip(lens, places, strict=True)
            ]
        else:
            one_place = places[0] if len(set(places)) == 1 else places
            tensors = [tensor for _, tensor, _ in file.load(numbers, one_place)]
        loaded = [tensor.untyped_storage() for tensor in tensors]
        return self._restored(loaded) if by_call else loaded

    def _check_count(self, count: int, where: str) -> None:
        if self.record is None:
            return
        if self.record.count() != count:
            raise FormatError(
                f"{self._name()} has {self.record.count()} storages, found {count} in {where}"
            )
        self._saved_locations = self.record.location_tags()

    def _location(self, index: int, device: Any) -> str:
        """Return the location for a storage: ``map_location``, else ``device``, else as saved.

        For a function as ``map_location``, it is as saved. Files of the old package do not state
        how they were saved.
        """
        wanted = self.map_location
        saved = self._saved_locations[index] if self._saved_locations else None
        if isinstance(wanted, dict):
            return str(wanted.get(saved or "cpu", saved or "cpu"))
        if callable(wanted):
            return saved or "cpu"
        if wanted is not None:
            return wanted.decode() if isinstance(wanted, bytes) else str(wanted)
        if device is not None or saved is None:
            return str(resolve_device(device))
        return saved

    def _restored(self, storages: list[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
        """Move storages to their locations, as torch does."""
        by_call = self.map_location if callable(self.map_location) else None
        restore = torch.serialization._get_restore_location(by_call)
        moved = [restore(one, self._location(at, None)) for at, one in enumerate(storages)]
        return [getattr(one, "_untyped_storage", one) for one in moved]
