"""Puts our functions in the place of safetensors' own, for code that cannot be changed."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from .._native import dicts_with_value
from .._patching import Patch
from . import torch as torch_functions
from .prefetching import PrefetchLoader
from .reading import PySafeSlice, safe_open
from .safetensors_file import TensorMeta

_FUNCTIONS = ("load", "load_file", "load_model", "save", "save_file", "save_model")


#: Classes that programs use in ``isinstance``; older releases of the library lack them.
_CLASSES = {"PrefetchLoader": PrefetchLoader, "PySafeSlice": PySafeSlice, "TensorMeta": TensorMeta}


class _SafetensorsPatch(Patch):
    """The replacement of safetensors' objects in modules."""

    #: Pairs of an original and its stand-in, which is made for these blocks alone.
    _pairs: Sequence[tuple[Any, Any]] = ()
    #: The namespaces in which originals were replaced.
    _changed: Sequence[dict[str, Any]] = ()

    def apply(self) -> None:
        self._pairs = _stand_ins()
        self._changed = _replace(self._pairs, _namespaces())

    def restore(self) -> None:
        # Also in modules that were imported in the block, and in those that are gone since.
        back = [(ours, original) for original, ours in self._pairs]
        _replace(back, [*self._changed, *_namespaces()])
        self._pairs = self._changed = ()


def _stand_ins() -> list[tuple[Any, Any]]:
    """Return pairs of an object of safetensors to be replaced, and a new stand-in."""
    import safetensors.torch

    stand_in = type("safe_open", (safe_open,), {"_prefetches_to_any_device": False})
    pairs: list[tuple[Any, Any]] = [(safetensors.safe_open, stand_in)]
    for name, ours in _CLASSES.items():
        original = getattr(safetensors, name, None)
        if original is not None:
            pairs.append((original, _StandInType(name, (ours,), {})))
    for name in _FUNCTIONS:
        original = getattr(safetensors.torch, name)
        pairs.append((original, _stand_in_function(original, getattr(torch_functions, name))))
    return pairs


class _StandInType(type):
    """A stand-in for one of our classes, of which all objects of that class are instances."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.__bases__[0])


def _stand_in_function(original: Any, ours: Any) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    return call


def _namespaces() -> list[dict[str, Any]]:
    """Return the globals of all modules outside of this package."""
    # By vars, not getattr: modules that import lazily would do so.
    return [
        vars(module)
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and name.partition(".")[0] != "tensorizer"
    ]


def _replace(
    pairs: Sequence[tuple[Any, Any]], namespaces: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Replace objects in namespaces, and return those that had some."""
    by_id = {id(one): other for one, other in pairs}
    # Large programs have thousands of modules, most of which have none of these objects.
    found = [namespaces[n] for n in dicts_with_value(namespaces, [one for one, _ in pairs])]
    for namespace in found:
        for key, value in list(namespace.items()):
            if id(value) in by_id:
                namespace[key] = by_id[id(value)]
    return found


_patch = _SafetensorsPatch()


@contextlib.contextmanager
def tensorizer_safetensors() -> Iterator[None]:
    """Make code that uses safetensors use this package, in a block or a decorated function.

    ``safe_open`` of ``safetensors`` and ``load``, ``load_file``, ``load_model``, ``save``,
    ``save_file`` and ``save_model`` of ``safetensors.torch`` are replaced there, and in every
    module that has imported them by name, before or in the block. References elsewhere, such as in
    a class or a default argument, are not replaced: a reference made before the block keeps the
    original function, and one made in the block keeps the function of this package.

    The whole process is affected, including the threads that libraries start. Blocks may be nested,
    and may overlap in several threads: the originals are restored when the last block ends, also
    after an exception. Objects that other code puts into a module meanwhile stay.

    Raises:
        ImportError: safetensors is not installed.

    """
    with _patch:
        yield
