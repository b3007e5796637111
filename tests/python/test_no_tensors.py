"""A save of no tensors is refused: no release reads such a file, and the old file stays."""

import io

import pytest
import tensorizer
import torch
from conftest import files
from tensorizer.stream_io import open_stream
from tensorizer.torch_compat import tensorizer_loading, tensorizer_saving


def by_serializer(path):
    with tensorizer.TensorSerializer(path):
        pass


def by_module(path):
    with tensorizer.TensorSerializer(path) as serializer:
        serializer.write_module(torch.nn.ReLU())


def by_stream(path):
    with tensorizer.TensorSerializer(open_stream(path, "wb+")) as serializer:
        serializer.write_state_dict({})


SAVES = {
    "save": lambda path: tensorizer.save({}, path),
    "nested": lambda path: tensorizer.save({"a": {}}, path),
    "async": lambda path: tensorizer.save_async({}, path).result(),
    "operator": lambda path: torch.ops.tensorizer.save(str(path), {}),
    "list": lambda path: torch.ops.tensorizer.save(str(path), [], []),
    "encrypted": lambda path: tensorizer.save(
        {}, path, encryption=tensorizer.EncryptionParams.random()
    ),
    "serializer": by_serializer,
    "module": by_module,
    "stream": by_stream,
}


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
@pytest.mark.parametrize("exists", [False, True], ids=["new", "over a file"])
def test_saving_no_tensors_is_refused_and_the_old_file_stays(save, exists, tmp_path):
    path = tmp_path / "f.tensors"
    if exists:
        tensorizer.save({"old": torch.ones(2)}, path)
    before = files(tmp_path)
    with pytest.raises((ValueError, RuntimeError), match=r"no tensors for `.*f\.tensors`"):
        save(path)
    assert files(tmp_path) == before


def test_an_object_on_s3_stays(s3):
    uri = "s3://bucket/no-tensors"
    tensorizer.save({"old": torch.ones(2)}, uri)
    with pytest.raises(ValueError, match="no tensors for"):
        tensorizer.save({}, uri)
    assert tensorizer.load(uri, "cpu")["old"].tolist() == [1, 1]


def test_a_file_object(tmp_path):
    with pytest.raises(ValueError, match="no tensors for"):
        by_serializer(io.BytesIO())


def test_closing_again_does_nothing(tmp_path):
    serializer = tensorizer.TensorSerializer(tmp_path / "f")
    with pytest.raises(ValueError, match="no tensors for"):
        serializer.close()
    serializer.close()
    assert files(tmp_path) == {}


def test_safetensors_have_such_files(tmp_path):
    tensorizer.save({}, tmp_path / "f.safetensors")
    assert tensorizer.load(tmp_path / "f.safetensors") == {}


def test_an_object_without_tensors_is_torchs_own_file(tmp_path):
    with tensorizer_saving():
        torch.save({"step": 3}, tmp_path / "f.pt")
    with tensorizer_loading():
        assert torch.load(tmp_path / "f.pt") == {"step": 3}
