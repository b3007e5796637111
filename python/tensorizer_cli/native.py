"""The native module of the package, loaded without importing torch if it is not imported yet.

Importing torch takes seconds and half a gigabyte; the native module needs torch's libraries only.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_NAME = "tensorizer._C"
#: The libraries of torch that the native module needs, in the order of their dependencies.
_LIBRARIES = ("libc10.so", "libtorch_cpu.so")


def module() -> Any:
    """Return the native module."""
    found = sys.modules.get(_NAME) or _alone()
    if found is None:
        from tensorizer import _native  # noqa: F401  # raises a helpful error if it cannot be

        found = sys.modules[_NAME]
    return found


def _alone() -> ModuleType | None:
    """Load the native module with torch's libraries alone; None if that is not possible."""
    if "torch" in sys.modules or "tensorizer" in sys.modules:
        return None
    package = Path(__file__).resolve().parent.parent / "tensorizer"
    torch = importlib.util.find_spec("torch")
    if torch is None or not torch.submodule_search_locations:
        return None
    torch_folder = Path(torch.submodule_search_locations[0])
    path = str(package / "_C.abi3.so")
    loader = ExtensionFileLoader(_NAME, path)
    try:
        # Files of the old package, or another torch: importing the package raises a helpful error.
        if (package / "_version.py").exists() or not _fits(package, torch_folder):
            return None
        for name in _LIBRARIES:
            ctypes.CDLL(str(torch_folder / "lib" / name))
        found = importlib.util.module_from_spec(ModuleSpec(_NAME, loader, origin=path))
        loader.exec_module(found)
    except (OSError, ImportError):
        return None
    sys.modules[_NAME] = found
    return found


def _fits(package: Path, torch: Path) -> bool:
    """Tell whether the package was built for this torch, by the versions in files of both."""
    built = re.search(r'TORCH_MINOR = "(.+)"', (package / "_build.py").read_text())
    there = re.search(r"__version__ = '(\d+\.\d+)\.", (torch / "version.py").read_text())
    return built is not None and there is not None and built[1] == there[1]
