"""What a program that is checked with ``mypy --strict`` sees of the package."""

import importlib.util
import os
import subprocess
import sys

import pytest
from conftest import ROOT

PROGRAM = """
from collections.abc import Callable

import tensorizer
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

async def save() -> None:
    await tensorizer.save_async({}, "f.tensors", hashes="crc32")
"""
SEEN = [
    'Revealed type is "torch.nn.parameter.Parameter"',
    'Revealed type is "torch._C.Size"',
    'Revealed type is "torch.nn.parameter.Parameter"',
    'Revealed type is "dict[str | tuple[str | int, ...], torch._tensor.Tensor]"',
]


def test_strictly(tmp_path):
    if importlib.util.find_spec("mypy") is None:
        if os.environ.get("CI"):
            pytest.fail("mypy is required in CI")
        pytest.skip("mypy is not installed")
    (tmp_path / "program.py").write_text(PROGRAM)
    checked = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--cache-dir",
            ROOT / ".mypy_cache",
            "program.py",
        ],
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT / "python"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    notes = [line.partition(": note: ")[2] for line in checked.stdout.splitlines()]
    assert "Success" in checked.stdout, checked.stdout + checked.stderr
    assert [note for note in notes if note] == SEEN
