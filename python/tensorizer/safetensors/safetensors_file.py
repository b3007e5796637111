"""An open safetensors file, whose tensors are loaded one by one, in part, or all at once."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .._errors import FormatError
from .._locks import ForkSafeLock
from ..file.open_file import OpenFile
from ..file.opening import FileBytes
from ..file.slices import ranges_of
from ..streams.addresses import is_address
from ..tensors import fake_mode
from .errors import SafetensorError, as_safetensor_errors

#: safetensors' names of the dtypes, by torch's name without ``torch.``, and the number of elements
#: of safetensors in one of torch.
DTYPES: dict[str, tuple[str, int]] = {
    "bool": ("BOOL", 1),
    **{f"uint{bits}": (f"U{bits}", 1) for bits in (8, 16, 32, 64)},
    **{f"int{bits}": (f"I{bits}", 1) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": (f"F{bits}", 1) for bits in (16, 32, 64)},
    "bfloat16": ("BF16", 1),
    "complex64": ("C64", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "float4_e2m1fn_x2": ("F4", 2),
    "float6_e2m3fn_x4": ("F6_E2M3", 4),
    "float6_e3m2fn_x4": ("F6_E3M2", 4),
}


def check_filename(filename: object) -> None:
    """Refuse the name of a file that is neither a ``str`` nor an ``os.PathLike``.

    Raises:
        TypeError: It is neither.

    """
    if not isinstance(filename, (str, os.PathLike)):
        raise TypeError(
            "argument 'filename': expected a str or os.PathLike object, not "
            f"{type(filename).__name__}"
        )


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """Return the device of an argument: without an index the first of its kind; None is the CPU.

    Raises:
        SafetensorError: There is no such device, or ``meta`` was given.

    """
    try:
        named = torch.device("cpu" if device is None else device)
        if named.type == "meta":
            raise ValueError("it has no data")
    except (RuntimeError, TypeError, ValueError) as error:
        raise SafetensorError(f"device {device} is invalid") from error
    return named if named.type == "cpu" or named.index is not None else torch.device(named.type, 0)


@dataclass(frozen=True)
class TensorMeta:
    """A tensor's entry in the header of a file; see :meth:`safe_open.get_tensor_meta`.

    Attributes:
        dtype: The name of its dtype in safetensors, such as ``"F32"``.
        shape: Its shape, in elements of the safetensors dtype.
        data_offsets: The positions of its first byte and of its end, in bytes from the end of the
            header.

    """

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class SafetensorsFile:
    """An open file, which stays open as long as it, or a slice of it, is referenced.

    Args:
        file: A path, an address, a file object, or bytes as :class:`FileBytes`.
        device: The device of the tensors.
        maps: True if tensors are used in place in a mapping of a local file.
        timeout: The seconds that opening, and each load, may take.

    Raises:
        OSError, SafetensorError: It cannot be opened, or is not a safetensors file.

    Attributes:
        file: The file as other functions open it.
        device: The device of the tensors.

    """

    def __init__(
        self, file: Any, device: torch.device, maps: bool, timeout: float | None = None
    ) -> None:
        self.device = device
        remote = is_address(file)
        with as_safetensor_errors("deserializing header"):
            try:
                # On CUDA each tensor has a storage of its own, because callers compare storages.
                self.file = OpenFile(
                    file, mmap=maps, clone=True, key_needed=False, lazily=remote, timeout=timeout
                )
            except FileNotFoundError as error:
                if remote:
                    raise
                raise FileNotFoundError(f"No such file or directory: {os.fspath(file)}") from error
        if self.file.is_whole:
            self._check_format()
        self._maps_tensors = (
            maps and not remote and self.file.reader.seekable and device.type == "cpu"
        )
        self._lock = ForkSafeLock()
        self._mapped: Mapping[int, torch.Tensor] | None = None

    @staticmethod
    def of_bytes(data: bytes) -> SafetensorsFile:
        """Open a file in memory, whose tensors are copied to the CPU.

        Raises:
            TypeError, SafetensorError: It is not ``bytes``, or not a safetensors file.

        """
        if not isinstance(data, bytes):
            raise TypeError(f"argument 'bytes': expected bytes, found {type(data).__name__}")
        return SafetensorsFile(FileBytes(data, "<bytes>"), torch.device("cpu"), maps=False)

    def _check_format(self) -> None:
        with as_safetensor_errors("deserializing header"):
            reader = self.file.reader
            if reader.format != "safetensors":
                self.file.close()
                raise FormatError(
                    f"expected a safetensors file, and {reader.uri} is one of {reader.format}"
                )

    def __del__(self) -> None:
        file: OpenFile | None = getattr(self, "file", None)
        if file is not None:
            file.close()

    @functools.cached_property
    def numbers(self) -> dict[str, int]:
        """The tensors' numbers by name, in the order of the file."""
        self._check_format()
        names = self.file.reader.names(range(len(self.file)))
        return {str(name): number for number, name in enumerate(names)}

    def find(self, name: str) -> int:
        """Return a tensor's number.

        Raises:
            TypeError, SafetensorError: It is not a ``str``, or no tensor has this name.

        """
        if not isinstance(name, str):
            raise TypeError(f"argument 'name': expected a str, found {type(name).__name__}")
        number = self.numbers.get(name)
        if number is None:
            raise SafetensorError(f"File does not contain tensor {name}")
        return number

    def describe(self, number: int) -> tuple[str, list[int]]:
        """Return a tensor's dtype and shape as in the header."""
        dtype, shape, _ = self.file.reader.describe(number)
        name, packed = DTYPES[dtype]
        if packed > 1:
            shape[-1] *= packed
        return name, shape

    def meta(self, number: int) -> TensorMeta:
        """Return a tensor's entry in the header."""
        return TensorMeta(*self.describe(number), self._data_offsets[number])

    @functools.cached_property
    def _data_offsets(self) -> list[tuple[int, int]]:
        """The first byte and the end of each tensor's data, counted from the header's end."""
        reader = self.file.reader
        rows = list(zip(reader.file_numbers(), reader.offsets(), reader.data_lens(), strict=True))
        # The first tensor of a file begins where its header ends.
        begin: dict[int, int] = {}
        for file, (_, start), _ in rows:
            begin[file] = min(start, begin.get(file, start))
        return [
            (start - begin[file], start - begin[file] + size) for file, (_, start), size in rows
        ]

    def load_named(self, name: str) -> torch.Tensor:
        """Return a tensor by name; of a checkpoint, open only its own shard if possible."""
        with as_safetensor_errors("reading"):
            shard = self.file.part(name) if isinstance(name, str) else None
        if shard is None:
            return self.load(self.find(name))
        return self._read(shard, shard.find(name))

    def load(self, number: int) -> torch.Tensor:
        """Return a tensor. Tensors in one mapping share their memory, and so all changes."""
        mapped = self._mapping().get(number)
        if mapped is None:
            return self._read(self.file, number)
        return self._read_ahead(number, mapped, mapped.detach())

    def load_all(self) -> dict[str, torch.Tensor]:
        """Return all tensors, in the order of the file."""
        for number in self.numbers.values():
            check_dtype(self.file, number)
        mapped = self._mapping()
        missing = [number for number in self.numbers.values() if number not in mapped]
        with as_safetensor_errors("reading"):
            read = {n: tensor for n, tensor, _ in self.file.load(missing, self.device)}
        return {
            name: read[number] if number in read else mapped[number].detach()
            for name, number in self.numbers.items()
        }

    def load_part(self, number: int, index: Any) -> torch.Tensor:
        """Return the part of a tensor that torch's indexing gives; read no more than it needs."""
        mapped = self._mapping().get(number)
        if mapped is not None:
            return self._read_ahead(number, mapped, mapped.detach()[index])
        _, shape, _ = self.file.reader.describe(number)
        try:
            ranges, rest = ranges_of(torch.Size(shape), index)
        except (IndexError, TypeError, ValueError):
            # Masks and the like need all of the tensor; for a wrong index, torch raises here.
            torch.empty((), dtype=torch.uint8).expand(shape)[index]
            return self._read(self.file, number)[index]
        tensor = self._read(self.file.sliced([(number, ranges)]), 0)
        return tensor[rest] if rest else tensor

    def _read(self, file: OpenFile, number: int) -> torch.Tensor:
        """Return a tensor of this file, or of a part of it."""
        check_dtype(file, number)
        with as_safetensor_errors("reading"):
            return file.load_one(number, self.device)[0]

    def _mapping(self) -> Mapping[int, torch.Tensor]:
        """Return the tensors that are used in a mapping of the file, which is made once."""
        if not self._maps_tensors or fake_mode.is_active():
            return {}
        with self._lock.current():
            if self._mapped is None:
                offsets, lens = self.file.reader.offsets(), self.file.reader.data_lens()
                numbers = [
                    n
                    for n in self.numbers.values()
                    if lens[n] and self._is_aligned(n, offsets[n][1])
                ]
                # Small files are read instead of mapped.
                with as_safetensor_errors("mapping"):
                    tensors, _ = self.file.read(numbers, self.device)
                self._mapped = dict(zip(numbers, tensors, strict=True))
        return self._mapped

    def _is_aligned(self, number: int, offset: int) -> bool:
        dtype = getattr(torch, self.file.reader.describe(number)[0], None)
        return isinstance(dtype, torch.dtype) and offset % dtype.itemsize == 0

    def _read_ahead(self, number: int, mapped: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Let the kernel begin to read a part of a mapped tensor, and return the part."""
        start = part.data_ptr() - mapped.data_ptr()
        # Copies, by masks for instance, are not in the mapping.
        if part.is_contiguous() and 0 <= start <= mapped.nbytes - part.nbytes:
            self.file.reader.read_ahead(number, start, part.nbytes)
        return part


def check_dtype(file: OpenFile, number: int) -> None:
    """Refuse a tensor of a dtype that torch lacks.

    Raises:
        SafetensorError: Torch has no such dtype.

    """
    dtype = file.reader.describe(number)[0]
    if not hasattr(torch, dtype):
        raise SafetensorError(f"Dtype not understood: {DTYPES[dtype][0]}")
