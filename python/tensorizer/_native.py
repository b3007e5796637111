"""The native module, after checking that it fits the torch of this process."""

import warnings
from importlib.machinery import EXTENSION_SUFFIXES

import torch

try:
    from ._build import TORCH_MINOR, TORCH_MINORS, VERSION
except ImportError as missing:
    raise ImportError(
        "tensorizer was not built: run `pip install .` in its source folder (before that, the "
        "package cannot be imported from there)."
    ) from missing

_found = ".".join(torch.__version__.split(".")[:2])
if _found != TORCH_MINOR:
    _advice = (
        f"install its wheel for this torch, *+torch{_found}-*.whl, or build it again with "
        "`pip install --force-reinstall --no-deps .` in its source folder"
        if _found in TORCH_MINORS
        else "there is no wheel for this torch: install another one"
    )
    raise ImportError(
        f"tensorizer was built against torch {TORCH_MINOR}, and this is torch {torch.__version__}: "
        f"{_advice}. It is made for torch {TORCH_MINORS[0]} to {TORCH_MINORS[-1]}."
    )

if ".abi3.so" not in EXTENSION_SUFFIXES:
    raise ImportError(
        "tensorizer needs an ordinary build of Python for Linux, and this one loads no modules of "
        "the stable ABI: free-threaded builds (python3.13t and the like) are not supported."
    )

from ._C import *  # noqa: E402, F403
from ._C import __version__ as __version__, unknown_variables  # noqa: E402

if __version__ != VERSION:
    raise ImportError(
        f"tensorizer {VERSION} was installed over {__version__}, or the other way round, and not "
        "completely: install it again with `pip install --force-reinstall --no-deps`."
    )

if (_unknown := unknown_variables()) is not None:
    warnings.warn(_unknown, stacklevel=2)
