"""Finds submodules by the names in a file, through modules that wrap others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import torch

#: Classes of modules that wrap one other: the Python module that defines them, their name, and the
#: attribute that holds the wrapped module. They are looked up only if a program has imported them.
_WRAPPERS = (
    ("torch.nn.parallel", "DistributedDataParallel", "module"),
    ("torch.nn.parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)
#: Attributes that only wrappers have; ``module`` may be the name of any submodule.
_PRIVATE = {attribute for _, _, attribute in _WRAPPERS if attribute.startswith("_")}

#: A function that finds a submodule by its path.
_SubmoduleFinder: TypeAlias = Callable[[torch.nn.Module, str], "torch.nn.Module | None"]


class Submodules:
    """Finds the submodules of a module that the names of a file mean.

    Names of a saved ``DistributedDataParallel``, compiled module or the like contain the attribute
    that holds the wrapped module (``module.fc.weight``, ``_orig_mod.fc.weight``), or leave it out
    as ``torch.distributed.checkpoint.state_dict`` does. Several ways to read the names are tried.
    The way that finds the most tensors is used, and of several such ways the first.

    Args:
        root: The module.
        names: The names of tensors, with a dot in front of each attribute.

    Attributes:
        inner: The module that the wrappers of ``root`` hold.

    """

    def __init__(self, root: torch.nn.Module, names: Iterable[str]) -> None:
        self._root, self.inner = root, unwrap(root)
        split = [(path, attribute) for path, _, attribute in (n.rpartition(".") for n in names)]
        paths = dict.fromkeys(path for path, _ in split)
        most = -1
        for finder in _finders(set(paths)):
            found = {path: finder(root, path) for path in paths}
            count = sum(tensor_of(found[path], attribute) is not None for path, attribute in split)
            if count > most:
                most, self._finder, self._found = count, finder, found
            if count == len(split):
                break

    def find(self, path: str) -> torch.nn.Module | None:
        """Return the submodule of a path; None if there is none."""
        if path not in self._found:
            self._found[path] = self._finder(self._root, path)
        return self._found[path]

    def tensor(self, name: str) -> torch.Tensor | None:
        """Return the parameter or buffer of a name; None if there is none."""
        path, _, attribute = name.rpartition(".")
        return tensor_of(self.find(path), attribute)


def tensor_of(module: torch.nn.Module | None, attribute: str) -> torch.Tensor | None:
    """Return the parameter or buffer of a module; None if there is none.

    The dicts of scripted modules have no ``get``.
    """
    if module is not None:
        for group in (module._parameters, module._buffers):
            if attribute in group:
                return group[attribute]
    return None


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that wrappers hold, or the module itself."""
    inner = _wrapped(module)
    while inner is not None:
        module, inner = inner, _wrapped(inner)
    return module


def _wrapped(module: torch.nn.Module) -> torch.nn.Module | None:
    for place, name, attribute in _WRAPPERS:
        kind = getattr(sys.modules.get(place), name, None)
        if kind is not None and isinstance(module, kind):
            inner: torch.nn.Module = getattr(module, attribute)
            return inner
    return None


def _finders(paths: set[str]) -> Iterator[_SubmoduleFinder]:
    """Yield the ways to find submodules by the paths in a file."""
    # Paths in the form of the module's own names.
    yield _PathWalker(_steps, lambda module: module).find
    # Paths without the attributes of wrappers that the module has.
    yield _PathWalker(_steps, unwrap).find
    # Paths with attributes of wrappers that the saved module had; these are skipped.
    yield _PathWalker(_without_private, unwrap).find
    if all(_without_private(path)[:1] == ["module"] for path in paths):
        yield _PathWalker(lambda path: _without_private(path)[1:], unwrap).find


def _steps(path: str) -> list[str]:
    return path.split(".") if path else []


def _without_private(path: str) -> list[str]:
    return [step for step in _steps(path) if step not in _PRIVATE]


class _PathWalker:
    """Finds the submodules of one module by their paths.

    Args:
        steps_of: Returns the attributes that make up a path.
        through: Returns the module to go on with, such as the one that a wrapper holds.

    """

    def __init__(
        self,
        steps_of: Callable[[str], list[str]],
        through: Callable[[torch.nn.Module], torch.nn.Module],
    ) -> None:
        self._steps_of, self._through = steps_of, through
        #: The parent path of the last search, and its module: neighbouring paths share it.
        self._last: tuple[list[str], torch.nn.Module | None] | None = None

    def find(self, root: torch.nn.Module, path: str) -> torch.nn.Module | None:
        """Return a submodule; None if there is none."""
        steps = self._steps_of(path)
        if not steps:
            return self._through(root)
        above = steps[:-1]
        if self._last is None or self._last[0] != above:
            self._last = above, self._walk(root, above)
        module = self._last[1]
        return None if module is None else self._step(module, steps[-1])

    def _walk(self, root: torch.nn.Module, steps: list[str]) -> torch.nn.Module | None:
        module: torch.nn.Module | None = self._through(root)
        for step in steps:
            if module is None:
                break
            module = self._step(module, step)
        return module

    def _step(self, module: torch.nn.Module, step: str) -> torch.nn.Module | None:
        """Return the submodule at an attribute; scripted modules have no ``get_submodule``."""
        inner = getattr(module, step, None)
        return self._through(inner) if isinstance(inner, torch.nn.Module) else None
