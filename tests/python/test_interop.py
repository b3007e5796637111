"""Both directions against the real tensorizer 2.12.1 from the package index."""

import numpy as np
import pytest
import tensorizer
import torch
from conftest import assert_same, bits
from tensorizer import TensorDeserializer, TensorSerializer, TensorType
from tensorizer.serialization import HashMismatchError

#: Every dtype of the table, without torch's prefix.
DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex32",
    "complex64",
    "complex128",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "int1",
    "int2",
    "int3",
    "int4",
    "int5",
    "int6",
    "int7",
    "uint1",
    "uint2",
    "uint3",
    "uint4",
    "uint5",
    "uint6",
    "uint7",
    "bits1x8",
    "bits2x4",
    "bits4x2",
    "bits8",
    "bits16",
]


def sample(name, shape=(3, 5)):
    dtype = getattr(torch, name)
    count = int(np.prod(shape))
    if name == "bool":
        return (torch.arange(count) % 3 == 0).reshape(shape)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    return raw.view(widths[dtype.itemsize]).view(dtype).reshape(shape)


READ_WITH_OLD = """
import hashlib
d = tensorizer.TensorDeserializer(args[0], device="cpu", lazy_load=True, verify_hash=True)
widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
out = []
for index, kind, name, t in d.read_tensors():
    t = t.detach()
    raw = t.reshape(-1).view(widths[t.element_size()]).numpy().tobytes() if t.numel() else b""
    out.append((index, int(kind), name, str(t.dtype), tuple(t.shape), raw))
return out
"""


def read_with_old(old, path):
    return {row[2]: row for row in old(READ_WITH_OLD, str(path))}


def expect_old(row, tensor, kind=TensorType.STATE_DICT):
    _, found_kind, _, dtype, shape, raw = row
    assert (found_kind, dtype, shape) == (int(kind), str(tensor.dtype), tuple(tensor.shape))
    assert raw == bits(tensor)


@pytest.mark.parametrize("alignment", [1, 64])
def test_the_old_package_reads_every_dtype_that_we_write(old, tmp_path, alignment):
    path = tmp_path / "dtypes.tensors"
    tensors = {name: sample(name) for name in DTYPES}
    tensorizer.save(tensors, path, alignment=alignment)
    rows = read_with_old(old, path)
    assert len(rows) == len(DTYPES) == 41
    for name, tensor in tensors.items():
        expect_old(rows[name], tensor)


def test_we_read_every_dtype_that_the_old_package_writes(old, tmp_path):
    path = tmp_path / "dtypes.tensors"
    raws = {name: (list(sample(name).shape), bits(sample(name))) for name in DTYPES}
    old(
        """
import numpy as np
widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
s = tensorizer.TensorSerializer(args[0])
tensors = {}
for name, (shape, raw) in args[1].items():
    dtype = getattr(torch, name)
    flat = torch.from_numpy(np.frombuffer(raw, np.uint8).copy())
    if name == "bool": tensors[name] = flat.bool().reshape(shape)
    else: tensors[name] = flat.view(widths[dtype.itemsize]).view(dtype).reshape(shape)
s.write_state_dict(tensors)
s.close()
""",
        str(path),
        raws,
    )
    loaded = tensorizer.load(path, verify_hash=True)
    assert list(loaded) == DTYPES
    for name, (shape, raw) in raws.items():
        assert loaded[name].dtype == getattr(torch, name)
        assert list(loaded[name].shape) == shape
        assert bits(loaded[name]) == raw


def test_shapes_views_and_devices(old, tmp_path):
    path = tmp_path / "shapes.tensors"
    base = torch.randn(6, 8)
    complex_base = torch.randn(4, 3, dtype=torch.complex64)
    tensors = {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0),
        "empty_2d": torch.empty(3, 0, 2),
        "transposed": base.t(),
        "sliced": base[::2, 1:5],
        "expanded": torch.arange(3).expand(4, 3),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugated": complex_base.conj(),
        "negative": complex_base.conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(2)),
    }
    assert tensors["conjugated"].is_conj()
    assert tensors["negative"].is_neg()
    before = {name: bits(tensor) for name, tensor in tensors.items()}
    tensorizer.save(tensors, path)
    rows = read_with_old(old, path)
    loaded = tensorizer.load(path, verify_hash=True)
    for name, tensor in tensors.items():
        expect_old(rows[name], tensor)
        assert bits(loaded[name]) == before[name]
        assert loaded[name].shape == tensor.shape
        assert bits(tensor) == before[name], "the caller's tensor is not modified"


