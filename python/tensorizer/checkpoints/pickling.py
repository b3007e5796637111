"""Pickle modules by which ``torch.save`` and ``torch.load`` leave storages to this package.

torch pickles a storage as a persistent id. Ours is
``("TensorizerPickler", 0, "storage", index, dtype)``, as the old package has it: a version, a
position in the list of storages, and the dtype of a typed storage or None.

A pickle of ours begins with a record of its own, written as opcodes that have no effect on what is
unpickled (push a string, pop it). The old package reads over it. In front of it, a function is
pushed and popped, so that torch names it where it refuses the pickle outside of a block.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import pickle
import re
import reprlib
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import IO, Any, Protocol

import torch

from ..file.pickles import PAIR_TAG
from ..file.placeholders import AllowedTag

_VERSION = 0
#: The third item of a storage's persistent id; other values are of newer releases.
_KIND = "storage"


#: The first bytes of a record's text, and the most bytes that the text may have.
_RECORD_START = b'{"tensorizer":'
_LONGEST_RECORD = 256 << 20
#: The opcodes in front of a record.
_OPENED_BY = pickle.GLOBAL + b"tensorizer.torch_compat\ntensorizer_loading\n" + pickle.POP
#: The identity of a storage file in a record.
_PAIR = re.compile("[0-9a-f]{32}")


@dataclass
class PairRecord:
    """The record in a pickle about the file that holds its storages.

    Attributes:
        pair: The identity of that file; None where a ``save_func`` wrote it.
        locations: torch's location tags of the storages (``"cpu"``, ``"cuda:0"``, …), in order,
            each with the number of consecutive storages that have it.

    """

    pair: str | None
    locations: list[tuple[str, int]]

    @staticmethod
    def of(pair: str | None, locations: Iterable[str]) -> PairRecord:
        """Make the record of storages with these location tags."""
        grouped = itertools.groupby(locations)
        return PairRecord(pair, [(location, len(list(run))) for location, run in grouped])

    def count(self) -> int:
        """Return the number of storages."""
        return sum(count for _, count in self.locations)

    def location_tags(self) -> list[str]:
        """Return the location tag of each storage.

        Compare :meth:`count` with the number of storages first: a damaged record may state any
        count.
        """
        return [location for location, count in self.locations for _ in range(count)]

    def encode(self) -> bytes:
        """Return the record as pickle opcodes."""
        content = {"version": 1, "pair": self.pair, "locations": self.locations}
        text = json.dumps({"tensorizer": content}, separators=(",", ":")).encode()
        return _OPENED_BY + pickle.BINUNICODE + len(text).to_bytes(4, "little") + text + pickle.POP

    @staticmethod
    def read(file: IO[bytes]) -> PairRecord | None:
        """Read a record if one begins at the file's position; else return None, and stay there."""
        start = file.tell()
        # Earlier files have the record alone.
        if file.read(len(_OPENED_BY)) != _OPENED_BY:
            file.seek(start)
        head = file.read(5 + len(_RECORD_START))
        length = int.from_bytes(head[1:5], "little")
        if (
            head[:1] == pickle.BINUNICODE
            and head[5:] == _RECORD_START
            and len(_RECORD_START) <= length <= _LONGEST_RECORD
        ):
            text = _RECORD_START + file.read(length - len(_RECORD_START))
            if file.read(1) == pickle.POP:
                return PairRecord._decode(text)
        file.seek(start)
        return None

    @staticmethod
    def _decode(text: bytes) -> PairRecord:
        try:
            content = json.loads(text)["tensorizer"]
            version, pair, runs = content["version"], content["pair"], content["locations"]
            if version != 1:
                raise pickle.UnpicklingError(
                    f"expected version 1 of the record of a pair, found {reprlib.repr(version)}: "
                    "written by a newer release of tensorizer"
                )
            if pair is not None and not (isinstance(pair, str) and _PAIR.fullmatch(pair)):
                raise ValueError(f"expected an identity of 32 digits, found {reprlib.repr(pair)}")
            return PairRecord(pair, [_checked_location(*run) for run in runs])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise pickle.UnpicklingError(f"damaged record of a pair: {error}") from error


def _checked_location(location: Any, count: Any) -> tuple[str, int]:
    if not isinstance(location, str) or not isinstance(count, int) or count < 1:
        found = f"{reprlib.repr(location)}, {reprlib.repr(count)}"
        raise ValueError(f"expected a location and a count, found {found}")
    return location, count


