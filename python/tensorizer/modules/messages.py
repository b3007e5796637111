"""Tensors and modules as protobuf messages."""

from __future__ import annotations

import math
from typing import Any, BinaryIO

import torch

from .._types import TensorType
from ..tensors import messages, without_data
from ..tensors.handles import bytes_of
from . import held_elsewhere
from .state import TensorSlot, register, walk

#: The numbers of dtypes in messages.
DtypePbs: dict[torch.dtype, int] = {
    getattr(torch, "quint4x2" if name == "DT_QUINT4_2" else name[3:].lower()): number
    for name, number in messages.Dtype.items()
    if name != "DT_INVALID"
}
PbDtypes: dict[int, torch.dtype] = {number: dtype for dtype, number in DtypePbs.items()}


def serialize_tensor(t: torch.Tensor, attribute: int | None = None) -> Any:
    """Return a tensor as a protobuf message.

    Args:
        t: The tensor; its data are copied.
        attribute: ``AT_PARAMETER`` or ``AT_BUFFER`` of :mod:`tensorizer.tensors_pb2`, or None.

    Raises:
        TypeError: It is not a tensor, or messages do not support its dtype.

    """
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"expected a tensor, found {type(t).__name__}")
    if t.dtype not in DtypePbs or t.is_quantized:
        raise TypeError(f"a message cannot hold a tensor of {t.dtype}")
    data = bytes_of(t.detach().cpu()).numpy().tobytes()
    return messages.Tensor(dtype=DtypePbs[t.dtype], shape=t.shape, data=data, attr_type=attribute)


def deserialize_tensor(t: Any) -> torch.Tensor | tuple[torch.Tensor, int]:
    """Return the tensor of a message, together with ``attr_type`` if it has one.

    Raises:
        ValueError: The message has an unknown dtype, or another number of bytes than its shape
            needs.

    """
    dtype = PbDtypes.get(t.dtype)
    if dtype is None or "quint" in str(dtype) or "qint" in str(dtype):
        raise ValueError(f"the message has dtype {t.dtype}, which is not a dtype of plain tensors")
    shape = tuple(t.shape)
    size = math.prod(shape) * dtype.itemsize
    if len(t.data) != size or any(length < 0 for length in shape):
        raise ValueError(f"expected {size} bytes for {dtype} {shape}, found {len(t.data)}")
    tensor = torch.empty(shape, dtype=dtype)
    if size:
        tensor = torch.frombuffer(bytearray(t.data), dtype=dtype).reshape(shape)
    return (tensor, t.attr_type) if t.HasField("attr_type") else tensor


def serialize_model(model: torch.nn.Module, file_stream: BinaryIO) -> None:
    """Write the parameters and buffers of a module as one message.

    Raises:
        RuntimeError: FSDP's first version or accelerate holds the weights elsewhere.
        ValueError: A tensor has no data.

    """
    held_elsewhere.put_in_place(model, to_load=False)
    named = {name: tensor for _, name, _, _, tensor in walk(model)}
    without_data.refuse(named, named.values())
    message = messages.Module()
    for name, module in model.named_modules():
        own = message.attributes.add(name=name).module
        # The presence of the field says that it is a module.
        own.SetInParent()
        kinds = (
            (module._parameters, messages.VALUES["AT_PARAMETER"]),
            (module._buffers, messages.VALUES["AT_BUFFER"]),
        )
        for tensors, kind in kinds:
            for attribute, tensor in tensors.items():
                if tensor is not None:
                    own.attributes.add(name=attribute, tensor=serialize_tensor(tensor, kind))
    file_stream.write(message.SerializeToString())


def deserialize_model(model: torch.nn.Module, file_stream: BinaryIO) -> None:
    """Load the parameters and buffers of a message into a module.

    Raises:
        KeyError: The module lacks a submodule of the message.
        ValueError: The message is damaged.

    """
    held_elsewhere.put_in_place(model, to_load=True)
    message = messages.Module()
    try:
        message.ParseFromString(file_stream.read())
    except Exception as error:
        raise ValueError(f"expected a message Module: {error}") from error
    modules = dict(model.named_modules())
    for part in message.attributes:
        if part.name not in modules:
            raise KeyError(f"the module has no submodule {part.name!r}")
        for attribute in part.module.attributes:
            found = deserialize_tensor(attribute.tensor)
            if isinstance(found, torch.Tensor):
                raise ValueError(f"{attribute.name!r} is neither parameter nor buffer")
            tensor, kind = found
            slot = TensorSlot(modules[part.name], attribute.name, TensorType.BUFFER)
            if kind == messages.VALUES["AT_PARAMETER"]:
                slot.kind = TensorType.PARAM
                differentiable = tensor.is_floating_point() or tensor.is_complex()
                tensor = torch.nn.Parameter(tensor, requires_grad=differentiable)
            register(slot, tensor)
