"""Tensors as numpy arrays and back, with the dtypes as files store them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: Integers that stand for elements which numpy does not know.
_SAME_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def stored_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of numpy that a file names."""
    # Not at once: torch and this package do without numpy.
    import numpy as np

    return np.dtype(name)


def opaque_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return the array of integers that are as wide as the elements of a CPU tensor."""
    array: npt.NDArray[Any] = tensor.view(_SAME_WIDTH[tensor.element_size()]).numpy()
    return array


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"expected the name of a torch.dtype, found {name!r}")
    return dtype


class _NumpyTensor(NamedTuple):
    """An array, and the names of its dtypes. Arrays share their memory with tensors.

    Attributes:
        data: The elements; integers of the same width if numpy does not know them.
        numpy_dtype: Such as ``"<f4"``; ``"<V2"`` for elements that numpy does not know.
        torch_dtype: Such as ``"torch.bfloat16"``; may be None for those that numpy knows.

    """

    data: npt.NDArray[Any]
    numpy_dtype: str
    torch_dtype: str | None

    @property
    def is_opaque(self) -> bool:
        """Whether the array's elements only stand for others, which numpy does not know."""
        return stored_dtype(self.numpy_dtype).kind == "V"

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> _NumpyTensor:
        """Return what stands for a tensor, which is copied if it is not on the CPU."""
        tensor = tensor.detach().cpu()
        try:
            array = tensor.numpy()
        except TypeError:
            return cls(opaque_array(tensor), f"<V{tensor.element_size()}", str(tensor.dtype))
        return cls(array, array.dtype.str, str(tensor.dtype))

    @classmethod
    def from_array(cls, arr: npt.NDArray[Any]) -> _NumpyTensor:
        """Return what stands for an array.

        Raises:
            TypeError: torch has no such dtype.
            ValueError: torch does not take its byte order.

        """
        return cls(arr, arr.dtype.str, str(torch.from_numpy(arr).dtype))

    @classmethod
    def from_buffer(
        cls,
        numpy_dtype: str,
        torch_dtype: str | None,
        shape_list: Sequence[int],
        buffer: Any,
        offset: int = 0,
    ) -> _NumpyTensor:
        """Return what stands for the bytes of a buffer from a position on."""
        import numpy as np

        dtype = np.dtype(numpy_dtype)
        if dtype.kind == "V":
            dtype = np.dtype(f"<i{dtype.itemsize}")
        array: npt.NDArray[Any] = np.ndarray(tuple(shape_list), dtype, buffer, offset)
        return cls(array, numpy_dtype, torch_dtype)

    def to_tensor(self) -> torch.Tensor:
        """Return the tensor over the array's memory.

        Raises:
            ValueError: The elements are not numpy's, and no dtype of torch is named.

        """
        tensor = torch.from_numpy(self.data)
        if not self.is_opaque:
            return tensor
        if not self.torch_dtype:
            raise ValueError(f"{self.numpy_dtype!r} needs the name of a dtype of torch")
        return tensor.view(_dtype(self.torch_dtype))
