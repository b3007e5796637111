"""An open file of tensors, for all functions that load."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from typing_extensions import Unpack

from .._errors import CryptographyError
from .._native import Reader, ShardIndex, announce, as_bytes, split_tensor_memory
from .._types import Head, Name, Slice
from ..streams.addresses import is_address
from ..tensors import devices, fake_mode
from ..tensors.batches import in_batches
from ..tensors.handles import are_plain, cast_dtype, dtype_of, lend, take
from . import hints, opening
from .arguments import checked_dtype, checked_verification
from .checkpoint import Checkpoint
from .encryption import DecryptionParams, native_decryption
from .lazy_shards import LazyShards
from .options import LoadOptions, check_reading, stated_hashes
from .placement import Places, all_of, by_device, native_numbers, zeros
from .progress import ProgressReporter

#: Bytes loaded at a time if torch then casts each tensor, or copies it to another device.
_BATCH_BYTES = 256 << 20
_CPU = torch.device("cpu")
#: Bytes that end a ``.tensors`` file.
_MARK_BYTES = 8


class OpenFile(contextlib.AbstractContextManager["OpenFile"]):
    """An open file, whose tensors are identified by their number in its order.

    Args:
        file_obj: The file, as for :class:`tensorizer.TensorDeserializer`.
        dtype: Cast floating-point tensors.
        key_needed: Refuse an encrypted file without ``encryption``. Names and shapes need no key.
        heads: Cached headers from another process that opened the same address; an empty sequence
            to collect them here.
        progress: Reports the bytes that are loaded, of slices too.
        wanted: The names of the tensors that will be requested. Of a checkpoint in several files,
            only the files are opened that hold them according to its index. None for all.
        lazily: Open the files of such a checkpoint when they are needed; see :meth:`part`.
        closes_stream: Close a file object with this one.
        options: See :class:`LoadOptions`. A call may override ``verify_hash``.

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
        key_needed: bool = True,
        heads: Sequence[Head] | None = None,
        progress: ProgressReporter | None = None,
        wanted: Sequence[Name] | None = None,
        lazily: bool = False,
        closes_stream: bool = False,
        **options: Unpack[LoadOptions],
    ) -> None:
        encryption, num_readers = options.get("encryption"), options.get("num_readers")
        self.memory_limit = options.get("memory_limit")
        # The key is derived once, below.
        check_reading(**{**options, "encryption": None})  # type: ignore[arg-type]
        by_address = is_address(file_obj)
        is_stream = not isinstance(file_obj, (str, bytes, os.PathLike, int))
        self._stream = file_obj if closes_stream and is_stream else None
        #: The path or address by which it can be opened again, or None.
        self._name = file_obj if isinstance(file_obj, (str, bytes, os.PathLike)) else None
        self._closed = False
        #: The options with which it is opened again.
        self._options: LoadOptions = {**options, "encryption": None, "sha256": None}
        #: The identity of each file, which later content does not have; None if it has none.
        self._identities: list[str | None] = []
        #: Readers of parts, to be closed with this file.
        self._adopted_readers: list[Reader] = []
        self._checkpoint: Checkpoint | None = None
        #: Bytes read so far; slices of this file add to the same counter.
        self._read = [0]
        self.maps = bool(options.get("mmap"))
        self.keeps_shared = True
        self._reader: Reader | None = None
        self._shards: LazyShards | None = None
        try:
            self.dtype = checked_dtype(dtype)
            self.verify = checked_verification(options.get("verify_hash"))
            self._reading: dict[str, Any] = {
                "verify": self.verify,
                "readers": num_readers,
                "map": self.maps,
                "separate_memory": options.get("clone", False),
                "timeout": options.get("timeout"),
            }
            keep_heads = by_address and heads is not None and not heads
            opened = opening.source_opener(file_obj, heads, options)
            sha256 = stated_hashes(options.get("sha256"))
            plain = encryption is None and num_readers is None and progress is None
            with opened() as source:
                lazily = lazily and plain and sha256 is None and self._name is not None
                index = ShardIndex.of(source) if lazily else None
                if index is not None:
                    self._shards = LazyShards(index, opened)
                    self.is_local, self.heads = opened.is_local, []
                    return
                self._reader = Reader(source, opened.base, keep_heads, wanted, sha256)
            self._identities = self._reader.identities()
            self._set_options(self._reader)
            self.heads = self.reader.heads() if keep_heads else []
            self.is_local = opened.is_local or self.reader.local
            if progress is not None and (report := progress.part()) is not None:
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
            self._reader = self._unpickled(self.reader)
        except BaseException:
            self.close()
            raise

    def _set_options(self, reader: Reader) -> None:
        """Make loads of a reader, and of its slices and parts, read as this file does."""
        reader.set_options(self._reading)
        reader.limit_memory(self.memory_limit)

    def _unpickled(self, reader: Reader) -> Reader:
        """Return the reader of a file's tensors, which the pickle names in files of torch."""
        if reader.format != "torch":
            return reader
        skips = self._options.get("skip_objects", False)
        self._checkpoint = Checkpoint(reader, skip_objects=skips)
        return self._checkpoint.reader

    @property
    def reader(self) -> Reader:
        """The native reader of the file; the first use of it opens all shards."""
        if self._reader is None:
            assert self._shards is not None
            reader = self._shards.all_shards()
            self._set_options(reader)
            self._reader = self._unpickled(reader)
        return self._reader

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

    def part(self, name: str) -> OpenFile | None:
        """Return the shard that has a tensor, as a file that need not be closed.

        None if all shards are open, or are needed to find the tensor.
        """
        if self._reader is not None or self._shards is None:
            return None
        reader = self._shards.part(name)
        if reader is None:
            return None
        self._set_options(reader)
        return self._with(reader)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data read so far."""
        return self._read[0]

    def strided(self, numbers: Iterable[int]) -> list[int]:
        """Return those tensors whose bytes are not in order in the file."""
        return [] if self._checkpoint is None else self._checkpoint.strided(numbers)

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

    def sliced(self, slices: Sequence[Slice]) -> OpenFile:
        """Return the same file with slices of some of its tensors as its only tensors.

        ``slices`` has a tensor's number, and the first index and the end in each dimension, or None
        for the whole tensor. The result need not be closed.
        """
        if self._checkpoint is None:
            return self._with(self.reader.sliced(slices))
        checkpoint = self._checkpoint.sliced(slices)
        part = self._with(checkpoint.reader)
        part._checkpoint = checkpoint
        return part

    def of_bytes(self) -> OpenFile:
        """Return the same file with the bytes of each tensor as a tensor of ``uint8``."""
        part = self._with(as_bytes(self.reader))
        part._checkpoint, part.dtype = None, None
        self._adopted_readers += {part.reader}
        return part

    def with_parts(self, reader: Reader, numbers: Sequence[int]) -> OpenFile:
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

    def uncast(self) -> OpenFile:
        """Return the same file, whose tensors are loaded in the dtypes of the file."""
        part = self._with(self.reader)
        part.dtype = None
        return part

    def _with(self, reader: Reader) -> OpenFile:
        part = copy.copy(self)
        part._reader, part._shards, part._stream = reader, None, None
        return part

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
        with OpenFile(self._name, key_needed=False, **self._options) as again:
            if again._identities != self._identities:
                raise ValueError(
                    f"{self.reader.uri} has changed since it was loaded: pass lazy_load=True, so "
                    "that the file stays open"
                )
            yield again.reader

    @property
    def left_out(self) -> list[str]:
        """Descriptions of the tensors of a checkpoint that no name reaches."""
        return [] if self._checkpoint is None else self._checkpoint.left_out

    def seek_behind(self, file_obj: Any) -> None:
        """Move a file object to the end of this file, where another one may begin."""
        reader = self.reader if self._checkpoint is None else self._checkpoint.records_in_order
        # A file without tensors has no data that tell where it ends.
        if not reader or len(reader.files()) > 1 or isinstance(file_obj, int):
            return
        if opening.is_seekable(file_obj):
            begins = (begin for _, begin in reader.offsets())
            end = max(map(operator.add, begins, reader.data_lens()))
            # The data of a .tensors file are followed by a mark.
            file_obj.seek(end + _MARK_BYTES * (reader.format == "tensors"))

    def close(self) -> None:
        """Close the file, and end what other threads do with it. Closing again does nothing."""
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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
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

    # Loading

    def load(
        self, numbers: Sequence[int], device: Places, verify: str | None = None
    ) -> Iterator[tuple[int, torch.Tensor, int]]:
        """Yield ``(number, tensor, module index)`` of tensors, in their final dtype.

        All are on one device, or each on its own. The dtype is ``dtype`` for floating-point tensors
        if that was given, and else the file's.
        """
        start = 0
        for batch in self._batches(numbers, device):
            end = start + len(batch)
            of_batch = device if isinstance(device, torch.device) else device[start:end]
            tensors, modules = self.read(batch, of_batch, verify)
            yield from zip(batch, self.placed(tensors, batch, of_batch), modules, strict=True)
            start = end

    def load_one(self, number: int, device: torch.device) -> tuple[torch.Tensor, int]:
        """Return a tensor, in the form in which :meth:`load` yields it, and its module index."""
        if self._checkpoint is not None or not self._unchanged(device) or fake_mode.is_active():
            ((_, tensor, module),) = self.load([number], device)
            return tensor, module
        reader, one = self.reader, [number]
        handle, (module,) = reader.load(one, devices=[devices.number(device)])
        (tensor,) = take(handle)
        self._read[0] += min(tensor.nbytes, reader.data_len(one))
        return tensor, module

    def read(
        self, numbers: Sequence[int], device: Places, verify: str | None = None
    ) -> tuple[list[torch.Tensor], list[int]]:
        """Return tensors in the file's dtype, and their module indices.

        They are on their devices if the native code supports these, and else on the CPU.
        """
        if self._checkpoint is not None or (numbers and fake_mode.is_active()):
            found = {
                number: tensor
                for one, some in by_device(numbers, device).items()
                for number, tensor in zip(some, self._read_on(some, one, verify), strict=True)
            }
            return [found[number] for number in numbers], [0] * len(numbers)
        handle, modules = self.reader.load(numbers, devices=native_numbers(device), verify=verify)
        tensors = take(handle)
        # In the file, a sliced tensor has more bytes, and a tensor of the meta device fewer.
        size = sum(tensor.nbytes for tensor in tensors)
        self._read[0] += min(size, self.reader.data_len(numbers))
        return tensors, modules

    def _read_on(
        self, numbers: Sequence[int], device: torch.device, verify: str | None
    ) -> list[torch.Tensor]:
        """Return tensors of a checkpoint, or of ``FakeTensorMode``, for which nothing is read."""
        if self._checkpoint is not None:
            tensors, read = self._checkpoint.load(numbers, device, verify, shared=self.keeps_shared)
            self._read[0] += read
            return tensors
        described = self.reader.describe_all(list(numbers))
        return [
            torch.empty(shape, dtype=dtype_of(dtype), device=device) for dtype, shape in described
        ]

    def fill(
        self, tensors: Sequence[torch.Tensor], numbers: Sequence[int], verify: str | None = None
    ) -> list[int]:
        """Fill existing tensors in place; return their module indices.

        Tensors of ``FakeTensorMode`` have nothing to fill.
        """
        if any(map(fake_mode.is_fake, tensors)):
            return [0] * len(numbers)
        direct = list(zip(tensors, numbers, strict=True))
        if self._checkpoint is not None:
            late = set(self.strided(numbers))
            for tensor, number in direct:
                if number in late:
                    (loaded,), _ = self.read([number], tensor.device, verify)
                    tensor.detach().copy_(loaded)
            direct = [pair for pair in direct if pair[1] not in late]
        plain = [tensor for tensor, _ in direct]
        chosen = [number for _, number in direct]
        handle = lend(plain if are_plain(plain) else [tensor.detach() for tensor in plain])
        modules = self.reader.load_into(handle, chosen, verify=verify)
        self._read[0] += sum(tensor.nbytes for tensor in plain)
        return modules if len(direct) == len(numbers) else [0] * len(numbers)

    def can_fill_on(self, device: torch.device) -> bool:
        """Tell whether tensors on a device can be filled in place."""
        direct = device.type == "cpu" or devices.is_native(device)
        return direct and not self.maps

    def _unchanged(self, device: Places) -> bool:
        """Tell whether loaded tensors are used on their devices without a further copy."""
        return self.dtype is None and all(
            one.type == "cpu" or devices.is_native(one) for one in all_of(device)
        )

    def _batches(self, numbers: Sequence[int], device: Places) -> Iterator[Sequence[int]]:
        """Split a load whose tensors are copied once more, to bound the bytes held twice."""
        if self._unchanged(device):
            if numbers:
                yield numbers
            return
        length = self.length_of(numbers)
        most = self.reserve_memory(_BATCH_BYTES, numbers, length, device)
        yield from self.in_batches(numbers, length, most)

    def length_of(self, numbers: Sequence[int]) -> Callable[[int], int]:
        """Return a function of the bytes that each of some tensors has in memory."""
        lens = self.reader.memory_lens(numbers)
        return dict(zip(numbers, lens, strict=True)).__getitem__

    def in_batches(
        self, numbers: Sequence[int], length: Callable[[int], int], most: int
    ) -> Iterator[list[int]]:
        """Split tensors as :func:`in_batches` does, for loads that count as one call to a cache."""
        announcement = announce(self.reader, numbers)
        yield from in_batches(numbers, length, most)
        del announcement

    def reserve_memory(
        self,
        wanted: int,
        numbers: Iterable[int],
        length: Callable[[int], int],
        device: Places = _CPU,
        *,
        min_memory: int = 0,
        reserved: int = 0,
    ) -> int:
        """Reserve a part of the memory limit for tensors that are held, and return its bytes.

        Args:
            wanted: The most bytes of tensors.
            numbers: The tensors.
            length: A function that returns the bytes of one.
            device: The device that they are loaded to, or that of each.
            min_memory: The fewest bytes to leave beside them.
            reserved: Bytes of the limit that are reserved for something else.

        Raises:
            ValueError: The limit is too small for the largest of them.

        """
        largest = max(map(length, numbers), default=0)
        reader = max(min_memory, self.min_memory(device))
        most, not_readers = split_tensor_memory(
            self.memory_limit, wanted, largest, reader, reserved
        )
        self.reader.limit_memory(self.memory_limit, not_readers)
        return most

    def min_memory(self, device: Places = _CPU) -> int:
        """Return the smallest memory limit with which tensors can be read."""
        return self.reader.minimum_memory(False, any(map(devices.is_native, all_of(device))))

    def placed(
        self, tensors: list[torch.Tensor], numbers: Sequence[int], device: Places
    ) -> Iterable[torch.Tensor]:
        """Return tensors on the requested devices and in the requested dtype, one by one."""
        if self._unchanged(device):
            return tensors
        of_each = itertools.repeat(device) if isinstance(device, torch.device) else device
        return map(self._cast, tensors, numbers, of_each)

    def _cast(self, tensor: torch.Tensor, number: int, device: torch.device) -> torch.Tensor:
        wanted = cast_dtype(tensor.dtype, self.dtype)
        there = tensor.device.type == device.type and device.index in (None, tensor.device.index)
        if there and wanted is tensor.dtype:
            # It may share its storage with others; ``to()`` copies it if the device has no index.
            return tensor
        unchanged = wanted is tensor.dtype or device.type != "cpu" or fake_mode.is_fake(tensor)
        if unchanged or tensor.numel() == 0 or self.reader.data_len([number]) > 0:
            return tensor.to(device, wanted)
        return zeros(tensor.shape, wanted)
