"""Errors of the build name what is missing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

pytestmark = pytest.mark.long

#: The minor of torch in this environment.
MINOR = ".".join(torch.__version__.split(".")[:2])


def build(tmp_path, **env):
    """Run the build's own checks on a copy of the sources, in a clean environment."""
    source = tmp_path / "source"
    source.mkdir()
    for name in (
        *("setup.py", "pyproject.toml", "Cargo.toml", "Cargo.lock", "build.rs"),
        *("README.md", "LICENSE"),
    ):
        shutil.copy(ROOT / name, source)
    for name in ("csrc", "src", "python"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.so"))
    clean = {"HOME": os.environ["HOME"], "PATH": os.environ["PATH"], **env}
    return subprocess.run(
        [sys.executable, "setup.py", "build_rust"],
        cwd=source,
        env=clean,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def fake_torch(tmp_path, version):
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "version.py").write_text(f"__version__ = '{version}'\n")
    return str(folder)


@pytest.mark.parametrize("version", ["2.9.1", "2.16.0+cpu", "1.13.0", "3.0.0"])
def test_an_unsupported_torch(version, tmp_path):
    done = build(tmp_path, TENSORIZER_TORCH=fake_torch(tmp_path, version))
    assert done.returncode == 1
    assert "tensorizer builds on torch 2.10 to 2.15, but" in done.stderr
    assert version.rsplit(".", 1)[0] in done.stderr


def test_no_rust(tmp_path):
    done = build(tmp_path, TENSORIZER_TORCH=fake_torch(tmp_path, "2.11.0"), CARGO="no-such-cargo")
    assert done.returncode == 1
    assert "tensorizer needs Rust to build: install it from https://rustup.rs" in done.stderr


@pytest.mark.parametrize(
    ("system", "libc", "target"),
    [("macos", "", "aarch64-apple-darwin"), ("linux", "musl", "x86_64-unknown-linux-musl")],
)
def test_another_system(system, libc, target, tmp_path):
    """The core's build script fails for other systems; Cargo describes the target by variables."""
    if shutil.which("rustc") is None:
        assert not os.environ.get("CI"), "in CI the extension is built from the sources"
        pytest.skip("there is no Rust here")
    script = tmp_path / "script"
    subprocess.run(["rustc", "--edition=2024", ROOT / "build.rs", "-o", script], check=True)

    def run(system, libc, target):
        told = {"CARGO_CFG_TARGET_OS": system, "CARGO_CFG_TARGET_ENV": libc, "TARGET": target}
        return subprocess.run([script], env={**os.environ, **told}, capture_output=True, text=True)

    assert (
        f"cargo::error=tensorizer needs Linux with glibc, found {target}: "
        in run(system, libc, target).stdout
    )
    assert "error" not in run("linux", "gnu", "aarch64-unknown-linux-gnu").stdout


@pytest.mark.parametrize(
    ("pretend", "found"),
    [
        ("import sys; sys.platform = 'darwin'", "darwin"),
        ("import platform; platform.libc_ver = lambda: ('', '')", "another C library"),
    ],
)
def test_another_system_says_so_before_anything_is_looked_for(pretend, found):
    code = (
        f"import runpy, sys, setuptools_rust; {pretend}; sys.argv = ['setup.py', 'build_rust'];"
        "runpy.run_path('setup.py', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PATH": "", "HOME": os.environ["HOME"]},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert f"tensorizer needs Linux with glibc, found {found}." in done.stderr, done.stderr


def test_no_torch(tmp_path):
    """The interpreter that the build asks is one without packages."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    code = (
        "import sys, runpy; sys.path[:0] = sys.argv[2].split(':');"
        "sys.argv = ['setup.py', 'build_rust']; runpy.run_path('setup.py', run_name='__main__')"
    )
    here = ":".join(path for path in sys.path if "site-packages" in path)
    done = subprocess.run(
        [venv / "bin/python", "-c", code, "setup.py", here],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "has none: pip install torch first." in done.stderr, done.stderr


def test_the_extension_alone_says_so_too(tmp_path):
    """`cargo build` without setup.py, as for the C++ library alone, gives the same error.

    The build script of the library that is tested here is run as Cargo runs it.
    """
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    # A hash of 16 digits follows the name, and not that of tensorizer-torch-library.
    scripts = target.glob(f"release/build/tensorizer-torch-{'?' * 16}/build-script-build")
    script = max(scripts, key=lambda path: path.stat().st_mtime, default=None)
    if script is None:
        assert not os.environ.get("CI"), "in CI the extension is built from the sources"
        pytest.skip("the extension was not built here")
    env = {
        **os.environ,
        "TENSORIZER_TORCH": fake_torch(tmp_path, "2.9.0"),
        "OUT_DIR": str(tmp_path),
    }
    done = subprocess.run([script], cwd=ROOT / "csrc", env=env, capture_output=True, text=True)
    # This line makes Cargo fail, and print the error.
    assert "cargo::error=tensorizer builds on torch 2.10 to 2.15, found 2.9.0" in done.stdout


@pytest.mark.parametrize(
    ("environment", "wanted", "command"),
    [
        ({}, f"=={MINOR}.*", "egg_info"),
        ({"TENSORIZER_WHEEL_FOR": "2.13"}, "==2.13.*", "egg_info"),
        ({}, ">=2.10,<2.16", "sdist"),
    ],
)
def test_a_wheel_requires_the_torch_release_that_it_was_built_for(environment, wanted, command):
    code = (
        "import sys, setuptools;"
        "setuptools.setup = lambda **given: print(given['install_requires'][0]);"
        f"sys.argv = ['setup.py', {command!r}]; import runpy; runpy.run_path('setup.py')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == f"torch{wanted}", done.stderr


# Tools that a machine lacks


def tools(tmp_path, *missing, **fakes):
    """Return a PATH with the tools of a build, but for some, and with stand-ins for others."""
    folder = tmp_path / "bin"
    folder.mkdir()
    needed = ("sh", "sed", "head", "sort", "cut", "awk", "df", "make", "find", "python3", "cargo")
    for name in (*needed, "c++"):
        found = shutil.which(name)
        if name not in missing and name not in fakes and found is not None:
            (folder / name).symlink_to(found)
    for name, script in fakes.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return {"PATH": str(folder), "HOME": os.environ["HOME"]}


NO_VENV = """case "$*" in *ensurepip*) exit 1 ;; esac"""
LACKS = {
    "python": (["python3"], {}, "Python is missing"),
    "an old Python": ([], {"python3": "exit 1"}, "is older than 3.10"),
    "venv": ([], {"python3": NO_VENV}, "apt install python3-venv"),
    "cargo": (["cargo"], {}, "cargo is missing: install Rust by curl"),
    "an old cargo": ([], {"cargo": "echo cargo 1.63.0"}, "cargo 1.63.0 is older than 1."),
    "a compiler": (["c++"], {}, "apt install g++"),
    "C++20": ([], {"c++": "echo old; exit 1"}, "does not know C++20"),
    "the disk": ([], {"df": "printf 'h\\n/ 1 1 6000 1 /\\n'"}, "less than 7 GB are free"),
}


@pytest.mark.parametrize("lack", LACKS)
def test_the_first_command_ends_with_what_is_missing(tmp_path, lack):
    missing, fakes, sentence = LACKS[lack]
    sources = tmp_path / "sources"
    (sources / "tests/packaging").mkdir(parents=True)
    for name in ("Makefile", "Cargo.toml", "tests/packaging/needs.sh"):
        shutil.copy(ROOT / name, sources / name)
    env = tools(tmp_path, *missing, **fakes)
    make = shutil.which("make")
    done = subprocess.run([make, "demo"], cwd=sources, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert sentence in done.stderr.strip().splitlines()[-1], done.stderr
    assert not (sources / ".venv").exists()


def test_nothing_is_missing_where_all_is_there(tmp_path):
    env = tools(tmp_path)
    command = ["sh", "tests/packaging/needs.sh", "python3"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")
