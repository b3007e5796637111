"""The error class of safetensors: the library's own if it is installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .._errors import FormatError, InvalidVersionError

try:
    from safetensors import SafetensorError as SafetensorError
except ImportError:

    class SafetensorError(Exception):  # type: ignore[no-redef]
        """A file is not a safetensors file, or has no tensor of a name."""


@contextlib.contextmanager
def as_safetensor_errors(doing: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise errors in the content of a file, and errors of these kinds, as ``SafetensorError``.

    A ``TimeoutError`` stays what it is.
    """
    caught: tuple[type[Exception], ...] = (FormatError, InvalidVersionError, *kinds)
    try:
        yield
    except TimeoutError:
        raise
    except caught as error:
        raise SafetensorError(f"Error while {doing}: {error}") from error
