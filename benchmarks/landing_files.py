"""The files that landing.py loads, and the emulated CUDA that it runs on."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EMULATOR = ROOT / "tests/cuda/emulator"
FORMATS = ("safetensors", "tensors")


@dataclass(frozen=True)
class Model:
    """Tensors of one file: the first one, and others of one shape, of a dtype of 2 or 4 bytes."""

    name: str
    first: tuple[int, ...]
    others: tuple[int, ...]
    count: int
    item: int

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for number in range(self.count):
            yield f"t.{number:06}", self.others if number else self.first

    @property
    def first_bytes(self) -> int:
        return self.item * _product(self.first)

    @property
    def total_bytes(self) -> int:
        return self.first_bytes + (self.count - 1) * self.item * _product(self.others)

    def path(self, ending: str) -> Path:
        return FOLDER / f"{self.name}.{ending}"


def _product(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


FOLDER = Path(tempfile.gettempdir()) / "tensorizer-landing"
LARGE = Model("large", (32_000, 2048), (4096, 5684), 45, item=2)
SMALL = tuple(Model(f"small-{count}", (256,), (256,), count, item=4) for count in (20_000, 100_000))
#: Files of which all bytes are compared: a large one of an eighth of the size, and a small one.
CHECKED_LARGE = Model("checked-large", (4000, 2048), (512, 5684), 45, item=2)
CHECKED_SMALL = Model("checked-small", (256,), (256,), 3000, item=4)
MODELS = (LARGE, *SMALL, CHECKED_LARGE, CHECKED_SMALL)


def model_of(name: str) -> Model:
    return next(model for model in MODELS if model.name == name)


def prepare(models: tuple[Model, ...] = MODELS) -> None:
    """Write the files that are not there yet, and read all into the page cache."""
    import tensorizer
    import torch
    from safetensors.torch import save_file

    FOLDER.mkdir(parents=True, exist_ok=True)
    for model in models:
        paths = [model.path(ending) for ending in FORMATS]
        if not all(path.exists() for path in paths):
            print(f"writing {model.name} to {FOLDER}", file=sys.stderr)
            torch.manual_seed(0)
            bits = {2: torch.int16, 4: torch.int32}[model.item]
            dtype = {2: torch.bfloat16, 4: torch.float32}[model.item]
            tensors = {
                name: torch.randint(-(2**15), 2**15, shape, dtype=bits).view(dtype)
                for name, shape in model.shapes()
            }
            for path, save in zip(paths, (save_file, tensorizer.save), strict=True):
                part = path.with_name(f"part-{path.name}")
                save(tensors, part)
                part.rename(path)
        for path in paths:
            with path.open("rb") as file:
                while file.read(64 << 20):
                    pass


#: The emulated device without delays and checks; copies take the bus's time, and none of the host.
SETTINGS = {
    "FAKE_CUDA_POISON": "0",
    "FAKE_CUDA_CHECK_SOURCE": "0",
    "FAKE_CUDA_FREE_COPIES": "1",
    "FAKE_CUDA_DELAY_US": "0",
    "FAKE_CUDA_COPY_LATENCY_NS": "5000",
    "FAKE_CUDA_CALL_NS": "1000",
    "FAKE_CUDA_MEM_MB": "6000",
}


def build() -> Path:
    """Build the emulated CUDA; return its folder."""
    command = ["sh", str(EMULATOR / "build.sh"), sys.executable]
    if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode != 0:
        raise SystemExit("the emulated CUDA is not built")
    return Path(os.environ.get("FAKE_CUDA_LIB", ROOT / ".make/fake-cuda")).resolve()


def build_runtime(emulator: Path) -> Path:
    """Build an empty libcudart, to be preloaded for safetensors; return its path.

    safetensors takes CUDA's functions from the loaded library of this name. Torch loads NVIDIA's,
    which is never called, since the emulator is before it, and does not work without a driver. The
    empty one is loaded instead, and a look-up in it goes on in the emulator, which it depends on.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    library = FOLDER / "libcudart.so.13"
    command = [os.environ.get("CXX", "c++"), "-shared", "-fPIC", "-o", str(library)]
    command += ["-x", "c++", "/dev/null", "-x", "none", f"-Wl,-soname,{library.name}"]
    command += ["-Wl,--no-as-needed", str(emulator / "libcuda.so.1"), f"-Wl,-rpath,{emulator}"]
    subprocess.run(command, check=True)
    return library
