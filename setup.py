"""Builds tensorizer._C and tensorizer/lib/libtensorizer_torch.so against the target's torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools_rust import Binding, RustExtension, build_rust

ROOT = Path(__file__).resolve().parent
FIND_TORCH = (
    "import importlib.util as u; s = u.find_spec('torch'); "
    "print(s.submodule_search_locations[0] if s else '')"
)


def find_torch() -> Path:
    """Return the folder of the torch to build against.

    Under pip's build isolation this process does not see the target environment; an isolated
    interpreter (``-I``) does.
    """
    if given := os.environ.get("TENSORIZER_TORCH"):
        return Path(given)
    found = subprocess.run(
        [sys.executable, "-I", "-c", FIND_TORCH], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not found:
        sys.exit(
            "tensorizer is built against the torch of the environment that it is installed into, "
            f"and {sys.executable} has none: pip install torch first."
        )
    return Path(found)


def torch_minor(torch: Path) -> str:
    """Return the ``major.minor`` of a torch folder, which must be one that we build on."""
    supported = re.search(
        r"RangeInclusive<u32> = (\d+)\.\.=(\d+)", (ROOT / "csrc/build.rs").read_text()
    )
    version_file = torch / "version.py"
    if not version_file.exists():
        version_file = torch / "build-version"
    found = re.search(r"(\d+)\.(\d+)", version_file.read_text()) if version_file.exists() else None
    assert supported, "csrc/build.rs does not say which torch minors it supports"
    oldest, newest = int(supported[1]), int(supported[2])
    if not found or int(found[1]) != 2 or not oldest <= int(found[2]) <= newest:
        sys.exit(
            f"tensorizer builds on torch 2.{oldest} to 2.{newest}, but {torch} is "
            f"{found[0] if found else 'of an unknown version'}: install a torch of that range."
        )
    return found[0]


class BuildRust(build_rust):
    """Finds torch, names the plain C++ library, and records what was built against."""

    def run(self) -> None:
        """Build everything."""
        if shutil.which(os.environ.get("CARGO", "cargo")) is None:
            sys.exit("tensorizer needs Rust to build: install it from https://rustup.rs.")
        torch = find_torch()
        minor = torch_minor(torch)
        os.environ["TENSORIZER_TORCH"] = str(torch)
        super().run()
        build_lib = self.get_finalized_command("build").build_lib
        package = Path("python") if self.inplace else Path(build_lib)
        (package / "tensorizer/_build.py").write_text(
            f'"""Written by the build."""\n\nTORCH_MINOR = "{minor}"\n'
        )

    def get_dylib_ext_path(self, ext: RustExtension, target_fname: str) -> str:
        """Return where a library goes."""
        path: str = super().get_dylib_ext_path(ext, target_fname)
        if not target_fname.endswith("libtensorizer_torch"):
            return path
        plain = Path(path).with_name("libtensorizer_torch.so")
        plain.parent.mkdir(parents=True, exist_ok=True)
        return str(plain)


def version() -> str:
    """Return the version that Cargo.toml states."""
    found = re.search(r'^version = "(.+)"$', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    assert found, "Cargo.toml has no version"
    return found[1]


setup(
    version=version(),
    cmdclass={"build_rust": BuildRust},
    rust_extensions=[
        RustExtension(
            "tensorizer._C",
            binding=Binding.PyO3,
            features=["python"],
            args=["--no-default-features"],
            py_limited_api=True,
            debug=False,
        ),
        RustExtension(
            "tensorizer.lib.libtensorizer_torch",
            binding=Binding.NoBinding,
            features=["torch", "cuda", "redis", "s3"],
            args=["--no-default-features"],
            debug=False,
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
    zip_safe=False,
)
