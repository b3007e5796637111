"""Files of safetensors, byte by byte, even those that its library would not write."""

import contextlib
import json
import os
import struct
import threading

import torch
from conftest import assert_same
from safetensors import safe_open
from safetensors.torch import load_file, save_file

#: Each dtype of safetensors that torch has, with the bits of one value.
DTYPES = {
    "BOOL": (torch.bool, 8),
    "U8": (torch.uint8, 8),
    "I8": (torch.int8, 8),
    "U16": (torch.uint16, 16),
    "I16": (torch.int16, 16),
    "U32": (torch.uint32, 32),
    "I32": (torch.int32, 32),
    "U64": (torch.uint64, 64),
    "I64": (torch.int64, 64),
    "F16": (torch.float16, 16),
    "BF16": (torch.bfloat16, 16),
    "F32": (torch.float32, 32),
    "F64": (torch.float64, 64),
    "C64": (torch.complex64, 64),
    "F4": (torch.float4_e2m1fn_x2, 4),
    "F8_E5M2": (torch.float8_e5m2, 8),
    "F8_E4M3": (torch.float8_e4m3fn, 8),
    "F8_E5M2FNUZ": (torch.float8_e5m2fnuz, 8),
    "F8_E4M3FNUZ": (torch.float8_e4m3fnuz, 8),
    "F8_E8M0": (torch.float8_e8m0fnu, 8),
}
#: Dtypes of safetensors that torch lacks.
BEYOND_TORCH = {"F6_E2M3": 6, "F6_E3M2": 6}


def pack(header, data=b"", length=None):
    """Return a file; a header of bytes is taken as it is, filled up with spaces to a length."""
    if not isinstance(header, bytes):
        header = json.dumps(header).encode()
    header = header.ljust(length or 0)
    return struct.pack("<Q", len(header)) + header + data


