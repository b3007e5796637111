"""Names of the old package for parts of the format."""

from .._errors import InvalidVersionError

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
