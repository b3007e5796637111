"""A string is a path or an address of a known scheme; addresses of other schemes are refused."""

import os

import pytest
import tensorizer
import torch
from conftest import COMMAND, run_python
from tensorizer import TensorDeserializer, TensorSerializer
from tensorizer.stream_io import open_stream

ops = torch.ops.tensorizer

UNKNOWN = ["gcs://bucket/f", "word://f", "file://host/f"]


@pytest.mark.parametrize("address", UNKNOWN)
def test_addresses_that_are_not_known(address, tmp_path, monkeypatch):
    """They are not taken for paths of folders."""
    monkeypatch.chdir(tmp_path)
    tensors = {"a": torch.ones(1)}
    for call in (
        lambda: tensorizer.save(tensors, address),
        lambda: tensorizer.load(address),
        lambda: open_stream(address, "wb"),
        lambda: open_stream(address),
        lambda: TensorDeserializer(address),
        lambda: TensorSerializer(address),
    ):
        with pytest.raises(ValueError, match="file://") as raised:
            call()
        assert address in str(raised.value)
    for operator in (lambda: ops.save(address, tensors), lambda: ops.load(address)):
        with pytest.raises(RuntimeError, match="file://"):
            operator()
    tensorizer.save(tensors, "f")
    done = run_python(COMMAND, "cp", "f", address)
    assert done.returncode != 0
    assert "file://" in done.stderr
    assert os.listdir(tmp_path) == ["f"]


def test_file_addresses(tmp_path):
    path = tmp_path / "with space/f"
    address = path.as_uri()
    assert "%20" in address
    tensorizer.save({"a": torch.arange(3)}, address)
    assert tensorizer.load(path)["a"].tolist() == [0, 1, 2]
    assert tensorizer.load(address)["a"].tolist() == [0, 1, 2]
    assert ops.load(address)["a"].tolist() == [0, 1, 2]
    ops.save(address, {"a": torch.arange(4)})
    assert TensorDeserializer(address, "cpu")["a"].tolist() == [0, 1, 2, 3]
    with TensorSerializer(address) as serializer:
        serializer.write_state_dict({"a": torch.arange(5)})
    with open_stream(address) as stream:
        assert len(TensorDeserializer(stream, "cpu")["a"]) == 5
    assert os.listdir(path.parent) == ["f"]