class StorageCollector:
    """Storages in the order in which a pickle meets them, each of them once."""

    def __init__(self) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self._numbers: dict[tuple[torch.device, int, int], int] = {}

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        """Return our persistent id of a storage, or None for objects that torch pickles itself."""
        if isinstance(obj, torch.storage.TypedStorage):
            storage, dtype = obj._untyped_storage, obj.dtype
        elif isinstance(obj, torch.UntypedStorage):
            storage, dtype = obj, None
        else:
            return None
        if storage.device.type == "meta" or storage.nbytes() == 0:
            return None
        # The list keeps storages alive, so that no other storage gets their address meanwhile.
        key = (storage.device, storage.data_ptr(), storage.nbytes())
        index = self._numbers.setdefault(key, len(self.storages))
        if index == len(self.storages):
            self.storages.append(storage)
        return (PAIR_TAG, _VERSION, _KIND, index, dtype)

    def forget(self) -> None:
        """Release the storages.

        The pickler's class refers to this object until the garbage collector frees the class.
        """
        self.storages.clear()

    def tensors(self) -> list[torch.Tensor]:
        """Return the storages as tensors of bytes, on their devices."""
        return [
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            for storage in self.storages
        ]

    def locations(self) -> list[str]:
        """Return torch's location tags of the storages."""
        return [torch.serialization.location_tag(storage) for storage in self.storages]


def saving_module(
    collector: StorageCollector, finish: Callable[[], PairRecord | None]
) -> types.ModuleType:
    """Return a pickle module that collects storages, for one call of ``torch.save``.

    ``finish`` is called when all storages are known, before anything is written to the file.
    """

    class StoragePickler(pickle.Pickler):
        def __init__(self, file: IO[bytes], *args: Any, **kwargs: Any) -> None:
            self._file = file
            self._pickle = io.BytesIO()
            super().__init__(self._pickle, *args, **kwargs)

        def __init_subclass__(cls) -> None:
            # torch derives a class whose ``persistent_id`` handles the objects that are not ours.
            torch_persistent_id = cls.__dict__["persistent_id"]

            def persistent_id(self: Any, obj: Any) -> Any:
                found = collector.persistent_id(obj)
                return torch_persistent_id(self, obj) if found is None else found

            cls.persistent_id = persistent_id  # type: ignore[method-assign]

        def dump(self, obj: Any) -> None:
            super().dump(obj)
            record = finish()
            if record is not None:
                self._file.write(record.encode())
            self._file.write(self._pickle.getbuffer())

    return _module(Pickler=StoragePickler)


class StorageProvider(Protocol):
    """The storages of a pickle that is being loaded; see :class:`.pairs.StorageFileLoader`."""

    record: PairRecord | None

    def get(self, index: int) -> torch.UntypedStorage:
        """Return the storage of an index.

        Raises:
            FormatError: There is no storage of this index.

        """


def unpickler_class(base: Any, storages: StorageProvider) -> type:
    """Return an unpickler that resolves our persistent ids too, for one call of ``torch.load``.

    ``base`` is Python's unpickler, or torch's restricted one for ``weights_only=True``.
    """

    class StorageUnpickler(base):  # type: ignore[misc]
        persistent_load: Any

        def __init__(self, file: IO[bytes], **kwargs: Any) -> None:
            storages.record = PairRecord.read(file)
            super().__init__(file, **kwargs)

        def load(self) -> Any:
            # torch has set a function that resolves its own ids.
            torchs = self.persistent_load
            self.persistent_load = functools.partial(_persistent_load, storages, torchs)
            return super().load()

        def pop_mark(self) -> list[Any]:
            # In the restricted unpickler, all tuples of more than three elements pass here, our
            # persistent ids among them.
            items: list[Any] = super().pop_mark()
            if len(items) == 5 and type(items[0]) is str and items[0] == PAIR_TAG:
                items[0] = AllowedTag(items[0])
            return items

    return StorageUnpickler


def loading_module(storages: StorageProvider) -> types.ModuleType:
    """Return a pickle module that resolves our persistent ids, for one call of ``torch.load``."""
    return _module(Unpickler=unpickler_class(pickle.Unpickler, storages))


def _persistent_load(storages: StorageProvider, torch_persistent_load: Any, pid: Any) -> Any:
    """Return the storage of one of our persistent ids, or what torch returns for another."""
    if not (isinstance(pid, tuple) and pid[:1] == (PAIR_TAG,)):
        return torch_persistent_load(pid)
    if len(pid) != 5 or pid[1] != _VERSION:
        raise pickle.UnpicklingError(
            f"expected version {_VERSION} of the ids of storages, found {pid[1:2]}: "
            "written by a newer release of tensorizer"
        )
    _, _, kind, index, dtype = pid
    if kind != _KIND:
        raise pickle.UnpicklingError(f"expected the id of a storage, found that of {kind!r}")
    if not isinstance(index, int) or not isinstance(dtype, (torch.dtype, type(None))):
        raise pickle.UnpicklingError(f"damaged id of a storage: {pid!r}")
    return torch.storage.TypedStorage(
        wrap_storage=storages.get(index), dtype=dtype or torch.uint8, _internal=True
    )


def _module(**replaced: Any) -> types.ModuleType:
    module = types.ModuleType("pickle")
    vars(module).update({name: getattr(pickle, name) for name in pickle.__all__} | replaced)
    return module