def test_meta_tensors_come_back_as_zeros_in_both(old, tmp_path):
    path = tmp_path / "meta.tensors"
    tensors = {
        "m": torch.empty(3, 4, device="meta"),
        "marker": torch.tensor((1,), device="meta"),
        "real": torch.ones(2),
    }
    tensorizer.save(tensors, path, allow_meta=True)
    rows = read_with_old(old, path)
    loaded = tensorizer.load(path, verify_hash=True)
    for name, tensor in tensors.items():
        expected = torch.zeros(tensor.shape, dtype=tensor.dtype) if name != "real" else tensor
        expect_old(rows[name], expected)
        assert_same(loaded[name], expected)


def test_meta_and_empty_tensors_of_opaque_dtypes(tmp_path):
    """Well-formed, but the old package cannot read what it writes of these."""
    path = tmp_path / "opaque.tensors"
    tensors = {
        "meta_scalar": torch.empty((), device="meta"),
        "meta_bf16": torch.empty(2, dtype=torch.bfloat16, device="meta"),
        "empty_bf16": torch.empty(0, 4, dtype=torch.bfloat16),
    }
    tensorizer.save(tensors, path, allow_meta=True)
    loaded = tensorizer.load(path, verify_hash=True)
    assert_same(loaded["meta_scalar"], torch.zeros(()))
    assert_same(loaded["meta_bf16"], torch.zeros(2, dtype=torch.bfloat16))
    assert_same(loaded["empty_bf16"], torch.empty(0, 4, dtype=torch.bfloat16))


def test_nested_structures_and_odd_names(old, tmp_path):
    path = tmp_path / "nested.tensors"
    t = [torch.full((2,), float(i)) for i in range(9)]
    tree = {
        "model": {"w": [t[0], {"deep": t[1]}], "é\u2603\U0001f600": t[2]},
        "flat.name": t[3],
        'quote"\\\n\x7f': {"tab\t": t[4]},
        "tuple": (t[6], t[7]),
        "nul\0": t[8],
    }
    with TensorSerializer(path) as serializer:
        serializer.write_state_dict(tree)
    rows = read_with_old(old, path)
    paths = {
        ("model", "w", 0): t[0],
        ("model", "w", 1, "deep"): t[1],
        ("model", "é\u2603\U0001f600"): t[2],
        "flat.name": t[3],
        ('quote"\\\n\x7f', "tab\t"): t[4],
        ("tuple", 0): t[6],
        ("tuple", 1): t[7],
        "nul\0": t[8],
    }
    assert set(rows) == set(paths)
    for name, tensor in paths.items():
        expect_old(rows[name], tensor)
    with TensorDeserializer(path, device="cpu") as file:
        loaded = file.tree()
        assert list(file.keys()) == list(tree)
        assert_same(file["model"]["w"][1]["deep"].detach(), t[1])
        assert_same(file.tree(["model", "w", 0]).detach(), t[0])
        assert isinstance(loaded["tuple"], list)
        assert file.tree(["none"], default=7) == 7


def test_names_that_the_old_package_writes_but_cannot_read(old, tmp_path):
    """The empty name and names that begin with U+001E; stored so that both read them."""
    path = tmp_path / "names.tensors"
    tensors = {"": torch.zeros(1), "\x1eabc": torch.ones(1), '\x1e["a"]': torch.ones(2)}
    with TensorSerializer(path) as serializer:
        serializer.write_state_dict(tensors)
    with TensorDeserializer(path, device="cpu") as file:
        assert list(file) == list(tensors)
    del tensors[""]
    with TensorSerializer(path) as serializer:
        serializer.write_state_dict(tensors)
    assert set(read_with_old(old, path)) == set(tensors)


def test_an_index_of_more_than_is_reserved(old, tmp_path):
    path = tmp_path / "many.tensors"
    # An entry has more than 60 bytes, and 256 KiB are reserved.
    count = 6_000
    tensors = {f"model.layers.{i}.weight": torch.tensor([i, -i]) for i in range(count)}
    tensorizer.save(tensors, path)
    assert int.from_bytes(path.read_bytes()[65:73], "little") > 256 << 10
    rows = read_with_old(old, path)
    assert len(rows) == count
    loaded = tensorizer.load(path)
    assert list(loaded) == list(tensors)
    for i in (0, 1, 4_369, count - 1):
        name = f"model.layers.{i}.weight"
        expect_old(rows[name], tensors[name])
    assert torch.equal(torch.stack(list(loaded.values())), torch.stack(list(tensors.values())))


