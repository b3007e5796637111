"""The command that tests and measures on a borrowed machine, at toy size on the emulated CUDA."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks/gpu"))
GO_ON = 75
CUT_OFF = '{"key": "compare/tmp'
SMALL = ["--toy", "--steps", "compare", "--only", "tmpfs-20k", "--engines"]

#: A peer that ends the run itself when it is first asked for tensors, and never has any.
KILLER = """
import os, pathlib, signal
def safe_open(name, **_):
    marker = pathlib.Path(name).parents[2] / "killed"
    if not marker.exists():
        marker.touch()
        os.kill(os.getppid(), signal.SIGKILL)
    raise RuntimeError("it never has tensors")
"""
#: A peer whose process crashes.
CRASHES = """
import ctypes
def fastsafe_open(**_):
    ctypes.string_at(0)
"""


@pytest.fixture
def wheels(tmp_path):
    """A folder of wheels: two peers that fail, and one that is no archive."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name, code in {"instanttensor": KILLER, "fastsafetensors": CRASHES}.items():
        with zipfile.ZipFile(folder / f"{name}-9.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}-9.0.data/purelib/{name}/__init__.py", code)
            about = f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.0\n"
            wheel.writestr(f"{name}-9.0.dist-info/METADATA", about)
    (folder / "runai_model_streamer-9.0-py3-none-any.whl").write_text("no archive")
    return folder


def run(tmp_path, *arguments, **env):
    command = [sys.executable, ROOT / "benchmarks/gpu/run.py", "--out", tmp_path / "out"]
    command += ["--tmpfs", tmp_path / "memory", "--disk", tmp_path / "disk", *arguments]
    env = os.environ | {"FAKE_CUDA_DELAY_US": "0", "TMPDIR": str(tmp_path)} | env
    return subprocess.run(
        list(map(str, command)), env=env, capture_output=True, text=True, timeout=200
    )


