"""Files as the commands read them: in batches, and within a memory limit.

A checkpoint of many ranks is one file of whole tensors to them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tensorizer import (
    CryptographyError,
    DecryptionParams,
    FormatError,
    HashMismatchError,
    TensorType,
)
from tensorizer._native import effective_memory_limit, local_path
from tensorizer._types import Name
from tensorizer.file.open_file import OpenFile
from tensorizer.file.progress import ProgressReporter
from tensorizer.streams.addresses import is_there
from tensorizer.tensors.batches import in_batches

from .file_description import CHECKPOINT, FileDescription
from .parts import below

#: Errors that mean that a file or a tensor is not as it was written.
DAMAGES = (HashMismatchError, CryptographyError, FormatError)
#: Stores without folders, whose addresses need no slash at their end.
_STORES = ("s3://", "gs://", "az://")
#: Bytes of tensors that are held at a time.
_BATCH_BYTES = 256 << 20


def open_file(
    file: str,
    options: argparse.Namespace,
    params: DecryptionParams | None = None,
    *,
    progress: ProgressReporter | None = None,
    names_only: bool = False,
    **more: Any,
) -> BatchedFile:
    """Open a file, or the folder of a checkpoint of many ranks, or only the names in it.

    ``more`` are options of :class:`BatchedFile`; a checkpoint takes neither hashes nor a key.
    """
    folder, limit = checkpoint_folder(file), options.memory_limit
    opened: BatchedFile
    allow_classes(options.allow_class or ())
    if folder is None:
        more |= {"num_readers": options.num_readers, "memory_limit": limit, "progress": progress}
        opened = BatchedFile(file, params, **more)
    elif "sha256" in more:
        raise ValueError(f"{folder} is a checkpoint: --sha256 and --sums are for other files")
    elif more.get("key") is not None:
        raise ValueError(f"{folder} is a checkpoint of many ranks: --key is for other files")
    elif limit is not None:
        raise ValueError(f"{folder} is a checkpoint: --memory-limit is for other files")
    else:
        opened = _CheckpointFile(folder, params, names_only=names_only, progress=progress)
    if progress is not None:
        progress.total = opened.total
    return opened


def stated_hashes(options: argparse.Namespace) -> dict[str, Any]:
    """Return the option ``sha256`` of the file that a command reads, if it is stated."""
    if options.sums is None:
        return {} if options.sha256 is None else {"sha256": options.sha256}
    by_name: dict[str, set[str]] = {}
    for line in Path(options.sums).read_text().splitlines():
        digits, _, name = line.strip().partition(" ")
        by_name.setdefault(name.strip().lstrip("*").rpartition("/")[2], set()).add(digits)
    # Of two files in different folders with one name, neither is known.
    known = {name: digits.pop() for name, digits in by_name.items() if name and len(digits) == 1}
    return {"sha256": known}


def allow_classes(names: Sequence[str]) -> None:
    """Allow classes and functions to the restricted unpickler, for the rest of the process.

    Raises:
        ImportError: A module cannot be imported.
        ValueError: It has nothing of that name.

    """
    for name in names:
        module, _, own = name.rpartition(".")
        found = getattr(importlib.import_module(module or "builtins"), own, None)
        if found is None:
            raise ValueError(f"--allow-class {name}: expected MODULE.NAME, found no such name")
        torch.serialization.add_safe_globals([(found, name)])


def checkpoint_folder(file: str) -> str | None:
    """Return the path or address of the folder of a checkpoint; None for another file."""
    path = local_path(file)
    if path is None:
        name = file.rpartition("/")[2]
        may_be_folder = name and "." not in name and file.startswith(_STORES)
        folder = f"{file}/" if may_be_folder else file
        is_folder = folder.endswith("/") and not folder.endswith("//")
        return folder if is_folder and is_there(folder + CHECKPOINT, PermissionError) else None
    return path if (Path(path) / CHECKPOINT).is_file() else None


def _boxes(shape: Sequence[int], itemsize: int, most: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the ranges in each dimension of pieces of at most so many bytes, in order."""
    row = math.prod(shape[1:]) * itemsize
    if not shape or row * shape[0] <= most:
        yield [(0, size) for size in shape]
        return
    step = max(1, most // row)
    for start in range(0, shape[0], step):
        rows = start, min(start + step, shape[0])
        rest = (
            [[(0, size) for size in shape[1:]]] if step > 1 else _boxes(shape[1:], itemsize, most)
        )
        for ends in rest:
            yield [rows, *ends]


class BatchedFile(FileDescription):
    """An open file, read in batches.

    Args:
        file: A path, an address or a descriptor.
        params: The key or passphrase. Names and shapes need none.
        key: Only the tensors below this key, without it in their names; None for all.
        options: Options of :class:`tensorizer.file.open_file.OpenFile`. The tensors of a batch
            count for its ``memory_limit``.

    """

    def __init__(
        self,
        file: str | int,
        params: DecryptionParams | None = None,
        *,
        key: str | None = None,
        **options: Any,
    ) -> None:
        self._has_key = params is not None
        # Objects of other classes are no tensors; those inside of them are refused by copies.
        options |= {"encryption": params, "key_needed": False, "skip_objects": True}
        self._opened = self.file = OpenFile(file, **options)
        #: The number in the file of each tensor.
        self._in_file: Sequence[int] = range(len(self._opened))
        try:
            self._describe(str(file))
            if key is not None:
                self.use_part(below(self.names, key, self.shown))
        except BaseException:
            self._opened.close()
            raise

    def _describe(self, shown: str) -> None:
        super().__init__(shown, self.file.reader, self._opened.heads)
        self.unreached = self.file.left_out
        self.is_local = self.file.is_local
        self.memory_limit = effective_memory_limit(self.file.memory_limit)

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def use_part(self, names: dict[int, Name]) -> None:
        """Use only some tensors, by the numbers that they have now, under other names."""
        self._in_file = [self._in_file[number] for number in names]
        self.file = self._opened.sliced([(number, None) for number in self._in_file])
        self._describe(self.shown)
        self.names = list(names.values())
        self._numbers = {name: number for number, name in enumerate(self.names)}

    def decrypt(self, params: DecryptionParams) -> None:
        """Decrypt the data that is loaded from now on."""
        self.file.decrypt(params)
        self._has_key = True

    def check_key(self, hint: str = "give its key, for example with --key-file") -> None:
        """Refuse an encrypted file without a key."""
        if self.reader.encrypted and not self._has_key:
            raise CryptographyError(
                f"{self.shown} is encrypted, and decryption was not requested: {hint}"
            )

    def refuse_unreached(self, skip_objects: bool) -> None:
        """Refuse a checkpoint with tensors that no name reaches, unless they may be left out.

        Raises:
            ValueError: There are such tensors; the message describes them.

        """
        if self.unreached and not skip_objects:
            raise ValueError(
                f"{self.shown} holds {'; '.join(self.unreached)}: --skip-objects leaves them out"
            )

    def is_meta(self, number: int) -> bool:
        """Tell whether a tensor has a shape, but no data."""
        return self.data_lens[number] == 0 < self.memory_lens[number]

    def without_data(self) -> list[Name]:
        """Return the names of the tensors that have a shape, but no data."""
        return [name for number, name in enumerate(self.names) if self.is_meta(number)]

    def check_object(self, name: str) -> None:
        """Compare an object of ``left_out`` with its hashes; files have none."""

    def load(self, numbers: list[int], verify: str) -> tuple[list[torch.Tensor], list[int]]:
        """Return tensors (on the ``meta`` device if they have no data), and module indices."""
        with_data = [n for n in numbers if not self.is_meta(n)]
        loaded = self.file.read(with_data, torch.device("cpu"), verify)
        found = dict(zip(with_data, zip(*loaded, strict=True), strict=True))
        for number in set(numbers) - found.keys():
            dtype, shape = self.types[number]
            found[number] = torch.empty(shape, dtype=getattr(torch, dtype), device="meta"), 0
        return [found[n][0] for n in numbers], [found[n][1] for n in numbers]

    def load_undamaged(self, numbers: list[int], verify: str) -> Sequence[torch.Tensor | Exception]:
        """Return tensors, and the errors in place of those that are damaged."""
        try:
            return self.load(numbers, verify)[0]
        except DAMAGES as error:
            if len(numbers) == 1:
                return [error]
            return [one for number in numbers for one in self.load_undamaged([number], verify)]

    def pieces(self, number: int, most: int, loaded: torch.Tensor | None) -> Iterator[torch.Tensor]:
        """Yield a tensor in pieces, which are read if it is not loaded.

        Pieces are so small that four of them are no more than ``most`` bytes: of two files that are
        compared, the next pieces are read while the last ones are still there.
        """
        shape = self.types[number][1]
        itemsize = self.memory_lens[number] // max(1, math.prod(shape))
        if loaded is None and self.file.strided([number]):
            # A piece would need the whole storage.
            loaded = self.load([number], "nothing")[0][0]
        for box in _boxes(shape, itemsize, max(1, most // 4)):
            if loaded is not None:
                yield loaded[tuple(slice(*ends) for ends in box)]
            else:
                part = self.file.sliced([(number, box)])
                ((_, tensor, _),) = part.load([0], torch.device("cpu"))
                yield tensor

    def load_all(self, device: torch.device, verify: bool) -> list[torch.Tensor]:
        """Return all tensors on a device, compared with their hashes if ``verify`` is true."""
        loaded = self.file.load(range(len(self)), device, "all" if verify else None)
        return [tensor for _, tensor, _ in loaded]

    def batches(self, most: int) -> Iterator[list[int]]:
        """Yield numbers of tensors of at most ``most`` bytes together, in the file's order."""
        return in_batches(range(len(self)), self.data_lens.__getitem__, most)

    def reserve_memory(self, beside: int = 0) -> tuple[int, int]:
        """Divide the memory limit; return the bytes of tensors at a time, and those beside them.

        The latter are at least ``beside``, and include half of the free bytes. They are 0 without a
        limit.

        Raises:
            ValueError: The limit is too small; the message states the minimum.

        """
        if self.memory_limit is None:
            return _BATCH_BYTES, 0
        min_memory = self.file.min_memory() + beside
        free = self.memory_limit - self.largest - min_memory
        # A limit that is too small is refused with the sum of all that is needed.
        min_memory, kept = (min_memory, 0) if free < 0 else (0, beside + free // 2 if beside else 0)
        lens = self.data_lens.__getitem__
        most = self.file.reserve_memory(
            _BATCH_BYTES, range(len(self)), lens, min_memory=min_memory, reserved=kept
        )
        return most, kept

    def reserve_memory_for_all(self, beside: int) -> int | None:
        """Hold all tensors at once, if they fit; return the rest of the limit.

        Raises:
            ValueError: They do not fit, together with ``beside`` bytes.

        """
        if self.memory_limit is None or (self.file.maps and self.is_local):
            return self.memory_limit
        self.file.reserve_memory(self.total, range(1), lambda _: self.total, min_memory=beside)
        return self.memory_limit - self.total

    def share_memory_with(self, other: BatchedFile) -> int:
        """Divide the memory limit with a file whose tensors are compared with those of this one.

        Return the bytes of tensors of each file that are held at a time.

        Raises:
            ValueError: See :meth:`reserve_memory`.

        """
        if self.memory_limit is None or other.memory_limit is None:
            return _BATCH_BYTES
        most, kept = self.reserve_memory(self.largest + other.file.min_memory())
        other.reader.limit_memory(self.memory_limit, self.memory_limit - kept + most)
        return most


class _CheckpointFile(BatchedFile):
    """The whole tensors of a checkpoint."""

    def __init__(self, folder: str, params: DecryptionParams | None, **options: Any) -> None:
        from tensorizer.distributed.whole_tensors import WholeTensors  # takes long to import

        self._stack = contextlib.ExitStack()
        self._whole = whole = self._stack.enter_context(WholeTensors(folder, params, **options))
        first = None
        if whole.files:
            file = OpenFile(whole.files[0], key_needed=False)
            first = self._stack.enter_context(file).reader
        count, described = len(whole.names), [whole.describe(name) for name in whole.names]
        lens = [math.prod(shape) * dtype.itemsize for dtype, shape in described]
        types = [(str(dtype).removeprefix("torch."), tuple(shape)) for dtype, shape in described]
        # The parts of a reader that commands use. A tensor in several files has no one position.
        reader = SimpleNamespace(
            uri=folder,
            format="checkpoint",
            version=None,
            encrypted=first is not None and first.encrypted,
            seekable=True,
            metadata=(),
            pair_id=None,
            find={name: number for number, name in enumerate(whole.names)}.get,
            names=lambda _: whole.names,
            describe_all=lambda _: types,
            kinds=lambda: [int(TensorType.STATE_DICT)] * count,
            data_lens=lambda: lens,
            memory_lens=lambda _: lens,
            offsets=lambda: [(None, None)] * count,
            files=lambda: whole.files,
            file_numbers=whole.file_numbers,
        )
        FileDescription.__init__(self, folder, reader)
        self.first, self.left_out, self.memory_limit = first, whole.objects, None
        self.is_local = local_path(folder) is not None
        # Files that need a key cannot have been opened without one.
        self._has_key = True

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def decrypt(self, params: DecryptionParams) -> None:
        """Refuse: its files were opened with their key, or are not encrypted."""
        raise ValueError(f"{self.shown} is a checkpoint: expected its key at cp")

    def load(self, numbers: list[int], verify: str) -> tuple[list[torch.Tensor], list[int]]:
        """Return tensors, and their module indices."""
        names = [self._whole.names[number] for number in numbers]
        return list(self._whole.load(names, verify)), [0] * len(names)

    def pieces(self, number: int, most: int, loaded: torch.Tensor | None) -> Iterator[torch.Tensor]:
        """Yield a tensor in pieces; it is read as a whole."""
        tensor = self.load([number], "nothing")[0][0] if loaded is None else loaded
        return super().pieces(number, most, tensor)

    def load_all(self, device: torch.device, verify: bool) -> list[torch.Tensor]:
        """Return all tensors on a device, compared with their hashes if ``verify`` is true."""
        loaded, _ = self.load([*range(len(self))], "all" if verify else "nothing")
        return [tensor.to(device) for tensor in loaded]

    def check_object(self, name: str) -> None:
        """Compare an object that is no tensor with its hashes."""
        self._whole.read_object(name, "all")
