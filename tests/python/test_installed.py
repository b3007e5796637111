"""An import beside the old package, or half of another release, warns or fails with the reason."""

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import tensorizer
from conftest import ROOT
from processes import run_python

PLATFORM = sysconfig.get_platform().replace("-", "_")
NAME = f"tensorizer-{tensorizer.__version__}+torch2.11-cp310-abi3-{PLATFORM}.whl"
SHOW = "import tensorizer; print(tensorizer.__version__, hasattr(tensorizer, 'load'))"


def wheel(folder, name, files):
    """Make a wheel of files, given as contents by name."""
    distribution, version = name.split("-")[:2]
    tag = name.removesuffix(".whl").split("-", 2)[2]
    info = f"{distribution}-{version}.dist-info"
    files = dict(files)
    head = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    files[f"{info}/METADATA"] = head.encode()
    pure = "true" if tag.endswith("any") else "false"
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nRoot-Is-Purelib: {pure}\nTag: {tag}\n".encode()
    record = ""
    for path, content in sorted(files.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(content)}\n"
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    with zipfile.ZipFile(folder / name, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return folder / name


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Return a wheel of this package, and one like the old package's; both have the same names."""
    folder = tmp_path_factory.mktemp("wheels")
    package = Path(tensorizer.__file__).parent
    ours = {
        f"tensorizer/{path.relative_to(package)}": path.read_bytes()
        for path in package.rglob("*")
        if path.suffix in (".py", ".so") and path.name != "libtensorizer_torch.so"
    }
    old = {
        "tensorizer/__init__.py": b"from . import serialization\nfrom ._version import __version__",
        "tensorizer/_version.py": b'__version__ = "2.10.1"\n',
        **{
            f"tensorizer/{name}.py": b"from . import _crypt\n"
            for name in ("serialization", "stream_io", "torch_compat", "utils")
        },
        "tensorizer/_crypt/__init__.py": b"",
    }
    return (
        wheel(folder, NAME, ours),
        wheel(folder, "tensorizer-2.10.1-py3-none-any.whl", old),
    )


@pytest.fixture
def site(tmp_path):
    """Return a folder of packages before that of this environment."""
    (tmp_path / "site").mkdir()
    return tmp_path / "site"


def install(site, wheel):
    """Install a wheel over what is there, as ``pip install --ignore-installed`` does."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)


def run(site, code=SHOW):
    return run_python(code, env=os.environ | {"PYTHONPATH": str(site)}, cwd=site)


# Another package's installer: four fresh processes of pip, and three of torch.
@pytest.mark.long
def test_pip_replaces_one_by_the_other(wheels, tmp_path):
    """`pip install vllm[tensorizer]` replaces ours, and docs/how-to/vllm.md undoes that."""
    ours, old = wheels
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site,) = (tmp_path / "venv/lib").glob("python3*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", tmp_path / "venv/bin/python", "--quiet"]
    install = [*pip, "--disable-pip-version-check", "install", "--no-deps", "--no-index"]
    right = f"{tensorizer.__version__} True\n"
    for wheel, found in ((ours, right), (old, "2.10.1 False\n"), (ours, right)):
        subprocess.run([*install, wheel], check=True)
        done = run(site)
        assert (done.stdout, done.stderr) == (found, "")
        assert (site / "tensorizer/_C.abi3.so").exists() == (wheel == ours)
    subprocess.run([*install, "--ignore-installed", old], check=True)
    # Uninstalling one removes files of the other, as the warning says; the rest is its advice.
    for _ in range(2):
        subprocess.run([*pip, "uninstall", "--yes", "tensorizer"], check=True)
    shutil.rmtree(site / "tensorizer", ignore_errors=True)
    subprocess.run([*install, ours], check=True)
    done = run(site)
    assert (done.stdout, done.stderr) == (right, "")


def test_ours_over_the_old_package(wheels, site):
    ours, old = wheels
    install(site, old)
    install(site, ours)
    done = run(site)
    assert done.stdout == f"{tensorizer.__version__} True\n", done.stderr
    assert (
        "<string>:1: RuntimeWarning: files of tensorizer 2.10.1 are mixed with those" in done.stderr
    )
    assert "run `pip uninstall -y tensorizer` until" in done.stderr
    # A wheel of this package that was given another name.
    (about,) = site.glob(f"tensorizer-{tensorizer.__version__}*/METADATA")
    about.write_text(about.read_text().replace("Name: tensorizer", "Name: acme"))
    assert "run `pip uninstall -y acme tensorizer` until" in run(site).stderr


def test_the_old_package_over_ours(wheels, site):
    ours, old = wheels
    install(site, ours)
    install(site, old)
    # Nothing of ours runs.
    assert run(site).stdout == "2.10.1 False\n"
    assert (site / "tensorizer/_C.abi3.so").exists()
    # One file of ours came back, as from an archive of half the package.
    with zipfile.ZipFile(ours) as archive:
        archive.extract("tensorizer/__init__.py", site)
    done = run(site)
    assert "ImportError: tensorizer 2.10.1 was installed over this package, without" in done.stderr
    assert "has replaced serialization.py, stream_io.py, torch_compat.py, utils.py: run" in (
        done.stderr
    )


HALF = """
import sys, tensorizer._build
tensorizer._build.VERSION = "3.10.0"
del sys.modules["tensorizer._native"]
import tensorizer._native
"""


def test_half_of_another_release():
    """The native module of this release with the Python code of another."""
    done = run_python(HALF)
    assert f"tensorizer 3.10.0 was installed over {tensorizer.__version__}, or the" in done.stderr


FREE_THREADED = """
import sys, sysconfig
sysconfig.get_config_vars()["Py_GIL_DISABLED"] = 1
sys.argv = ["setup.py", "build_rust"]
import runpy
runpy.run_path("setup.py", run_name="__main__")
"""

SUFFIXES = """
import importlib.machinery, sys
importlib.machinery.EXTENSION_SUFFIXES.remove(".abi3.so")
for name in [name for name in sys.modules if name.startswith("tensorizer")]:
    del sys.modules[name]
import tensorizer
"""


def test_free_threaded_python():
    """An ordinary Python stands in for a free-threaded one."""
    done = subprocess.run(
        [sys.executable, "-c", FREE_THREADED], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "tensorizer cannot be built for a free-threaded Python" in done.stderr
    done = run_python(SUFFIXES)
    assert "ImportError: tensorizer needs an ordinary build of Python for Linux" in done.stderr
