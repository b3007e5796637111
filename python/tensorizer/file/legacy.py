"""Names of the old package for parts of the format."""

from __future__ import annotations

import enum
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar

from .._errors import InvalidVersionError
from .._types import HashType, TensorType
from ..tensors.arrays import stored_dtype
from ..tensors.devices import stats

#: The first bytes of every file.
TENSORIZER_MAGIC = b"|TZR|"
#: The newest data version, and the version that each feature needs.
TENSORIZER_VERSION = 5
NON_OPAQUE_TENSORIZER_VERSION = 1
OPAQUE_TENSORIZER_VERSION = 2
ENCRYPTION_TENSORIZER_VERSION = 3
META_TENSOR_TENSORIZER_VERSION = 4
LONG_TENSOR_TENSORIZER_VERSION = 5
#: Separates the numpy from the torch part of a stored dtype.
OPAQUE_DTYPE_SEP = "\0"
#: True if ``_get_perf_stats`` may be called.
_enable_perf_stats = bool(os.environ.get("TENSORIZER_ENABLE_PERF_STATS"))


def _get_perf_stats() -> dict[str, float]:
    """Return the sums over the loads that :func:`tensorizer.stats` keeps.

    Raises:
        RuntimeError: ``TENSORIZER_ENABLE_PERF_STATS`` was not set at the import.

    """
    if not _enable_perf_stats:
        raise RuntimeError(
            "Performance stats are not enabled: use tensorizer.stats(), which needs no variable"
        )
    loads = [call for call in stats(0) if call["what"] == "load"]
    copied = [call for call in loads if call["device"] != "cpu"]
    return {
        "tensor_to_device_secs": sum(call["stages"]["copy"] for call in copied),
        "tensor_to_device_bytes": sum(call["bytes"] for call in copied),
        "file_readinto_secs": sum(call["stages"]["read"] for call in loads),
        "file_readinto_bytes": sum(call["bytes"] for call in loads),
    }


@dataclass(order=True, slots=True)
class TensorHash:
    """A hash that a file holds of one of its tensors."""

    type: HashType
    hash: bytes


@dataclass(order=True, slots=True)
class TensorEntry:
    """An entry for a tensor in the index of a file.

    Attributes:
        metadata_version: The data version that the tensor needs.
        dtype: The dtype as it is stored: numpy's name, and for opaque dtypes torch's name after
            :data:`OPAQUE_DTYPE_SEP`.
        offset: Position of the tensor's header.
        data_offset: Position of its data.
        data_length: Bytes of its data in the file.

    """

    metadata_version: int
    name: Any
    type: TensorType
    dtype: str
    shape: tuple[int, ...]
    offset: int
    data_offset: int
    data_length: int
    hashes: list[TensorHash] | None
    header_hashes: dict[HashType, Any] | None

    @property
    def deserialized_length(self) -> int:
        """Bytes of the tensor in memory, even if the file has no data of it."""
        if self.data_length > 0:
            return self.data_length
        element = stored_dtype(self.dtype.partition(OPAQUE_DTYPE_SEP)[0])
        return element.itemsize * math.prod(self.shape)

    @property
    def is_long_tensor(self) -> bool:
        """True if the data version is the one for tensors of 4 GiB and more."""
        return self.metadata_version >= LONG_TENSOR_TENSORIZER_VERSION


class _FileFeatureFlags(enum.IntFlag):
    """The features that a file uses, as bit flags."""

    encrypted = 1
    versioned_headers = 2


@dataclass(slots=True)
class _FileHeader:
    """The header after the magic bytes: version, flags, bytes of tensor data, number of tensors."""

    version_number_format: ClassVar[struct.Struct] = struct.Struct("<I")
    #: Flags (32 bytes), bytes of tensor data, eight unused bytes, number of tensors.
    format: ClassVar[struct.Struct] = struct.Struct("<32sQ8xQ")
    #: The exception class, at its place in the old package.
    InvalidVersionError: ClassVar[type[InvalidVersionError]] = InvalidVersionError

    version_number: int
    feature_flags: _FileFeatureFlags
    tensor_size: int
    tensor_count: int

    def to_bytes(self) -> bytes:
        """Return the header as its 60 bytes."""
        flags = int(self.feature_flags).to_bytes(32, "little")
        version = self.version_number_format.pack(self.version_number)
        return version + self.format.pack(flags, self.tensor_size, self.tensor_count)

    @classmethod
    def from_io(cls, reader: BinaryIO, accepted_versions: Sequence[int]) -> _FileHeader:
        """Read a header.

        Raises:
            ValueError: There are too few bytes, or unknown flags.
            InvalidVersionError: The version is not one of ``accepted_versions``.

        """
        size = cls.version_number_format.size + cls.format.size
        found = reader.read(size)
        if len(found) < size:
            raise ValueError(f"File too small: expected a header of {size}, found {len(found)}")
        (version,) = cls.version_number_format.unpack_from(found)
        if version not in accepted_versions:
            accepted = ", ".join(map(str, accepted_versions))
            raise cls.InvalidVersionError(
                f"Unsupported version: {version}, expected {accepted}", version=version
            )
        stored, tensor_size, count = cls.format.unpack_from(found, cls.version_number_format.size)
        flags = int.from_bytes(stored, "little")
        known = int(_FileFeatureFlags.encrypted | _FileFeatureFlags.versioned_headers)
        if flags & ~known:
            raise ValueError(f"Unsupported feature flags: {flags & ~known:#x}")
        return cls(version, _FileFeatureFlags(flags), tensor_size, count)
