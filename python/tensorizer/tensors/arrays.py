"""Converts tensors to numpy arrays and back, with dtypes in the form that files store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: Integers that stand for elements of dtypes that numpy lacks, by their width in bytes.
_SAME_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def stored_dtype(name: str) -> np.dtype[Any]:
    """Return numpy's dtype for its name in a file."""
    # Imported here: torch and this package work without numpy.
    import numpy as np

    return np.dtype(name)


def opaque_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a CPU tensor's elements as an array of integers of the same width."""
    array: npt.NDArray[Any] = tensor.view(_SAME_WIDTH[tensor.element_size()]).numpy()
    return array


class _NumpyTensor(NamedTuple):
    """An array, and the names of its dtypes. Arrays share their memory with tensors.

    Attributes:
        data: The elements; integers of the same width if numpy lacks their dtype.
        numpy_dtype: A name such as ``"<f4"``; ``"<V2"`` for elements whose dtype numpy lacks.
        torch_dtype: A name such as ``"torch.bfloat16"``; may be None if numpy has the dtype.

    """

    data: npt.NDArray[Any]
    numpy_dtype: str
    torch_dtype: str | None

    @property
    def is_opaque(self) -> bool:
        """True if the array's integers stand for elements of a dtype that numpy lacks."""
        return stored_dtype(self.numpy_dtype).kind == "V"

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> _NumpyTensor:
        """Return the array of a tensor, which is copied if it is not on the CPU."""
        tensor = tensor.detach().cpu()
        try:
            array = tensor.numpy()
        except TypeError:
            return cls(opaque_array(tensor), f"<V{tensor.element_size()}", str(tensor.dtype))
        return cls(array, array.dtype.str, str(tensor.dtype))

    @classmethod
    def from_array(cls, arr: npt.NDArray[Any]) -> _NumpyTensor:
        """Return an array with the names of its dtypes.

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
        """Return an array over the bytes of a buffer, from a position on."""
        import numpy as np

        dtype = np.dtype(numpy_dtype)
        if dtype.kind == "V":
            dtype = np.dtype(f"<i{dtype.itemsize}")
        array: npt.NDArray[Any] = np.ndarray(tuple(shape_list), dtype, buffer, offset)
        return cls(array, numpy_dtype, torch_dtype)

    def to_tensor(self) -> torch.Tensor:
        """Return a tensor over the array's memory.

        Raises:
            ValueError: numpy lacks the dtype of the elements, and no dtype of torch is named.

        """
        tensor = torch.from_numpy(self.data)
        if not self.is_opaque:
            return tensor
        if not self.torch_dtype:
            raise ValueError(f"{self.numpy_dtype!r} needs the name of a dtype of torch")
        dtype = getattr(torch, self.torch_dtype.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"expected the name of a torch.dtype, found {self.torch_dtype!r}")
        return tensor.view(dtype)
