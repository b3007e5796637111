"""Shared code of the tests of the stand-in for a CUDA device."""

import os

import torch
from tensorizer import _C


def make():
    tensors = {f"small.{i}": torch.randn(17 * i % 501 + 1, 3) for i in range(60)}
    tensors["large"] = torch.randn(3_000_000)
    tensors["empty"] = torch.empty(0, 4)
    tensors["meta"] = torch.empty(5, 3, device="meta", dtype=torch.int16)
    tensors["scalar"] = torch.tensor(3.5)
    tensors["bytes"] = torch.arange(7, dtype=torch.uint8)
    return tensors


def same(loaded, expected):
    assert set(loaded) == set(expected)
    for name, tensor in expected.items():
        wanted = torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor
        assert loaded[name].dtype == wanted.dtype, name
        assert torch.equal(loaded[name], wanted), name


def on_cpu(function, *args, **kwargs):
    """Call without the stand-in."""
    seed = os.environ.pop("TENSORIZER_FAKE_DEVICE")
    _C.forget_environment()
    try:
        return function(*args, **kwargs)
    finally:
        os.environ["TENSORIZER_FAKE_DEVICE"] = seed
        _C.forget_environment()
