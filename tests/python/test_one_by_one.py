"""Many calls of write_tensor: what they cost, and what the file is after each of them."""

import io

import pytest
import tensorizer
import torch
from conftest import assert_same
from processes import run_python
from tensorizer import TensorDeserializer, TensorSerializer, TensorType

#: Names of this length make an index of a megabyte out of some hundred tensors.
LONG = "x" * 2500
#: Bytes that may be moved for each byte of a file: what the index outgrows is moved a few times.
MOST = 5
#: Index and manifest are made anew each time that they have grown by an eighth.
MOST_SEALED = 16


class Counting(io.BytesIO):
    """A file that adds up what is written to it and read from it."""

    moved = 0
    kept = b""

    def write(self, data):
        self.moved += len(data)
        return super().write(data)

    def read(self, size=-1):
        data = super().read(size)
        self.moved += len(data)
        return data

    def readinto(self, buffer):
        count = super().readinto(buffer)
        self.moved += count
        return count

    def close(self):
        self.kept = self.getvalue()
        super().close()


def write(serializer, count):
    tensors = {f"{i}{LONG}": torch.full((4,), float(i)) for i in range(count)}
    for name, tensor in tensors.items():
        serializer.write_tensor(0, name, TensorType.PARAM, tensor)
    return tensors


@pytest.mark.parametrize("manifest", [False, True])
def test_an_object_is_moved_a_few_times(manifest):
    encryption = tensorizer.EncryptionParams.random(manifest=True) if manifest else None
    for count in (150, 300, 600):
        file = Counting()
        with TensorSerializer(file, encryption=encryption) as serializer:
            write(serializer, count)
        assert len(file.kept) > count * 5000
        most = MOST_SEALED if manifest else MOST
        assert file.moved < most * len(file.kept), (count, file.moved, len(file.kept))


CODE = """
import ctypes, os, sys, torch
from tensorizer import TensorSerializer, TensorType
target, path, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
serializer = TensorSerializer(path if target == "path" else open(path, "wb+"))
tensor = torch.ones(4)
total = ctypes.CDLL(None).bytes_asked_for
total.restype = ctypes.c_long
before = total()
for i in range(count):
    serializer.write_tensor(0, f"{i}{sys.argv[4]}", TensorType.PARAM, tensor)
serializer.close()
print((total() - before) / os.path.getsize(path))
"""


@pytest.mark.parametrize("target", ["path", "file"])
def test_bytes_are_written_a_bounded_number_of_times(target, with_faults, tmp_path):
    for count in (150, 300, 600):
        done = run_python(CODE, target, tmp_path / "f", count, LONG, env=with_faults())
        assert done.returncode == 0, done.stderr
        assert 1 < float(done.stdout) < MOST, count


@pytest.mark.parametrize("encrypted", [False, True])
def test_one_by_one_or_together_the_bytes_are_the_same(encrypted, tmp_path):
    """Until close the index of a path is written once, that of a file with each tensor."""
    tensors = {f"{i}{LONG}": torch.full((4,), float(i)) for i in range(120)}
    # From here on entries of the index have another form.
    tensors["long"] = torch.empty(2**32, 0)
    tensors |= {f"{i}": torch.full((4,), float(i)) for i in range(50)}
    encryption = tensorizer.EncryptionParams.random() if encrypted else None
    with (
        TensorSerializer(tmp_path / "a", encryption=encryption) as path,
        TensorSerializer((tmp_path / "b").open("wb+"), encryption=encryption) as file,
    ):
        for name, tensor in tensors.items():
            for serializer in (path, file):
                serializer.write_tensor(0, name, TensorType.PARAM, tensor)
    a, b = ((tmp_path / name).read_bytes() for name in "ab")
    assert len(a) == len(b)
    key = tensorizer.DecryptionParams.from_key(encryption.key) if encryption else None
    if not encrypted:
        assert a == b
    for file in "ab":
        with TensorDeserializer(tmp_path / file, encryption=key, verify_hash=True) as reader:
            assert list(reader.keys()) == list(tensors)
            for name, tensor in tensors.items():
                assert_same(reader[name], tensor)


@pytest.mark.parametrize("begin", [0, 1000])
def test_the_file_is_complete_after_each_tensor(begin, tmp_path):
    path = tmp_path / "f"
    with path.open("wb+") as file:
        file.write(bytes(begin))
        serializer = TensorSerializer(file)
        names = []
        for i in range(120):
            names.append(f"{i}{LONG}")
            serializer.write_tensor(0, names[-1], TensorType.PARAM, torch.full((4,), float(i)))
            # Around the places where the index outgrows its space, and now and then.
            if i < 3 or i % 10 == 7 or 95 < i < 110:
                with path.open("rb") as now:
                    now.seek(begin)
                    with TensorDeserializer(now, device="cpu") as reader:
                        assert list(reader.keys()) == names
                        assert reader[names[-1]][0] == i
        serializer.close()


def test_a_sealed_file_is_complete_and_lags_by_a_ninth_at_most(tmp_path):
    path = tmp_path / "f"
    encryption = tensorizer.EncryptionParams.random(manifest=True)
    key = tensorizer.DecryptionParams.from_key(encryption.key, require_manifest=True)
    names = [f"{i}" for i in range(200)]
    with path.open("wb+") as file, TensorSerializer(file, encryption=encryption) as serializer:
        for count, name in enumerate(names, 1):
            serializer.write_tensor(0, name, TensorType.PARAM, torch.full((4,), float(count)))
            with TensorDeserializer(path, encryption=key, device="cpu") as reader:
                found = list(reader.keys())
                assert found == names[: len(found)]
                assert len(found) * 9 >= count * 8
                assert reader[found[-1]][0] == len(found)
    with TensorDeserializer(path, encryption=key, device="cpu") as reader:
        assert list(reader.keys()) == names
