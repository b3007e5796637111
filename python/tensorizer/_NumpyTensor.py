"""Import path of ``_NumpyTensor`` in the old package of the same name, kept for compatibility."""

from .tensors.arrays import _NumpyTensor

__all__ = ["_NumpyTensor"]
