"""A case of the benchmarks, its engines, and their input."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Tensors = Mapping[str, torch.Tensor]
Pairs = Iterator[tuple[str, torch.Tensor]]
#: Number of files of a sharded checkpoint, and the file that lists them.
SHARDS, INDEX = 4, "model.safetensors.index.json"


@dataclass(frozen=True)
class Model:
    """Tensors of float16, all of one size; the bytes come from a seed."""

    name: str
    count: int
    total: int

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return tensors of random bits, 3 % of them NaN or infinite; the same on every call."""
        each = self.total // self.count // 64 * 32
        flat = torch.empty(self.count * each, dtype=torch.float16)
        words = flat.view(torch.int64)
        length = min(words.numel(), 1 << 22)
        generator = torch.Generator().manual_seed(17)
        block = torch.randint(-(2**63), 2**63 - 1, (length,), generator=generator)
        for number, part in enumerate(words.split(length)):
            # Parts differ, so that a part in a wrong place changes the sums.
            torch.add(block[: part.numel()], number * 0x9E37_79B9, out=part)
        return {f"layers.{i}.weight": flat[i * each :][:each].view(32, -1)
                for i in range(self.count)}  # fmt: skip


@dataclass(frozen=True)
class Given:
    """The input of an engine.

    Attributes:
        folder: The folder of the model's files.
        base: The folder, or the address at which a server has it.
        model: The model.
        form: The form of the files that the engine reads.
        host: Host and port of the case's server; empty if it needs none.
        out: A folder of the engine's own, for what it saves.
        target: ``out``, or an address of the engine's own.
        quick: True for toy sizes.
        ready: The result of the engine's ``before``.

    """

    folder: Path
    base: str
    model: Model
    form: str
    host: str
    out: Path
    target: str
    quick: bool
    ready: Any = None

    @property
    def file(self) -> Path:
        """The local file of the model in the engine's form; for shards their folder."""
        return self.folder / f"{self.model.name}.{self.form}"

    @property
    def where(self) -> str:
        """The path or address that tensorizer takes; of shards their folder or index."""
        found = f"{self.base}/{self.file.name}"
        remote = "://" in self.base and self.form in ("shards", "each")
        return f"{found}/{INDEX}" if remote else found

    @property
    def files(self) -> list[str]:
        """The paths or addresses of all files."""
        found = f"{self.base}/{self.file.name}"
        if self.form not in ("shards", "llama"):
            return [found]
        return [f"{found}/{name}" for name in shard_names()]


def shard_names() -> list[str]:
    """Return the names of the files of a sharded checkpoint."""
    return [f"model-{n:05}-of-{SHARDS:05}.safetensors" for n in range(1, SHARDS + 1)]


@dataclass
class Measured:
    """The result of an engine that measures itself."""

    seconds: float
    bytes: int = 0
    cpu: float | None = None
    #: Counts and other numbers by name.
    figures: dict[str, float] = field(default_factory=dict)
    verified: bool = True
    #: Memory beyond the tensors.
    extra: int = 0


class AbsentError(Exception):
    """The engine cannot run here: a package, a program or a device is missing."""


def program(name: str) -> str:
    """Return the path of a program.

    Raises:
        AbsentError: It is not installed.

    """
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    if found is None:
        raise AbsentError(f"{name} is not installed")
    return found


@dataclass(frozen=True)
class Engine:
    """One way to load or save; a row of a case.

    Attributes:
        name: Names of this package's engines begin with "tensorizer".
        run: The measured call. It returns tensors, an iterator of pairs, None after a save, or
            :class:`Measured`.
        form: The form of the files that it reads; see ``files.py``.
        imports: Modules that are imported before the clock starts.
        baseline: True for a few lines that do a part of the work.
        before: Runs in the same process before the clock starts; its result is ``given.ready``.
        make: Runs once before all rounds, in a process of its own.
        saved: For savers: loads what was saved, to be compared.
        touch: False if the clock stops when the call returns.
        idle: Seconds to wait before the clock starts.
        site: The packages that come first, as "old"; see ``process.py``.
        env: Environment variables, set before anything is imported.
        part: The part of the model that it loads, if not the case's; see ``files.py``.

    """

    name: str
    run: Callable[[Given], Any]
    form: str = "tensors"
    imports: tuple[str, ...] = ("tensorizer",)
    baseline: bool = False
    before: Callable[[Given], Any] | None = None
    make: Callable[[Given], Any] | None = None
    saved: Callable[[Given], Tensors] | None = None
    touch: bool = True
    idle: float = 0
    site: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    part: str = ""


@dataclass(frozen=True)
class Case:
    """One comparison: engines that do the same work with the same bytes.

    Attributes:
        name: Subject and case, as ``tensors/http``.
        title: What is measured.
        engines: The first one is this package's; the report compares the others with it.
        model: The name of the model; see ``files.py``.
        part: The part of the model that is loaded; see ``files.py``.
        cold: True if the files are dropped from the page cache before each run.
        server: The kind of the server that is started; see ``servers.py``.
        scheme: "http" or "s3" if engines read the model's files from the server.
        device: True if it needs a CUDA device.
        memory: True if the files are in memory instead of on a disk.
        rounds: The most rounds.
        quick: The names of the engines at toy size; all if it is empty, and no run if it is None.

    """

    name: str
    title: str
    engines: tuple[Engine, ...]
    model: str = "large"
    part: str = "all"
    cold: bool = False
    server: str = ""
    scheme: str = ""
    device: bool = False
    memory: bool = False
    rounds: int = 99
    quick: tuple[str, ...] | None = ()


def is_ours(name: str) -> bool:
    """True if an engine is this package, and not its predecessor."""
    return name.startswith("tensorizer") and not name.startswith("tensorizer 2")
