"""Compares what is in a wheel and in a source archive with the tree: contents.py WHEEL SDIST."""

import json
import os
import re
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

# Licences, and the inventory for scanners.
(info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}


def member(name: str) -> str:
    """Return a text in the wheel's metadata."""
    return zipfile.ZipFile(wheel).read(f"{info}/{name}").decode()


sbom = json.loads(member("sboms/tensorizer.cdx.json"))
linked = {one["name"]: one for one in sbom["components"]}
locked = dict(re.findall(r'name = "(.+)"\nversion = "(.+)"', (ROOT / "Cargo.lock").read_text()))
assert sbom["specVersion"] == "1.6" and len(linked) > 100, len(linked)
for name in ("aws-sdk-s3", "hyper", "libsodium-sys-stable", "memmap2", "ring", "rustls"):
    assert linked[name]["version"] == locked[name] and linked[name]["licenses"], name
assert re.fullmatch(r"pkg:generic/libsodium@1\.\d+\.\d+", linked["libsodium"]["purl"])
assert not {"serde_derive", "cxx-build", "tensorizer"} & linked.keys(), "what is not linked"
notices = member("licenses/NOTICES")
for text in ("Frank Denis", "Brian Smith", "Apache License", "libsodium-sys-stable", "\nring "):
    assert text in notices, f"the notices lack {text!r}"
assert "MIT License" in member("licenses/LICENSE")
about = member("METADATA").split("\n\n")[0].splitlines()
fields = {
    name: [line for line in about if line.startswith(f"{name}: ")]
    for name in (
        "Project-URL",
        "Requires-Python",
        "Classifier",
        "Provides-Extra",
        "Requires-Dist",
    )
}
url = os.environ.get("URL")
if url:
    assert not re.search(r"\]\((?!https:|#)", member("METADATA")), (
        "a link of the README leads nowhere"
    )
assert fields["Project-URL"] == ([f"Project-URL: Homepage, {url}"] if url else [])
assert fields["Requires-Python"] == ["Requires-Python: >=3.10"]
assert {f"Classifier: Programming Language :: Python :: 3.{n}" for n in range(10, 15)} <= {
    *fields["Classifier"]
}
assert sorted(fields["Provides-Extra"]) == ["Provides-Extra: protobuf", "Provides-Extra: redis"]
assert any(re.match(r"Requires-Dist: torch[=>]=?", line) for line in fields["Requires-Dist"])

unpacked = sum(one.file_size for one in zipfile.ZipFile(wheel).infolist())
assert unpacked <= 50_000_000, f"{wheel} takes {unpacked:,} bytes: were its libraries stripped?"

# Every file that Cargo reads. The archive's own folder is taken off.
with tarfile.open(sdist) as archive:
    found = {name.split("/", 1)[-1] for name in archive.getnames()}
assert not {name for name in found if name.endswith(".so")}, "what was compiled is no source"
wanted = {"Cargo.toml", "Cargo.lock", "csrc/Cargo.toml", "python/Cargo.toml"}
for folder, kind in (("src", "*.rs"), ("csrc", "*.*"), ("python", "*.rs")):
    wanted |= {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob(kind)}
assert wanted <= found, f"the source archive lacks {wanted - found}"
