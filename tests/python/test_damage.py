"""Files that are damaged, cut off, of another version or format: what is said of them."""

import io
import json
import random

import pytest
import tensorizer
import torch
from conftest import assert_same
from tensorizer import TensorDeserializer
from tensorizer.serialization import (
    FormatError,
    HashMismatchError,
    InvalidVersionError,
    TruncatedError,
)
from tensorizer_cli.main import main

pytestmark = pytest.mark.device

TENSORS = {
    "a": torch.arange(10.0),
    "b.weight": torch.randn(600, 500),
    "c": torch.arange(7, dtype=torch.int64),
    "d": torch.ones(3, dtype=torch.bfloat16),
    "e": torch.tensor([True, False]),
    "f": torch.randn(2, dtype=torch.complex64),
}
NAMES = list(TENSORS)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "f.tensors"
    tensorizer.save(TENSORS, path)
    return path


def test_errors_name_the_file(tmp_path, path):
    missing = tmp_path / "missing"
    with pytest.raises(FileNotFoundError) as info:
        TensorDeserializer(missing)
    assert info.value.filename == str(missing)
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match=str(tmp_path / "folder")):
        TensorDeserializer(tmp_path / "folder")
    with pytest.raises(OSError, match="Bad file descriptor"):
        TensorDeserializer(987654)
    text = tmp_path / "text"
    text.write_text("this is not a file of ours")
    with pytest.raises(FormatError, match="no format that tensorizer reads") as info:
        TensorDeserializer(text)
    assert str(text) in str(info.value)
    data = bytearray(path.read_bytes())
    data[5] = 9
    text.write_bytes(data)
    with pytest.raises(InvalidVersionError, match="Unsupported version") as info:
        TensorDeserializer(text)
    assert info.value.version == 9
    assert isinstance(info.value, tensorizer.serialization._FileHeader.InvalidVersionError)


def test_every_truncation_is_an_error(path, capsys):
    """At every boundary and in between; never data, never another error."""
    data = path.read_bytes()
    assert main(["ls", "--json", str(path)]) == 0
    rows = json.loads(capsys.readouterr().out)["tensors"]
    ends = {end for row in rows for end in (row["offset"], row["offset"] + row["bytes"])}
    ends.remove(max(ends))  # Only what ends the file is behind the last.
    near = {end + by for end in ends for by in (-1, 0, 1)}
    between = random.Random(0).sample(range(262_144 + 60, len(data) - 8), 100)
    cuts = {*range(0, 100), *near, *between, len(data) - 9}
    for cut in sorted(cuts):
        for source in (io.BytesIO(data[:cut]), _file_with(path, data[:cut])):
            with pytest.raises(FormatError) as info:
                TensorDeserializer(source, "cpu")
            if cut >= 73:
                assert isinstance(info.value, TruncatedError)
                assert isinstance(info.value, OSError)


def _file_with(path, data):
    cut = path.with_name("cut")
    cut.write_bytes(data)
    return cut


def test_flipped_bits_are_found(path):
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    with pytest.raises(HashMismatchError, match=r"Tensor 'f' failed CRC32 verification. Expected"):
        TensorDeserializer(path, "cpu", verify_hash=True)
    with TensorDeserializer(path, "cpu", lazy_load=True, verify_hash=True) as file:
        assert_same(file["a"].detach(), TENSORS["a"])
        with pytest.raises(HashMismatchError):
            file["f"]
    with TensorDeserializer(path, "cpu", lazy_load=True) as file:
        with pytest.raises(HashMismatchError):
            list(file.read_tensors(verify_hash=True))
    assert len(TensorDeserializer(path, "cpu")) == len(TENSORS)


@pytest.mark.parametrize(
    ("begin", "said"),
    [
        (b"", "an empty file"),
        (b"PK\x05\x06", "a zip archive that holds nothing"),
        (b"\x80\x02}", "a pickle that torch.save did not write: the program that wrote it"),
        (b"\x1f\x8b\x08", "a gzip file"),
        (b"GGUF\x03", "a GGUF file"),
        (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
        (b"\x93NUMPY\x01\x00", "an array of numpy"),
        (b"\x08\x07\x12\x07pytorch", "an ONNX model"),
        (b"version https://git-lfs.github.com/spec/v1\n", "`git lfs pull` fetches it"),
        (b"\n<!DOCTYPE html><html>", "an HTML page"),
        (b"\xef\xbb\xbf<!-- x -->", "an HTML page"),
        (b"<?xml version='1.0'?>", "this is XML"),
        (b"ab\x00\xff-and more", r'begins with "ab\\x00\\xff-and "'),
    ],
)
def test_other_files_are_recognised(tmp_path, begin, said):
    (tmp_path / "f").write_bytes(begin)
    with pytest.raises(FormatError, match=rf"no format that tensorizer reads .*: .*{said}"):
        tensorizer.load(tmp_path / "f")
