"""Devices that the package does not know itself: tensors pass through the CPU, and torch copies.

As XPU, ROCm and others do. The device is real to torch, and its memory cannot be touched.
"""

import shutil
import subprocess
from pathlib import Path

import build_cache
import pytest
import torch
from conftest import ROOT
from processes import run_python

CODE = """
import contextlib, sys, torch, tensorizer
from tensorizer import TensorDeserializer, TensorSerializer
from tensorizer.torch_compat import tensorizer_loading, tensorizer_saving

library, path = sys.argv[1:]
torch.ops.load_library(library)
torch.utils.rename_privateuse1_backend("other")
module = type(sys)("torch.other")
module.is_available, module.device_count = lambda: True, lambda: 1
module.current_device, module.device = lambda: 0, contextlib.nullcontext
torch._register_device_module("other", module)
torch.utils.generate_methods_for_privateuse1_backend()
values = {
    "weight": torch.arange(12.0).reshape(3, 4),
    "half": torch.ones(5, dtype=torch.bfloat16),
    "large": torch.arange(300_000),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(7, dtype=torch.uint8),
}
there = {name: tensor.to("other") for name, tensor in values.items()}
assert all(str(tensor.device) == "other:0" for tensor in there.values())


def check(found, device="other:0"):
    assert list(found) == list(values)
    for name, tensor in found.items():
        assert str(tensor.device) == device, (name, tensor.device)
        assert torch.equal(tensor.cpu(), values[name]), name


# From the device, in every way.
strided = there | {"weight": values["weight"].t().contiguous().to("other").t()}
ops = torch.ops.tensorizer
ways = [
    lambda: tensorizer.save(there, path),
    lambda: tensorizer.save(strided, path),
    lambda: tensorizer.save_async(there, path).result(),
    lambda: ops.save(path, there),
    lambda: ops.save(path, list(there), list(there.values())),
]
for save in ways:
    save()
    check(tensorizer.load(path, verify_hash=False, device="cpu"), "cpu")

# To the device, in every way.
tensorizer.save(values, path)
check(tensorizer.load(path, "other"))
check(tensorizer.load(path, "other:0", verify_hash=True, mmap=True))
cast = tensorizer.load(path, "other", dtype=torch.float64)["weight"]
assert (str(cast.device), cast.dtype) == ("other:0", torch.float64)
for lazy in (False, True):
    with TensorDeserializer(path, "other", lazy_load=lazy) as file:
        check(dict(file))
check(ops.load(path, device="other"))
out = {name: torch.zeros_like(tensor).to("other") for name, tensor in values.items()}
before = [tensor.data_ptr() for tensor in out.values()]
ops.load.into(path, list(out), list(out.values()))
check(out)
assert before == [tensor.data_ptr() for tensor in out.values()]

# torch.save and torch.load.
with tensorizer_saving(path):
    torch.save(there, path + ".pt")
with tensorizer_loading(path):
    check(torch.load(path + ".pt"))
    check(torch.load(path + ".pt", map_location="cpu"), "cpu")

# What torch has saved, with storages shared.
torch.save(values | {"view": values["weight"].t()}, path + "2.pt")
found = tensorizer.load(path + "2.pt", "other")
view = found.pop("view")
check(found)
assert view.stride() == (1, 4)
assert view.data_ptr() == found["weight"].data_ptr()
assert torch.equal(view.cpu(), values["weight"].t())

# Modules.
model = torch.nn.Sequential(torch.nn.Linear(4, 3))
expected = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
model.to("other")
with TensorSerializer(path) as serializer:
    serializer.write_module(model)
for device in ("other", "other:0", "cpu"):
    again = torch.nn.Sequential(torch.nn.Linear(4, 3)).to(device)
    weight = again[0].weight
    with TensorDeserializer(path, device) as file:
        file.load_into_module(again)
        file.verify_module(again)
    assert again[0].weight is weight
    for name, tensor in again.state_dict().items():
        assert tensor.device.type == device[:5].rstrip(":")
        assert torch.equal(tensor.cpu(), expected[name])
print("all")
"""


@pytest.fixture(scope="module")
def library():
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    source = ROOT / "tests/python/other_device.cpp"

    def make(place):
        folder = Path(torch.__file__).parent
        command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", "-w"]
        command += ["-I", folder / "include", "-I", folder / "include/torch/csrc/api/include"]
        command += [source, "-o", place / "other_device.so"]
        command += ["-L", folder / "lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{folder / 'lib'}"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    return build_cache.build_once("other-device", [source], make) / "other_device.so"


def test_every_way_to_load_and_save(library, tmp_path):
    done = run_python(CODE, library, tmp_path / "model.tensors")
    assert (done.returncode, done.stdout) == (0, "all\n"), done.stderr
