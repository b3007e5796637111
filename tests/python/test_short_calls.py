"""Arguments and errors of :func:`tensorizer.load`, ``save`` and ``save_async``."""

import asyncio
import io
import pickle
import re

import pytest
import tensorizer
import torch
from tensorizer import TensorDeserializer
from tensorizer.stream_io import open_stream

TENSORS = {"a": torch.arange(4), "b": torch.ones(2, 3), "c": torch.zeros(5)}


@pytest.fixture
def path(tmp_path):
    tensorizer.save(TENSORS, tmp_path / "f.tensors")
    return tmp_path / "f.tensors"


def test_a_filter(path):
    assert list(tensorizer.load(path, filter_func=lambda name: name != "b")) == ["a", "c"]
    some = tensorizer.load(path, names=["c", "b"], filter_func=lambda name: name != "b")
    assert list(some) == ["c"]
    assert torch.equal(some["c"], TENSORS["c"])


@pytest.mark.parametrize(
    "name", ["nothing", "\x1e5", "\x1enull", "\x1e[1.5]", "\x1e[]", "\x1e{", "\x1e" + "[" * 99_999]
)
def test_names_that_are_not_there(path, name):
    with pytest.raises(KeyError, match="not found"):
        tensorizer.load(path, names=[name])


def test_which_hashes_are_saved(path, tmp_path):
    tensorizer.save(TENSORS, tmp_path / "crc", hashes="crc32")
    assert (tmp_path / "crc").stat().st_size < path.stat().st_size
    tensorizer.load(tmp_path / "crc", verify_hash=True)
    with pytest.raises(ValueError, match="hashes must be 'all' or 'crc32', not .md5"):
        tensorizer.save(TENSORS, tmp_path / "crc", hashes="md5")


@pytest.mark.parametrize(
    ("option", "least", "call"),
    [
        ("alignment", 1, lambda path, **given: tensorizer.save(TENSORS, path, **given)),
        ("limit_cpu_concurrency", 1, tensorizer.TensorSerializer),
        ("memory_limit", 1, lambda path, **given: tensorizer.save(TENSORS, path, **given)),
        ("max_shard_size", 1, lambda path, **given: tensorizer.save(
            TENSORS, path.with_suffix(".safetensors"), **given)),
        ("num_readers", 1, tensorizer.load),
        ("memory_limit", 1, tensorizer.iterate),
        ("buffer_bytes", 1, tensorizer.iterate),
        ("begin", 0, open_stream),
        ("end", 0, open_stream),
        ("since", 0, lambda _, **given: tensorizer.stats(**given)),
        ("limit", 0, lambda _, **given: tensorizer.set_pinned_limit(**given)),
    ],
)  # fmt: skip
def test_numbers_out_of_range_are_refused_by_the_name_of_the_option(option, least, call, path):
    for value in (least - 1, 1 << 63, 1 << 70):
        with pytest.raises(ValueError, match=f"{option} must be .*, not {value}"):
            call(path, **{option: value})
    for value in (True, 1.5, [1]):
        with pytest.raises(
            TypeError, match=f"{option} must be an int.*, not {re.escape(repr(value))}"
        ):
            call(path, **{option: value})


def test_a_save_is_awaited(tmp_path):
    async def save(target):
        future = tensorizer.save_async(TENSORS, target)
        assert await future is None
        return future.done()

    assert asyncio.run(save(tmp_path / "f"))
    assert tensorizer.load(tmp_path / "f").keys() == TENSORS.keys()

    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        asyncio.run(save(tmp_path / "folder"))


@pytest.mark.parametrize("call", [tensorizer.load, TensorDeserializer])
def test_a_file_in_memory_is_no_path(path, call):
    data = path.read_bytes()
    with pytest.raises(ValueError, match=rf"found {len(data)} bytes .*BytesIO") as raised:
        call(data)
    assert len(str(raised.value)) < 200
    with pytest.raises(TypeError, match="found bytearray: pass io.BytesIO"):
        call(bytearray(data))
    with pytest.raises(ValueError, match="found 5000 characters") as raised:
        call("x" * 5000)
    assert len(str(raised.value)) < 200
    assert len(call(io.BytesIO(data), "cpu")) == 3
    assert len(call(str(path).encode(), "cpu")) == 3


def test_the_text_of_a_deserializer(path):
    with TensorDeserializer(path, "cpu", lazy_load=True) as file:
        text = repr(file)
        assert text == f"<TensorDeserializer of {str(path)!r}: 3 tensors, 76.0 bytes, for cpu>"
    assert repr(file) == text
    with TensorDeserializer(path, "cpu", lambda name: name == "a") as file:
        assert "1 tensor, 32.0 bytes" in repr(file)


def test_public_names_say_where_they_are():
    errors = [
        "ClosedError",
        "CryptographyError",
        "DeviceError",
        "DeviceMemoryError",
        "FormatError",
        "HashMismatchError",
        "InvalidVersionError",
        "PairMismatchError",
        "TruncatedError",
    ]
    for name in [*errors, "TensorDeserializer", "TensorSerializer", "EncryptionParams", "load"]:
        value = getattr(tensorizer, name)
        assert name in tensorizer.__all__
        assert value.__module__ == "tensorizer"
        assert pickle.loads(pickle.dumps(value)) is value
