"""What ``safetensors`` and ``safetensors.torch`` have, on this package's engine.

The same names, arguments, results and errors, for local files and for any address::

    from tensorizer.safetensors import load_file, safe_open

Inside a block of :func:`tensorizer_safetensors` code that imports them from safetensors itself
gets them too.
"""

from .errors import SafetensorError
from .files import load, load_file, load_model, save, save_file, save_model
from .reading import safe_open
from .replacing import tensorizer_safetensors
from .sharing import storage_ptr, storage_size

__all__ = [
    "SafetensorError",
    "load",
    "load_file",
    "load_model",
    "safe_open",
    "save",
    "save_file",
    "save_model",
    "storage_ptr",
    "storage_size",
    "tensorizer_safetensors",
]

for _public in (
    *(load, load_file, load_model, safe_open, save, save_file, save_model),
    *(storage_ptr, storage_size, tensorizer_safetensors),
):
    # Tracebacks, reprs and pickles name them as programs do.
    _public.__module__ = __name__

del _public
