"""The API of ``safetensors`` and ``safetensors.torch``, on this package's engine.

Names, arguments, results and errors are those of safetensors 0.9. Local files and all addresses
are supported::

    from tensorizer.safetensors import load_file, safe_open

Inside a block of :func:`tensorizer_safetensors`, code that imports them from safetensors uses the
functions of this package too.
"""

from .errors import SafetensorError
from .patching import tensorizer_safetensors
from .prefetching import PrefetchLoader
from .raw import TensorSpec, deserialize, serialize, serialize_file
from .reading import PySafeSlice, safe_open
from .safetensors_file import TensorMeta
from .sharing import storage_ptr, storage_size
from .torch import load, load_file, load_model, save, save_file, save_model

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
