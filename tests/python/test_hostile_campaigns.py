"""The campaigns of hostile files and servers find what is wrong, in every way that there is."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

pytestmark = pytest.mark.long
TRUST = ROOT / "tests/trust"


@pytest.fixture
def run():
    """Run a campaign whose loads may be broken; return what it says."""

    def run(campaign, *options, broken=""):
        code = f"import sys\nsys.path.insert(0, {str(TRUST)!r})\n"
        code += f"import tensorizer, hostile_ways, {campaign}\n{broken}\n{campaign}.main()"
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, options)],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        said = json.loads(done.stdout.splitlines()[-1])
        assert done.returncode == bool(said["findings"]), done.stderr
        return said

    return run


def test_every_way(run):
    said = run("hostile_files", "--inputs", 180, "--first", 850)
    assert said["findings"] == []
    assert said["inputs"] == 180 == sum(said["kinds"].values())
    assert set(said["ways"]) == WAYS
    assert min(said["ways"][name] for name in ("eager", "mapped", "operators")) > 100


#: The ways in which files are loaded.
WAYS = {
    "eager", "mapped", "one reader", "iterated", "operators", "stream", "lazy", "in order",
    "sliced", "verified", "module", "info", "ranks", "pair", "command", "command as a process",
}  # fmt: skip


#: By the kind of defect: code that breaks a load, and a part of the finding.
BROKEN = {
    "a crash": (
        "import os\ntensorizer.iterate = lambda *a: os.kill(os.getpid(), 11)",
        "the process ended by signal 11",
    ),
    "a hang": (
        "import time\nhostile_files.HANGS = 1\ntensorizer.iterate = lambda *a: time.sleep(60)",
        "nothing happened for 1 s",
    ),
    "memory": (
        "kept = []\ntensorizer.iterate = lambda *a: kept.append(b'x' * (500 << 20)) or {}",
        "a fresh process",
    ),
    "an untyped error": (
        "tensorizer.iterate = lambda *a: [][0]",
        "iterated: IndexError",
    ),
    "other data": (
        "before = tensorizer.iterate\n"
        "tensorizer.iterate = lambda *a: {n: t * 0 + 1 for n, t in before(*a)}",
        "iterated: tensor",
    ),
    "a hash that nobody compares": (
        "before = tensorizer.load\n"
        "tensorizer.load = lambda *a, verify_hash=False, **k: before(*a, **k)",
        "passed, and its hashes do not fit",
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_the_hostile_files_campaign_finds_each_planted_defect(broken, run):
    code, said = BROKEN[broken]
    # Some ways are tried with any file, others with those that load.
    files = {"other data": 60, "a hash that nobody compares": 400}.get(broken, 2)
    findings = run("hostile_files", "--inputs", files, "--only", "tensors", broken=code)["findings"]
    assert any(said in finding for finding in findings), findings


def test_wrong_data_from_a_server_are_found(run):
    # The first two loads are right: all others are compared with them.
    code = """
import itertools
before, calls = tensorizer.load, itertools.count()
def load(*arguments, **options):
    loaded = before(*arguments, **options)
    return loaded if next(calls) < 2 else {name: tensor + 1 for name, tensor in loaded.items()}
tensorizer.load = load
"""
    said = run("hostile_servers", "--inputs", 5, broken=code)
    assert any("differs" in finding for finding in said["findings"])