def lines(tmp_path):
    text = (tmp_path / "out/rows.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines() if line != CUT_OFF]


def ends(tmp_path):
    return {row["key"]: row for row in lines(tmp_path) if "key" in row}


def test_failures_are_recorded_as_rows_and_a_killed_run_resumes(tmp_path, wheels):
    engines = ["pinned copy", "ours", "InstantTensor", "run:ai", "fastsafetensors"]
    command = ["--wheels", wheels, *SMALL, *engines]
    killed = run(tmp_path, *command)
    assert killed.returncode == -9, killed.stderr
    before = lines(tmp_path)
    assert before[-1] == {"begin": "compare/tmpfs-20k/InstantTensor/0"}
    assert "compare/tmpfs-20k/ours/0" in ends(tmp_path)
    # As a crash of the machine may leave it.
    with (tmp_path / "out/rows.jsonl").open("a") as file:
        file.write(CUT_OFF)

    done = run(tmp_path, *command)
    assert done.returncode == 1, done.stdout + done.stderr
    text = (tmp_path / "out/rows.jsonl").read_text()
    assert text.startswith("".join(json.dumps(line) + "\n" for line in before))
    keys = [row["key"] for row in lines(tmp_path) if "key" in row]
    assert len(keys) == len(set(keys)), "nothing that had a row was done again"
    rows = ends(tmp_path)
    compared = {row["engine"]: row for row in rows.values() if row["step"] == "compare"}
    assert list(compared) == engines
    assert compared["ours"]["status"] == "ok" and compared["ours"]["of_pinned"] > 0
    assert compared["ours"]["verified"] is True
    assert "it never has tensors" in compared["InstantTensor"]["why"]
    assert compared["fastsafetensors"]["status"] == "failed"
    assert "SIGSEGV" in compared["fastsafetensors"]["why"]
    broken = rows["wheels/runai_model_streamer-9.0-py3-none-any.whl"]
    assert broken["status"] == "failed" and "BadZipFile" in broken["why"]
    assert rows["wheels/fastsafetensors-9.0-py3-none-any.whl"]["status"] == "ok"
    assert "SIGSEGV" in done.stdout and "3 failures" in done.stdout
    assert not list((tmp_path / "memory").iterdir()), "models are removed at the end"

    # All is done: what failed is not tried again, and the status is the same.
    again = run(tmp_path, *command)
    assert again.returncode == 1
    assert ends(tmp_path).keys() == rows.keys()


def test_a_run_ends_at_its_time_limit_and_the_next_call_resumes(tmp_path):
    """Each call does at least one unit, however few its minutes are."""
    (tmp_path / "memory").mkdir()
    command = ["--minutes", "0.001", *SMALL, "pinned copy", "ours"]
    calls = []
    for _ in range(4):
        calls.append(run(tmp_path, *command))
        assert calls[-1].returncode in (0, GO_ON), calls[-1].stdout + calls[-1].stderr
        if calls[-1].returncode == 0:
            break
    assert [call.returncode for call in calls] == [GO_ON, GO_ON, 0]
    assert "To go on" in calls[0].stdout and "--minutes 0.001" in calls[0].stdout
    assert [row["engine"] for row in ends(tmp_path).values()] == ["pinned copy", "ours"]


def test_a_run_resumes_from_the_rows_of_an_earlier_one(tmp_path):
    """A machine may be another one for each call; units that crash it twice are left out."""
    brought = tmp_path / "brought.jsonl"
    done = {"key": "compare/tmpfs-20k/pinned copy/0", "step": "compare", "case": "tmpfs-20k"}
    done |= {"engine": "pinned copy", "round": 0, "status": "ok", "rate": 1e9, "seconds": 1}
    crashed = {"begin": "compare/tmpfs-20k/ours clone/0"}
    brought.write_text("".join(json.dumps(row) + "\n" for row in (done, crashed, crashed)))
    command = ["--go-on", brought, *SMALL, "pinned copy", "ours", "ours clone"]
    ended = run(tmp_path, *command)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    rows = ends(tmp_path)
    assert rows["compare/tmpfs-20k/ours/0"]["of_pinned"] > 0
    assert "started twice" in rows["compare/tmpfs-20k/ours clone/0"]["why"]
    assert lines(tmp_path)[0] == done, "what was brought is not measured again"


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
def test_after_the_crash():
    pass
"""


def test_a_crashed_test_is_recorded_and_later_tests_run(tmp_path):
    path = tmp_path / "test_some.py"
    path.write_text(TESTS)
    command = ["--toy", "--steps", "tests", "--tests", path]
    ended = run(tmp_path, *command)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    rows = {key.rpartition("::")[2]: row for key, row in ends(tmp_path).items()}
    found = {name: row["status"] for name, row in rows.items()}
    assert found == {
        "test_passes": "ok", "test_fails": "failed", "test_is_skipped": "absent",
        "test_crashes": "failed", "test_after_the_crash": "ok", "tests": "ok",
    }  # fmt: skip
    assert "1 + 1" in rows["test_fails"]["why"] and "SIGABRT" in rows["test_crashes"]["why"]
    assert "Tests: 2 passed, 1 skipped, 2 failed." in ended.stdout


def test_pieces_at_wrong_positions_are_detected():
    """The bytes of a load are compared by sums that a device can take."""
    from checks import PIECE, weighed

    words = torch.arange(PIECE + 99_999)
    exchanged = words.clone()
    exchanged[:65_536], exchanged[65_536:131_072] = words[65_536:131_072], words[:65_536]
    late = torch.cat([words[5:], words[:5]])
    one = words.clone()
    one[-1] ^= 1 << 40
    others = (words, exchanged, late, one, words.view(-1, 1), words.view(torch.float64))
    assert len({weighed(tensor) for tensor in others}) == len(others)
    assert weighed(words.clone()) == weighed(words)


def test_a_sweep_recommends_the_faster_setting():
    from sweep import DEFAULTS, best, label, scores

    class Stored:
        def of(self, step, **fields):
            return [row for row in made if fields.items() <= row.items()]

    class Bench:
        rows = Stored()

    tried = [{}, {"A": 1}, {"A": 2}, {"B": 1}]
    seconds = {DEFAULTS: 1.0, "A=1": 0.8, "A=2": 0.5, "B=1": 0.99}
    made = [
        {"phase": "alone", "status": "ok", "model": model, "setting": label(setting),
         "seconds": seconds[label(setting)], "again": [seconds[label(setting)] / 2] * 2}
        for setting in tried for model in ("large", "20k")
    ]  # fmt: skip
    found = scores(Bench, "alone")
    assert found[DEFAULTS] == 1 and found["A=2"] == pytest.approx(2)
    # A gain of one percent is within the noise.
    assert best(tried, found) == {"A": 2}


def test_a_model_that_does_not_fit_is_recorded(tmp_path):
    for kind in ("memory", "disk"):
        (tmp_path / kind).mkdir()
    small = ["--steps", "compare", "--only", "tmpfs", "save-disk", "--gigabytes", "1e6"]
    ended = run(tmp_path, *small)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    rows = ends(tmp_path)
    assert rows.keys() == {"compare/tmpfs", "compare/save-disk"}
    for row in rows.values():
        assert row["status"] == "failed" and "bytes of room" in row["why"]
