"""``TensorDeserializer``: sources, options, access in any order, closing rules."""

import io
import itertools
import os
import warnings

import numpy as np
import pytest
import tensorizer
import torch
from conftest import assert_same
from reading import NAMES, TENSORS, check
from tensorizer import (
    DecryptionParams,
    EncryptionParams,
    HashMismatchError,
    TensorDeserializer,
    TensorSerializer,
    TensorType,
)
from tensorizer.serialization import (
    FormatError,
)
from tensorizer.tensors.handles import cast_dtype

pytestmark = pytest.mark.device


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "f.tensors"
    tensorizer.save(TENSORS, path)
    return path


def test_lazy_access_in_any_order(path):
    with TensorDeserializer(path, "cpu", lazy_load=True) as file:
        assert "b.weight" in file
        assert file.total_bytes_read == 0
        for name in reversed(NAMES):
            assert_same(file[name].detach(), TENSORS[name])
        assert file["a"] is file["a"]
    assert_same(file["a"].detach(), TENSORS["a"])


def test_membership_of_a_leading_dot_name_loads_nothing(tmp_path):
    model = torch.nn.Linear(2, 2)
    model.vllm_tensorized_marker = torch.nn.Parameter(
        torch.tensor((1,), device="meta"), requires_grad=False
    )
    path = tmp_path / "m.tensors"
    serializer = TensorSerializer(path)
    serializer.write_module(model)
    serializer.close()
    lazy = TensorDeserializer(path, lazy_load=True)
    assert ".vllm_tensorized_marker" in lazy
    assert lazy.total_bytes_read == 0
    with TensorDeserializer(path, device="cpu") as file:
        file.load_into_module(model)
    file.close()
    assert file.total_tensor_bytes == 24
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    del model.vllm_tensorized_marker
    lazy.close()


def test_mapping(path):
    file = TensorDeserializer(path, "cpu")
    assert len(file) == len(TENSORS)
    assert isinstance(file.keys(), type({}.keys()))
    assert list(file.keys()) == NAMES == list(dict(file.items()))
    assert all(isinstance(tensor, torch.nn.Parameter) for tensor in file.values())
    assert file["a"].requires_grad
    assert file["f"].requires_grad
    assert not file["c"].requires_grad
    assert file.get("missing") is None
    with pytest.raises(KeyError, match=r"Tensor 'missing' not found"):
        file["missing"]
    with pytest.raises(KeyError):
        file[("a",)]
    assert file.total_tensor_bytes == sum(tensor.nbytes for tensor in TENSORS.values())
    assert file.total_file_bytes == file.total_tensor_bytes == file.total_bytes_read
    assert (file.read_bytes, file.total_compressed_tensor_bytes, file.cache_status) == (0, 0, None)


@pytest.mark.parametrize("lazy", [True, False])
def test_names(path, lazy):
    with TensorDeserializer(path, "cpu", names=["c", "a"], lazy_load=lazy) as file:
        assert list(file) == ["a", "c"]
        assert torch.equal(file["a"], TENSORS["a"])
        assert file.total_tensor_bytes == TENSORS["a"].nbytes + TENSORS["c"].nbytes
    both = TensorDeserializer(path, "cpu", lambda name: name != "a", names=("c", "a"))
    assert list(both) == ["c"]
    assert list(TensorDeserializer(path, "cpu", names="a")) == ["a"]
    with pytest.raises(KeyError, match="nothing"):
        TensorDeserializer(path, "cpu", names=["a", "nothing"], lazy_load=lazy)


