"""The libraries that models come from, imported when a call needs them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: The oldest major release of transformers that converts weights while it loads them.
_TRANSFORMERS = 5


def library(name: str) -> Any:
    """Return the module of a library: ``transformers``, ``diffusers`` or ``peft``.

    Raises:
        ImportError: The library is not installed, or transformers is older than release 5.

    """
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(
            f"this call needs the library {name}: pip install {name}", name=name
        ) from error
    version = str(getattr(module, "__version__", _TRANSFORMERS))
    if name == "transformers" and int(version.partition(".")[0]) < _TRANSFORMERS:
        raise ImportError(
            f"tensorizer.transformers needs transformers {_TRANSFORMERS} or newer, found {version}",
            name=name,
        )
    return module


def is_of(cls: type, name: str) -> bool:
    """Tell whether a class, or one of its bases, is defined in a library."""
    return any(base.__module__.partition(".")[0] == name for base in cls.__mro__)
