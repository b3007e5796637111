"""Finds submodules by the names in a file, through modules that wrap others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator

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
        self.inner = unwrap(root)
        split = [name.rpartition(".") for name in names]
        most = -1
        for modules, read in _readings(root, {path for path, _, _ in split}):
            there = [tensor_of(modules.get(read(path)), end) is not None for path, _, end in split]
            if sum(there) > most:
                most, self._modules, self._read = sum(there), modules, read
            if all(there):
                break

    def find(self, path: str) -> torch.nn.Module | None:
        """Return the submodule of a path; None if there is none."""
        return self._modules.get(self._read(path))

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
    for place, name, attribute in _WRAPPERS:
        if isinstance(module, getattr(sys.modules.get(place), name, ())):
            return unwrap(getattr(module, attribute))
    return module


def _readings(
    root: torch.nn.Module, paths: set[str]
) -> Iterator[tuple[dict[str, torch.nn.Module], Callable[[str], str]]]:
    """Yield the ways to read paths: submodules by name, and a function from a path to a name."""
    # Paths in the form of the module's own names.
    yield dict(root.named_modules(remove_duplicate=False)), str
    # Paths without the attributes of wrappers that the module has.
    inner = dict(_named_without_wrappers(root, ""))
    yield inner, str
    # Paths with attributes of wrappers that the saved module had; these are skipped.
    yield inner, _without_private
    if all(_without_private(path).partition(".")[0] == "module" for path in paths):
        yield inner, lambda path: _without_private(path).partition(".")[2]


def _named_without_wrappers(
    module: torch.nn.Module, path: str
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield modules by their paths, in which no wrapper has a part."""
    module = unwrap(module)
    yield path, module
    for name, inner in module._modules.items():
        if inner is not None:
            yield from _named_without_wrappers(inner, f"{path}.{name}" if path else name)


def _without_private(path: str) -> str:
    return ".".join(step for step in path.split(".") if step not in _PRIVATE)
