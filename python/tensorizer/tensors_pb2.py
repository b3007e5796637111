"""The protobuf messages of :mod:`tensorizer.protobuf`."""

from .tensors.messages import DESCRIPTOR, VALUES, Attribute, AttributeType, Dtype, Module, Tensor

globals().update(VALUES)

__all__ = ["DESCRIPTOR", "Attribute", "AttributeType", "Dtype", "Module", "Tensor"]
__all__.extend(VALUES)

del VALUES
