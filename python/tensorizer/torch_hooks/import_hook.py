"""Calls functions once a module of torch is imported: importing it takes far longer than ours."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType

_Callback = Callable[[ModuleType], None]


class _ImportHook(importlib.abc.MetaPathFinder):
    """Finds one module as the default finder does, and runs a callback after its execution."""

    def __init__(self, name: str, callback: _Callback) -> None:
        self.name, self.callback = name, callback

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # An import that fails may be tried again: the finder stays until one succeeds.
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _run_callback(self.callback, module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def when_imported(name: str, callback: _Callback) -> None:
    """Call a function with a module: now if it is imported, else as soon as it is.

    An error of the function becomes a warning, because importing torch must not fail by it.
    """
    if module := sys.modules.get(name):
        _run_callback(callback, module)
    else:
        sys.meta_path.insert(0, _ImportHook(name, callback))


def _run_callback(callback: _Callback, module: ModuleType) -> None:
    try:
        callback(module)
    except Exception as error:
        warnings.warn(
            f"tensorizer does not support this release of {module.__name__} completely: "
            "torch.compile "
            f"may fail for some of tensorizer's operators ({type(error).__name__}: {error})",
            stacklevel=2,
        )
