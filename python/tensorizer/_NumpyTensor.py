"""Where callers of the old package find it."""

from .tensors.arrays import _NumpyTensor

__all__ = ["_NumpyTensor"]
