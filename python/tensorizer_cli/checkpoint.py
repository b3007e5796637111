"""Checkpoints of many ranks, which the commands see as one file of whole tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensorizer import DecryptionParams, TensorType
from tensorizer._native import Reader, local_path
from tensorizer._types import Head, VerifyHash
from tensorizer.file.open_file import OpenFile
from tensorizer.streams.addresses import is_address, is_there

from .compare import DAMAGES
from .file import BatchedFile
from .file_description import CHECKPOINT
from .output import without_password

if TYPE_CHECKING:
    from tensorizer.distributed.whole_tensors import WholeTensors


def open_file(
    file: str | int,
    params: DecryptionParams | None = None,
    readers: int | None = None,
    mmap: bool = False,
    memory_limit: int | None = None,
    *,
    names_only: bool = False,
    heads: Sequence[Head] | None = None,
) -> BatchedFile:
    """Open a file, or the folder of a checkpoint of many ranks, or only the names in it."""
    if isinstance(file, str):
        folder = local_path(file) or file
        if _is_checkpoint(folder):
            if memory_limit is not None:
                raise ValueError(f"{folder} is a checkpoint: --memory-limit is for other files")
            return _CheckpointFile(folder, params, names_only)
    return BatchedFile(file, params, readers, mmap, memory_limit=memory_limit, heads=heads)


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
    return file.endswith("/") and is_there(file + CHECKPOINT)


class _CheckpointFile(BatchedFile):
    """The whole tensors of a checkpoint."""

    def __init__(self, folder: str, params: DecryptionParams | None, names_only: bool) -> None:
        self.shown = without_password(folder)
        self._opened = folder, params
        self._whole = self._open(names_only=names_only)
        #: The same checkpoint with hashes compared, once that was requested.
        self._verifying: WholeTensors | None = None
        self.reader: Any = _CheckpointReader(self._whole, folder)
        self.kinds = [int(TensorType.STATE_DICT)] * len(self._whole.names)
        self.data_lens = [self._whole.nbytes(name) for name in self._whole.names]
        self.memory_lens = self.data_lens
        self.total = sum(self.data_lens)
        self.metadata = {}
        self.left_out = self._whole.objects
        self.unreached = []
        self.memory_limit = None
        self.heads = []
        self._first: OpenFile | None = None

    def _open(self, *, verify_hash: VerifyHash = False, names_only: bool = False) -> WholeTensors:
        from tensorizer.distributed.whole_tensors import WholeTensors  # see above

        return WholeTensors(*self._opened, verify_hash=verify_hash, names_only=names_only)

    @property
    def first(self) -> Reader | None:
        """The reader of the first of its files."""
        if self._first is None and self._whole.files:
            self._first = OpenFile(self._whole.files[0], key_needed=False)
        return None if self._first is None else self._first.reader

    def __exit__(self, *_: object) -> None:
        if self._first is not None:
            self._first.close()
        for whole in filter(None, (self._whole, self._verifying)):
            whole.__exit__()

    def decrypt(self, params: DecryptionParams) -> None:
        """Refuse: its files were opened with their key, or are not encrypted."""
        raise ValueError(f"{self.shown} is a checkpoint: expected its key at cp")

    def check_key(self, hint: str = "") -> None:
        """Do nothing: files that need a key cannot have been opened without one."""

    def load(self, numbers: list[int], verify: str) -> tuple[list[torch.Tensor], list[int]]:
        """Return tensors, and their module indices."""
        # Only one of the two has open files at a time; they are opened again when they are needed.
        if verify != "nothing":
            self._whole.__exit__()
            which: VerifyHash = True if verify == "all" else "crc32"
            whole = self._verifying = self._verifying or self._open(verify_hash=which)
        else:
            whole = self._whole
            if self._verifying is not None:
                self._verifying.__exit__()
        names = [whole.names[number] for number in numbers]
        return list(whole.load(names)), [0] * len(names)

    @property
    def is_local(self) -> bool:
        """True for a folder of this machine."""
        return not is_address(self._opened[0])

    def load_all(self, device: torch.device, verify: bool) -> list[torch.Tensor]:
        """Return all tensors on a device, compared with their hashes if ``verify`` is true."""
        loaded, _ = self.load([*range(len(self))], "all" if verify else "nothing")
        return [tensor.to(device) for tensor in loaded]

    def damaged_objects(self) -> Iterator[tuple[str, Exception]]:
        """Yield objects that are no tensors and differ from what was saved."""
        self.load([], "all")
        for name in self.left_out:
            try:
                if self._verifying is not None:
                    self._verifying.read_object(name)
            except DAMAGES as error:
                yield name, error


class _CheckpointReader:
    """The interface of a file's reader, for a checkpoint."""

    seekable, pair_id, format = True, None, "checkpoint"
    metadata: tuple[tuple[str, str], ...] = ()
    version = None

    def __init__(self, whole: WholeTensors, folder: str) -> None:
        self._whole, self.uri = whole, folder
        self.encrypted = whole.is_encrypted()
        self._numbers = {name: number for number, name in enumerate(whole.names)}

    def __len__(self) -> int:
        return len(self._numbers)

    def name(self, number: int) -> str:
        return self._whole.names[number]

    def files(self) -> list[str]:
        return self._whole.files

    def file_numbers(self) -> list[int]:
        """Return the number of the file of each part of each tensor."""
        return self._whole.file_numbers()

    def offsets(self) -> list[tuple[None, None]]:
        """Return no positions: parts of a tensor lie in several files."""
        return [(None, None)] * len(self)

    def find(self, name: Any) -> int | None:
        return self._numbers.get(name)

    def describe(self, number: int) -> tuple[str, list[int], bool]:
        dtype, shape = self._whole.describe(self._whole.names[number])
        return str(dtype).removeprefix("torch."), list(shape), False
