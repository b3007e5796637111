"""A plugin of pytest: tests run inside a block of ``tensorizer_safetensors``."""

import gc

import pytest
import tensorizer.safetensors
import torch

_block = tensorizer.safetensors.tensorizer_safetensors()
_block.__enter__()


@pytest.fixture(autouse=True)
def _empty_cache():
    """Empty torch's cache after each test: some tests compare the free memory of the device."""
    yield
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
