"""Folders of wheels: collected where there is a network, unpacked where there is none.

python benchmarks/gpu/run.py --collect DIR
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rows import Rows

ROOT = Path(__file__).resolve().parents[2]
#: Limit for the sources and wheels together: they have to be sent to a machine.
MOST_BYTES = 64 << 20
#: The compared libraries.
PEERS = [
    line.replace("[s3]", "")
    for line in ROOT.joinpath("benchmarks/peers.txt").read_text().splitlines()
    if not line.startswith("#")
]
#: They, the tests' needs, and what these need beside torch and numpy; the most wanted first.
PACKAGES = (
    "pytest", "pluggy", "iniconfig", "packaging", "pygments", *PEERS, "humanize", "typer", "click",
    "shellingham", "rich", "markdown-it-py", "mdurl", "typing-extensions", "annotated-doc",
)  # fmt: skip
#: Wheels are for machines with this Python, and with this minor of glibc or a newer one.
PYTHON, GLIBC = "3.12", 39


def tree_bytes() -> int:
    """Return the size of the files that git knows or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    paths = {ROOT / name.decode() for name in listed.split(b"\0") if name}
    return sum(path.lstat().st_size for path in paths if path.is_symlink() or path.is_file())


def download(package: str, folder: Path) -> Path | str:
    """Download a wheel of a package, which may be "name==version"; return it, or why not."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(5, GLIBC + 1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--python-version", PYTHON]
    command += ["--implementation", "cp", "--dest", str(folder)]
    command += [word for name in platforms for word in ("--platform", name)]
    done = subprocess.run([*command, package], capture_output=True, text=True, check=False)
    found = list(folder.glob("*.whl"))
    return found[0] if done.returncode == 0 and found else done.stderr.strip()[-300:]


def ours() -> Path | str:
    """Return the newest wheel of the package in dist/, or why there is none."""
    found = sorted((ROOT / "dist").glob("tensorizer-*.whl"), key=lambda path: path.stat().st_mtime)
    fitting = [path for path in found if "torch2.11" in path.name]
    return fitting[-1] if fitting else "dist/ has none for torch 2.11: make wheels TORCHES=2.11"


def collect(folder: Path) -> bool:
    """Fill a folder with our wheel and those of PACKAGES; return whether it has all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    tree = tree_bytes()
    room, complete = MOST_BYTES - tree, True
    print(f"the sources: {tree / 2**20:.1f} MiB")
    for package in ("tensorizer", *PACKAGES):
        with tempfile.TemporaryDirectory() as temporary:
            found = ours() if package == "tensorizer" else download(package, Path(temporary))
            if isinstance(found, Path) and found.stat().st_size > room:
                found = f"{found.name} has no room in {MOST_BYTES >> 20} MiB"
            if isinstance(found, str):
                complete = False
                print(f"left out: {package}: {found}")
                continue
            shutil.copy(found, folder)
            room -= found.stat().st_size
            print(f"{found.stat().st_size / 2**20:6.2f} MiB  {found.name}")
    used = (MOST_BYTES - room) / 2**20
    print(f"sources and wheels: {used:.1f} of {MOST_BYTES >> 20} MiB")
    return complete


def unpack_one(wheel: Path, site: Path) -> None:
    """Unpack a wheel as pip would, without its scripts."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(dir=site.parent) as name:
        archive.extractall(name)
        folder = Path(name)
        if not list(folder.glob("*.dist-info/METADATA")):
            raise ValueError("it has no METADATA")
        for data in folder.glob("*.data"):
            for kind in ("purelib", "platlib"):
                if (data / kind).is_dir():
                    shutil.copytree(data / kind, folder, dirs_exist_ok=True)
            shutil.rmtree(data)
        shutil.copytree(folder, site, dirs_exist_ok=True)


def unpack(folder: Path, site: Path, rows: Rows) -> None:
    """Unpack all wheels of a folder anew, with a row for each. What is broken is left out."""
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    found = sorted(folder.glob("*.whl"))
    if not found:
        sys.exit(f"{folder} has no wheels: make it with --collect {folder}")
    for wheel in found:
        row: dict[str, object] = {"step": "wheels", "wheel": wheel.name, "status": "ok"}
        try:
            row["sha256"] = hashlib.sha256(wheel.read_bytes()).hexdigest()
            unpack_one(wheel, site)
        except (OSError, ValueError, zipfile.BadZipFile, zipfile.LargeZipFile) as error:
            row |= {"status": "failed", "why": f"{type(error).__name__}: {error}"}
            print(f"{wheel.name}: {row['why']}", flush=True)
        key = f"wheels/{wheel.name}"
        before = rows.ends.get(key)
        # Another wheel of the same name, or a better one, replaces the row.
        if before is None or (before.get("sha256"), before["status"]) != (
            row.get("sha256"),
            row["status"],
        ):
            rows.end(key, row)
