"""The description of a file is read without its data."""

import copy
import io
import pickle
import zlib

import pytest
import tensorizer
import torch
from conftest import TENSORS
from scripted import FaultServer
from tensorizer import DecryptionParams, EncryptionParams

safetensors = pytest.importorskip("safetensors.torch")


def test_a_file_of_ours(tmp_path):
    path = tmp_path / "f.tensors"
    tensorizer.save({**TENSORS, "nested": {"a": [torch.zeros(3)]}}, path)
    info = tensorizer.info(path)
    assert (info.uri, info.format, info.version, info.encrypted) == (str(path), "tensors", 2, False)
    assert info.files == (str(path),)
    assert list(info.tensors) == [*TENSORS, ("nested", "a", 0)]
    assert info.metadata == {}
    weight = info.tensors["weight"]
    assert (weight.name, weight.dtype, weight.nbytes) == ("weight", "float32", 4800)
    assert weight.shape == torch.Size([40, 30])
    assert (weight.file, weight.hashes) == (str(path), None)
    assert info.nbytes == sum(t.nbytes for t in TENSORS.values()) + 12
    assert "weight" not in repr(info)
    hashes = tensorizer.info(path, hashes=True).tensors["weight"].hashes
    assert set(hashes) == {"CRC32", "SHA256"}
    assert len(hashes["SHA256"]) == 64
    assert 0 < int(hashes["CRC32"]) < 2**32


def test_crc32_covers_header_and_data(tmp_path):
    """The CRC-32 covers the header, with its hashes as zeros, and the data."""
    path = tmp_path / "f.tensors"
    tensorizer.save({"a": torch.arange(9)}, path, hashes="crc32")
    (entry,) = tensorizer.info(path, hashes=True).tensors.values()
    assert set(entry.hashes) == {"CRC32"}
    data = path.read_bytes()
    value = int(entry.hashes["CRC32"]).to_bytes(4, "little")
    at = data.index(value)
    start = data.rindex(b"a", 0, at) - 13
    (length,) = [int.from_bytes(data[start : start + 8], "little")]
    header = data[start : start + length].replace(value, bytes(4))
    covered = header + data[start + length : start + length + 72]
    assert zlib.crc32(covered) == int(entry.hashes["CRC32"])


def test_an_encrypted_file_needs_no_key(tmp_path):
    path = tmp_path / "f.tensors"
    tensorizer.save(TENSORS, path, encryption=EncryptionParams(bytes(32), manifest=True))
    info = tensorizer.info(path, hashes=True)
    assert info.encrypted
    assert list(info.tensors) == list(TENSORS)
    sealed = DecryptionParams.from_key(bytes(32), require_manifest=True)
    assert tensorizer.info(path, encryption=sealed).encrypted
    with pytest.raises(tensorizer.CryptographyError):
        tensorizer.info(path, encryption=DecryptionParams.from_key(bytes(31) + b"x"))


def test_a_safetensors_file(tmp_path):
    path = tmp_path / "f.safetensors"
    safetensors.save_file(TENSORS, path, metadata={"format": "pt", "licence": "none"})
    info = tensorizer.info(path, hashes=True)
    assert (info.format, info.version, info.encrypted) == ("safetensors", None, False)
    assert info.metadata == {"format": "pt", "licence": "none"}
    assert {n: (t.dtype, t.shape) for n, t in info.tensors.items()} == {
        n: (str(t.dtype).removeprefix("torch."), t.shape) for n, t in TENSORS.items()
    }
    assert all(t.hashes == {} for t in info.tensors.values())
    assert tensorizer.info(io.BytesIO(path.read_bytes())).metadata == info.metadata
    with pytest.raises(TypeError):
        info.metadata["format"] = "x"


def test_data_are_not_read(tmp_path):
    path = tmp_path / "f.safetensors"
    safetensors.save_file({f"{i}": torch.randn(1_000_000) for i in range(5)}, path)
    with FaultServer(path.read_bytes()) as server:
        assert len(tensorizer.info(server.url).tensors) == 5
    # The first request is for 1 MiB, with which most headers come.
    assert [(start, end) for start, end, _ in server.requests] == [(0, 1 << 20)]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_description_can_be_pickled(tmp_path, copied):
    tensorizer.save({"a": torch.ones(3)}, tmp_path / "f.tensors", metadata={"x": "y"})
    found = tensorizer.info(tmp_path / "f.tensors", hashes=True)
    again = copied(found)
    assert again == found
    with pytest.raises(TypeError):
        again.tensors["b"] = None
