"""The harness of the benchmarks finds wrong bytes, whatever an engine returns."""

import pytest
from conftest import ROOT
from processes import SCRIPT, run_python

#: Runs an engine in this process, which it changes, and prints whether the bytes were right.
PROGRAM = """
import sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[1])
from harness import files
from harness.case import Case, Engine, Given
from runner import once

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
    ended = run_python(PROGRAM, ROOT / "benchmarks", tmp_path)
    assert ended.stdout == "done\n", ended.stderr


def run(*options):
    return run_python(SCRIPT, ROOT / "benchmarks/run.py", *options)


@pytest.mark.parametrize("pattern", ["tensors/http", "formats/*", "device/*"])
def test_a_pattern_chooses_cases(pattern):
    names = [line.split()[0] for line in run("--list", pattern).stdout.splitlines()]
    assert names and all(name.startswith(pattern.rstrip("*")) for name in names)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--list", "tensors/none"], "no case is named tensors/none"),
        (["device/load"], "one is named device/load, but not with these options"),
        (["--engines", "none", "--", "tensors/http"], "no engine of these cases is named none"),
        (["--ours", "--engines", "safetensors"], "no engine of these cases is named safetensors"),
        (["--record", "--ours"], "only whole cases at full size"),
        (["--record", "--rounds", "2"], "three rounds or more"),
        (["--record", "--device", "--gigabytes", "2"], "only whole cases at full size"),
    ],
)
def test_wrong_options_are_errors(options, message):
    ended = run(*options)
    assert ended.returncode == 2 and message in ended.stderr


#: Prints the processes that are left when one was too late, and what a rank that fails raises.
ENDED = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from harness.process import Process, ranks

def late():
    os.setsid()
    if os.fork() == 0:
        Path(sys.argv[2], "child").write_text(str(os.getpid()))
    time.sleep(60)

def failing():
    import torch.distributed as dist
    if dist.get_rank() == 1:
        raise ValueError("of rank 1")
    time.sleep(60)

process = Process("fork", late)
while not Path(sys.argv[2], "child").exists() or not Path(sys.argv[2], "child").read_text():
    time.sleep(0.01)
for call in (lambda: process.result(0), lambda: ranks(2, failing)):
    try:
        call()
    except RuntimeError as error:
        print(str(error).splitlines()[-1])
time.sleep(0.1)
child = Path("/proc", Path(sys.argv[2], "child").read_text(), "stat")
print(not child.exists() or child.read_text().split()[2] == "Z")
"""


def test_what_is_late_or_fails_is_ended_with_all_its_processes(tmp_path):
    ended = run_python(ENDED, ROOT / "benchmarks", tmp_path, timeout=50)
    lines = ["no result in time", "ValueError: of rank 1", "True"]
    assert ended.stdout.splitlines() == lines, ended.stderr
