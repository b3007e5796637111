"""Programs without Python: the header, the CMake package, scripted and compiled modules."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import build_cache
import pytest
import tensorizer
import torch
from conftest import ROOT
from safetensors.torch import save_file
from scripted import FaultServer

pytestmark = pytest.mark.long

ops = torch.ops.tensorizer
PACKAGE = Path(tensorizer.__file__).parent
TORCH = Path(torch.__file__).parent


def run(command, **kwargs):
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=280, **kwargs
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="session")
def cmake():
    found = Path(sys.executable).with_name("cmake")
    found = found if found.exists() else shutil.which("cmake")
    if not found:
        if os.environ.get("CI"):
            pytest.fail("cmake is required in CI")
        pytest.skip("cmake is not installed: pip install cmake")
    return found


def configure(cmake, source, build, *options, prefix=()):
    paths = ";".join([tensorizer.cmake_prefix_path, *map(str, prefix)])
    return run([cmake, "-S", source, "-B", build, f"-DCMAKE_PREFIX_PATH={paths}", *options])


def built(cmake, source):
    """Build what a folder holds with the torch that pip installed, unless it is kept."""
    needed = [PACKAGE / name for name in ("include", "share", "lib")]

    def make(build):
        configure(cmake, source, build, prefix=[torch.utils.cmake_prefix_path])
        run([cmake, "--build", build])

    return build_cache.build_once(source.name, [source, *needed], make)


@pytest.fixture(scope="session")
def program(cmake):
    return built(cmake, ROOT / "tests/cpp") / "deployment"


class Scripted(torch.nn.Module):
    def __init__(self, uri: str):
        super().__init__()
        self.uri = uri

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.ops.tensorizer.load(self.uri)
        return x @ weights["weight"] + weights["bias"].sum()


class OneByOne(torch.nn.Module):
    def __init__(self, uri: str):
        super().__init__()
        self.uri = uri

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: dict[str, torch.Tensor] = {}
        iterator = torch.ops.tensorizer.iterate(self.uri, buffer_bytes=1, verify=True)
        tensors = torch.ops.tensorizer.iterate_next(iterator)
        while len(tensors) > 0:
            found.update(tensors)
            tensors = torch.ops.tensorizer.iterate_next(iterator)
        return x @ found["weight"] + found["bias"].sum()


class Compiled(torch.nn.Module):
    def __init__(self, uri):
        super().__init__()
        self.uri = uri
        self.register_buffer("weight", torch.zeros(40, 30), persistent=False)

    def forward(self, x):
        bias = torch.ops.tensorizer.load(self.uri)["bias"]
        weight = torch.empty_like(self.weight)
        torch.ops.tensorizer.load(self.uri, ["weight"], [weight])
        torch.ops.tensorizer.save(self.uri + ".seen", {"x": x})
        seen = torch.ops.tensorizer.load(self.uri + ".seen", ["x"])[0]
        return torch.relu(seen @ weight) + bias.sum()


def write_other_formats(weights, folder):
    """Write the same tensors as others do: in one file, in two shards, by torch.save."""
    save_file(weights, folder / "weights.safetensors")
    shards = folder / "shards"
    shards.mkdir()
    for name, tensor in weights.items():
        save_file({name: tensor}, shards / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in weights}}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.save(weights, folder / "checkpoint.pt")


def test_a_program_without_python(program, tmp_path, monkeypatch):
    weights = {"weight": torch.randn(40, 30), "bias": torch.arange(5)}
    path = str(tmp_path / "weights.tensors")
    tensorizer.save(weights, path)
    write_other_formats(weights, tmp_path)
    x = torch.ones(2, 40)
    tensorizer.save({"x": x}, path + ".seen")
    scripted = x @ weights["weight"] + weights["bias"].sum()
    compiled = torch.relu(x @ weights["weight"]) + weights["bias"].sum()
    tensorizer.save({"scripted": scripted, "compiled": compiled}, tmp_path / "expected.tensors")
    torch.jit.script(Scripted(path)).save(str(tmp_path / "scripted.pt"))
    torch.jit.script(OneByOne(path)).save(str(tmp_path / "one_by_one.pt"))
    torch.jit.script(Scripted(str(tmp_path / "missing"))).save(str(tmp_path / "broken.pt"))
    exported = torch.export.export(Compiled(path), (x,))
    # Its code has the address in it, so that keeping it would be of no use.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
    out = run([program, tmp_path], env={"PATH": os.environ["PATH"]})
    assert out.split("\n") == ["header", "in place", "errors", "one by one", "other formats",
                               "scripted", "aot_inductor", "threads", "no python", ""]  # fmt: skip
    # A file that C++ wrote is read here.
    assert tensorizer.load(tmp_path / "from_cpp.tensors", verify_hash=True)["y"].shape == (40, 30)


@pytest.mark.parametrize("place", ["folder", "variable"])
def test_a_libtorch_folder(place, cmake, tmp_path):
    """A folder with include and lib, as unpacked from an archive."""
    if place == "folder":
        out = configure(cmake, ROOT / "tests/cpp", tmp_path, prefix=[TORCH])
    else:
        out = configure(cmake, ROOT / "tests/cpp", tmp_path, f"-DTENSORIZER_TORCH={TORCH}")
    assert "Generating done" in out


def test_torch_targets_that_are_there_already(cmake, tmp_path):
    """The targets are those of find_package(Torch) if it finds CUDA's toolkit."""
    (tmp_path / "CMakeLists.txt").write_text(
        """cmake_minimum_required(VERSION 3.18)
project(targets CXX)
add_library(torch INTERFACE IMPORTED)
find_package(tensorizer REQUIRED)
get_target_property(libraries tensorizer::tensorizer INTERFACE_LINK_LIBRARIES)
message(STATUS "links [${libraries}]")
"""
    )
    assert "links [torch]" in configure(cmake, tmp_path, tmp_path / "build")