def test_dimensions_of_2_to_the_32(old, tmp_path):
    path = tmp_path / "long.tensors"
    tensors = {
        "short": torch.arange(3),
        "long_empty": torch.empty(0, 2**32, dtype=torch.int8),
        "also_short": torch.ones(2, 2),
    }
    with TensorSerializer(path, alignment=1) as serializer:
        # The first long one comes after others: their index entries grow.
        for name, tensor in tensors.items():
            serializer.write_tensor(7, name, TensorType.STATE_DICT, tensor)
    rows = read_with_old(old, path)
    loaded = tensorizer.load(path, verify_hash=True)
    for name, tensor in tensors.items():
        expect_old(rows[name], tensor)
        assert_same(loaded[name], tensor)
    theirs = tmp_path / "theirs.tensors"
    old(
        """
s = tensorizer.TensorSerializer(args[0])
for name, dtype, shape in args[1]:
    t = torch.arange(3) if name == "short" else torch.ones(shape, dtype=getattr(torch, dtype))
    s.write_tensor(7, name, tensorizer.TensorType.STATE_DICT, t)
s.close()
""",
        str(theirs),
        [(n, str(t.dtype)[6:], tuple(t.shape)) for n, t in tensors.items()],
    )
    assert theirs.read_bytes() == path.read_bytes()


def test_modules_are_exchanged_with_the_old_package(old, tmp_path):
    torch.manual_seed(1)
    ours, theirs = tmp_path / "ours.tensors", tmp_path / "theirs.tensors"
    body = """
torch.manual_seed(1)
m = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
m.register_buffer("root", torch.arange(3))
s = tensorizer.TensorSerializer(args[0])
s.write_module(m)
s.close()
"""
    old(body, str(theirs))
    m = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    m.register_buffer("root", torch.arange(3))
    with TensorSerializer(ours, alignment=1) as serializer:
        serializer.write_module(m)
    assert ours.read_bytes() == theirs.read_bytes()
    with TensorSerializer(ours) as serializer:
        serializer.write_module(m)
    state = old(
        """
m = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
m.register_buffer("root", torch.zeros(3, dtype=torch.int64))
d = tensorizer.TensorDeserializer(args[0], device="cpu", verify_hash=True)
d.load_into_module(m)
return {k: v.tolist() for k, v in m.state_dict().items()}
""",
        str(ours),
    )
    assert state == {name: tensor.tolist() for name, tensor in m.state_dict().items()}


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.eye(3).to_sparse(), "tensor `t`: .*layout Sparse"),
        (torch.eye(3).to_sparse_csr(), "tensor `t`: .*layout SparseCsr"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "tensor `t`: .*quantized"),
        (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "'t' is a nested"),
    ],
)
def test_tensors_without_plain_bytes_are_refused_with_a_sentence(tensor, text, tmp_path):
    path = tmp_path / "no.tensors"
    with pytest.raises(RuntimeError, match=text), TensorSerializer(path) as s:
        s.write_state_dict({"t": tensor})
    assert list(tmp_path.iterdir()) == []


def test_names_of_more_than_65535_bytes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="at most 65535 bytes, found 65536"):
        tensorizer.save({"x" * 65536: torch.ones(1)}, tmp_path / "no.tensors")
    tensorizer.save({"é" * 32767 + "x": torch.ones(1)}, tmp_path / "yes.tensors")
    assert list(tmp_path.iterdir()) == [tmp_path / "yes.tensors"]


@pytest.mark.parametrize("encrypted", [False, True])
def test_files_with_one_hash_only(old, tmp_path, encrypted):
    path = tmp_path / "f.tensors"
    key = bytes(range(32))
    params = tensorizer.EncryptionParams(key) if encrypted else None
    tensors = {"large": torch.randn(300, 1000), "small": torch.arange(5), "empty": torch.empty(0)}
    with TensorSerializer(path, hashes="crc32", encryption=params) as serializer:
        serializer.write_state_dict(tensors)
        serializer.write_tensor(0, "strided", TensorType.BUFFER, torch.randn(50, 60).t())
    decryption = tensorizer.DecryptionParams.from_key(key) if encrypted else None
    for verify in (True, "crc32"):
        loaded = tensorizer.load(path, "cpu", verify_hash=verify, encryption=decryption)
        assert_same(loaded["large"], tensors["large"])
    if not encrypted:
        found = read_with_old(old, path)
        assert found["large"][5] == bits(tensors["large"])
        data = path.read_bytes()
        at = data.index(bits(tensors["large"])[:100])
        path.write_bytes(data[: at + 5] + bytes([data[at + 5] ^ 4]) + data[at + 6 :])
        with pytest.raises(HashMismatchError, match="CRC32"):
            tensorizer.load(path, "cpu", verify_hash=True)
    with pytest.raises(ValueError, match="hashes must be"):
        TensorSerializer(path, hashes="md5")
