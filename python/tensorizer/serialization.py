"""The serializer and the deserializer, and the names that programs import with them."""

from ._errors import (
    CryptographyError,
    FormatError as FormatError,
    HashMismatchError as HashMismatchError,
    InvalidVersionError as InvalidVersionError,
    TruncatedError as TruncatedError,
)
from ._native import cpu_count as cpu_count
from ._types import FilterFuncType, HashType as HashType, TensorType
from .file.encryption import DecryptionParams, EncryptionParams
from .file.file_writer import logger as logger
from .file.legacy import (
    ENCRYPTION_TENSORIZER_VERSION as ENCRYPTION_TENSORIZER_VERSION,
    LONG_TENSOR_TENSORIZER_VERSION as LONG_TENSOR_TENSORIZER_VERSION,
    META_TENSOR_TENSORIZER_VERSION as META_TENSOR_TENSORIZER_VERSION,
    NON_OPAQUE_TENSORIZER_VERSION as NON_OPAQUE_TENSORIZER_VERSION,
    OPAQUE_DTYPE_SEP as OPAQUE_DTYPE_SEP,
    OPAQUE_TENSORIZER_VERSION as OPAQUE_TENSORIZER_VERSION,
    TENSORIZER_MAGIC as TENSORIZER_MAGIC,
    TENSORIZER_VERSION as TENSORIZER_VERSION,
    TensorEntry as TensorEntry,
    TensorHash as TensorHash,
    _enable_perf_stats as _enable_perf_stats,
    _FileFeatureFlags as _FileFeatureFlags,
    _FileHeader as _FileHeader,
    _get_perf_stats as _get_perf_stats,
)
from .file.reader import TensorDeserializer
from .file.writer import TensorSerializer
from .tensors.arrays import _NumpyTensor as _NumpyTensor

__all__ = [
    "CryptographyError",
    "DecryptionParams",
    "EncryptionParams",
    "FilterFuncType",
    "TensorDeserializer",
    "TensorSerializer",
    "TensorType",
]
