"""The harness of the benchmarks finds wrong bytes, whatever an engine returns."""

import subprocess
import sys

import pytest
from conftest import ROOT

#: Runs an engine in this process, which it changes, and prints whether the bytes were right.
PROGRAM = """
import sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[1])
from harness import files
from harness.case import Case, Engine, Given
from harness.process import once

folder = Path(sys.argv[2])
model = files.model_of("3k", True)
files.prepare(folder, model, ["tensors"], {"all"}, True)
given = Given(folder, str(folder), model, "tensors", "", folder, str(folder), True)

def right(given):
    return model.tensors()

def changed(given):
    tensors = model.tensors()
    tensors["layers.7.weight"].view(torch.int64)[0, 0] ^= 1
    return tensors

def fewer(given):
    return dict(list(model.tensors().items())[1:])

engines = {}
for load in (right, changed, fewer):
    name, iterate = load.__name__, lambda given, load=load: iter(load(given).items())
    engines[name] = Engine(name, load, imports=())
    engines[f"{name}, iterated"] = Engine(name, iterate, imports=())
    engines[f"{name}, saved"] = Engine(name, lambda given: None, imports=(), saved=load)
for name, engine in engines.items():
    found = once(Case("a/b", "a case", (engine,)), engine, given)
    assert found["seconds"] > 0 and found["verified"] == name.startswith("right"), name
print("done")
"""


def test_wrong_bytes_are_found(tmp_path):
    command = [sys.executable, "-c", PROGRAM, ROOT / "benchmarks", tmp_path]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    assert ended.stdout == "done\n", ended.stderr


@pytest.mark.parametrize("pattern", ["tensors/http", "formats/*"])
def test_a_pattern_chooses_cases(pattern):
    command = [sys.executable, str(ROOT / "benchmarks/run.py"), "--list", pattern]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    names = [line.split()[0] for line in ended.stdout.splitlines()]
    assert names and all(name.startswith(pattern.rstrip("*")) for name in names)


def test_an_unknown_case_is_an_error():
    command = [sys.executable, str(ROOT / "benchmarks/run.py"), "--list", "tensors/none"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and "no case is named tensors/none" in ended.stderr
