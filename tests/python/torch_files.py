"""Objects that torch.save takes, and a comparison of what is loaded with torch.load's result."""

import io
import sys

import torch

#: Dtypes for which torch.zeros does not work.
ODD = ("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2", "float4_e2m1fn_x2")


def dtypes():
    """Return all dtypes that torch.save takes, without those of quantized tensors."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    for dtype in sorted(found, key=str):
        name = str(dtype).removeprefix("torch.")
        if name.startswith("q") or "quint" in name:
            continue
        memory = torch.arange(32, dtype=torch.uint8) % 2
        tensor = torch.empty(0, dtype=dtype)
        tensor.set_(memory.untyped_storage(), 0, (2,), (1,))
        try:
            torch.save(tensor, io.BytesIO())
        except (KeyError, RuntimeError):
            continue
        yield name, tensor


def bits(tensor):
    """Return what can be compared of any dtype."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype in (torch.complex64, torch.complex128):
        return torch.view_as_real(tensor).contiguous().view(torch.uint8)
    whole = torch.empty(0, dtype=torch.uint8)
    whole.set_(tensor.untyped_storage())
    size, start = tensor.element_size(), tensor.storage_offset() * tensor.element_size()
    shape, stride = (*tensor.shape, size), (*(size * step for step in tensor.stride()), 1)
    return whole.as_strided(shape, stride, start).contiguous()


def leaves(tree, path=()):
    """Yield paths and tensors of what torch.load returns."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from leaves(value, (*path, index))


def check(loaded, expected):
    """Compare tensors by name with what torch.load returns: bytes, strides, shared storages."""
    found = {}
    for path, tensor in leaves(expected):
        name = path[0] if len(path) == 1 and isinstance(path[0], str) else path
        found[name] = tensor
    assert list(loaded) == list(found)
    for name, tensor in found.items():
        ours = loaded[name]
        assert (ours.dtype, ours.shape, ours.stride()) == (
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
        ), name
        assert (ours.is_conj(), ours.is_neg()) == (tensor.is_conj(), tensor.is_neg()), name
        assert ours.storage_offset() >= tensor.storage_offset()
        assert torch.equal(bits(ours), bits(tensor)), name

    def shared(tensors):
        groups = {}
        for name, tensor in tensors.items():
            if tensor.numel():
                groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
        return sorted(map(sorted, (map(str, group) for group in groups.values())))

    if "through_device" not in sys.modules:
        assert shared(loaded) == shared(found)


def make():
    """Return what a training script keeps, and what else torch.save takes."""
    torch.manual_seed(5)
    weight = torch.randn(40, 30)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 7)).sum().backward()
    optimizer.step()
    return {
        "weight": weight,
        "tied": weight,
        "transposed": weight.t(),
        "row": weight[3],
        "every other": weight[::2, 1::3],
        "expanded": torch.randn(3, 1).expand(3, 500),
        "empty": torch.empty(0, 3),
        "empty, far": torch.randn(10)[10:],
        "scalar": torch.tensor(2.5),
        "half": torch.randn(9).half()[1:],
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch._neg_view(torch.randn(4)),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(6)),
        "buffer": torch.nn.Buffer(torch.arange(3)),
        "large": torch.randn(700, 1000),
        "epoch": 3,
        "lr": 0.1,
        "note": "text",
        "none": None,
        "some": {1, 2},
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "list": [torch.randn(2), (torch.randn(1), 5, {"deep": torch.ones(2, dtype=torch.bool)})],
        "nothing": [[], {}, ()],
    }
