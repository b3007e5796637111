"""Tensors of a CUDA device as they land, other formats, compiled graphs and models on the device.

These tests run kernels while copies are under way, so that a real device shows races that the
emulated one can only detect.
"""

import os
import subprocess
import sys

import pytest
import tensorizer
import torch
from processes import run_python
from tensorizer.safetensors import safe_open, save_file

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("REQUIRE_CUDA") != "1",
    reason="no CUDA device (REQUIRE_CUDA=1 demands one)",
)

CUDA = torch.device("cuda", 0)
PAUSE = 2_000_000  # cycles of the device: about 1 ms
COUNT = 60
EMULATED = "cuda" in os.environ.get("LD_PRELOAD", "")
real_only = pytest.mark.skipif(EMULATED, reason="the emulated CUDA has no compiled kernels")


def made():
    """Return tensors of 1.2 to 2.3 MB and small ones, each filled with its number."""
    tensors = {
        f"t{i:02}": torch.full((300_000 + 70_000 * (i % 5),), float(i)) for i in range(COUNT)
    }
    return tensors | {f"z{i:03}": torch.full((i,), float(i)) for i in range(200)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("landing")
    tensorizer.save(made(), folder / "f.tensors")
    save_file(made(), folder / "f.safetensors")
    torch.save({name: tensor.clone() for name, tensor in made().items()}, folder / "f.pt")
    return folder


def check(found):
    assert len(found) == COUNT + 200
    torch.cuda.synchronize()
    for name, tensor in found.items():
        assert tensor.device == CUDA, name
        assert bool((tensor.cpu() == int(name[1:])).all()), name


@pytest.mark.parametrize("order", ["file", "ready"])
@pytest.mark.parametrize("name", ["f.tensors", "f.safetensors"])
def test_memory_is_not_used_again_before_kernels_have_read_it(folder, name, order):
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    iterator = tensorizer.iterate(folder / name, "cuda", buffer_bytes=4 << 20, order=order)
    kept = {}
    for turn in range(10**6):
        with torch.cuda.stream(streams[turn % 3]):
            try:
                found, tensor = next(iterator)
            except StopIteration:
                break
            torch.cuda._sleep(PAUSE)
            kept[found] = tensor.clone()
            del tensor
    check(kept)


@pytest.mark.parametrize("buffer_bytes", [None, 4 << 20])
def test_prefetched_tensors_can_be_used_on_every_stream(folder, buffer_bytes):
    other = torch.cuda.Stream()
    kept = {}
    with safe_open(folder / "f.safetensors", "pt", "cuda") as file:
        for name, tensor in file.prefetch(buffer_bytes=buffer_bytes):
            with torch.cuda.stream(other):
                kept[name] = tensor.clone()
            other.synchronize()
    check(kept)


def test_a_budget_bounds_the_memory_of_the_device(folder):
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    for _, tensor in tensorizer.iterate(folder / "f.tensors", "cuda", buffer_bytes=8_000_000):
        del tensor
    torch.cuda.synchronize()
    # Of what torch was asked for: its allocator gives blocks that are up to 1 MiB larger.
    most = 8_000_000 + 580_000 * 4 + 200 * 512
    assert torch.cuda.memory_stats()["requested_bytes.all.peak"] - before <= most


@pytest.mark.parametrize("suffix", ["tensors", "safetensors", "pt"])
def test_every_format_arrives_by_every_call(folder, suffix):
    path = folder / f"f.{suffix}"
    check(tensorizer.load(path, "cuda"))
    out = {name: torch.empty_like(tensor, device="cuda") for name, tensor in made().items()}
    tensorizer.load(path, out=out)
    check(out)
    check(tensorizer.load(path, like=out))
    some = tensorizer.load(path, "cuda", names=["t03", "z150"])
    values = {name: tensor.cpu().unique().tolist() for name, tensor in some.items()}
    assert values == {"t03": [3.0], "z150": [150.0]}
    part = tensorizer.load(path, "cuda", names=["t07"], slices={"t07": (slice(1000, 70_001),)})
    assert torch.equal(part["t07"].cpu(), torch.full((69_001,), 7.0))


def test_files_that_the_device_may_read_by_itself(folder):
    """With GPUDirect Storage asked for, whatever of it the machine has."""
    code = """
import sys, tensorizer
found = tensorizer.load(sys.argv[1], "cuda")
assert all(bool((t.cpu() == int(name[1:])).all()) for name, t in found.items())
report = tensorizer.stats()
print(report["reading"], report["fallbacks"])
assert (report["reading"] == "GPUDirect Storage") != bool(report["fallbacks"])
"""
    done = run_python(code, folder / "f.tensors", env=os.environ | {"TENSORIZER_GDS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr


@real_only
def test_inductor_compiles_a_load_and_kernels_that_use_it(folder):
    path = str(folder / "f.tensors")

    def weights(x):
        (found,) = torch.ops.tensorizer.load(path, ["t03"], device="cuda")
        return torch.nn.functional.gelu(found * 2 + x)

    ones = torch.ones(510_000, device="cuda")
    compiled = torch.compile(weights, fullgraph=True)
    expected = torch.nn.functional.gelu(torch.full((510_000,), 7.0))
    for _ in range(3):
        torch.testing.assert_close(compiled(ones).cpu(), expected)


PACKAGE = """
import sys, torch
path, package = sys.argv[1:]

class Model(torch.nn.Module):
    def forward(self, x):
        found = x * 3
        if path:
            (found,) = torch.ops.tensorizer.load(path, ["t03"], device="cuda")
        return found * 2 + x

if path:
    import tensorizer
ones = torch.ones(510_000, device="cuda")
program = torch.export.export(Model(), (ones,))
torch._inductor.aoti_compile_and_package(program, package_path=package)
run = torch._inductor.aoti_load_package(package)
assert bool((run(ones).cpu() == 7).all())
"""


@real_only
def test_aot_inductor_loads_to_the_device(folder, tmp_path):
    """In processes of their own: on some machines a package of torch alone crashes as it opens."""

    def run(path):
        command = [sys.executable, "-X", "faulthandler", "-c", PACKAGE, path]
        command += [str(tmp_path / f"{bool(path)}.pt2")]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    if (alone := run("")).returncode != 0:
        pytest.skip(f"torch's packages do not run here: {alone.stderr[-500:]}")
    done = run(str(folder / "f.tensors"))
    assert done.returncode == 0, done.stderr[-3000:]


@real_only
def test_a_model_of_transformers_generates_the_same(tmp_path):
    transformers = pytest.importorskip("transformers")
    from tensorizer.transformers import from_pretrained

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=1000,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    ours = from_pretrained(str(tmp_path), device="cuda")
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path).to("cuda")
    assert {p.device for p in ours.parameters()} == {CUDA}
    tokens = torch.tensor([[1, 2, 3]], device="cuda")
    torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits)
