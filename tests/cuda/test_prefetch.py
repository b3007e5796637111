"""``safe_open.prefetch`` on the emulated CUDA: streams, memory, devices."""

import emulated
import pytest

WRITE = """
import sys
from tensorizer.safetensors import save_file
tensors = {f"t{i:02}": torch.full((300_000 + 70_000 * (i % 5),), float(i)) for i in range(40)}
tensors |= {f"z{i:03}": torch.full((i,), float(i)) for i in range(200)}
save_file(tensors, sys.argv[1])
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("prefetch") / "f.safetensors"
    written = emulated.run(WRITE, path)
    assert written.returncode == 0, written.stderr
    return path


def passes(code, path, **env):
    done = emulated.run(
        "import sys\nfrom tensorizer.safetensors import safe_open\n" + code, path, **env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("buffer_bytes", "seed"), [("None", "1"), ("4 << 20", "2")])
def test_tensors_can_be_used_on_every_stream(path, buffer_bytes, seed):
    """Use of a tensor before its copy has ended would be a race, which the emulator detects."""
    code = f"""
other = torch.cuda.Stream()
loader = safe_open(sys.argv[1], "pt", "cuda").prefetch(buffer_bytes={buffer_bytes})
kept = {{}}
for name, tensor in loader:
    with torch.cuda.stream(other):
        kept[name] = tensor * 1
    other.synchronize()
assert len(kept) == 240
for name, tensor in kept.items():
    assert bool((tensor.cpu() == int(name[1:])).all()), name
"""
    passes(code, path, FAKE_CUDA_SEED=seed, FAKE_CUDA_DELAY_US="2000", FAKE_CUDA_BUS_MBPS="500")


def test_memory_is_not_used_again_before_the_consumer_has_done_with_it(path):
    code = """
kept = []
for name, tensor in safe_open(sys.argv[1], "pt", 0).prefetch(buffer_bytes=4 << 20):
    emulated.pause(torch.cuda.current_stream(), 0.0005)
    kept.append((int(name[1:]), tensor * 1))
    del tensor
for number, tensor in kept:
    assert bool((tensor.cpu() == number).all()), number
"""
    passes(code, path, FAKE_CUDA_DELAY_US="300")


def test_a_budget_bounds_the_memory_of_the_device(path):
    code = """
torch.zeros(1, device="cuda")
torch.cuda.reset_peak_memory_stats()
for name, tensor in safe_open(sys.argv[1], "pt", "cuda").prefetch(buffer_bytes=8 << 20):
    del tensor
# Of what torch was asked for: its allocator gives blocks that are up to 1 MiB larger.
peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
assert peak <= (8 << 20) + 2_400_000, peak
"""
    passes(code, path)


def test_only_the_plan_is_allocated(path):
    code = """
torch.zeros(1, device="cuda")
before = torch.cuda.memory_allocated()
plan = {"t00": None, "t39": slice(1000, 2000)}
loader = safe_open(sys.argv[1], "pt").prefetch(plan, device="cuda:0")
found = dict(loader)
assert bool((found["t39"].cpu() == 39).all()) and len(found["t39"]) == 1000
assert torch.cuda.memory_allocated() - before < 1_300_000
"""
    passes(code, path)


def test_loaders_may_have_different_devices(path):
    code = """
with safe_open(sys.argv[1], "pt", device="cuda:1") as file:
    one, other = file.prefetch({"t01": None}), file.prefetch({"t02": None}, device="cuda:0")
assert one.take("t01").device == torch.device("cuda:1")
assert other.take("t02").device == torch.device("cuda:0")
"""
    passes(code, path)


@pytest.mark.parametrize("fault", ["copy=719@9", "cuEventQuery=719@30", "cudaMalloc=2@2-"])
def test_device_faults_are_errors_and_never_hang(path, fault):
    code = """
import os
import tensorizer
from tensorizer.safetensors import SafetensorError
torch.cuda.init()
try:
    loader = safe_open(sys.argv[1], "pt", "cuda").prefetch(buffer_bytes=8 << 20)
    dict(loader)
except (tensorizer.DeviceError, tensorizer.DeviceMemoryError) as error:
    print(type(error).__name__, flush=True)
if "loader" in globals():
    try:
        dict(loader)
    except SafetensorError as error:
        print(error, flush=True)
os._exit(0)
"""
    said = passes(code, path, FAKE_CUDA_FAIL=fault, FAKE_CUDA_STRICT="0").splitlines()
    assert said[0] in ("DeviceError", "DeviceMemoryError"), said
    assert len(said) == 1 or "the load has failed" in said[1], said
