"""Types of the package in a program that is checked with ``mypy --strict``."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

PROGRAM = """
from collections.abc import Callable

import tensorizer
import torch
from tensorizer import TensorDeserializer
from tensorizer.serialization import HashMismatchError
from tensorizer.stream_io import CAInfo, open_stream
from tensorizer.torch_compat import tensorizer_loading
from tensorizer.utils import get_mem_usage, no_init_or_tensor

def wanted(name: str) -> bool:
    return name.startswith("layers.")

typed: Callable[[str], bool] = wanted

with TensorDeserializer("f.tensors", filter_func=typed, lazy_load=True) as file:
    reveal_type(file["x"])
    reveal_type(file["x"].shape)
    for _, _, name, tensor in file.read_tensors(filter_func=wanted):
        reveal_type(tensor)

reveal_type(tensorizer.load("f.tensors", filter_func=wanted))
reveal_type(tensorizer.load("f.tensors", names=["x"]))
reveal_type(tensorizer.load("f.tensors", names=[("x", 0)]))
reveal_type(tensorizer.load("f.tensors", out={"x": torch.zeros(3)}))
for text, landed in tensorizer.iterate("f.tensors"):
    reveal_type(text)
torch.nn.Linear(2, 2).load_state_dict(tensorizer.load("f.tensors", verify_hash="crc32"))
print(tensorizer.stats()["bytes"], [one["bytes"] for one in tensorizer.stats(since=0)])
tensorizer.save({"x": torch.zeros(3)}, "f", hashes="crc32", format="safetensors")

async def save() -> None:
    await tensorizer.save_async({}, "f.tensors", hashes="crc32")
"""
SEEN = [
    'Revealed type is "torch.nn.parameter.Parameter"',
    'Revealed type is "torch._C.Size"',
    'Revealed type is "torch.nn.parameter.Parameter"',
    'Revealed type is "dict[str, torch._tensor.Tensor]"',
    'Revealed type is "dict[str, torch._tensor.Tensor]"',
    'Revealed type is "dict[tuple[str, int], torch._tensor.Tensor]"',
    'Revealed type is "dict[str, torch._tensor.Tensor]"',
    'Revealed type is "str"',
]
#: Calls that are mistakes for a type checker, too.
WRONG = """
import tensorizer

tensorizer.load("f.tensors", verify_hash="sha256")
tensorizer.save({}, "f.tensors", hashes="sha256")
tensorizer.save({}, "f.tensors", format="st")
tensorizer.save("f.tensors", {})
tensorizer.load("f.tensors", memory_limit="1GB")
"""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs/tutorial").glob("*.md"))]


def checked(folder, *programs, strict=True):
    """Return what mypy says of programs."""
    if importlib.util.find_spec("mypy") is None:
        if os.environ.get("CI"):
            pytest.fail("mypy is required in CI")
        pytest.skip("mypy is not installed")
    how = ["--strict"] if strict else ["--check-untyped-defs", "--ignore-missing-imports"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *how, "--cache-dir", ROOT / ".mypy_cache", *programs],
        cwd=folder,
        env={"MYPYPATH": str(ROOT / "python"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


def pyright_errors(folder):
    """Return the errors of pyright in the programs of a folder."""
    if importlib.util.find_spec("basedpyright") is None:
        if os.environ.get("CI"):
            pytest.fail("basedpyright is required in CI")
        pytest.skip("basedpyright is not installed")
    settings = {"typeCheckingMode": "standard", "extraPaths": [str(ROOT / "python")]}
    settings |= {"reportMissingImports": False, "reportMissingModuleSource": False}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = ["-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "."]
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True)
    found = json.loads(done.stdout)["generalDiagnostics"]
    return [
        (Path(one["file"]).name, one["range"]["start"]["line"] + 1, one["message"])
        for one in found
        if one["severity"] == "error"
    ]


def test_a_program_that_is_checked_strictly(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    said = checked(tmp_path, "program.py")
    notes = [line.partition(": note: ")[2] for line in said.splitlines()]
    assert "Success" in said, said
    assert pyright_errors(tmp_path) == []
    assert [note for note in notes if note] == SEEN


def test_mistakes_are_errors_for_a_type_checker(tmp_path):
    (tmp_path / "program.py").write_text(WRONG)
    errors = [line for line in checked(tmp_path, "program.py").splitlines() if ": error:" in line]
    lines = [int(line.split(":")[1]) for line in errors]
    assert sorted({*lines}) == [4, 5, 6, 7, 8], errors
    found = pyright_errors(tmp_path)
    assert sorted({line for _, line, _ in found}) == [4, 5, 6, 7, 8], found


def test_the_code_of_the_pages_is_typed(tmp_path):
    for page in PAGES:
        code = re.findall(
            r"^```python[^\n]*\n(.+?)^```", page.read_text(), re.DOTALL | re.MULTILINE
        )
        (tmp_path / f"{page.stem.replace('-', '_')}_page.py").write_text("\n".join(code))
    programs = sorted(path.name for path in tmp_path.glob("*_page.py"))
    assert len(programs) == len(PAGES)
    said = checked(tmp_path, *programs, strict=False)
    assert "Success" in said, said
    assert pyright_errors(tmp_path) == []
