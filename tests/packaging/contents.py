"""Compares what is in a wheel and in a source archive with the tree: contents.py WHEEL SDIST."""

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent for path in (ROOT / "python").glob("tensorizer*/__init__.py"))
wheel, sdist = sys.argv[1:]

# Every module of every subpackage, the stubs, the header, the CMake package and the texts of helps.
kinds = ("*.py", "*.pyi", "py.typed", "*.h", "*.cmake", "*.txt")
wanted = {
    str(path.relative_to(ROOT / "python"))
    for package in PACKAGES
    for kind in kinds
    for path in package.rglob(kind)
}
wanted |= {"tensorizer/_C.abi3.so", "tensorizer/lib/libtensorizer_torch.so", "tensorizer/_build.py"}
wanted |= {f"tensorizer_cli/completions/{shell}" for shell in ("bash", "zsh", "fish")}
names = [name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")]
found = {name for name in names if name.startswith(tuple(f"{path.name}/" for path in PACKAGES))}
assert found == wanted, f"missing {wanted - found}, too many {found - wanted}"

unpacked = sum(one.file_size for one in zipfile.ZipFile(wheel).infolist())
assert unpacked <= 45_000_000, f"{wheel} takes {unpacked:,} bytes: were its libraries stripped?"

# Every file that Cargo reads. The archive's own folder is taken off.
with tarfile.open(sdist) as archive:
    found = {name.split("/", 1)[-1] for name in archive.getnames()}
wanted = {"Cargo.toml", "Cargo.lock", "csrc/Cargo.toml", "python/Cargo.toml"}
for folder, kind in (("src", "*.rs"), ("csrc", "*.*"), ("python", "*.rs")):
    wanted |= {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob(kind)}
assert wanted <= found, f"the source archive lacks {wanted - found}"
