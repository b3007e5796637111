"""Loads and saves torch tensors as ``.tensors`` files, at the speed of the machine.

:class:`TensorDeserializer` and :class:`TensorSerializer` are the classes of the package of the
same name that this one succeeds. :func:`load` and :func:`save` are the short way. The operators
``torch.ops.tensorizer.load`` and ``.save`` work in TorchScript and without Python too.
"""

from ._native import __version__

from . import _ops  # isort: skip  # defines what torch must know before anything is compiled
from . import serialization, utils
from ._api import load, save
from .serialization import (
    CryptographyError,
    FilterFuncType,
    TensorDeserializer,
    TensorSerializer,
    TensorType,
)

__all__ = [
    "CryptographyError",
    "FilterFuncType",
    "TensorDeserializer",
    "TensorSerializer",
    "TensorType",
    "__version__",
    "load",
    "save",
    "serialization",
    "utils",
]

del _ops
