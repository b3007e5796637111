"""The serializer and the deserializer, and the names that callers import beside them."""

from ._deserializer import TensorDeserializer
from ._encryption import DecryptionParams, EncryptionParams
from ._errors import (
    CryptographyError,
    FormatError,
    HashMismatchError,
    InvalidVersionError,
    TruncatedError,
)
from ._native import cpu_count
from ._serializer import TensorSerializer, logger
from ._types import FilterFuncType, HashType, TensorType

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
__extra__ = (FormatError, HashMismatchError, HashType, TruncatedError, cpu_count, logger)

#: The first bytes of every file.
TENSORIZER_MAGIC = b"|TZR|"
#: The newest data version, and the one that each feature needs.
TENSORIZER_VERSION = 5
NON_OPAQUE_TENSORIZER_VERSION = 1
OPAQUE_TENSORIZER_VERSION = 2
ENCRYPTION_TENSORIZER_VERSION = 3
META_TENSOR_TENSORIZER_VERSION = 4
LONG_TENSOR_TENSORIZER_VERSION = 5
#: Separates the numpy from the torch part of a stored dtype.
OPAQUE_DTYPE_SEP = "\0"


class _FileHeader:
    """Where callers of the old package find its exception."""

    InvalidVersionError = InvalidVersionError
