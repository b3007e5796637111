"""The protobuf messages of ``tensorizer.protobuf``."""

import importlib
import inspect
import io
import pickle

import pytest
import torch
from conftest import assert_same
from processes import run_python

#: Messages of release 2.12.1 for ``Model()``, and for two tensors.
MODEL = bytes.fromhex(
    "1a3a1a381a160a0177221108011201021a080000003f0000003f20001a1e0a01622219080c1201021a10000000000000"
    "0000010000000000000020011a3a0a01611a351a1c0a0677656967687422120801120201021a080000003f0000003f20"
    "001a150a0462696173220d08011201011a040000003f20001a050a01731a001aac010a03732e301aa4011a1b0a067765"
    "69676874221108011201021a080000003f0000003f20001a190a0462696173221108011201021a080000003f0000003f"
    "20001a210a0c72756e6e696e675f6d65616e221108011201021a08000000000000000020011a200a0b72756e6e696e67"
    "5f766172221108011201021a080000803f0000803f20011a250a136e756d5f626174636865735f747261636b6564220e"
    "080c1a08000000000000000020011a070a03732e311a001a3a0a05732e312e301a311a180a06776569676874220e0801"
    "120201011a040000003f20001a150a0462696173220d08011201011a040000003f2000"
)
PLAIN = bytes.fromhex("080a120202031a0c000001000200030004000500")
BUFFER = PLAIN + bytes.fromhex("2001")


class Model(torch.nn.Module):
    """Parameters, buffers and submodules."""

    def __init__(self, value=0.5):
        super().__init__()
        self.a = torch.nn.Linear(2, 1)
        self.w = torch.nn.Parameter(torch.empty(2))
        self.register_buffer("b", torch.arange(2))
        self.s = torch.nn.Sequential(
            torch.nn.BatchNorm1d(2), torch.nn.Sequential(torch.nn.Linear(1, 1))
        )
        self.register_parameter("nothing", None)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(value)


@pytest.fixture(autouse=True)
def messages(need_protobuf):
    need_protobuf()
    return importlib.import_module("tensorizer.protobuf")


def test_the_bytes_are_those_of_the_old_package(messages):
    tensor = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    buffer = messages.tensors_pb.AT_BUFFER
    assert messages.serialize_tensor(tensor).SerializeToString() == PLAIN
    assert messages.serialize_tensor(tensor, buffer).SerializeToString() == BUFFER
    assert messages.serialize_tensor(tensor.t().contiguous().t()).SerializeToString() == PLAIN
    read = messages.TensorPb.FromString(PLAIN)
    assert torch.equal(messages.deserialize_tensor(read), tensor)
    found, kind = messages.deserialize_tensor(messages.TensorPb.FromString(BUFFER))
    assert torch.equal(found, tensor) and kind == buffer
    assert pickle.loads(pickle.dumps(read)) == read

    stream = io.BytesIO()
    messages.serialize_model(Model(), stream)
    assert stream.getvalue() == MODEL
    model = Model(9.0)
    messages.deserialize_model(model, io.BytesIO(MODEL))
    wanted = Model().state_dict()
    assert model.state_dict().keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    assert isinstance(model.w, torch.nn.Parameter) and model.w.requires_grad


@pytest.mark.parametrize("name", ["bfloat16", "complex32", "complex64", "bool", "uint8", "float64"])
def test_dtypes(messages, name):
    tensor = torch.tensor([1, 0, 1]).to(getattr(torch, name))
    for shape in ((3,), (1, 3, 1)):
        found = messages.deserialize_tensor(messages.serialize_tensor(tensor.reshape(shape)))
        assert found.dtype == tensor.dtype and found.shape == shape
        assert found.view(-1).tolist() == tensor.tolist()
    for empty in (tensor[:0], tensor[0]):
        found = messages.deserialize_tensor(messages.serialize_tensor(empty))
        assert found.shape == empty.shape and found.tolist() == empty.tolist()


#: Dtypes that the old package stores and reads unchanged: not bfloat16, nor complex32.
COMMON = (
    *("float16", "float32", "float64", "complex64", "complex128"),
    *("uint8", "int8", "int16", "int32", "int64", "bool"),
)


