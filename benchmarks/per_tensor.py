"""CPU time of a tensor: of many tiny ones in a warm local file, which cost nothing but calls.

A row for each way to load them: the median of some runs, in µs of CPU time of this process for
each tensor, opening the file included. What was loaded is compared with what was saved, outside the
time. Beside it stands the library of safetensors, where it has the same call.

    python benchmarks/per_tensor.py [number of tensors] [runs]
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import tensorizer
import tensorizer.safetensors
import torch

SHAPE = (4, 4)
Tensors = Mapping[str, torch.Tensor]


class Ways:
    """The ways to load a file, each of which returns what it has loaded.

    Args:
        folder: Where the files are made.
        count: The number of tensors.

    """

    def __init__(self, folder: Path, count: int) -> None:
        every = torch.arange(count * 16.0).reshape(count, *SHAPE)
        self.saved = {f"layer.{n}": tensor.clone() for n, tensor in enumerate(every)}
        self._path, self._other = folder / "f.tensors", folder / "f.safetensors"
        tensorizer.save(self.saved, self._path)
        tensorizer.save(self.saved, self._other)
        self._slices = dict.fromkeys(self.saved, (0, 1, 3))
        self._out = {name: torch.zeros(2, 4) for name in self.saved}
        self._module = torch.nn.Module()
        empty = (torch.nn.Parameter(torch.zeros(SHAPE)) for _ in self.saved)
        self._module.layer = torch.nn.ParameterList(empty)

    def lazy(self) -> Tensors:
        with tensorizer.TensorDeserializer(self._path, "cpu", lazy_load=True) as file:
            return {name: file[name] for name in file}

    def _opened(self, library: Any) -> Tensors:
        with library.safe_open(self._other, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def ours(self) -> Tensors:
        return self._opened(tensorizer.safetensors)

    def theirs(self) -> Tensors:
        return self._opened(safetensors)

    def module(self) -> Tensors:
        with tensorizer.TensorDeserializer(self._path, "cpu", lazy_load=True) as file:
            file.load_into_module(self._module)
        return dict(self._module.named_parameters())

    def whole(self) -> Tensors:
        return tensorizer.load(self._path, "cpu")

    def slices(self) -> Tensors:
        return tensorizer.load(self._path, "cpu", slices=self._slices)

    def slices_out(self) -> Tensors:
        return tensorizer.load(self._path, slices=self._slices, out=self._out)

    def shard(self) -> Tensors:
        return tensorizer.load(self._path, "cpu", shard=tensorizer.Shard(0, 1, 2))

    def slices_of_theirs(self) -> Tensors:
        with safetensors.safe_open(self._other, "pt") as file:
            return {name: file.get_slice(name)[1:3] for name in self.saved}


def same(found: Tensors, expected: Iterable[tuple[str, torch.Tensor]]) -> bool:
    """Tell whether tensors are all that was expected."""
    rows = list(expected)
    return len(found) == len(rows) and all(torch.equal(found[name], one) for name, one in rows)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    runs = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    with tempfile.TemporaryDirectory() as folder:
        ways = Ways(Path(folder), count)
        # The garbage collector would look at every saved tensor in each call again.
        gc.collect()
        gc.freeze()
        every = slice(None)
        rows: list[tuple[str, Callable[[], Tensors], slice]] = [
            ("TensorDeserializer(lazy_load=True)[name]", ways.lazy, every),
            ("tensorizer.safetensors.safe_open, get_tensor", ways.ours, every),
            ("safetensors.safe_open, get_tensor", ways.theirs, every),
            ("load_into_module", ways.module, every),
            ("load", ways.whole, every),
            ("load(slices=)", ways.slices, slice(1, 3)),
            ("load(slices=, out=)", ways.slices_out, slice(1, 3)),
            ("load(shard=)", ways.shard, slice(2, 4)),
            ("safetensors.safe_open, get_slice", ways.slices_of_theirs, slice(1, 3)),
        ]
        print(f"{count} tensors of {list(SHAPE)} float32, median of {runs} runs\n")
        print("| call | µs of CPU a tensor | least |\n|---|---|---|")
        for title, way, part in rows:
            times = []
            for _ in range(runs):
                begun = time.process_time()
                found = way()
                times.append((time.process_time() - begun) / count * 1e6)
                if not same(found, ((name, one[part]) for name, one in ways.saved.items())):
                    raise SystemExit(f"{title}: other bytes than were saved")
                del found
            print(f"| {title} | {statistics.median(times):.1f} | {min(times):.1f} |")


if __name__ == "__main__":
    main()
