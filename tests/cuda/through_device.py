"""A plugin for pytest that sends loads to the CPU, and saves from it, through the emulated device.

`make test-cuda` runs tests of loading and saving once more with it. Tensors are loaded to device 0,
and then copied to the CPU, where the test finds them. Tensors that are saved, compared or filled
are copied to the device before.
"""

import torch
from tensorizer.file.open_file import OpenFile
from tensorizer.tensors import devices, fake_mode, handles, subclasses

CPU, DEVICE = torch.device("cpu"), torch.device("cuda", 0)
_number, _is_native = devices.number, devices.is_native
_lend, _take, _fill = handles._lend, handles._take, OpenFile.fill


def number(device):
    """Return the number of device 0 for the CPU."""
    return _number(DEVICE if device == CPU and not fake_mode.is_active() else device)


def is_native(device):
    """Tell whether the native module copies to a device, or to device 0 in place of the CPU."""
    return _is_native(DEVICE if device == CPU and not fake_mode.is_active() else device)


def is_movable(tensor):
    """Tell whether a copy of the storage on another device is all of the tensor."""
    if not subclasses.is_plain(tensor) or tensor.layout != torch.strided or tensor.is_quantized:
        return False
    return tensor.device.type in ("cpu", "cuda") and not tensor.is_conj() and not tensor.is_neg()


def moved(tensors, device):
    """Return copies of tensors on a device, which share storages as the tensors do."""
    storages = {}

    def copy(tensor):
        if tensor.device == device or not is_movable(tensor):
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.to(device=device)
        there = torch.empty(0, dtype=tensor.dtype, device=device)
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        return there.set_(storages[storage._cdata], *place)

    return [copy(tensor) for tensor in tensors]


def lend(handle, tensors):
    """Lend copies on the device."""
    _lend(handle, moved(tensors, DEVICE))


def take(handle):
    """Return loaded tensors on the CPU."""
    return moved(_take(handle), CPU)


def fill(self, tensors, *args, **kwargs):
    """Fill copies on the device, then the tensors."""
    copies = moved([tensor.detach() for tensor in tensors], DEVICE)
    try:
        return _fill(self, copies, *args, **kwargs)
    finally:
        for tensor, copy in zip(tensors, copies, strict=True):
            if copy.device == DEVICE:
                tensor.detach().untyped_storage().copy_(copy.untyped_storage())


devices.number, devices.is_native = number, is_native
handles._lend, handles._take, OpenFile.fill = lend, take, fill