def test_filter(tmp_path, path):
    seen = []

    def wanted(name):
        seen.append(name)
        return 1 if name in ("c", "a") else 0

    with TensorDeserializer(path, "cpu", wanted) as file:
        assert list(file) == ["a", "c"]
        assert file.total_tensor_bytes == TENSORS["a"].nbytes + TENSORS["c"].nbytes
    assert seen == NAMES
    assert len(TensorDeserializer(path, "cpu", lambda name: False)) == 0
    with pytest.raises(ZeroDivisionError):
        TensorDeserializer(path, "cpu", lambda name: 1 / 0)
    nested = tmp_path / "nested.tensors"
    tensorizer.save({"x": [torch.ones(1)], "y": torch.ones(1)}, nested)
    paths = []
    TensorDeserializer(nested, "cpu", paths.append)
    assert paths == [("x", 0), "y"]


@pytest.mark.parametrize("lazy", [False, True])
def test_dtype_casts_floating_point_only(lazy, path):
    with TensorDeserializer(path, "cpu", dtype=torch.float16, lazy_load=lazy) as file:
        for name, tensor in TENSORS.items():
            expected = tensor.to(torch.float16) if tensor.is_floating_point() else tensor
            assert_same(file[name].detach(), expected)
    with TensorDeserializer(path, "cpu", dtype=torch.complex128) as file:
        assert file["f"].dtype == file["a"].dtype == torch.complex128
        assert file["c"].dtype == torch.int64
    with TensorDeserializer(path, "cpu", dtype="float16", lazy_load=lazy) as file:
        assert file["a"].dtype == torch.float16 and file["c"].dtype == torch.int64
    assert tensorizer.load(path, "cpu", dtype="bfloat16")["a"].dtype == torch.bfloat16
    for wrong in ("Tensor", "float15", 16):
        with pytest.raises(TypeError, match=f"the name of one, not {wrong!r}"):
            TensorDeserializer(path, "cpu", dtype=wrong)


def test_devices(path, monkeypatch):
    with TensorDeserializer(path, device="meta") as file:
        assert all(tensor.is_meta for tensor in file.values())
        assert file["b.weight"].shape == (600, 500)
    if not torch.cuda.is_available():
        assert TensorDeserializer(path)["a"].device.type == "cpu"
        with pytest.raises(RuntimeError, match="CUDA is not available"):
            TensorDeserializer(path, device="cuda")


@pytest.mark.parametrize("readers", [1, 2, 7, 100])
def test_num_readers(readers, path):
    check(TensorDeserializer(path, "cpu", num_readers=readers))


def test_bad_arguments(path, tmp_path):
    for value, error in ((0, ValueError), (-1, ValueError), ("2", TypeError), (True, TypeError)):
        with pytest.raises(error, match="num_readers"):
            TensorDeserializer(path, num_readers=value)
    with pytest.raises(ValueError, match="num_readers=2"):
        TensorDeserializer(io.BytesIO(path.read_bytes()), num_readers=2)
    with pytest.raises(ValueError, match="text file"):
        TensorDeserializer(io.StringIO("x"))
    with pytest.raises(ValueError, match="text file"), path.open("r", errors="ignore") as file:
        TensorDeserializer(file)
    with pytest.raises(ValueError, match="readable"), (tmp_path / "w").open("wb") as file:
        TensorDeserializer(file)
    for nothing in (None, 1.5, object(), True):
        with pytest.raises(TypeError, match="expected a path"):
            TensorDeserializer(nothing)
    for uri in ("redis:///prefix", "REDISS:///prefix", "s3://", "http://"):
        with pytest.raises(ValueError, match=r"no host|expected s3://|empty host"):
            TensorDeserializer(uri)


def test_read_tensors(path):
    with TensorDeserializer(path, "cpu", lazy_load=True) as file:
        first = list(file.read_tensors(num_tensors=2))
        assert [name for _, _, name, _ in first] == NAMES[:2]
        assert all(kind is TensorType.STATE_DICT and index == 0 for index, kind, _, _ in first)
        assert list(file.read_tensors(num_tensors=0)) == []
        rest = file.read_tensors(filter_func=lambda name: name != "d")
        assert [name for _, _, name, _ in rest] == ["c", "e", "f"]
        assert list(file.read_tensors()) == []
        with pytest.raises(ValueError, match="num_tensors"):
            next(file.read_tensors(num_tensors=-2))
    eager = TensorDeserializer(path, "cpu")
    assert [name for _, _, name, _ in eager.read_tensors()] == NAMES


