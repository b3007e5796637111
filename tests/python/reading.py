"""The file that the tests of reading read."""

import torch
from conftest import assert_same

TENSORS = {
    "a": torch.arange(10.0),
    "b.weight": torch.randn(600, 500),
    "c": torch.arange(7, dtype=torch.int64),
    "d": torch.ones(3, dtype=torch.bfloat16),
    "e": torch.tensor([True, False]),
    "f": torch.randn(2, dtype=torch.complex64),
}
NAMES = list(TENSORS)


def check(deserializer):
    assert list(deserializer) == NAMES
    for name, tensor in TENSORS.items():
        assert_same(deserializer[name].detach(), tensor)
