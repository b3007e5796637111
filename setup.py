"""Builds tensorizer._C and tensorizer/lib/libtensorizer_torch.so against the target's torch."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools_rust import Binding, RustExtension, build_rust

ROOT = Path(__file__).resolve().parent
#: Each extension, and the package of the workspace that makes it.
PACKAGES = {
    "tensorizer._C": "tensorizer-python",
    "tensorizer.lib.libtensorizer_torch": "tensorizer-torch-library",
}
FIND_TORCH = (
    "import importlib.util as u; s = u.find_spec('torch'); "
    "print(s.submodule_search_locations[0] if s else '')"
)


def torch_there() -> Path | None:
    """Return the folder of the torch to build against; None if there is none.

    Under pip's build isolation this process does not see the target environment; an isolated
    interpreter (``-I``) does.
    """
    if given := os.environ.get("TENSORIZER_TORCH"):
        return Path(given)
    found = subprocess.run(
        [sys.executable, "-I", "-c", FIND_TORCH], capture_output=True, text=True, check=True
    ).stdout.strip()
    return Path(found) if found else None


def supported_minors() -> tuple[int, int]:
    """Return the oldest and the newest minor of torch 2 that we build on."""
    found = re.search(
        r"RangeInclusive<u32> = (\d+)\.\.=(\d+)", (ROOT / "csrc/build.rs").read_text()
    )
    assert found, "csrc/build.rs does not say which torch minors it supports"
    return int(found[1]), int(found[2])


def torch_minor(torch: Path) -> str:
    """Return the ``major.minor`` of a torch folder, which must be one that we build on."""
    oldest, newest = supported_minors()
    version_file = torch / "version.py"
    if not version_file.exists():
        version_file = torch / "build-version"
    found = re.search(r"(\d+)\.(\d+)", version_file.read_text()) if version_file.exists() else None
    if not found or int(found[1]) != 2 or not oldest <= int(found[2]) <= newest:
        sys.exit(
            f"tensorizer builds on torch 2.{oldest} to 2.{newest}, but {torch} is "
            f"{found[0] if found else 'of an unknown version'}: install a torch of that range."
        )
    return found[0]


class BuildRust(build_rust):
    """Makes both libraries by one build, and records which torch they were built against.

    Left alone, setuptools-rust runs Cargo once for each extension, which compiles everything twice:
    Cargo resolves the features of what both depend on anew for each package it is asked for.
    """

    artifacts: dict[str, Path] | None = None

    def run(self) -> None:
        """Build everything."""
        system = platform.libc_ver()[0] if sys.platform == "linux" else sys.platform
        if system != "glibc":
            sys.exit(f"tensorizer needs Linux with glibc, found {system or 'another C library'}.")
        if sysconfig.get_config_var("Py_GIL_DISABLED"):
            sys.exit(
                "tensorizer cannot be built for a free-threaded Python, which loads no modules of "
                f"the stable ABI, and {sys.executable} is one: use an ordinary build of Python."
            )
        if shutil.which(self.cargo) is None:
            sys.exit("tensorizer needs Rust to build: install it from https://rustup.rs.")
        torch = torch_there()
        if torch is None:
            sys.exit(
                "tensorizer is built against the torch of the environment that it is installed "
                f"into, and {sys.executable} has none: pip install torch first."
            )
        minor = torch_minor(torch)
        os.environ["TENSORIZER_TORCH"] = str(torch)
        super().run()
        build_lib = self.get_finalized_command("build").build_lib
        package = Path("python") if self.inplace else Path(build_lib)
        if not self.inplace:
            strip_symbols(package)
        oldest, newest = supported_minors()
        minors = tuple(f"2.{number}" for number in range(oldest, newest + 1))
        (package / "tensorizer/_build.py").write_text(
            f'"""Written by the build."""\n\nTORCH_MINOR = "{minor}"\n'
            f'TORCH_MINORS = {minors}\nVERSION = "{cargo_version()}"\n'
        )
        if not self.inplace and importlib.util.find_spec("shtab"):
            write_completions(package / "tensorizer_cli/completions")

    def build_extension(  # type: ignore[override]  # its pairs are of a private class
        self, ext: RustExtension
    ) -> tuple[list[tuple[str, str]], Path | None]:
        """Find one of the libraries, after building both."""
        if self.artifacts is None:
            self.artifacts = self.build_both()
        return [(ext.name, str(self.artifacts[ext.name]))], None

    def build_both(self) -> dict[str, Path]:
        """Run Cargo, and return where each extension's library is."""
        command = [self.cargo, "build", "--release", "--locked"]
        command += ["--message-format=json-render-diagnostics"]
        for package in PACKAGES.values():
            command += ["--package", package]
        if isinstance(self.target, str):
            command += ["--target", self.target]
        # For every Python from 3.10 on: none in particular is asked, and libpython is not linked.
        env = {**os.environ, "PYO3_BUILD_EXTENSION_MODULE": "1", "PYO3_NO_PYTHON": "1"}
        done = subprocess.run(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode != 0:
            sys.exit("tensorizer could not be built: see the compiler's message above.")
        libraries = {}
        for message in map(json.loads, done.stdout.splitlines()):
            if message["reason"] == "compiler-artifact" and "cdylib" in message["target"]["kind"]:
                found = (Path(name) for name in message["filenames"] if name.endswith(".so"))
                libraries[message["target"]["name"]] = next(found)
        return {name: libraries[crate.replace("-", "_")] for name, crate in PACKAGES.items()}

    def get_dylib_ext_path(self, ext: RustExtension, target_fname: str) -> str:
        """Return where a library goes: the one without Python keeps its plain name."""
        path: str = super().get_dylib_ext_path(ext, target_fname)
        if not target_fname.endswith("libtensorizer_torch"):
            return path
        plain = Path(path).with_name("libtensorizer_torch.so")
        plain.parent.mkdir(parents=True, exist_ok=True)
        return str(plain)


def write_completions(folder: Path) -> None:
    """Write the scripts by which shells complete the command.

    An editable build has none: the command makes them when they are requested.
    """
    sys.path.insert(0, str(ROOT / "python"))
    from tensorizer_cli.arguments import SHELLS
    from tensorizer_cli.local import completion_script

    folder.mkdir(parents=True, exist_ok=True)
    for shell in SHELLS:
        (folder / shell).write_text(completion_script(shell))


def strip_symbols(package: Path) -> None:
    """Leave the names of functions out of what is installed, a fifth of it.

    Messages of panics name file and line without them; linking needs the dynamic symbols, which
    stay. Here and not by Cargo, which would compile everything anew.
    """
    strip = shutil.which(os.environ.get("STRIP", "strip"))
    for library in package.glob("tensorizer/**/*.so") if strip else ():
        subprocess.run([str(strip), "--strip-unneeded", str(library)], check=True)


def ask_cargo(*command: str) -> str:
    """Return what Cargo says of the workspace."""
    manifest = ["--locked", "--manifest-path", "Cargo.toml"]
    command = ("cargo", *command, *manifest)
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit("the packages that are linked are not known: see the message of Cargo above.")
    return done.stdout


@functools.cache
def linked_packages() -> list[dict[str, Any]]:
    """Return the packages that are linked into the libraries, as Cargo describes them."""
    shown = ["--prefix=none", "--format={p}", "--edges=normal,no-proc-macro"]
    linked = set(ask_cargo("tree", "--workspace", *shown).splitlines())
    target = f"--filter-platform={platform.machine()}-unknown-linux-gnu"
    packages = json.loads(ask_cargo("metadata", "--format-version=1", target))["packages"]
    found = [one for one in packages if f"{one['name']} v{one['version']}" in linked]
    return sorted(found, key=lambda package: (package["name"], package["version"]))


def libsodium(package: dict[str, Any], name: str) -> str:
    """Return a file of the C library in a package; an empty text if it has none."""
    if package["name"] != "libsodium-sys-stable":
        return ""
    with tarfile.open(Path(package["manifest_path"]).with_name("LATEST.tar.gz")) as archive:
        file = archive.extractfile(f"libsodium-stable/{name}")
        return file.read().decode() if file else ""


def write_notices() -> None:
    """Write the licences of everything that is linked, each with the packages that it is for."""
    by_text: dict[str, list[str]] = {}
    for package in linked_packages():
        folder = Path(package["manifest_path"]).parent
        files = sorted(one for one in folder.rglob("*") if one.is_file())
        is_notice = re.compile("(?i)(un)?licen[cs]e|copying|copyright|notice").match
        texts = [
            one.read_text(errors="replace")
            for one in files
            if is_notice(str(one.relative_to(folder)))
        ]
        texts += filter(None, [libsodium(package, "LICENSE")])
        name = f"{package['name']} {package['version']} ({package['license']})"
        for text in texts or ["The package has no text of its licence."]:
            by_text.setdefault(text.strip(), []).append(name)
    parts = ["\n".join([*names, "", text, ""]) for text, names in by_text.items()]
    head = "Licences of the packages that are linked into tensorizer, libsodium among them\n"
    (ROOT / "NOTICES").write_text(f"\n{'=' * 80}\n".join([head, *parts]))


def inventory() -> dict[str, Any]:
    """Return the linked packages in the form of CycloneDX 1.6."""
    rows = [("tensorizer", cargo_version(), "MIT", "generic")]
    for package in linked_packages():
        rows.append((package["name"], package["version"], package["license"], "cargo"))
        found = re.search(r"AC_INIT\(\[libsodium\],\[(.+?)\]", libsodium(package, "configure.ac"))
        rows += [("libsodium", found[1], "ISC", "generic")] if found else []
    product, *components = [
        {
            "type": "library",
            "name": name,
            "version": version,
            "purl": f"pkg:{kind}/{name}@{version}",
            "licenses": [{"expression": licence.replace("/", " OR ")}],
        }
        for name, version, licence, kind in rows
    ]
    form = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1}
    return {**form, "metadata": {"component": product}, "components": components}