def test_tensors_that_the_old_package_reads_and_writes(messages, old):
    tensors = [torch.tensor([[1, 0, 1], [0, 1, 1]]).to(getattr(torch, name)) for name in COMMON]
    kinds = [None, messages.tensors_pb.AT_PARAMETER, messages.tensors_pb.AT_BUFFER]
    ours = [
        messages.serialize_tensor(tensor, kind).SerializeToString()
        for tensor in tensors
        for kind in kinds
    ]
    code = """
from tensorizer import protobuf
read, written = [], []
for data in args[0]:
    message = protobuf.TensorPb.FromString(data)
    found = protobuf.deserialize_tensor(message)
    tensor, kind = found if isinstance(found, tuple) else (found, None)
    read.append((str(tensor.dtype), tuple(tensor.shape), tensor.tolist(), kind))
    written.append(protobuf.serialize_tensor(tensor, kind).SerializeToString())
return read, written
"""
    read, written = old(code, ours)
    assert written == ours
    expected = [
        (str(tensor.dtype), tuple(tensor.shape), tensor.tolist(), kind)
        for tensor in tensors
        for kind in kinds
    ]
    assert read == expected


def test_models_that_the_old_package_reads_and_writes(messages, old):
    stream = io.BytesIO()
    messages.serialize_model(Model(0.25), stream)
    code = """
import contextlib, io
from tensorizer import protobuf
exec(args[1], globals())
model = Model(9.0)
with contextlib.redirect_stdout(io.StringIO()):
    protobuf.deserialize_model(model, io.BytesIO(args[0]))
    stream = io.BytesIO()
    other = Model(0.75)
    protobuf.serialize_model(other, stream)
return {name: tensor.tolist() for name, tensor in model.state_dict().items()}, stream.getvalue()
"""
    found, theirs = old(code, stream.getvalue(), "import torch\n" + inspect.getsource(Model))
    assert found == {name: tensor.tolist() for name, tensor in Model(0.25).state_dict().items()}
    model = Model(9.0)
    messages.deserialize_model(model, io.BytesIO(theirs))
    for name, tensor in Model(0.75).state_dict().items():
        assert_same(model.state_dict()[name], tensor)


def test_damage(messages):
    pb = messages.tensors_pb
    for message, said in [
        (pb.Tensor(dtype=pb.DT_FLOAT32, shape=[2], data=b"1234567"), "expected 8 bytes"),
        (pb.Tensor(dtype=pb.DT_FLOAT32, shape=[-1, -2], data=b"12345678"), "expected 8 bytes"),
        (pb.Tensor(dtype=pb.DT_INVALID), "dtype 0"),
        (pb.Tensor(dtype=pb.DT_QINT8, shape=[1], data=b"1"), "dtype 15"),
        (pb.Tensor(dtype=99), "dtype 99"),
    ]:
        with pytest.raises(ValueError, match=said):
            messages.deserialize_tensor(message)
    for other in (torch.ones(2, dtype=torch.uint16), 5):
        with pytest.raises(TypeError, match="uint16|found int"):
            messages.serialize_tensor(other)
    with pytest.raises(ValueError, match="expected a message Module"):
        messages.deserialize_model(Model(), io.BytesIO(MODEL[:-1]))
    with pytest.raises(KeyError, match="no submodule 'a'"):
        messages.deserialize_model(torch.nn.Linear(1, 1), io.BytesIO(MODEL[60:]))


def test_without_protobuf():
    code = """
import sys
for name in [name for name in sys.modules if name.startswith(("google.protobuf", "tensorizer."))]:
    del sys.modules[name]
sys.modules["google.protobuf"] = None
from tensorizer import *
import tensorizer
try:
    import tensorizer.protobuf
except ImportError as error:
    print(error)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert "pip install 'protobuf>=4.22'" in done.stdout


def test_a_module_without_data_is_refused_by_name(messages):
    for module, text in (
        (torch.nn.LazyLinear(3), "'.weight' and '.bias' are uninitialised"),
        (torch.nn.Linear(2, 2, device="meta"), "'.weight' and '.bias' are on the meta device"),
    ):
        file = io.BytesIO()
        with pytest.raises(ValueError, match=text):
            messages.serialize_model(module, file)
        assert not file.getvalue()
