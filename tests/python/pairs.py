"""An object with storages of many kinds, saved and loaded inside the blocks of torch_compat."""

import torch
from conftest import assert_same
from tensorizer.torch_compat import tensorizer_loading, tensorizer_saving


def state():
    """Views that share a storage, a parameter, small and unusual dtypes, and plain values."""
    base = torch.arange(24, dtype=torch.float32)
    return {
        "base": base,
        "view": base[4:10],
        "transposed": base.view(4, 6).t(),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "eight": torch.ones(5).to(torch.float8_e4m3fn),
        "wide": torch.arange(3).to(torch.uint64),
        "bits": torch.ones(6, dtype=torch.uint8).view(torch.bits8),
        "complex": torch.tensor([1 + 2j]).conj(),
        "empty": torch.empty(0, 3),
        "meta": torch.empty(3, device="meta"),
        "list": [torch.arange(3), {"deep": torch.tensor(True)}],
        "plain": (1, "two", 3.0, None),
    }


def assert_state(found, expected=None):
    expected = state() if expected is None else expected
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name == "meta":
            assert found[name].device.type == "meta"
        elif isinstance(value, torch.Tensor):
            assert type(found[name]) is type(value), name
            assert found[name].stride() == value.stride(), name
            assert found[name].requires_grad == value.requires_grad, name
            assert_same(found[name], value)
    assert found["view"].untyped_storage().data_ptr() == found["base"].untyped_storage().data_ptr()
    assert_same(found["list"][0], expected["list"][0])
    assert_same(found["list"][1]["deep"], expected["list"][1]["deep"])
    assert found["plain"] == expected["plain"]


def save(obj, path, **kwargs):
    with tensorizer_saving(**kwargs):
        torch.save(obj, path)


def load(path, block=None, **kwargs):
    with tensorizer_loading(**(block or {})):
        return torch.load(path, **kwargs)
