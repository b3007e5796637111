"""Whether the bytes that were loaded are those that were written."""

from __future__ import annotations

import ctypes

import torch

#: Words in a piece of a tensor; pieces have different weights.
PIECE = 1 << 17
#: The emulated CUDA has no kernels that sum.
EMULATED = hasattr(ctypes.CDLL(None), "fake_cuda_stat")

Tensors = dict[str, torch.Tensor]


def weighed(tensor: torch.Tensor) -> int:
    """Sum the 64-bit words of a tensor where it is, modulo 2^64.

    Piece ``i`` counts ``i + 1`` times: a piece of 1 MiB that lies where another belongs shows.
    Every word is read once.
    """
    words = tensor.detach().flatten().view(torch.int64)
    if EMULATED:
        words = words.cpu()
    whole = words.numel() // PIECE
    if whole == 0:
        return int(words.sum())
    pieces = words[: whole * PIECE].view(whole, PIECE).sum(1)
    weights = torch.arange(1, whole + 1, device=words.device)
    total = (pieces * weights).sum() + words[whole * PIECE :].sum() * (whole + 1)
    return int(total)


def sums(tensors: Tensors) -> dict[str, int]:
    return {name: weighed(tensor) for name, tensor in tensors.items()}
