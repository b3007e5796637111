"""The API of ``safetensors`` and ``safetensors.torch``, on this package's engine.

Names, arguments, results and errors are those of release 0.9, for local files and for any
address::

    from tensorizer.safetensors import load_file, safe_open

Inside a block of :func:`tensorizer_safetensors` code that imports them from safetensors itself
uses them too.
"""

from .errors import SafetensorError
from .files import load, load_file, load_model, save, save_file, save_model
from .prefetching import PrefetchLoader
from .raw import TensorSpec, deserialize, serialize, serialize_file
from .reading import PySafeSlice, TensorMeta, safe_open
from .replacing import tensorizer_safetensors
from .sharing import storage_ptr, storage_size

__all__ = [
    "PrefetchLoader",
    "PySafeSlice",
    "SafetensorError",
    "TensorMeta",
    "TensorSpec",
    "deserialize",
    "load",
    "load_file",
    "load_model",
    "safe_open",
    "save",
    "save_file",
    "save_model",
    "serialize",
    "serialize_file",
    "storage_ptr",
    "storage_size",
    "tensorizer_safetensors",
]

for _name in __all__:
    # So that tracebacks, reprs and pickles show the public names.
    if _name != "SafetensorError":
        globals()[_name].__module__ = __name__

del _name