class BdistWheel(bdist_wheel):  # type: ignore[misc]  # it has no types
    """Adds the inventory of what is linked to the metadata."""

    def egg2dist(self, egginfo_path: str, distinfo_path: str) -> None:
        """Write the metadata."""
        super().egg2dist(egginfo_path, distinfo_path)
        folder = Path(distinfo_path) / "sboms"
        folder.mkdir(exist_ok=True)
        (folder / "tensorizer.cdx.json").write_text(json.dumps(inventory(), indent=1))


def cargo_version() -> str:
    """Return the version that Cargo.toml states, and the native module too."""
    found = re.search(r'^version = "(.+)"$', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    assert found, "Cargo.toml has no version"
    return found[1]


def version() -> str:
    """Return this version, followed by the torch of a wheel."""
    wheel_for = os.environ.get("TENSORIZER_WHEEL_FOR")
    return f"{cargo_version()}+torch{wheel_for}" if wheel_for else cargo_version()


def dependencies() -> list[str]:
    """Return what an installation needs: the torch it was built for; of sources, any that fits."""
    minor = os.environ.get("TENSORIZER_WHEEL_FOR")
    torch = None if minor or "sdist" in sys.argv else torch_there()
    if torch is not None:
        minor = torch_minor(torch)
    oldest, newest = supported_minors()
    ours = f"=={minor}.*" if minor else f">=2.{oldest},<2.{newest + 1}"
    return [f"torch{ours}", "numpy>=1.22,<3"]


# Read by setup(): the licences are a part of the metadata of a wheel.
if {"bdist_wheel", "dist_info"} & set(sys.argv) and shutil.which("cargo"):
    write_notices()

setup(
    version=version(),
    install_requires=dependencies(),
    cmdclass={"build_rust": BuildRust, "bdist_wheel": BdistWheel},
    rust_extensions=[
        RustExtension(
            "tensorizer._C",
            "python/Cargo.toml",
            binding=Binding.PyO3,
            py_limited_api=True,
            debug=False,
        ),
        RustExtension(
            "tensorizer.lib.libtensorizer_torch",
            "csrc/library/Cargo.toml",
            binding=Binding.NoBinding,
            debug=False,
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
    zip_safe=False,
)
