"""Checksums by which loaded bytes are compared with those that were written."""

from __future__ import annotations

import ctypes

import torch

#: Words that are weighed at once: 64 MiB.
PIECE = 1 << 23
#: The emulated CUDA has no kernels that sum.
EMULATED = hasattr(ctypes.CDLL(None), "fake_cuda_stat")

Tensors = dict[str, torch.Tensor]


def weighed(tensor: torch.Tensor) -> str:
    """Return dtype, shape, and a sum of the 64-bit words of a tensor, taken where it is.

    Word number n has the weight 2n + 1, modulo 2^64, so that words in a wrong place change the sum,
    unless they are equal to those that belong there.
    """
    words = tensor.detach().flatten().view(torch.int64)
    if EMULATED:
        words = words.cpu()
    total = 0
    for number, piece in enumerate(words.split(PIECE)):
        first = 2 * number * PIECE + 1
        weights = torch.arange(first, first + 2 * len(piece), 2, device=words.device)
        total += int((piece * weights).sum())
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} {total % 2**64:x}"


def sums(tensors: Tensors) -> dict[str, str]:
    return {name: weighed(tensor) for name, tensor in tensors.items()}


def blank(size: int, device: str) -> None:
    """Have free memory of a device hold other bytes than those that were loaded before."""
    torch.full((size // 8,), -1, dtype=torch.int64, device=device)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
