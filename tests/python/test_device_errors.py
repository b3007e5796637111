"""Loads to a device that is not there, and libraries that are no driver."""

import os
import re
import subprocess

import pytest
import tensorizer
import torch
from conftest import ROOT
from processes import run_python


def test_a_device_that_is_not_there(saved):
    device = f"cuda:{torch.cuda.device_count()}" if torch.cuda.is_available() else "cuda"
    with pytest.raises(RuntimeError):
        tensorizer.load(saved, device)
    with pytest.raises(RuntimeError):
        torch.ops.tensorizer.load(saved, device=device)


def driver(folder, name, answer):
    """Compile a library with the driver's functions, all of which give the same answer."""
    names = re.findall(r'"(cu[A-Z]\w+)"', (ROOT / "src/mem/device/cuda/driver.rs").read_text())
    assert "cuInit" in names
    source = folder / f"{name}.c"
    source.write_text("".join(f"int {function}() {{ return {answer}; }}\n" for function in names))
    compiler = ["cc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*compiler, "-o", folder / name, source], check=True, timeout=60)


@pytest.mark.parametrize(
    ("folders", "found"),
    # Where nothing is but the stub: a fresh process more, and it cannot show more than the other.
    [(["stubs", "real"], True), pytest.param(["stubs"], False, marks=pytest.mark.long)],
    ids=["and the driver", "alone"],
)
def test_stubs_to_link_programs_with_are_not_the_driver(tmp_path, folders, found):
    """CUDA's toolkit has such a ``libcuda.so``, which machines that build programs look into."""
    if folders == ["stubs"] and torch.cuda.is_available():
        pytest.skip("there is a driver")
    (tmp_path / "stubs").mkdir()
    driver(tmp_path / "stubs", "libcuda.so", 34)  # CUDA_ERROR_STUB_LIBRARY
    (tmp_path / "real").mkdir()
    driver(tmp_path / "real", "libcuda.so.1", 0)
    code = "import tensorizer; print(tensorizer._C.uses_staging_memory(0))"
    given = os.environ.get("LD_LIBRARY_PATH", "")
    path = os.pathsep.join([*(str(tmp_path / folder) for folder in folders), given])
    done = run_python(code, env=os.environ | {"LD_LIBRARY_PATH": path})
    assert done.stdout == f"{found}\n", done.stderr