@pytest.mark.parametrize("lazy", [False, True])
def test_read_numpy_arrays(lazy, path):
    with TensorDeserializer(path, "cpu", lazy_load=lazy) as file:
        with pytest.raises(ValueError, match=r"'d' has the dtype torch.bfloat16"):
            list(file.read_numpy_arrays())
    with TensorDeserializer(path, "cpu", lazy_load=lazy) as file:
        arrays = {row[2]: row for row in file.read_numpy_arrays(allow_raw_data=True)}
    assert list(arrays) == NAMES
    for name, tensor in TENSORS.items():
        _, _, _, array, opaque, dtype = arrays[name]
        assert isinstance(array, np.ndarray)
        assert array.shape == tuple(tensor.shape)
        if name == "d":
            assert (opaque, dtype, array.dtype) == (True, "torch.bfloat16", np.int16)
            assert torch.equal(torch.from_numpy(array).view(torch.bfloat16), tensor)
        else:
            assert (opaque, dtype) == (False, None)
            assert np.array_equal(array, tensor.numpy())
    with TensorDeserializer(path, "meta", lazy_load=True) as file:
        with pytest.raises(RuntimeError, match="numpy arrays are on the CPU"):
            next(file.read_numpy_arrays())


def test_tree(tmp_path):
    path = tmp_path / "tree.tensors"
    t = [torch.full((1,), float(i)) for i in range(4)]
    tensorizer.save({"m": {"w": [t[0], t[1], t[2]]}, "x": t[3]}, path)
    with TensorDeserializer(path, "cpu", lazy_load=True) as file:
        assert list(file) == ["m", "x"]
        assert file["m"]["w"][2].item() == 2
        with pytest.raises(TypeError):
            file["m"]["w"] = 1
        tree = file.tree()
        assert [w.item() for w in tree["m"]["w"]] == [0, 1, 2]
        kept = file.tree(["m", "w"], filter_func=lambda name: name[-1] != 1)
        assert [w.item() for w in kept] == [0, 2]
        assert file.tree(["x"]).item() == 3
        assert file.tree(["x", "deeper"], default="none") == "none"
        assert file.tree(["nothing"]) is None
        for bad in ("m", 1):
            with pytest.raises(TypeError, match="prefix"):
                file.tree(bad)


def test_closing_rules(path):
    stream = path.open("rb")
    eager = TensorDeserializer(stream, "cpu")
    assert stream.closed, "an eager load closes the file"
    eager.close()
    check(eager)
    stream = path.open("rb")
    lazy = TensorDeserializer(stream, "cpu", lazy_load=True)
    assert not stream.closed
    assert_same(lazy["a"].detach(), TENSORS["a"])
    lazy.close()
    lazy.close()
    assert stream.closed
    assert_same(lazy["a"].detach(), TENSORS["a"])
    for error in (RuntimeError, ValueError):
        with pytest.raises(error, match="closed file"):
            lazy["b.weight"]
    for bad in (b"", b"junk" * 100):
        stream = io.BytesIO(bad)
        with pytest.raises(FormatError):
            TensorDeserializer(stream)
        assert stream.closed, "a failed constructor closes the file"


class Counted(TensorDeserializer):
    """Has a ``close`` that needs what its constructor sets at the end."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.closed = 0

    def close(self):
        self.closed += 1
        super().close()


class CountedSerializer(tensorizer.TensorSerializer):
    """The same for writing."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.closed = 0

    def close(self):
        self.closed += 1
        super().close()


