"""The library safetensors' own tests, with its functions and with ours in their place."""

import functools
import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as xml
import zipfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EMULATOR = ROOT / "tests/cuda/emulator"
#: Tests of torch and of what all frameworks share, by release.
TESTS = ["pt_comparison", "pt_model", "simple", "threadable", "multithreaded", "handle"]
RELEASES = {"0.8.0": TESTS, "0.9.0rc1": [*TESTS, "pread_backend"]}


@pytest.fixture(scope="module")
def fetched(tmp_path_factory):
    """Return a function that gives a release, the folder of its package, and that of its tests."""
    return functools.cache(lambda version: fetch(version, tmp_path_factory.mktemp("safetensors")))


def fetch(version, folder):
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    wanted = f"safetensors=={version}"
    subprocess.run([*command, "--only-binary=:all:", wanted], check=True, timeout=300)
    subprocess.run([*command, "--no-binary=safetensors", wanted], check=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    (source,) = folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "package")
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    (tests,) = folder.glob("safetensors-*/bindings/python")
    return version, folder / "package", tests


def passed(release, *options, before=()):
    """Run the tests of a release; return the names of those that pass."""
    version, package, folder = release
    report = folder / "report.xml"
    path = os.pathsep.join([str(package), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [*before, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--junitxml", report, *options]
    command += [f"tests/test_{name}.py" for name in RELEASES[version]]
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=500)
    assert report.exists(), done.stdout + done.stderr
    cases = xml.parse(report).iter("testcase")
    bad = ("failure", "error", "skipped")
    return {
        f"{case.get('classname')}.{case.get('name')}"
        for case in cases
        if not any(child.tag in bad for child in case)
    }


@pytest.mark.parametrize("version", RELEASES)
def test_every_argument_of_the_library_is_accepted_in_a_block(fetched, version):
    release = fetched(version)
    theirs = passed(release)
    ours = passed(release, "-p", "in_block")
    assert len(theirs) >= 50, theirs
    assert not theirs - ours


def test_prefetch_to_an_emulated_device(fetched):
    release = fetched("0.9.0rc1")
    built = subprocess.run(["sh", EMULATOR / "build.sh", sys.executable], check=False)
    if built.returncode == 77:
        pytest.skip("torch is of another build than the one that the emulator is for")
    assert built.returncode == 0
    emulated = ["sh", str(EMULATOR / "run.sh")]
    ours = passed(release, "-p", "in_block", "-k", "PrefetchCuda", before=emulated)
    assert len(ours) == 25, ours
