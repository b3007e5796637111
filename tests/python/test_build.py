"""What the build says when something is missing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.extended


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
    """What Cargo runs before it compiles the core, told of each target as Cargo tells it."""
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
    """`cargo build` without setup.py, for those who build the C++ library by hand.

    The build script that built what is tested here is run as Cargo runs it.
    """
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    scripts = target.glob("release/build/tensorizer-torch-*/build-script-build")
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
    # What makes Cargo fail, and show the sentence.
    assert "cargo::error=tensorizer builds on torch 2.10 to 2.15, found 2.9.0" in done.stdout
