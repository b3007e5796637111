"""The serializer and the deserializer, and the names that callers import beside them."""

from ._errors import (
    CryptographyError,
    FormatError,
    HashMismatchError,
    InvalidVersionError,
    TruncatedError,
)
from ._native import cpu_count
from ._types import FilterFuncType, HashType, TensorType
from .file.encryption import DecryptionParams, EncryptionParams
from .file.file_writer import logger
from .file.legacy import (
    ENCRYPTION_TENSORIZER_VERSION,
    LONG_TENSOR_TENSORIZER_VERSION,
    META_TENSOR_TENSORIZER_VERSION,
    NON_OPAQUE_TENSORIZER_VERSION,
    OPAQUE_DTYPE_SEP,
    OPAQUE_TENSORIZER_VERSION,
    TENSORIZER_MAGIC,
    TENSORIZER_VERSION,
    TensorEntry,
    TensorHash,
    _FileFeatureFlags,
    _FileHeader,
)
from .file.reader import TensorDeserializer
from .file.writer import TensorSerializer
from .tensors.arrays import _NumpyTensor

__all__ = [
    "CryptographyError",
    "DecryptionParams",
    "EncryptionParams",
    "FilterFuncType",
    "TensorDeserializer",
    "TensorSerializer",
    "TensorType",
]

# Reachable, as before, but not part of ``import *``.
__extra__ = (
    ENCRYPTION_TENSORIZER_VERSION,
    FormatError,
    HashMismatchError,
    HashType,
    InvalidVersionError,
    LONG_TENSOR_TENSORIZER_VERSION,
    META_TENSOR_TENSORIZER_VERSION,
    NON_OPAQUE_TENSORIZER_VERSION,
    OPAQUE_DTYPE_SEP,
    OPAQUE_TENSORIZER_VERSION,
    TENSORIZER_MAGIC,
    TENSORIZER_VERSION,
    TensorEntry,
    TensorHash,
    TruncatedError,
    _FileFeatureFlags,
    _FileHeader,
    _NumpyTensor,
    cpu_count,
    logger,
)