@pytest.mark.parametrize("lazy", [False, True])
def test_a_subclass_may_close_in_its_own_way(lazy, path, tmp_path):
    file = Counted(path, "cpu", lazy_load=lazy)
    assert file.closed == 0
    check(file)
    with file:
        pass
    assert file.closed == 1
    with pytest.raises(FormatError, match="no format that tensorizer reads"):
        Counted(__file__, "cpu", lazy_load=lazy)
    with CountedSerializer(tmp_path / "g") as writer:
        writer.write_state_dict({"a": torch.ones(2)})
    assert writer.closed == 1
    with pytest.raises(IsADirectoryError):
        CountedSerializer(tmp_path)


def test_descriptors_are_released(path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        TensorDeserializer(path, "cpu")
        TensorDeserializer(path, "cpu", lazy_load=True, mmap=True)["a"]
    assert len(os.listdir("/proc/self/fd")) <= before


# The short way


def test_load(path, tmp_path):
    loaded = tensorizer.load(path)
    assert list(loaded) == NAMES
    for name, tensor in TENSORS.items():
        assert type(loaded[name]) is torch.Tensor
        assert not loaded[name].requires_grad
        assert_same(loaded[name], tensor)
    some = tensorizer.load(str(path), names=["f", "a"], dtype=torch.bfloat16, verify_hash=True)
    assert list(some) == ["f", "a"]
    assert some["a"].dtype == torch.bfloat16
    with pytest.raises(KeyError, match="nothing"):
        tensorizer.load(path, names=["a", "nothing"])
    with torch.device("meta"):
        assert tensorizer.load(path, names=["a"])["a"].is_meta
    nested = tmp_path / "nested"
    tensorizer.save({"x": [torch.ones(1)], "flat": torch.zeros(2)}, nested)
    assert list(tensorizer.load(nested)) == [("x", 0), "flat"]
    for name in (("x", 0), '\x1e["x",0]'):
        assert list(tensorizer.load(nested, names=[name], mmap=True)) == [name]
    # The result can be saved, which gives the same file again.
    again = tmp_path / "again"
    tensorizer.save(tensorizer.load(nested), again)
    assert again.read_bytes() == nested.read_bytes()
    assert TensorDeserializer(again, "cpu").tree().keys() == {"x", "flat"}
    for path_of in ((), ("x", None), ("x", True)):
        with pytest.raises((TypeError, ValueError)):
            tensorizer.save({path_of: torch.ones(1)}, again)


def test_ignored_options_of_the_old_package(path):
    check(TensorDeserializer(path, "cpu", plaid_mode=True, plaid_mode_buffers=4, verify_hash=None))
    check(TensorDeserializer(path, torch.device("cpu"), None, None))


#: The methods that override the verification of the constructor.
VERIFIED = {
    "load_into_module": lambda file, verify: file.load_into_module(Both(), verify_hash=verify),
    "read_tensors": lambda file, verify: list(file.read_tensors(verify_hash=verify)),
    "read_numpy_arrays": lambda file, verify: list(file.read_numpy_arrays(verify_hash=verify)),
}


class Both(torch.nn.Module):
    """Two parameters, of which a file may be damaged in the second."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(4))
        self.second = torch.nn.Parameter(torch.zeros(300))


@pytest.mark.parametrize("verify", [True, "crc32"])
@pytest.mark.parametrize("method", VERIFIED)
def test_tensors_that_are_loaded_already_are_verified(tmp_path, method, verify):
    call = VERIFIED[method]
    tensorizer.save({"first": torch.ones(4), "second": torch.full((300,), 2.5)}, tmp_path / "sound")
    key = EncryptionParams.random()
    state = {"first": torch.ones(4), "second": torch.full((300,), 2.5)}
    tensorizer.save(state, tmp_path / "encrypted", encryption=key)
    data = bytearray((tmp_path / "sound").read_bytes())
    data[data.index(torch.full((300,), 2.5).numpy().tobytes()) + 1000] ^= 16
    (tmp_path / "damaged").write_bytes(data)

    def accessed(path):
        file = TensorDeserializer(path, "cpu", lazy_load=True)
        assert file["second"].shape == (300,)
        return file

    for opened in (
        lambda path: TensorDeserializer(path, "cpu"),
        lambda path: TensorDeserializer(path, "cpu", mmap=True),
        lambda path: TensorDeserializer(io.BytesIO(path.read_bytes()), "cpu"),
        accessed,
    ):
        call(opened(tmp_path / "sound"), verify)
        call(opened(tmp_path / "damaged"), False)
        with pytest.raises(HashMismatchError, match="loaded bytes of tensor 'second' do not have"):
            call(opened(tmp_path / "damaged"), verify)
    decryption = DecryptionParams.from_key(key.key)
    call(TensorDeserializer(tmp_path / "encrypted", "cpu", encryption=decryption), verify)
    # Hashes that were compared are not compared again, whatever a caller has done to the tensor.
    file = TensorDeserializer(tmp_path / "sound", "cpu", verify_hash=True)
    file["second"].detach().zero_()
    call(file, verify)


@pytest.mark.parametrize("method", ["load_into_module", "read_tensors"])
def test_tensors_that_were_cast_cannot_be_verified(path, tmp_path, method):
    tensorizer.save(Both().state_dict(), tmp_path / "f")
    for options in ({}, {"lazy_load": True}):
        file = TensorDeserializer(tmp_path / "f", "cpu", dtype=torch.float64, **options)
        assert file["first"].dtype == torch.float64
        text = "'first' was loaded without verification, and cast from torch.float32: pass verify_"
        with pytest.raises(ValueError, match=text), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            VERIFIED[method](file, True)


SCALED = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2]
PACKED = [torch.uint4, torch.int4, torch.int8, torch.uint8, torch.int32]


def test_the_dtypes_that_casts_leave_alone():
    wanted = (torch.float16, torch.float64, torch.complex64, torch.float8_e5m2)
    for dtype, target in itertools.product(SCALED + PACKED, wanted):
        assert cast_dtype(dtype, target) is dtype
    for target in wanted:
        assert cast_dtype(torch.bfloat16, target) is target
    assert cast_dtype(torch.complex64, torch.float32) is torch.complex64
    assert cast_dtype(torch.complex64, torch.complex128) is torch.complex128


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.int64, "int4"])
def test_casts_to_integers_are_refused(path, dtype):
    text = "expected a floating-point or complex dtype; a cast to another would lose the values"
    for call in (tensorizer.load, tensorizer.iterate, TensorDeserializer):
        with pytest.raises(ValueError, match=text):
            call(path, "cpu", dtype=dtype)


@pytest.mark.parametrize("ending", ["tensors", "safetensors", "pt"])
def test_numbers_with_scales_are_not_cast(tmp_path, ending):
    path = tmp_path / f"f.{ending}"
    state = {f"t{n}": torch.arange(8, dtype=torch.uint8).view(d) for n, d in enumerate(SCALED[:3])}
    state |= {"packed": torch.tensor([7, -1], dtype=torch.int32), "plain": torch.ones(2)}
    if ending == "pt":
        torch.save(state, path)
    else:
        tensorizer.save(state, path)
    half = torch.bfloat16

    def as_read(**options):
        with TensorDeserializer(path, "cpu", dtype=half, **options) as file:
            return dict(file)

    for loaded in (
        tensorizer.load(path, "cpu", dtype=half),
        tensorizer.load(path, "cpu", dtype=half, slices={"t0": (0, 0, 8)}),
        dict(tensorizer.iterate(path, "cpu", dtype=half)),
        as_read(),
        as_read(lazy_load=True),
        as_read(mmap=True),
    ):
        assert loaded.keys() == state.keys()
        for name, tensor in state.items():
            assert_same(loaded[name].detach(), tensor.to(half) if name == "plain" else tensor)
