"""The reader of a member of a group: of the shares of blocks that it reads for all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..group.blocks import Piece
from ..tensors.handles import dtype_of
from .open_file import OpenFile


class BlockReader:
    """Reads a member's shares of blocks from an open file.

    Args:
        file: The file.
        verify: The hashes of tensors that are compared, if they are read as wholes.

    """

    def __init__(self, file: OpenFile, verify: str) -> None:
        self._file, self._verify = file, verify
        self._bytes = file.of_bytes()
        self._lens = file.reader.data_lens()

    def read(
        self, pieces: Sequence[Piece], memory: Sequence[torch.Tensor], *, as_bytes: bool
    ) -> None:
        """Fill memory with pieces of tensors: with boxes, or with ranges of their bytes."""
        described = self._file.reader.describe_all([piece.number for piece in pieces])
        wholes: list[tuple[torch.Tensor, int]] = []
        cuts: list[tuple[torch.Tensor, Piece]] = []
        for piece, data, (dtype, shape) in zip(pieces, memory, described, strict=True):
            sizes = [self._lens[piece.number]] if as_bytes else shape or [1]
            if piece.ranges == tuple((0, size) for size in sizes):
                wholes.append((data.view(dtype_of(dtype)).view(shape), piece.number))
            else:
                cuts.append((data, piece))
        if wholes:
            tensors, numbers = zip(*wholes, strict=True)
            self._file.fill(tensors, numbers, self._verify)
        if cuts:
            cut = self._bytes if as_bytes else self._file
            some = cut.sliced([(piece.number, piece.ranges) for _, piece in cuts])
            some.fill([data for data, _ in cuts], range(len(cuts)))
