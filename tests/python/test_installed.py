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
    for path, content in files.items():
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
    """Return an environment that sees the packages of this one, and where its own go."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site,) = (tmp_path / "venv/lib").glob("python3*/site-packages")
    # Behind those of the environment itself.
    beside = [path for path in sys.path if path.endswith("site-packages")]
    (site / "beside.pth").write_text("\n".join(beside) + "\n")
    return site


def pip(site, *args):
    command = [sys.executable, "-m", "pip", "--python", site.parents[2] / "bin/python"]
    quiet = ["--quiet", "--disable-pip-version-check", *map(str, args)]
    done = subprocess.run([*command, *quiet], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def install(site, *args):
    pip(site, "install", "--no-deps", "--no-index", *args)


def run(site, code=SHOW):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [site.parents[2] / "bin/python", "-c", code],
        cwd=site.parents[2],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_pip_replaces_one_by_the_other(wheels, site):
    """`pip install vllm[tensorizer]` replaces ours, and docs/how-to/vllm.md undoes that."""
    ours, old = wheels
    install(site, ours)
    done = run(site)
    assert (done.stdout, done.stderr) == (f"{tensorizer.__version__} True\n", "")
    install(site, old)
    assert run(site).stdout == "2.10.1 False\n"
    assert not (site / "tensorizer/_C.abi3.so").exists()
    install(site, ours)
    done = run(site)
    assert (done.stdout, done.stderr) == (f"{tensorizer.__version__} True\n", "")


def test_ours_over_the_old_package(wheels, site):
    ours, old = wheels
    install(site, old)
    install(site, "--ignore-installed", ours)
    done = run(site)
    assert done.stdout == f"{tensorizer.__version__} True\n", done.stderr
    assert (
        "<string>:1: RuntimeWarning: files of tensorizer 2.10.1 are mixed with those" in done.stderr
    )
    # Uninstalling one removes files of the other, as the warning says; the rest is its advice.
    pip(site, "uninstall", "--yes", "tensorizer")
    assert "True" not in run(site).stdout
    pip(site, "uninstall", "--yes", "tensorizer")
    shutil.rmtree(site / "tensorizer", ignore_errors=True)
    install(site, ours)
    done = run(site)
    assert (done.stdout, done.stderr) == (f"{tensorizer.__version__} True\n", "")


def test_the_old_package_over_ours(wheels, site):
    ours, old = wheels
    install(site, ours)
    install(site, "--ignore-installed", old)
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


def test_half_of_another_release(wheels, site):
    ours, _ = wheels
    install(site, ours)
    build = site / "tensorizer/_build.py"
    build.write_text(build.read_text().replace(tensorizer.__version__, "3.10.0"))
    done = run(site)
    assert f"tensorizer 3.10.0 was installed over {tensorizer.__version__}, or the" in done.stderr


FREE_THREADED = """
import sys, sysconfig
sysconfig.get_config_vars()["Py_GIL_DISABLED"] = 1
sys.argv = ["setup.py", "build_rust"]
import runpy
runpy.run_path("setup.py", run_name="__main__")
"""

SUFFIXES = """
import importlib.machinery
importlib.machinery.EXTENSION_SUFFIXES.remove(".abi3.so")
import tensorizer
"""


def test_free_threaded_python(wheels, site):
    """An ordinary Python stands in for a free-threaded one."""
    done = subprocess.run(
        [sys.executable, "-c", FREE_THREADED], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "tensorizer cannot be built for a free-threaded Python" in done.stderr
    install(site, wheels[0])
    done = run(site, SUFFIXES)
    assert "ImportError: tensorizer needs an ordinary build of Python for Linux" in done.stderr
