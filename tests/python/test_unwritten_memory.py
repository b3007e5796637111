"""Memory that has other bytes before a load: each byte of a tensor is one of its file."""

import json

import pytest
import tensorizer
import torch
from processes import run_python

#: Loads a file in some way, from memory that the C library fills with 0x5a before it hands it out;
#: prints the bytes of each tensor.
LOADED = """
import ctypes, io, json, sys, tensorizer, torch

M_PERTURB = -6
assert ctypes.CDLL(None).mallopt(M_PERTURB, 0xFF - 0x5A)

class Short(io.BytesIO):
    # Returns at most 7 bytes at a time, and nothing at first.
    calls = 0
    def readinto(self, buffer):
        self.calls += 1
        return super().readinto(memoryview(buffer)[: 7])
    def read(self, size=-1):
        return super().read(min(size, 7) if size >= 0 else 7)

way, path = sys.argv[1:]
def source():
    return Short(open(path, "rb").read()) if way == "short" else path

for _ in range(3 if way == "short" else 20):
    if way == "iterated":
        found = dict(tensorizer.iterate(path, "cpu"))
    elif way == "sliced":
        found = tensorizer.load(path, "cpu", names=["rows"], slices={"rows": (1, 3, 9)})
    elif way == "lazy":
        with tensorizer.TensorDeserializer(path, "cpu", lazy_load=True) as file:
            found = {name: file[name] for name in file}
    else:
        found = tensorizer.load(source(), "cpu")
print(json.dumps({n: t.detach().reshape(-1).view(torch.uint8).tolist() for n, t in found.items()}))
"""
ROWS = torch.arange(400, dtype=torch.int16).reshape(20, 20)
TENSORS = {
    "rows": ROWS,
    "odd": torch.arange(13, dtype=torch.uint8),
    "one": torch.tensor(1.5, dtype=torch.float16),
    "flags": torch.tensor([True, False, True]),
    "empty": torch.empty(0, 4),
    "packed": torch.arange(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "large": torch.arange(150_000, dtype=torch.int32),
}


@pytest.mark.parametrize("ending", ["tensors", "safetensors"])
@pytest.mark.parametrize("way", ["eager", "short", "iterated", "sliced", "lazy"])
def test_no_byte_is_what_was_there_before(tmp_path, way, ending):
    path = tmp_path / f"f.{ending}"
    tensorizer.save(TENSORS, path)
    done = run_python(LOADED, way, path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    expected = {"rows": ROWS[:, 3:9].contiguous()} if way == "sliced" else TENSORS
    expected = {n: t.reshape(-1).view(torch.uint8).tolist() for n, t in expected.items()}
    assert found == expected


def test_what_a_file_has_no_bytes_of_is_zero(tmp_path):
    path = tmp_path / "f.tensors"
    with tensorizer.TensorSerializer(path) as serializer, pytest.warns(UserWarning, match="meta"):
        serializer.write_state_dict({"a": torch.ones(5), "m": torch.empty(1000, device="meta")})
    for way in ("eager", "iterated", "lazy"):
        done = run_python(LOADED, way, path)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found == {"a": [0, 0, 128, 63] * 5, "m": [0] * 4000}, way
