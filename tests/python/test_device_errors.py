"""Errors of loads to a device, by a stand-in; drivers and children that are none of its own."""

import os
import re
import subprocess
import sys

import pytest
import tensorizer
import torch
from conftest import ROOT, golden_bytes, golden_files, run_python
from staged import make, on_cpu


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setenv("TENSORIZER_FAKE_DEVICE", "7")
    yield
    tensorizer.release_pinned()
    tensorizer.set_pinned_limit(256 << 20)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "f.tensors"
    tensorizer.save(make(), path, allow_meta=True)
    return str(path)


def test_damaged_files_are_the_same_errors(tmp_path):
    seen = 0
    for file in golden_files("corrupt"):
        path = tmp_path / "f"
        path.write_bytes(golden_bytes(file))
        outcomes = []
        for call in (tensorizer.load, lambda *a, **k: on_cpu(tensorizer.load, *a, **k)):
            try:
                call(path, verify_hash=True)
                outcomes.append(None)
            except Exception as error:
                outcomes.append(type(error))
        assert outcomes[0] == outcomes[1], file["file"]
        seen += outcomes[0] is not None
    assert seen > 50


def test_a_device_without_room(tmp_path):
    tensorizer.save({"a": torch.zeros(100_000_000)}, tmp_path / "f")
    code = """
import resource, sys, tensorizer, torch
used = next(int(l.split()[1]) << 10 for l in open("/proc/self/status") if l.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20), resource.RLIM_INFINITY))
try:
    tensorizer.load(sys.argv[1])
except torch.OutOfMemoryError as error:
    print(isinstance(error, MemoryError), sys.argv[1] in str(error), tensorizer.stats())
"""
    found = run_python(code, tmp_path / "f")
    assert found.stdout == "True True None\n", found.stderr


def test_a_device_that_is_not_there(path):
    device = f"cuda:{torch.cuda.device_count()}" if torch.cuda.is_available() else "cuda"
    with pytest.raises(RuntimeError):
        tensorizer.load(path, device)
    with pytest.raises(RuntimeError):
        torch.ops.tensorizer.load(path, device=device)


#: A load in a process, then one in its child.
FORKED = """
import os, re, sys
import tensorizer, torch

def segments():
    # Ranges of addresses that a child does not get.
    found, name = set(), None
    for line in open("/proc/self/smaps"):
        if re.match("[0-9a-f]+-", line):
            name = line.split()[0]
        elif line.startswith("VmFlags:") and "dc" in line.split():
            found.add(name)
    return found

def ends(name):
    return [int(end, 16) for end in name.split("-")]

path, other = sys.argv[1:]
before = segments()
expected = tensorizer.load(path)
assert tensorizer.stats()["pinned_bytes"] > 0
staging = [ends(name) for name in segments() - before]
assert sum(end - start for start, end in staging) >= tensorizer.stats()["pinned_bytes"]
child = os.fork()
if child == 0:
    status = 1
    try:
        there = [ends(line.split()[0]) for line in open("/proc/self/maps")]
        assert not any(s < end and start < e for s, e in there for start, end in staging)
        tensorizer.release_pinned()
        assert not tensorizer.release_pinned(), "nothing is the child's to give back"
        loaded = tensorizer.load(path)
        assert tensorizer.stats()["device"] == "fake"
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
        assert tensorizer.stats()["pinned_bytes"] > 0
        tensorizer.save(loaded, other)
        tensorizer.release_pinned()
        status = 0
    finally:
        sys.excepthook(*sys.exc_info()) if status else None
        sys.stderr.flush()
        os._exit(status)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
again = tensorizer.load(other)
assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="how a child's memory is made is Linux's")
def test_a_forked_child_has_staging_memory_of_its_own(path, tmp_path):
    done = run_python(FORKED, path, tmp_path / "by_child.tensors")
    assert done.returncode == 0, done.stderr


def driver(folder, name, answer):
    """Compile a library with the driver's functions, all of which give the same answer."""
    names = re.findall(r'"(cu[A-Z]\w+)"', (ROOT / "src/mem/device/cuda/driver.rs").read_text())
    assert "cuInit" in names
    source = folder / f"{name}.c"
    source.write_text("".join(f"int {function}() {{ return {answer}; }}\n" for function in names))
    compiler = ["cc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*compiler, "-o", folder / name, source], check=True, timeout=60)


def test_stubs_to_link_programs_with_are_not_the_driver(tmp_path):
    """CUDA's toolkit has such a ``libcuda.so``, which machines that build programs look into."""
    (tmp_path / "stubs").mkdir()
    driver(tmp_path / "stubs", "libcuda.so", 34)  # CUDA_ERROR_STUB_LIBRARY
    (tmp_path / "real").mkdir()
    driver(tmp_path / "real", "libcuda.so.1", 0)
    code = "import tensorizer; print(tensorizer._C.uses_staging_memory(0))"
    for folders, found in [(["stubs", "real"], "True"), (["stubs"], "False")]:
        given = os.environ.get("LD_LIBRARY_PATH", "")
        path = os.pathsep.join([*(str(tmp_path / folder) for folder in folders), given])
        done = run_python(code, env=os.environ | {"LD_LIBRARY_PATH": path})
        if folders == ["stubs"] and torch.cuda.is_available():
            continue
        assert done.stdout == f"{found}\n", (folders, done.stderr)
