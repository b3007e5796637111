"""Files as the commands read them: in batches, and within a memory limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from tensorizer import CryptographyError, DecryptionParams
from tensorizer._native import effective_memory_limit
from tensorizer._types import Head
from tensorizer.file.open_file import OpenFile
from tensorizer.file.placement import in_batches

from .file_description import FileDescription

#: Bytes of tensors that are held at a time.
_BATCH_BYTES = 256 << 20


class BatchedFile(FileDescription):
    """An open file, read in batches.

    Args:
        file: A path, an address or a descriptor.
        params: The key or passphrase. Names and shapes need none.
        readers: Threads that read at once; None for as many as help.
        mmap: Use tensors of a local file in place, where all of them are needed at once.
        heads: An empty sequence to keep the servers' headers of the files, as ``heads``.
        memory_limit: The most bytes in flight, the tensors of a batch among them.

    """

    def __init__(
        self,
        file: str | int,
        params: DecryptionParams | None = None,
        readers: int | None = None,
        mmap: bool = False,
        *,
        heads: Sequence[Head] | None = None,
        memory_limit: int | None = None,
    ) -> None:
        self._has_key = params is not None
        self._file = OpenFile(
            file,
            encryption=params,
            num_readers=readers,
            mmap=mmap,
            key_needed=False,
            heads=heads,
            memory_limit=memory_limit,
        )
        super().__init__(str(file), self._file.reader, self._file.heads)
        self.unreached = self._file.left_out
        self.memory_limit = effective_memory_limit(memory_limit)

    def __enter__(self) -> BatchedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def decrypt(self, params: DecryptionParams) -> None:
        """Decrypt the data that is loaded from now on."""
        self._file.decrypt(params)
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

    def without_data(self) -> list[int]:
        """Return the numbers of the tensors that have a shape, but no data."""
        return [number for number in range(len(self)) if self.is_meta(number)]

    def damaged_objects(self) -> Iterator[tuple[str, Exception]]:
        """Yield damaged objects that are no tensors: files have none."""
        return iter(())

    def batches(self, most: int = _BATCH_BYTES) -> Iterator[list[int]]:
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
        largest = self.largest
        min_memory = self.min_memory + beside
        free = self.memory_limit - largest - min_memory
        # A limit that is too small is refused with the sum of all that is needed.
        min_memory, kept = (min_memory, 0) if free < 0 else (0, beside + free // 2 if beside else 0)
        lens = self.data_lens.__getitem__
        most = self._file.reserve_memory(
            _BATCH_BYTES, range(len(self)), lens, min_memory=min_memory, reserved=kept
        )
        return most, kept

    def reserve_memory_for_all(self, beside: int) -> int | None:
        """Hold all tensors at once, if they fit; return the rest of the limit.

        Raises:
            ValueError: They do not fit, together with ``beside`` bytes.

        """
        if self.memory_limit is None or (self._file.maps and self._file.is_local):
            limit: int | None = self.memory_limit
            return limit
        self._file.reserve_memory(self.total, range(1), lambda _: self.total, min_memory=beside)
        return self.memory_limit - self.total

    def share_memory_with(self, other: BatchedFile) -> int:
        """Divide the memory limit with a file whose tensors are compared with those of this one.

        Return the bytes of tensors of each file that are held at a time.

        Raises:
            ValueError: See :meth:`reserve_memory`.

        """
        if self.memory_limit is None or other.memory_limit is None:
            return _BATCH_BYTES
        most, kept = self.reserve_memory(self.largest + other.min_memory)
        other.reader.limit_memory(self.memory_limit, self.memory_limit - kept + most)
        return most

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor."""
        return max(self.data_lens, default=0)

    @property
    def min_memory(self) -> int:
        """The smallest memory limit with which a tensor can be read."""
        return self._file.min_memory()

    def size(self, numbers: list[int]) -> int:
        """Return the number of bytes of data of some tensors."""
        return sum(self.data_lens[number] for number in numbers)

    def load(self, numbers: list[int], verify: str) -> tuple[list[torch.Tensor], list[int]]:
        """Return tensors (on the ``meta`` device if they have no data), and module indices."""
        with_data = [n for n in numbers if not self.is_meta(n)]
        loaded = self._file.read(with_data, torch.device("cpu"), verify)
        found = dict(zip(with_data, zip(*loaded, strict=True), strict=True))
        tensors = [found[n][0] if n in found else self._meta(n) for n in numbers]
        return tensors, [found[n][1] if n in found else 0 for n in numbers]

    @property
    def is_local(self) -> bool:
        """True for a file of this machine."""
        return self._file.is_local

    def load_all(self, device: torch.device, verify: bool) -> list[torch.Tensor]:
        """Return all tensors on a device, compared with their hashes if ``verify`` is true."""
        numbers = range(len(self))
        loaded = self._file.load(numbers, device, "all" if verify else None)
        return [tensor for _, tensor, _ in loaded]

    def is_meta(self, number: int) -> bool:
        """Tell whether a tensor has a shape, but no data."""
        return self.data_lens[number] == 0 < self.memory_lens[number]

    def _meta(self, number: int) -> torch.Tensor:
        dtype, shape, _ = self.reader.describe(number)
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