def info(dtype="U8", shape=(4,), begin=0, end=4, **more):
    """Return the entry of a tensor in a header."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **more}


def pack_tensors(tensors, metadata=None, length=None):
    """Return a file of ``{name: (dtype, shape, bytes)}``, whose data lie in this order."""
    header, data = {}, b""
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, (dtype, shape, values) in tensors.items():
        header[name] = info(dtype, shape, len(data), len(data) + len(values))
        data += values
    return pack(header, data, length)


def some_bytes(dtype, shape, seed=0):
    """Return as many bytes as a tensor has, none of which is a NaN or no boolean."""
    bits = (DTYPES[dtype][1] if dtype in DTYPES else BEYOND_TORCH[dtype]) * torch.Size(
        shape
    ).numel()
    assert bits % 8 == 0
    most = 2 if dtype == "BOOL" else 50
    return bytes((seed + 7 * at) % most for at in range(bits // 8))


def filled(dtype, shape, seed=0):
    """Return a tensor for :func:`pack_tensors`."""
    return dtype, shape, some_bytes(dtype, shape, seed)


#: Names that need care, each with what is stored under it.
NAMES = ["", "plain", "a.b.c", "a/b", "ümläut.重み.🙂", "with space", "\x01\x1f\x7f\n\t", "\x1e",
         '\x1e["a"]', "\x1e[0]", '"quoted\\"', "__metadata", "a.b", "0"]  # fmt: skip


def every_dtype():
    """One tensor of each dtype, scalars and empty ones, at offsets that fit none of them."""
    tensors = {"odd": filled("U8", [1])}
    for number, dtype in enumerate(DTYPES):
        last = 6 if dtype == "F4" else 3
        tensors[f"{dtype}.matrix"] = filled(dtype, [5, last], number)
        tensors[f"{dtype}.empty"] = filled(dtype, [0, last])
        if dtype != "F4":
            tensors[f"{dtype}.scalar"] = filled(dtype, [], number)
    return tensors


FILES = {
    # As the library writes them.
    "library": None,
    "dtypes": pack_tensors(every_dtype()),
    "unpadded": pack_tensors(every_dtype(), {"a": "b"}, length=2 * len(str(every_dtype())) | 1),
    "names": pack_tensors({name: filled("F32", [2], at) for at, name in enumerate(NAMES)}),
    "no tensors": pack({}),
    "metadata only": pack({"__metadata__": {"format": "pt", "": "\x1e🙂"}}),
    "metadata null": pack({"__metadata__": None, "a": info()}, b"1234"),
    "all empty": pack({"b": info("F32", [0], 0, 0), "a": info("I64", [3, 0], 0, 0)}),
    # The data begin within the first bytes that are read of any file.
    "tiny": pack({"a": info("U8", [3], 0, 3)}, b"123"),
    "one byte": pack({"a": info("BOOL", [], 0, 1)}, b"\1"),
    # Older writers sorted by name, or not at all, and wrote tensors in the order of their data.
    "by name": pack_tensors(
        {"a": filled("U8", [3]), "b": filled("F64", [2]), "c": filled("I16", [1])}
    ),
    "header in another order": pack(
        {"z": info("I16", [2], 8, 12), "y": info("F64", [1], 0, 8), "a": info("U8", [1], 12, 13)},
        bytes(range(13)),
    ),
    # Fields that the format does not define.
    "unknown fields": pack({"a": info(strides=[1], note={"x": [None, True, 1.5]})}, b"1234"),
    "fields as a list": pack({"a": ["U8", [4], [0, 4]]}, b"1234"),
    "escapes": pack(
        b'{"\\u0061\\ud83d\\ude42":{"dtype":"\\u00558","shape":[4],"data_offsets":[0,4]}}', b"1234"
    ),
    "spaces": pack(
        b'{ "a" :\n{"shape": [ 4 ],\t"data_offsets":[0, 4 ] ,"dtype":"U8"}\r\n} \n\t', b"1234"
    ),
    "64 dimensions": pack({"a": info("U8", [1] * 64, 0, 1)}, b"1"),
}  # fmt: skip


def write(which, path):
    """Write one of the files; the one without bytes by the library."""
    data = FILES[which]
    if data is not None:
        path.write_bytes(data)
        return
    torch.manual_seed(1)
    tensors = {f"layer.{i}.weight": torch.randn(i * 40, 60) for i in range(7)}
    tensors["half"] = torch.randn(300, 7).to(torch.bfloat16)
    tensors["large"] = torch.randn(700, 1000)
    tensors["scalar"] = torch.tensor(5)
    save_file(tensors, path, metadata={"format": "pt"})


def in_file_order(path):
    """Return the library's tensors in the order of their data."""
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        return {name: tensors[name] for name in file.offset_keys()}


def check(loaded, path):
    expected = in_file_order(path)
    with_data = [name for name in expected if expected[name].numel()]
    # Tensors without data may come in any order.
    assert [name for name in loaded if loaded[name].numel()] == with_data
    assert set(loaded) == set(expected)
    for name, tensor in expected.items():
        mine = loaded[name].detach()
        assert_same(mine, tensor)
        assert mine.is_contiguous()
        assert mine.data_ptr() % mine.element_size() == 0, name


def stored_name(name):
    """Return the name as operators have it: those that begin with U+001E are paths elsewhere."""
    if name and not name.startswith("\x1e"):
        return name
    return "\x1e[" + ('"' + name.replace('"', '\\"').replace("\x1e", "\\u001e") + '"') + "]"


@contextlib.contextmanager
def feeding(data):
    """Yield the end of a pipe that gives these bytes."""
    reading, writing = os.pipe()

    def feed():
        with contextlib.suppress(BrokenPipeError), os.fdopen(writing, "wb") as file:
            file.write(data)

    thread = threading.Thread(target=feed)
    thread.start()
    try:
        yield reading
    finally:
        os.close(reading)
        thread.join()
