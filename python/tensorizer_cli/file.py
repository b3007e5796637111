"""Files as the commands read them: in batches, and within a memory limit.

A checkpoint of many ranks is one file of whole tensors to them.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensorizer import (
    CryptographyError,
    DecryptionParams,
    FormatError,
    HashMismatchError,
    TensorType,
)
from tensorizer._native import Reader, effective_memory_limit, local_path
from tensorizer.file.open_file import OpenFile
from tensorizer.file.progress import ProgressReporter
from tensorizer.streams.addresses import is_address, is_there
from tensorizer.tensors.batches import in_batches

from .file_description import CHECKPOINT, FileDescription

if TYPE_CHECKING:
    from tensorizer.distributed.whole_tensors import WholeTensors

#: Errors that mean that a file or a tensor is not as it was written.
DAMAGES = (HashMismatchError, CryptographyError, FormatError)
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

    ``more`` are options of :class:`BatchedFile`, which a checkpoint does not need.
    """
    folder = local_path(file) or file
    limit = options.memory_limit
    if not _is_checkpoint(folder):
        more |= {"num_readers": options.readers, "memory_limit": limit, "progress": progress}
        opened = BatchedFile(file, params, **more)
    elif limit is not None:
        raise ValueError(f"{folder} is a checkpoint: --memory-limit is for other files")
    else:
        from tensorizer.distributed.whole_tensors import WholeTensors  # see prepare()

        whole = WholeTensors(folder, params, names_only=names_only, progress=progress)
        opened = _CheckpointFile(folder, whole)
    if progress is not None:
        progress.total = opened.total
    return opened


def prepare(file: str, mmap: bool) -> None:
    """Import the modules that open a file, so that their time is not counted as the file's.

    Raises:
        ValueError: A checkpoint was to be mapped.

    """
    if _is_checkpoint(local_path(file) or file):
        if mmap:
            raise ValueError(f"{file} is a checkpoint: --mmap is for other files")
        import tensorizer.distributed.whole_tensors  # noqa: F401


def _is_checkpoint(file: str) -> bool:
    if not is_address(file):
        return (Path(file) / CHECKPOINT).is_file()
    return file.endswith("/") and is_there(file + CHECKPOINT, PermissionError)


class BatchedFile(FileDescription):
    """An open file, read in batches.

    Args:
        file: A path, an address or a descriptor.
        params: The key or passphrase. Names and shapes need none.
        options: Options of :class:`tensorizer.file.open_file.OpenFile`. The tensors of a batch
            count for its ``memory_limit``.

    """

    def __init__(
        self, file: str | int, params: DecryptionParams | None = None, **options: Any
    ) -> None:
        self._has_key = params is not None
        self.file = OpenFile(file, encryption=params, key_needed=False, **options)
        super().__init__(str(file), self.file.reader, self.file.heads)
        self.unreached = self.file.left_out
        self.is_local = self.file.is_local
        self.memory_limit = effective_memory_limit(self.file.memory_limit)

    def __exit__(self, *_: object) -> None:
        self.file.close()

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

    def without_data(self) -> list[Any]:
        """Return the names of the tensors that have a shape, but no data."""
        return [self.reader.name(number) for number in range(len(self)) if self.is_meta(number)]

    def damaged_objects(self) -> Iterator[tuple[str, Exception]]:
        """Yield damaged objects that are no tensors: files have none."""
        return iter(())

    def load(self, numbers: list[int], verify: str) -> tuple[list[torch.Tensor], list[int]]:
        """Return tensors (on the ``meta`` device if they have no data), and module indices."""
        with_data = [n for n in numbers if not self.is_meta(n)]
        loaded = self.file.read(with_data, torch.device("cpu"), verify)
        found = dict(zip(with_data, zip(*loaded, strict=True), strict=True))
        for number in set(numbers) - found.keys():
            dtype, shape, _ = self.reader.describe(number)
            found[number] = torch.empty(shape, dtype=getattr(torch, dtype), device="meta"), 0
        return [found[n][0] for n in numbers], [found[n][1] for n in numbers]

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

    def __init__(self, folder: str, whole: WholeTensors) -> None:
        self._whole = whole
        self._opened = contextlib.ExitStack()
        self._opened.enter_context(whole)
        FileDescription.__init__(self, folder, _CheckpointReader(whole, folder))
        self.left_out, self.is_local = whole.objects, not is_address(folder)
        self.memory_limit = None
        # Files that need a key cannot have been opened without one.
        self._has_key = True

    @cached_property
    def first(self) -> Reader | None:
        """The reader of the first of its files."""
        if not self._whole.files:
            return None
        file = OpenFile(self._whole.files[0], key_needed=False)
        return self._opened.enter_context(file).reader

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def decrypt(self, params: DecryptionParams) -> None:
        """Refuse: its files were opened with their key, or are not encrypted."""
        raise ValueError(f"{self.shown} is a checkpoint: expected its key at cp")

    def load(self, numbers: list[int], verify: str) -> tuple[list[torch.Tensor], list[int]]:
        """Return tensors, and their module indices."""
        names = [self._whole.names[number] for number in numbers]
        return list(self._whole.load(names, verify)), [0] * len(names)

    def load_all(self, device: torch.device, verify: bool) -> list[torch.Tensor]:
        """Return all tensors on a device, compared with their hashes if ``verify`` is true."""
        loaded, _ = self.load([*range(len(self))], "all" if verify else "nothing")
        return [tensor.to(device) for tensor in loaded]

    def damaged_objects(self) -> Iterator[tuple[str, Exception]]:
        """Yield objects that are no tensors and differ from what was saved."""
        for name in self.left_out:
            try:
                self._whole.read_object(name, "all")
            except DAMAGES as error:
                yield name, error


class _CheckpointReader:
    """The interface of a file's reader, for a checkpoint."""

    seekable, pair_id, format, version = True, None, "checkpoint", None
    metadata: tuple[tuple[str, str], ...] = ()

    def __init__(self, whole: WholeTensors, folder: str) -> None:
        self._whole, self.uri = whole, folder
        self.encrypted = whole.is_encrypted()
        self._numbers = {name: number for number, name in enumerate(whole.names)}
        self.name, self.find = whole.names.__getitem__, self._numbers.get
        self.file_numbers = whole.file_numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def files(self) -> list[str]:
        return self._whole.files

    def kinds(self) -> list[int]:
        return [int(TensorType.STATE_DICT)] * len(self)

    def data_lens(self) -> list[int]:
        return [self._whole.nbytes(name) for name in self._whole.names]

    def memory_lens(self, numbers: range) -> list[int]:
        return self.data_lens()

    def offsets(self) -> list[tuple[None, None]]:
        """Return no positions: parts of a tensor lie in several files."""
        return [(None, None)] * len(self)

    def describe(self, number: int) -> tuple[str, list[int], bool]:
        dtype, shape = self._whole.describe(self._whole.names[number])
        return str(dtype).removeprefix("torch."), list(shape), False
