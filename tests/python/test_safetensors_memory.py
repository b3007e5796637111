"""Tensors of ``tensorizer.safetensors`` are in a mapping of the file, or in memory of their own."""

import struct
from pathlib import Path

import torch
from safetensors_library import FILES, assert_like, theirs
from tensorizer import safetensors as ours

# Memory


def test_files_are_mapped_and_stay_as_they_are(tmp_path):
    path = tmp_path / "f.safetensors"
    tensors = FILES["mapped"]
    theirs.save_file(tensors, path)
    before = path.read_bytes()

    def mapped():
        return str(path) in Path("/proc/self/maps").read_text()

    with ours.safe_open(path, "pt") as file:
        assert not mapped()
        large = file.get_tensor("large")
        assert mapped()
        assert Path("/proc/self/maps").read_text().count(str(path)) == 1
        large.fill_(7)
        # As in the library, the change is seen through the same open file, and nowhere else.
        assert file.get_tensor("large").unique().tolist() == [7]
        assert file.get_slice("large")[3, :2].tolist() == [7, 7]
    assert torch.equal(ours.load_file(path)["large"], tensors["large"])
    loaded = ours.load_file(path)
    for tensor in loaded.values():
        tensor.reshape(-1).view(torch.uint8).zero_()
    assert path.read_bytes() == before
    path.unlink()
    assert large.unique().tolist() == [7]
    del file, large, loaded, tensor
    assert not mapped()
    theirs.save_file(tensors, path)
    loaded = ours.load_file(path, backend="pread")
    assert not mapped()
    assert torch.equal(loaded["large"], tensors["large"])


def test_a_file_whose_tensors_are_not_aligned(tmp_path):
    large = torch.randn(600, 1000)
    data = bytearray(theirs.save({"a": large, "b": torch.arange(5)}))
    length = struct.unpack("<Q", data[:8])[0]
    path = tmp_path / "f"
    path.write_bytes(
        struct.pack("<Q", length + 1) + data[8 : 8 + length] + b" " + data[8 + length :]
    )
    assert_like(ours.load_file(path), theirs.load_file(path))
    file = ours.safe_open(path, "pt")
    assert torch.equal(file.get_slice("a")[5:7], large[5:7])
    assert torch.equal(file.get_tensor("a"), large)
