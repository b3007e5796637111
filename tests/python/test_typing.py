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
MISTAKES = [4, 5, 6, 7, 8]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs/tutorial").glob("*.md"))]


#: Parts of torch that no type of these programs is from: most of what a type checker would read.
UNUSED = [
    f"{name}.*"
    for name in ("torch._decomp", "torch._dynamo", "torch._export", "torch._functorch",
                 "torch._higher_order_ops", "torch._inductor", "torch._prims", "torch._refs",
                 "torch._subclasses", "torch.ao", "torch.backends", "torch.cuda",
                 "torch.distributed", "torch.export", "torch.fx", "torch.jit", "torch.onnx",
                 "torch.package", "torch.testing", "torch.utils", "sympy", "numpy")
]  # fmt: skip


def need(module):
    """Skip where a type checker is not installed."""
    if importlib.util.find_spec(module) is None:
        if os.environ.get("CI"):
            pytest.fail(f"{module} is required in CI")
        pytest.skip(f"{module} is not installed")


@pytest.fixture
def pages(tmp_path):
    """Write the programs and the code of each page to the folder; return the names of the pages."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "wrong.py").write_text(WRONG)
    names = []
    for page in PAGES:
        code = re.findall(
            r"^```python[^\n]*\n(.+?)^```", page.read_text(), re.DOTALL | re.MULTILINE
        )
        names.append(f"{page.stem.replace('-', '_')}_page")
        (tmp_path / f"{names[-1]}.py").write_text("\n".join(code))
    return names


def test_mypy(tmp_path, pages):
    """The program is checked strictly; the code of pages has no annotations."""
    need("mypy")
    strict = ("untyped_calls", "untyped_defs", "incomplete_defs", "any_generics")
    (tmp_path / "mypy.ini").write_text(
        f"[mypy]\nstrict = True\n[mypy-{','.join(pages)}]\nignore_missing_imports = True\n"
        + "".join(f"disallow_{name} = False\n" for name in strict)
        + f"[mypy-{','.join(UNUSED)}]\nfollow_imports = skip\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", ROOT / ".mypy_cache/pages", "."],
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT / "python"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    said = done.stdout.splitlines()
    errors = [tuple(line.split(":")[:2]) for line in said if ": error:" in line]
    assert sorted({*errors}) == [("wrong.py", str(line)) for line in MISTAKES], done
    assert "checked" in said[-1], done
    notes = [line.partition(": note: ")[2] for line in said if line.startswith("program.py:")]
    assert notes == SEEN


def test_pyright(tmp_path, pages):
    need("basedpyright")
    settings = {"typeCheckingMode": "standard", "extraPaths": [str(ROOT / "python")]}
    settings |= {"reportMissingImports": False, "reportMissingModuleSource": False}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = ["-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "."]
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True)
    said = json.loads(done.stdout)
    assert said["summary"]["filesAnalyzed"] == 2 + len(pages)
    found = [
        (Path(one["file"]).name, one["range"]["start"]["line"] + 1)
        for one in said["generalDiagnostics"]
        if one["severity"] == "error"
    ]
    assert sorted({*found}) == [("wrong.py", line) for line in MISTAKES], said
