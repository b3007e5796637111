"""Defers work until a module of torch is imported: importing it takes far longer than ours."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType

_Work = Callable[[ModuleType], None]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as the default finder does, and runs some work after its execution."""

    def __init__(self, name: str, work: _Work) -> None:
        self.name, self.work = name, work

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
            _try(self.work, module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def when_imported(name: str, work: _Work) -> None:
    """Run some work with a module: now if it is imported, else as soon as it is.

    An error of the work becomes a warning, because importing torch must not fail by it.
    """
    if module := sys.modules.get(name):
        _try(work, module)
    else:
        sys.meta_path.insert(0, _Finder(name, work))


def _try(work: _Work, module: ModuleType) -> None:
    try:
        work(module)
    except Exception as error:
        warnings.warn(
            f"tensorizer does not know this release of {module.__name__}, so that torch.compile "
            f"may not take all of its operators ({type(error).__name__}: {error})",
            stacklevel=2,
        )
