"""Has old releases of the package read files of this one that hold metadata behind their index.

Usage: old_releases.py [RELEASE ...]. Each is installed without its dependencies, which it finds in
the environment of the newest one (see the Makefile), and reads every file in a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import tensorizer
import torch
from tensorizer import EncryptionParams
from tensorizer.file.file_writer import FileWriter

RELEASES = ["1.1.0", "2.0.0", "2.5.0", "2.7.0", "2.8.0", "2.9.0", "2.10.1", "2.11.0", "2.12.1"]
#: The first that reads encrypted files.
ENCRYPTED = "2.7.0"
OLD_PYTHON = os.environ.get(
    "TENSORIZER_OLD_PYTHON", str(Path(__file__).resolve().parents[1] / ".venv-old/bin/python")
)
KEY = bytes(range(32))
#: The least index, which files of few tensors have.
MIN_INDEX = 256 << 10

READ = """
import hashlib, json, sys, tensorizer, torch
folder, *paths = sys.argv[1:]
assert tensorizer.__file__.startswith(folder), tensorizer.__file__
found = {}
for path in paths:
    options = {}
    if "encrypted" in path:
        options["encryption"] = tensorizer.DecryptionParams.from_key(bytes(range(32)))
    file = tensorizer.TensorDeserializer(path, device="cpu", **options)
    found[path] = {}
    for name, t in file.items():
        data = t.detach().numpy().tobytes()
        found[path][name] = [str(t.dtype), list(t.shape), hashlib.sha256(data).hexdigest()]
json.dump(found, sys.stdout)
"""


def index_of(path: Path) -> bytes:
    """Return the index block of a file."""
    data = path.read_bytes()
    return data[73 : 73 + int.from_bytes(data[65:73], "little")]


def few() -> dict[str, torch.Tensor]:
    """Return some tensors that the oldest release knows."""
    return {
        "weight": torch.randn(30, 7),
        "bias": torch.arange(5),
        "large": torch.randn(800, 1000),
        "scalar": torch.tensor(2.5),
    }


def make(folder: Path) -> dict[Path, dict[str, torch.Tensor]]:
    """Write files of every layout that metadata may have."""
    files: dict[Path, dict[str, torch.Tensor]] = {}
    some = {"format": "pt", "licence": "ü" * 100}
    many = {f"layer.{number}.weight": torch.full((3,), float(number)) for number in range(5000)}
    for alignment in (1, 64):
        for kind, tensors in (("one", {"a": torch.arange(9.0)}), ("few", few()), ("many", many)):
            path = folder / f"{kind}-{alignment}.tensors"
            tensorizer.save(tensors, path, alignment=alignment, metadata=some)
            files[path] = tensors
    long = folder / "long.tensors"
    tensorizer.save(few(), long, metadata={"long": "x" * 3_000_000})
    files[long] = tensorizer.load(long, "cpu")
    files.update(full(folder))
    pair = folder / "pair.tensors"
    with FileWriter(pair, metadata=some) as writer:
        writer.set_pair_id(None)
        writer.write_leaves(list(files[long]), list(files[long].values()))
    files[pair] = files[long]
    for manifest in (False, True):
        path = folder / f"encrypted-{manifest}.tensors"
        params = EncryptionParams(KEY, manifest=manifest)
        tensorizer.save(files[long], path, encryption=params, metadata=some, clear_metadata=True)
        files[path] = files[long]
    return files


def full(folder: Path) -> dict[Path, dict[str, torch.Tensor]]:
    """Write files whose metadata begin where their entries end, and one that needs a byte more."""
    # Shorter entries would leave room for later ones before the metadata.
    tensors = few() | {f"layer.{number}.weight": torch.ones(2) for number in range(2500)}
    empty = folder / "empty.tensors"
    tensorizer.save(tensors, empty)
    entries = len(index_of(empty).rstrip(b"\0"))
    assert MIN_INDEX // 2 < entries < MIN_INDEX - 4096, entries
    # The last bytes of an entry are its length's, of which the highest are zero.
    found = {}
    for entries_len in range(entries, entries + 8):
        path = folder / f"full-{entries_len}.tensors"
        # Two lengths of four bytes, a name of one, and 16 bytes at the end.
        value = "x" * (MIN_INDEX - entries_len - 8 - 1 - 16)
        tensorizer.save(tensors, path, metadata={"x": value})
        assert tensorizer.info(path).metadata == {"x": value}
        found[path] = tensors
    lengths = {len(index_of(path)) for path in found}
    assert lengths == {MIN_INDEX, MIN_INDEX + 4096}, lengths
    return found


def described(tensors: dict[str, torch.Tensor]) -> dict[str, list[object]]:
    """Return what an old release is to find."""
    return {
        name: [str(t.dtype), list(t.shape), hashlib.sha256(t.numpy().tobytes()).hexdigest()]
        for name, t in tensors.items()
    }


def check(release: str, folder: Path, files: dict[Path, dict[str, torch.Tensor]]) -> None:
    """Install a release, and have it read files."""
    target = folder / release
    install = [OLD_PYTHON, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target]
    subprocess.run([*install, f"tensorizer=={release}"], check=True)
    encrypts = tuple(map(int, release.split("."))) >= tuple(map(int, ENCRYPTED.split(".")))
    paths = [path for path in files if encrypts or "encrypted" not in path.name]
    done = subprocess.run(
        [OLD_PYTHON, "-c", READ, target, *paths],
        env={**os.environ, "PYTHONPATH": str(target)},
        cwd=folder,
        stdout=subprocess.PIPE,
        check=True,
    )
    found = json.loads(done.stdout)
    for path in paths:
        assert found[str(path)] == described(files[path]), (release, path.name)
    print(f"{release} reads {len(paths)} files with metadata")


def main() -> None:
    """Write the files, and have each release read them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = make(folder)
        assert all(tensorizer.info(path).metadata for path in files)
        for release in sys.argv[1:] or RELEASES:
            check(release, folder, files)


if __name__ == "__main__":
    main()
