"""Loads and saves torch tensors as ``.tensors`` files, at the speed of the disk or the network.

safetensors files, their shards, and checkpoints of ``torch.save`` are loaded without conversion.

:func:`load` and :func:`save` are the shortest calls, :func:`iterate` yields tensors one by one, and
:func:`info` describes a file. :class:`TensorDeserializer` and :class:`TensorSerializer` have the
interface of the old package of the same name. The operators ``torch.ops.tensorizer.load`` and
``.save`` also work in TorchScript and without Python.
"""

from . import _command_start  # isort: skip  # before torch, which takes long

from . import _installation_check  # isort: skip  # before what may have been replaced

from importlib import import_module as _import_module
from pathlib import Path as _Path
from types import FunctionType as _FunctionType
from typing import TYPE_CHECKING as _TYPE_CHECKING, Any as _Any

from ._native import __version__

from .torch_hooks import operators  # isort: skip  # defines what torch must know before anything is compiled
from ._errors import (
    ClosedError,
    CryptographyError,
    DamagedFileError,
    DeviceError,
    DeviceMemoryError,
    FormatError,
    GroupError,
    HashMismatchError,
    InvalidVersionError,
    PairMismatchError,
    TruncatedError,
)
from ._types import FilterFuncType, TensorType
from .file.encryption import DecryptionParams, EncryptionParams
from .file.iterate import iterate
from .file.load import load
from .file.options import IterateOptions, LoadOptions, ReadOptions, SaveOptions
from .file.reader import TensorDeserializer
from .file.slices import TensorSlice
from .tensors.devices import release_pinned, set_pinned_limit, stats
from .tensors.sharding import Shard

if _TYPE_CHECKING:
    from . import safetensors, serialization, stream_io, torch_compat, utils
    from .file.background import SaveFuture, save_async
    from .file.info import FileInfo, TensorInfo, info
    from .file.save import save
    from .file.writer import TensorSerializer

__all__ = [
    "ClosedError",
    "CryptographyError",
    "DamagedFileError",
    "DecryptionParams",
    "DeviceError",
    "DeviceMemoryError",
    "EncryptionParams",
    "FileInfo",
    "FilterFuncType",
    "FormatError",
    "GroupError",
    "HashMismatchError",
    "InvalidVersionError",
    "IterateOptions",
    "LoadOptions",
    "PairMismatchError",
    "ReadOptions",
    "SaveFuture",
    "SaveOptions",
    "Shard",
    "TensorDeserializer",
    "TensorInfo",
    "TensorSerializer",
    "TensorSlice",
    "TensorType",
    "TruncatedError",
    "__version__",
    "cmake_prefix_path",
    "info",
    "iterate",
    "load",
    "release_pinned",
    "safetensors",
    "save",
    "save_async",
    "serialization",
    "set_pinned_limit",
    "stats",
    "stream_io",
    "torch_compat",
    "utils",
]

#: Modules that are imported on first access, and those of names that few programs use.
_MODULES = {
    *("distributed", "lightning", "safetensors", "serialization", "stream_io"),
    *("torch_compat", "transformers", "utils"),
}
_MODULE_OF = {
    **dict.fromkeys(("SaveFuture", "save_async"), "file.background"),
    **dict.fromkeys(("FileInfo", "TensorInfo", "info"), "file.info"),
    "TensorSerializer": "file.writer",
    "save": "file.save",
}


def __getattr__(name: str) -> _Any:
    """Import what few programs use on first access."""
    if name in _MODULES:
        return _import_module(f"{__name__}.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(_import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    found.__module__ = __name__
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Return the public names, including modules that are imported on first access."""
    return sorted({*__all__, *_MODULES})


#: The folder with this package's CMake configuration, like ``torch.utils.cmake_prefix_path``: pass
#: it as ``cmake -DCMAKE_PREFIX_PATH=...``.
cmake_prefix_path = str(_Path(__file__).parent / "share/cmake")

for _public in map(globals().get, __all__):
    # So that tracebacks, reprs and pickles show the public names, such as ``tensorizer.load``.
    if isinstance(_public, (type, _FunctionType)):
        _public.__module__ = __name__

del _command_start, _installation_check, _public, operators
