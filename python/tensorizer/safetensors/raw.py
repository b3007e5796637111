"""Raw bytes of tensors without a framework: ``serialize``, ``serialize_file``, ``deserialize``."""

from __future__ import annotations

import ctypes
import io
import math
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._calls import limited_save
from ..file.to_safetensors import write_one
from .errors import SafetensorError, as_safetensor_errors
from .safetensors_file import DTYPES, SafetensorsFile

_BY_NAME = {code: name for name, (code, _) in DTYPES.items()}
#: Dtypes that files may have, but that a ``TensorSpec`` of the library refuses.
_NOT_WRITTEN = ("float6_e2m3fn_x4", "float6_e3m2fn_x4")


@dataclass(frozen=True, eq=False, kw_only=True)
class TensorSpec:
    """The memory of a tensor that :func:`serialize` and :func:`serialize_file` write.

    Args:
        dtype: The name of its dtype in torch, such as ``"float32"``.
        shape: Its shape, in elements of the torch dtype: an element of ``float4_e2m1fn_x2`` has two
            values.
        data_ptr: The address of its bytes. They must stay allocated and unchanged during the calls.
        data_len: The number of its bytes.

    Raises:
        SafetensorError: There is no such dtype.
        TypeError: An argument is of another type.
        OverflowError: A number is negative, or has more than 64 bits.

    Attributes:
        dtype: The name of the dtype in safetensors, such as ``"F32"``.
        shape: The shape, in elements of the safetensors dtype.

    """

    dtype: str
    shape: Sequence[int]
    data_ptr: int
    data_len: int

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str):
            raise TypeError(f"argument 'dtype': expected a str, found {type(self.dtype).__name__}")
        supported = [name for name in DTYPES if name not in _NOT_WRITTEN]
        if self.dtype not in supported:
            raise SafetensorError(
                f"Unknown dtype {self.dtype!r}. Supported dtypes: {', '.join(supported)}"
            )
        if isinstance(self.shape, (str, bytes)):
            found = type(self.shape).__name__
            raise TypeError(f"argument 'shape': expected numbers, found {found}")
        dtype, packed = DTYPES[self.dtype]
        sizes = [_unsigned("shape", size) for size in self.shape]
        if packed > 1 and sizes:
            sizes[-1] *= packed
        checked = {name: _unsigned(name, getattr(self, name)) for name in ("data_ptr", "data_len")}
        vars(self).update(checked, dtype=dtype, shape=sizes)


def _unsigned(argument: str, number: int) -> int:
    """Return an unsigned number of at most 64 bits; raise the library's error for others."""
    found = operator.index(number)
    if not 0 <= found < 1 << 64:
        raise OverflowError(f"argument {argument!r}: {found} is negative, or has more than 64 bits")
    return found


def serialize(
    tensor_dict: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the bytes of a safetensors file.

    Args:
        tensor_dict: The memory of tensors, by name.
        metadata: Strings by name.

    Raises:
        SafetensorError: The length of a tensor does not match its shape, or the format cannot hold
            it.
        TypeError: A value is not a :class:`TensorSpec`, or metadata are of another type.

    """
    memory = io.BytesIO()
    with as_safetensor_errors("serializing", ValueError):
        write_one(memory, _tensors(tensor_dict), metadata=metadata)
    return memory.getvalue()


@limited_save
def serialize_file(
    tensor_dict: Mapping[str, TensorSpec],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    timeout: float | None = None,
) -> None:
    """Write a safetensors file, which appears when it is complete.

    Arguments and errors are those of :func:`serialize`. ``filename`` is a path, or an address that
    :class:`tensorizer.TensorSerializer` opens. ``SafetensorError`` is raised if the file cannot be
    written, and ``TimeoutError`` after ``timeout`` seconds.
    """
    with as_safetensor_errors("serializing", ValueError, OSError):
        write_one(filename, _tensors(tensor_dict), metadata=metadata)


def deserialize(bytes: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Return the tensors of a safetensors file in memory, in the order of the file.

    Returns:
        For each tensor its name, and a dict of ``"shape"`` (in elements of the safetensors dtype),
        ``"dtype"`` (such as ``"F32"``) and ``"data"`` (a bytearray).

    Raises:
        SafetensorError: These are not the bytes of a safetensors file.
        TypeError: The argument is not ``bytes``.

    """
    opened = SafetensorsFile.of_bytes(bytes)
    offsets = opened.file.reader.offsets()
    found = []
    for name, number in opened.numbers.items():
        meta, (_, start) = opened.meta(number), offsets[number]
        begin, end = meta.data_offsets
        data = bytearray(bytes[start : start + end - begin])
        found.append((name, {"shape": meta.shape, "dtype": meta.dtype, "data": data}))
    return found


def _tensors(specs: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
    """Return tensors in the memory that specs describe; specs of the library are accepted, too."""
    if not isinstance(specs, Mapping):
        raise TypeError(f"argument 'tensor_dict': expected a dict, found {type(specs).__name__}")
    return {name: _tensor(name, spec) for name, spec in specs.items()}


def _tensor(name: str, spec: Any) -> torch.Tensor:
    if type(spec).__name__ != "TensorSpec":
        raise TypeError(f"{name!r}: expected a TensorSpec, found {type(spec).__name__}")
    dtype = getattr(torch, _BY_NAME[spec.dtype], None)
    if dtype is None:
        raise ValueError(f"torch has no dtype for {spec.dtype}")
    packed = DTYPES[_BY_NAME[spec.dtype]][1]
    shape = list(spec.shape)
    if packed > 1 and shape:
        if shape[-1] % packed:
            raise ValueError(
                f"{name}: the last dimension of {spec.dtype} must be a multiple of {packed}, and "
                f"is {shape[-1]}"
            )
        shape[-1] //= packed
    expected = math.prod(shape) * dtype.itemsize
    if spec.data_len != expected:
        raise ValueError(
            f"{name}: expected {expected} bytes for {spec.dtype} of shape {list(spec.shape)}, "
            f"found {spec.data_len}"
        )
    if math.prod(filter(None, shape)) * dtype.itemsize >= 1 << 63:
        raise ValueError(f"{name}: a tensor of shape {list(spec.shape)} is too large")
    if expected == 0:
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_char * expected).from_address(spec.data_ptr)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
