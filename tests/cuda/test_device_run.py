"""The cases of a device, at toy size on the emulated CUDA."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))
#: Peers that fail: one has no tensors, and the process of the other one crashes.
PEERS = {
    "instanttensor": "def safe_open(*_, **__):\n    raise RuntimeError('it never has tensors')\n",
    "fastsafetensors": "import ctypes\ndef fastsafe_open(**_):\n    ctypes.string_at(0)\n",
}
TESTS = """
import os, pytest
def test_passes():
    assert os.environ["REQUIRE_CUDA"] == "1"
def test_fails():
    assert 1 + 1 == 3
def test_is_skipped():
    pytest.skip("why not")
def test_crashes():
    os.abort()
def test_after_the_crash_to_load():
    pass
"""


def run(tmp_path, *arguments, **env):
    command = [sys.executable, ROOT / "benchmarks/run.py", "--device", "--quick", *arguments]
    command += ["--memory", tmp_path / "memory", "--disk", tmp_path / "disk"]
    env = os.environ | {"FAKE_CUDA_DELAY_US": "0", "TMPDIR": str(tmp_path)} | env
    return subprocess.run(
        list(map(str, command)), env=env, capture_output=True, text=True, timeout=200
    )


def rows(ended):
    """Return the cells of the printed rows, by engine."""
    lines = [line.strip("| ").split(" | ") for line in ended.stdout.splitlines() if "|" in line]
    return {cells[0]: dict(zip(lines[0], cells, strict=False)) for cells in lines[2:]}


def test_engines_that_fail_are_named_and_the_others_are_measured(tmp_path):
    for name, code in PEERS.items():
        (tmp_path / f"{name}.py").write_text(code)
    engines = ["tensorizer", "InstantTensor", "fastsafetensors", "pinned copy"]
    ended = run(tmp_path, "device/20k", "--engines", *engines, PYTHONPATH=str(tmp_path))
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert set(rows(ended)) == {"tensorizer", "baseline: pinned copy"}
    assert "it never has tensors" in ended.stdout and "exit code -11" in ended.stdout
    assert "2 failed: device/20k, InstantTensor; device/20k, fastsafetensors" in ended.stdout
    assert not (tmp_path / "memory/quick").exists(), "models in memory are removed at the end"


def test_a_crashed_test_is_counted_and_later_tests_run(tmp_path):
    path = tmp_path / "test_some.py"
    path.write_text(TESTS.replace("def test_", "def test_load_"))
    ended = run(tmp_path, "device/tests", DEVICE_TESTS=str(path))
    assert ended.returncode == 1, ended.stdout + ended.stderr
    found = rows(ended)["pytest"]
    assert (found["passed"], found["skipped"], found["failed"]) == ("2", "1", "2")
    assert re.search(r"FAILED .*test_load_crashes", ended.stdout)


def test_a_package_that_is_missing_is_no_failure(tmp_path):
    ended = run(tmp_path, "device/load", "--engines", "InstantTensor", "safetensors prefetch")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "InstantTensor: not measured: instanttensor is not installed" in ended.stdout


def test_a_model_that_does_not_fit_is_not_measured(tmp_path):
    from harness import files
    from harness.case import AbsentError, Model

    with pytest.raises(AbsentError, match="has no room"):
        files.prepare(tmp_path, Model("large", 10, 10**18), ["tensors"], {"all"}, quick=True)


def test_pieces_at_wrong_positions_are_detected():
    """The bytes of a load are compared by sums that a device can take."""
    from harness.files import PIECE, weighed

    words = torch.arange(PIECE + 99_999)
    exchanged = words.clone()
    exchanged[:65_536], exchanged[65_536:131_072] = words[65_536:131_072], words[:65_536]
    late = torch.cat([words[5:], words[:5]])
    one = words.clone()
    one[-1] ^= 1 << 40
    others = (words, exchanged, late, one, words.view(-1, 1), words.view(torch.float64))
    assert len({weighed(tensor) for tensor in others}) == len(others)
    assert weighed(words.clone()) == weighed(words)
