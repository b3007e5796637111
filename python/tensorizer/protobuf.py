"""Tensors and modules as protobuf messages, as the old package's earliest releases stored them.

They have nothing in common with ``.tensors`` files. Needs ``pip install 'protobuf>=4.22'``.
"""

from . import tensors_pb2 as tensors_pb
from .modules.messages import (
    DtypePbs,
    PbDtypes,
    deserialize_model,
    deserialize_tensor,
    serialize_model,
    serialize_tensor,
)
from .tensors.messages import Tensor as TensorPb

__all__ = [
    "DtypePbs",
    "PbDtypes",
    "TensorPb",
    "deserialize_model",
    "deserialize_tensor",
    "serialize_model",
    "serialize_tensor",
    "tensors_pb",
]
