"""``serialize``, ``serialize_file`` and ``deserialize`` of ``tensorizer.safetensors``."""

import pytest
import safetensors
import torch
from tensorizer import safetensors as ours
from tensorizer.safetensors import SafetensorError


def spec_of(module, tensor):
    return module.TensorSpec(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tensor.shape,
        data_ptr=tensor.data_ptr(),
        data_len=tensor.nbytes,
    )


def test_serialized_bytes_are_those_of_the_library(tmp_path):
    tensors = {
        "a": torch.arange(6).reshape(2, 3),
        "b": torch.randn(5).bfloat16(),
        "c": torch.zeros(0, 4),
        "d": torch.arange(8, dtype=torch.uint8).reshape(2, 4).view(torch.float4_e2m1fn_x2),
        "ü": torch.tensor(True),
    }
    metadata = {"format": "pt"}
    expected = safetensors.serialize(
        {name: spec_of(safetensors, tensor) for name, tensor in tensors.items()}, metadata
    )
    for module in (ours, safetensors):
        specs = {name: spec_of(module, tensor) for name, tensor in tensors.items()}
        assert ours.serialize(specs, metadata) == expected
        ours.serialize_file(specs, tmp_path / "f", metadata)
        assert (tmp_path / "f").read_bytes() == expected
    assert repr(spec_of(ours, tensors["d"]))[:40] == "TensorSpec(dtype='F4', shape=[2, 8], dat"
    found, theirs = ours.deserialize(expected), safetensors.deserialize(expected)
    assert sorted(found, key=str) == sorted(theirs, key=str)
    assert all(type(row["data"]) is bytearray for _, row in found)


def test_wrong_raw_tensors_are_refused(tmp_path):
    tensor = torch.ones(3)
    for options, message in [
        ({"dtype": "nonsense"}, "Unknown dtype"),
        ({"dtype": "float6_e2m3fn_x4"}, "Unknown dtype"),
    ]:
        with pytest.raises(SafetensorError, match=message):
            ours.TensorSpec(
                **{"dtype": "float32", "shape": [3], "data_ptr": 0, "data_len": 0} | options
            )
    for options, error in [
        ({"shape": [-2, -1]}, OverflowError),
        ({"data_ptr": -1}, OverflowError),
        ({"data_len": 1 << 64}, OverflowError),
        ({"shape": "ab"}, TypeError),
        ({"shape": [1.5]}, TypeError),
        ({"dtype": 5}, TypeError),
    ]:
        with pytest.raises(error):
            ours.TensorSpec(
                **{"dtype": "float32", "shape": [3], "data_ptr": 0, "data_len": 0} | options
            )
    huge = ours.TensorSpec(dtype="float32", shape=[1 << 40, 1 << 40, 0], data_ptr=0, data_len=0)
    for specs, error in [({"a": huge}, SafetensorError), (None, TypeError)]:
        with pytest.raises(error):
            ours.serialize(specs)
    wrong = ours.TensorSpec(dtype="float32", shape=[4], data_ptr=tensor.data_ptr(), data_len=12)
    with pytest.raises(SafetensorError, match="a: expected 16 bytes for F32 of shape"):
        ours.serialize({"a": wrong})
    with pytest.raises(TypeError):
        ours.serialize({"a": {"dtype": "float32", "shape": [3], "data": b""}})
    right = spec_of(ours, tensor)
    with pytest.raises(SafetensorError):
        ours.serialize_file({"a": right}, tmp_path)
    with pytest.raises(SafetensorError):
        ours.deserialize(b"nothing")
    with pytest.raises(TypeError, match="expected bytes, found str"):
        ours.deserialize("nothing")
