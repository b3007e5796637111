"""A plugin for pytest that sends loads to the CPU, and saves from it, through the emulated device.

`make test-cuda` runs tests of loading and saving once more with it: of the modules of tests/python
those tests that are marked `device`, and neither `host` nor `long`. Tensors are loaded to device 0,
and then copied to the CPU, where the test finds them. Tensors that are saved, compared or filled
are copied to the device before.
"""

from pathlib import Path

import pytest
import torch
from tensorizer.file.open_file import OpenFile
from tensorizer.tensors import devices, fake_mode, handles, subclasses

#: Of the tests in this folder those that are marked run, through the device.
MARKED = Path(__file__).resolve().parents[1] / "python"
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


def switch(on):
    """Send loads and saves through the device, or no longer."""
    chosen = (number, is_native) if on else (_number, _is_native)
    devices.number, devices.is_native = chosen
    chosen = (lend, take, fill) if on else (_lend, _take, _fill)
    handles._lend, handles._take, OpenFile.fill = chosen


def pytest_collection_modifyitems(config, items):
    """Deselect the tests of tests/python that are not for the device."""
    others = [item for item in items if item.path.parent == MARKED and not is_for_device(item)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item.path.parent != MARKED or is_for_device(item)]


def is_for_device(item):
    """Tell whether the marks of a test say that it runs through the device too."""
    marks = {mark.name for mark in item.iter_markers()}
    return "device" in marks and not marks & {"host", "long"}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Run tests of tests/python through the device, with their fixtures."""
    switch(item.path.parent == MARKED)
    try:
        return (yield)
    finally:
        switch(False)
