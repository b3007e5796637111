"""An open file of tensors: how it is opened and closed, and the numbers of its tensors."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch

from .._errors import CryptographyError
from .._native import Reader, ShardIndex, Source, as_bytes, open as native_open
from .._types import Head, Name, OpenOptions, Slice, VerifyHash
from ..streams.addresses import is_address
from ..streams.endpoints import assigned_endpoint
from . import hints, opening
from .arguments import (
    check_num_readers,
    checked_dtype,
    checked_memory_limit,
    checked_verification,
)
from .checkpoint import Checkpoint, SlicedCheckpoint
from .encryption import DecryptionParams, native_decryption
from .lazy_shards import LazyShards
from .progress import ProgressReporter

_File = TypeVar("_File", bound="OpenFile")


class OpenFile:
    """An open file, whose tensors are identified by their number in its order.

    Args:
        file_obj: The file, as for :class:`tensorizer.TensorDeserializer`.
        dtype: Cast floating-point tensors.
        num_readers: Threads that read at once; None for as many as help.
        verify_hash: The hashes that are compared unless a call overrides it.
        encryption: The key or passphrase of an encrypted file.
        mmap: Use tensors in place in a mapping of the file.
        clone: On CUDA, give each tensor a storage of its own.
        key_needed: Refuse an encrypted file without ``encryption``. Names and shapes need no key.
        heads: Cached headers from another process that opened the same address; an empty sequence
            to collect them here.
        progress: Reports the bytes that are loaded, of slices too.
        cache_dir: A folder that caches data from an address.
        memory_limit: The most bytes that a load has in flight beside the tensors.
        wanted: The names of the tensors that will be requested. Of a checkpoint in several files,
            only the files are opened that hold them according to its index. None for all.
        lazily: Open the files of such a checkpoint when they are needed; see :meth:`part`.
        closes_stream: Close a file object with this one.

    Raises:
        OSError, ValueError, TypeError, CryptographyError: See
            :class:`tensorizer.TensorDeserializer`.

    Attributes:
        dtype: The dtype that floating-point tensors are cast to, or None.
        maps: True if tensors are used in place in a mapping of the file.
        verify: The hashes that are compared: ``"nothing"``, ``"crc32"`` or ``"all"``.
        heads: Cached headers of this file, for other processes.
        is_local: True if it is a file of this machine.
        memory_limit: The most bytes that a load has in flight, or None.
        keeps_shared: True if tensors that shared a storage are to share it again.

    """

    def __init__(
        self,
        file_obj: Any,
        *,
        dtype: torch.dtype | str | None = None,
        num_readers: int | None = None,
        verify_hash: VerifyHash | None = False,
        encryption: DecryptionParams | None = None,
        mmap: bool = False,
        clone: bool = False,
        key_needed: bool = True,
        heads: Sequence[Head] | None = None,
        progress: ProgressReporter | None = None,
        cache_dir: str | os.PathLike[Any] | None = None,
        memory_limit: int | None = None,
        wanted: Sequence[Name] | None = None,
        lazily: bool = False,
        closes_stream: bool = False,
    ) -> None:
        check_options(num_readers=num_readers, memory_limit=memory_limit, cache_dir=cache_dir)
        self.memory_limit = memory_limit
        by_address = is_address(file_obj)
        is_stream = not isinstance(file_obj, (str, bytes, os.PathLike, int))
        self._stream = file_obj if closes_stream and is_stream else None
        #: The path or address by which it can be opened again, or None.
        self._name = file_obj if isinstance(file_obj, (str, bytes, os.PathLike)) else None
        self._closed = False
        #: The identity of each file, which later content does not have; None if it has none.
        self._identities: list[str | None] = []
        #: Readers of parts, to be closed with this file.
        self._adopted_readers: list[Reader] = []
        self._checkpoint: Checkpoint | SlicedCheckpoint | None = None
        #: Bytes read so far; slices of this file add to the same counter.
        self._read = [0]
        self.maps = bool(mmap)
        self.keeps_shared = True
        self._clone = clone
        self._reader: Reader | None = None
        self._shards: LazyShards | None = None
        try:
            self.dtype = checked_dtype(dtype)
            self.verify = checked_verification(verify_hash)
            self._num_readers = num_readers
            keep_heads = by_address and heads is not None and not heads
            opened = self._opener(file_obj, heads, cache_dir)
            plain = encryption is None and num_readers is None and progress is None
            if opened is not None:
                # Readers have handles of their own; without closing, an exception's traceback would
                # keep this one open.
                with contextlib.closing(opened()) as source:
                    index = ShardIndex.of(source) if lazily and plain else None
                    if index is not None:
                        self._shards = LazyShards(index, opened)
                        self.is_local, self.heads = not by_address, []
                        return
                    self._reader = Reader(source, keep_heads=keep_heads, wanted=wanted)
            else:
                self._reader = opening.open_reader(file_obj)
            self._identities = self._reader.identities()
            self._reader.limit_memory(self.memory_limit)
            self.heads = self.reader.heads() if keep_heads else []
            self.is_local = opening.is_local(file_obj) or self.reader.local
            report = None if progress is None else progress.part()
            if report is not None:
                self.reader.watch(report)
            if encryption is not None:
                self.decrypt(encryption)
            elif key_needed and self.reader.encrypted:
                raise CryptographyError(
                    f"Tensor is encrypted, but decryption was not requested: {self.reader.uri}: "
                    + hints.KEY
                )
            if num_readers not in (None, 1) and not self.reader.parallel:
                raise ValueError(
                    f"num_readers={num_readers}, but {self.reader.uri} can only be read by one "
                    "thread"
                )
            self.reader = self._unpickled(self.reader)
        except BaseException:
            self.close()
            raise

    def _opener(
        self,
        file_obj: Any,
        heads: Sequence[Head] | None,
        cache_dir: str | os.PathLike[Any] | None,
    ) -> Callable[[], Source] | None:
        """Return a function that opens an address or a path, and can do so again; else None."""
        if is_address(file_obj):
            options: OpenOptions = {
                "model": True,
                "heads": heads or None,
                "cache": None if cache_dir is None else os.fsdecode(cache_dir),
                "default_endpoint": assigned_endpoint(reading=True),
            }
            return functools.partial(native_open, file_obj, options)
        target = None if self._name is None else opening.classify(file_obj)
        if isinstance(target, opening.LocalPath):
            return functools.partial(native_open, target.path, {"path": True})
        return None

    def _unpickled(self, reader: Reader) -> Reader:
        """Return the reader of a file's tensors, which the pickle names in files of torch."""
        if reader.format != "torch":
            return reader
        self._checkpoint = Checkpoint(reader)
        return self._checkpoint.reader

    @property
    def reader(self) -> Reader:
        """The native reader of the file; the first use of it opens all shards."""
        if self._reader is None:
            if self._shards is None:
                raise AttributeError("reader")
            reader = self._shards.all_shards()
            reader.limit_memory(self.memory_limit)
            self._reader = self._unpickled(reader)
        return self._reader

    @reader.setter
    def reader(self, reader: Reader) -> None:
        self._reader = reader

    @property
    def uri(self) -> str:
        """The path or address of the file, without opening any shards."""
        if self._reader is None and self._shards is not None:
            return self._shards.uri
        return self.reader.uri

    @property
    def is_whole(self) -> bool:
        """False until all shards of a checkpoint that is opened lazily are open."""
        return self._reader is not None

    def part(self: _File, name: str) -> _File | None:
        """Return the shard that has a tensor, as a file that need not be closed.

        None if all shards are open, or are needed to find the tensor.
        """
        if self._reader is not None or self._shards is None:
            return None
        reader = self._shards.part(name)
        if reader is None:
            return None
        reader.limit_memory(self.memory_limit)
        part = copy.copy(self)
        part._reader, part._shards, part._stream = reader, None, None
        return part

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data read so far."""
        return self._read[0]

    def strided(self, numbers: Iterable[int]) -> list[int]:
        """Return those tensors whose bytes are not in order in the file."""
        if self._checkpoint is None:
            return []
        return [number for number in numbers if self._checkpoint.strided(number)]

    def refuse_without_data(self, numbers: Sequence[int]) -> None:
        """Refuse tensors of a checkpoint that were saved without data.

        Raises:
            NotImplementedError: A tensor was saved on the ``meta`` device.

        """
        if self._checkpoint is not None:
            self._checkpoint.refuse_without_data(numbers)

    def decrypt(self, encryption: DecryptionParams) -> None:
        """Decrypt the data that is loaded from now on."""
        decryption = native_decryption(encryption)
        if decryption is not None:
            self.reader.decrypt(decryption)

    def sliced(self: _File, slices: Sequence[Slice]) -> _File:
        """Return the same file with slices of some of its tensors as its only tensors.

        ``slices`` has a tensor's number, and the first index and the end in each dimension, or None
        for the whole tensor. The result need not be closed.
        """
        if not isinstance(self._checkpoint, Checkpoint):
            return self._with(self.reader.sliced(slices))
        checkpoint = SlicedCheckpoint(self._checkpoint, slices)
        part = self._with(checkpoint.reader)
        part._checkpoint = checkpoint
        return part

    def of_bytes(self: _File) -> _File:
        """Return the same file with the bytes of each tensor as a tensor of ``uint8``."""
        part = self._with(as_bytes(self.reader))
        part._checkpoint, part.dtype = None, None
        self._adopted_readers += {part.reader}
        return part

    def with_parts(self: _File, reader: Reader, numbers: Sequence[int]) -> _File:
        """Return the same file with parts of some tensors as its only tensors.

        ``reader`` was made of these parts of the tensors ``numbers``, and is closed with this file.
        """
        if self._checkpoint is None:
            part = self._with(reader)
        else:
            # A checkpoint needs the parts themselves.
            part = self.sliced([(number, reader.ranges(at)) for at, number in enumerate(numbers)])
        self._adopted_readers += {reader, part.reader}
        return part

    def uncast(self: _File) -> _File:
        """Return the same file, whose tensors are loaded in the dtypes of the file."""
        part = self._with(self.reader)
        part.dtype = None
        return part

    def _with(self: _File, reader: Reader) -> _File:
        part = copy.copy(self)
        part.reader = reader
        part._stream = None
        return part

    def stop(self) -> None:
        """End loads that are under way on other threads, and refuse more."""
        if self._shards is not None:
            self._shards.stop()
        if self._reader is not None:
            self._reader.stop()
        if self._checkpoint is not None:
            self._checkpoint.stop()

    @contextlib.contextmanager
    def reopened(self) -> Iterator[Reader]:
        """Yield a reader of the file, which is opened once more if it was closed.

        Raises:
            ValueError: The name now belongs to another file, or its server does not tell versions
                of a file apart. A file without a name stays closed.

        """
        if not self._closed or self._name is None:
            yield self.reader
            return
        if None in self._identities:
            raise ValueError(
                f"{self.reader.uri} was closed after its tensors were loaded, and its server sends "
                "no strong ETag, which would show whether the file is still the same: pass "
                "lazy_load=True, so that it stays open"
            )
        with OpenFile(self._name, key_needed=False) as again:
            if again._identities != self._identities:
                raise ValueError(
                    f"{self.reader.uri} has changed since it was loaded: pass lazy_load=True, so "
                    "that the file stays open"
                )
            yield again.reader

    @property
    def left_out(self) -> list[str]:
        """Descriptions of the tensors of a checkpoint that no name reaches."""
        whole = self._checkpoint
        return whole.left_out if isinstance(whole, Checkpoint) else []

    def close(self) -> None:
        """Close the file. Closing again does nothing."""
        self._closed = True
        if self._shards is not None:
            self._shards.close()
        if self._reader is not None:
            self._reader.close()
        for reader in self._adopted_readers:
            reader.close()
        if self._checkpoint is not None:
            self._checkpoint.close()
        stream, self._stream = self._stream, None
        if stream is not None and hasattr(stream, "close"):
            stream.close()

    def __enter__(self: _File) -> _File:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.reader)

    def find_all(self, names: Iterable[Name]) -> dict[Name, int]:
        """Return the numbers of tensors by their names; see :meth:`find`."""
        wanted = list(names)
        found = zip(wanted, self.reader.find_all(wanted), strict=True)
        return {name: self.find(name) if number is None else number for name, number in found}

    def find(self, name: Name) -> int:
        """Return the number of a tensor; the name may also be in the form that files store.

        Raises:
            KeyError: There is no tensor of this name.

        """
        number = None
        if not isinstance(name, str) or not name.startswith("\x1e"):
            number = self.reader.find(name)
        else:
            # A plain name may begin like this, too; one that is too long raises.
            with contextlib.suppress(ValueError):
                number = self.reader.find(name)
            with contextlib.suppress(ValueError, RecursionError, TypeError, OverflowError):
                path = json.loads(name[1:])
                if number is None and isinstance(path, list) and path:
                    number = self.reader.find(tuple(path))
        if number is None:
            raise self.missing(name)
        return number

    def missing(self, name: Name | int) -> KeyError:
        """Return the error for a missing tensor, with a hint."""
        reader = self.reader
        hint = hints.of_name(name, reader.names(range(len(reader))))
        return KeyError(f"Tensor {name!r} not found in {reader.uri}{hint}")


def check_options(
    *,
    num_readers: int | None = None,
    verify_hash: VerifyHash | None = False,
    encryption: DecryptionParams | None = None,
    memory_limit: int | None = None,
    cache_dir: str | os.PathLike[Any] | None = None,
) -> None:
    """Refuse options with which no file could be read.

    Raises:
        TypeError, ValueError: See :class:`OpenFile`.

    """
    check_num_readers(num_readers)
    checked_verification(verify_hash)
    native_decryption(encryption)
    checked_memory_limit(memory_limit)
    if cache_dir is not None and not isinstance(cache_dir, (str, bytes, os.PathLike)):
        raise TypeError(f"cache_dir must be the path of a folder or None, not {cache_dir!r}")
