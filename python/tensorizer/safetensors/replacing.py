"""Our functions under the names of safetensors, for code that cannot be changed."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from .._locks import OwnLock
from .._native import holders
from . import files
from .prefetching import PrefetchLoader
from .reading import PySafeSlice, TensorMeta, safe_open

_FUNCTIONS = ("load", "load_file", "load_model", "save", "save_file", "save_model")


#: Classes that programs ask for by ``isinstance``, and older releases of the library lack.
_CLASSES = {"PrefetchLoader": PrefetchLoader, "PySafeSlice": PySafeSlice, "TensorMeta": TensorMeta}


class _Patch:
    """What modules have of safetensors, replaced while there is a block anywhere in the process."""

    def __init__(self) -> None:
        self._lock = OwnLock()
        self._blocks = 0
        #: The originals, and what stands in for them, which nobody else has.
        self._pairs: list[tuple[Any, Any]] = []
        #: How often what stands in is referred to while it stands nowhere.
        self._references: list[int] = []
        #: Where it was put: the globals of a module, and a name there.
        self._places: list[tuple[dict[str, Any], str]] = []

    def __enter__(self) -> None:
        with self._lock.here():
            if self._blocks == 0:
                self._pairs = _stand_ins()
                self._references = _references(self._pairs)
                self._places = []
                try:
                    _replace(self._pairs, self._places)
                except BaseException:
                    self._restore()
                    raise
            self._blocks += 1

    def __exit__(self, *_: object) -> None:
        with self._lock.here():
            self._blocks -= 1
            if self._blocks == 0:
                self._restore()

    def _restore(self) -> None:
        originals = {id(ours): original for original, ours in self._pairs}
        for namespace, name in self._places:
            number = id(namespace.get(name))
            if number in originals:
                namespace[name] = originals[number]
        self._places = []
        # Somebody else has some, perhaps a module that imported them in the block.
        if _references(self._pairs) != self._references:
            _replace([(ours, original) for original, ours in self._pairs], [])


def _stand_ins() -> list[tuple[Any, Any]]:
    """Return each object of safetensors that is replaced, and a new one in its place."""
    import safetensors.torch

    stand_in = type("safe_open", (safe_open,), {"_prefetches_to_any_device": False})
    pairs: list[tuple[Any, Any]] = [(safetensors.safe_open, stand_in)]
    for name, ours in _CLASSES.items():
        original = getattr(safetensors, name, None)
        if original is not None:
            pairs.append((original, _Named(name, (ours,), {})))
    for name in _FUNCTIONS:
        original = getattr(safetensors.torch, name)
        pairs.append((original, _like(original, getattr(files, name))))
    return pairs


class _Named(type):
    """A class of ours under another identity, of which all objects of ours are instances."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.__bases__[0])


def _like(original: Any, ours: Any) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    return call


def _references(pairs: list[tuple[Any, Any]]) -> list[int]:
    """Return how often each thing that stands in is referred to."""
    return [sys.getrefcount(ours) for _, ours in pairs]


def _replace(pairs: list[tuple[Any, Any]], places: list[tuple[dict[str, Any], str]]) -> None:
    """Replace objects wherever they are globals of a module, but not in this package.

    Notes where that was.
    """
    by_id = {id(one): other for one, other in pairs}
    # Not by getattr: modules that import lazily would do so.
    namespaces = [
        vars(module)
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and name.partition(".")[0] != "tensorizer"
    ]
    # Large programs have thousands of modules, and most of them none of these.
    for number in holders(namespaces, [one for one, _ in pairs]):
        namespace = namespaces[number]
        for key, value in list(namespace.items()):
            if id(value) in by_id:
                places.append((namespace, key))
                namespace[key] = by_id[id(value)]


_patch = _Patch()


@contextlib.contextmanager
def tensorizer_safetensors() -> Iterator[None]:
    """Have code that uses safetensors use this package, in a block or a function.

    ``safe_open`` of ``safetensors`` and ``load``, ``load_file``, ``load_model``, ``save``,
    ``save_file`` and ``save_model`` of ``safetensors.torch`` are replaced there, and in every
    module that has imported them by name, before or in the block. What was kept elsewhere, such as
    in a class or a default argument, is not: before the block it is the original, from within the
    block it stays ours.

    The whole process is concerned, with the threads that libraries start. Blocks may be nested, and
    overlap in several threads: all is restored when the last one ends, however it ends. What
    somebody else has put into a module meanwhile stays.

    Raises:
        ImportError: safetensors is not installed.

    """
    with _patch:
        yield