def test_missing_torch_is_reported(cmake, tmp_path):
    """The package alone, as where it lies beside no torch."""
    copy = tmp_path / "site/tensorizer"
    shutil.copytree(PACKAGE / "share", copy / "share")
    done = subprocess.run(
        [str(cmake), "-S", ROOT / "tests/cpp", "-B", tmp_path / "build",
         f"-DCMAKE_PREFIX_PATH={copy / 'share/cmake'}"],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "torch was not found: set TENSORIZER_TORCH to its folder" in " ".join(
        done.stderr.split()
    )


def test_the_library_has_no_python_in_it():
    lib = PACKAGE / "lib/libtensorizer_torch.so"
    symbols = run(["nm", "-D", lib]).splitlines()
    assert not [line for line in symbols if line.split()[-1].startswith(("Py", "_Py"))]
    needed = run(["readelf", "-d", lib])
    assert "[libtensorizer_torch.so]" in needed
    for other in ("libpython", "torch_python", "torch_cuda"):
        assert other not in needed


@pytest.mark.parametrize(
    ("library", "exported"),
    [
        ("_C.abi3.so", {"PyInit__C"}),
        ("lib/libtensorizer_torch.so", {"tensorizer_abi_version"}),
    ],
)
def test_libraries_export_their_interface_alone(library, exported):
    """Another Rust library of a process can have the same crates, such as ``cxx``."""
    symbols = run(["nm", "-D", "--defined-only", PACKAGE / library]).splitlines()
    assert {line.split()[-1] for line in symbols} == exported
    assert "SYMBOLIC" in run(["readelf", "-dW", PACKAGE / library])
    undefined = run(["nm", "-D", "--undefined-only", PACKAGE / library])
    assert not [name for name in ("cxxbridge", "crc_fast") if name in undefined]


@pytest.fixture(scope="session")
def server(cmake):
    return built(cmake, ROOT / "examples/cpp-server") / "server"


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """The example's model in both forms, its weights, a request and the answers to it."""
    folder = tmp_path_factory.mktemp("exported")
    run([sys.executable, ROOT / "examples/cpp-server/export.py", folder], cwd=folder)
    return folder


@pytest.mark.parametrize("form", ["model.pt", "model.pt2"])
def test_the_example_server(form, server, exported, tmp_path):
    expected = [float(word) for word in (exported / "expected.txt").read_text().split()]

    def answer(weights, request):
        return subprocess.run(
            [str(server), str(exported / form), str(weights)],
            input=request, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip

    request = (exported / "request.txt").read_text()
    done = answer(exported / "weights.tensors", request)
    assert done.returncode == 0, done.stderr
    answers = [float(word) for word in done.stdout.split()]
    assert answers == pytest.approx(expected, rel=1e-4, abs=1e-6)
    with FaultServer((exported / "weights.tensors").read_bytes()) as remote:
        done = answer(remote.url, request)
    assert done.returncode == 0, done.stderr
    answers = [float(word) for word in done.stdout.split()]
    assert answers == pytest.approx(expected, rel=1e-4, abs=1e-6)
    # The same weights as others write them.
    other = tmp_path / "weights.safetensors"
    save_file(tensorizer.load(exported / "weights.tensors"), other)
    done = answer(other, request)
    assert done.returncode == 0, done.stderr
    answers = [float(word) for word in done.stdout.split()]
    assert answers == pytest.approx(expected, rel=1e-4, abs=1e-6)
    done = answer(tmp_path / "missing.tensors", request)
    assert done.returncode == 1
    assert "missing.tensors`: No such file" in done.stderr
    tensorizer.save({"other": torch.ones(1)}, tmp_path / "other.tensors")
    done = answer(tmp_path / "other.tensors", request)
    assert done.returncode == 1
    assert "Tensor not found: `" in done.stderr
    done = answer(exported / "weights.tensors", "1 2 x\n")
    assert done.returncode == 1
    assert "expected 16 numbers" in done.stderr


def test_the_tutorial_shows_the_example():
    text = (ROOT / "docs/tutorial/cpp.md").read_text()
    files = ("server.cpp", "CMakeLists.txt")
    example = "".join((ROOT / "examples/cpp-server" / name).read_text() for name in files)
    shown = re.findall(r"```(?:cpp|cmake)\n(.+?)```", text, re.DOTALL)
    assert len(shown) == 3
    for block in shown:
        for part in block.strip().split("\n\n"):
            assert part in example, part
