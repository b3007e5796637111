"""The library safetensors, files for it and for ours, and comparisons of both."""

import types
import warnings

import safetensors.torch
import torch
from conftest import assert_same

theirs = types.SimpleNamespace(
    **{
        name: getattr(safetensors.torch, name)
        for name in (
            *("load", "load_file", "load_model", "safe_open", "save", "save_file", "save_model"),
            *("storage_ptr", "storage_size", "_find_shared_tensors", "_remove_duplicate_names"),
        )
    },
    SafetensorError=safetensors.SafetensorError,
)
DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.float16),
    *(torch.bfloat16, torch.int32, torch.uint32, torch.float32, torch.complex64, torch.float64),
    *(torch.int64, torch.uint64, torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e8m0fnu),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float4_e2m1fn_x2),
]
ODD_NAMES = ["", " ", 'a "quoted" \\ name', "ü\n\t\x7f", "\x1e[1]", '\x1e["a"]', "a.b/c", "💾", "0"]


def make():
    torch.manual_seed(3)
    tensors = {
        f"{9 - number}.{dtype}": torch.randint(
            0, 2 if dtype is torch.bool else 255, (3, 16), dtype=torch.uint8
        ).view(dtype)
        for number, dtype in enumerate(DTYPES)
    }
    tensors["scalar"] = torch.tensor(1.5)
    tensors["empty"] = torch.zeros(0, 4)
    tensors["cube"] = torch.arange(4 * 5 * 6).reshape(4, 5, 6)
    return {**tensors, **{name: torch.randn(3) for name in ODD_NAMES}}


#: A file below and one above the size from which files are mapped.
FILES = {"small": make(), "mapped": {**make(), "large": torch.randn(900, 1001)}}


def result_of(call):
    """Return what a call returns, or the class of what it raises and its text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call()
        except Exception as error:
            return type(error), str(error)


def assert_like(left, right):
    """Two results agree, or two errors are of one class."""
    if isinstance(left, torch.Tensor):
        assert_same(left, right)
        assert left.device == right.device
        assert left.requires_grad == right.requires_grad
        assert left.untyped_storage().nbytes() == right.untyped_storage().nbytes()
        return
    if isinstance(left, dict):
        assert list(left) == list(right)
        for name in left:
            assert_like(left[name], right[name])
        return
    assert left == right
