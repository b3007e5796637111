"""A small load and a small save, for compute-sanitizer: sanitized.py FOLDER."""

import sys
from pathlib import Path

import tensorizer
import torch


def main(folder: Path) -> None:
    tensors = {f"t.{i}": torch.randn(37 * i + 1) for i in range(50)}
    tensors["large"] = torch.randn(5_000_000)
    path = folder / "sanitized.tensors"
    try:
        tensorizer.save(tensors, path)
        loaded = tensorizer.load(path, "cuda", verify_hash=True)
        torch.cuda.synchronize()
        assert all(torch.equal(loaded[name].cpu(), tensor) for name, tensor in tensors.items())
        tensorizer.save(loaded, path)
        again = tensorizer.load(path, "cpu", verify_hash=True)
        assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    finally:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
