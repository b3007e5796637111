"""The protobuf messages of the old package's earliest format, which is not the file format."""

from __future__ import annotations

from typing import Any

try:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from google.protobuf.internal import enum_type_wrapper
except ImportError as missing:
    raise ImportError(
        "tensorizer.protobuf and tensorizer.tensors_pb2 need protobuf: pip install 'protobuf>=4.22'"
    ) from missing

_Field = descriptor_pb2.FieldDescriptorProto

#: The values of each enum, numbered from 0 on.
_ENUMS = {
    "Dtype": "DT_INVALID DT_FLOAT32 DT_FLOAT64 DT_FLOAT16 DT_BFLOAT16 DT_COMPLEX32 DT_COMPLEX64 "
    "DT_COMPLEX128 DT_UINT8 DT_INT8 DT_INT16 DT_INT32 DT_INT64 DT_BOOL DT_QUINT8 DT_QINT8 "
    "DT_QINT32 DT_QUINT4_2",
    "AttributeType": "AT_PARAMETER AT_BUFFER",
}
#: The fields of each message, with number and type. Types begin with "*" for a repeated field, with
#: "?" for an optional one, and with "|" for one of several alternatives.
_MESSAGES = {
    "Tensor": [
        ("dtype", 1, "Dtype"),
        ("shape", 2, "*int64"),
        ("data", 3, "bytes"),
        ("attr_type", 4, "?AttributeType"),
    ],
    "Attribute": [
        ("name", 1, "string"),
        ("module", 3, "|Module"),
        ("tensor", 4, "|Tensor"),
        ("string", 5, "|string"),
        ("int64", 6, "|int64"),
        ("float", 7, "|float"),
        ("bool", 8, "|bool"),
    ],
    "Module": [("name", 1, "string"), ("names", 2, "*string"), ("attributes", 3, "*Attribute")],
}


def _add_field(message: Any, name: str, number: int, type_: str) -> None:
    plain = type_.lstrip("*?|")
    field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if plain in _ENUMS:
        field.type, field.type_name = _Field.TYPE_ENUM, f".tensors.{plain}"
    elif plain in _MESSAGES:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".tensors.{plain}"
    else:
        field.type = _Field.Type.Value(f"TYPE_{plain.upper()}")
    if type_[0] == "*":
        field.label = _Field.LABEL_REPEATED
    elif type_[0] in "?|":
        if not message.oneof_decl:
            message.oneof_decl.add(name="value" if type_[0] == "|" else f"_{name}")
        field.oneof_index, field.proto3_optional = 0, type_[0] == "?"


def _describe() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="tensors.proto", package="tensors", syntax="proto3"
    )
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values.split()):
            enum.value.add(name=value, number=number)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields:
            _add_field(message, *field)
    # In a pool of its own: another package of the process may have messages of these names.
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool.FindFileByName("tensors.proto")


def _message(name: str) -> Any:
    kind: Any = message_factory.GetMessageClass(DESCRIPTOR.message_types_by_name[name])
    kind.__module__ = "tensorizer.tensors_pb2"
    return kind


#: The descriptor of the file that defines all messages.
DESCRIPTOR = _describe()
Dtype = enum_type_wrapper.EnumTypeWrapper(DESCRIPTOR.enum_types_by_name["Dtype"])
AttributeType = enum_type_wrapper.EnumTypeWrapper(DESCRIPTOR.enum_types_by_name["AttributeType"])
Tensor = _message("Tensor")
Attribute = _message("Attribute")
Module = _message("Module")
#: The values of both enums by name.
VALUES: dict[str, int] = {**dict(Dtype.items()), **dict(AttributeType.items())}
