"""The modules in the names of tensors, and the totals of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from .facts import totals


class Module:
    """A module: its tensors, with those of modules below it, and its children down to a depth."""

    def __init__(self, path: tuple[str, ...]) -> None:
        self.path = path
        self.tensors: list[dict[str, Any]] = []
        self.below: dict[str, Module] = {}

    @cached_property
    def totals(self) -> dict[str, int]:
        """The totals of its tensors."""
        return totals(self.tensors)

    @property
    def number(self) -> int:
        """The number that names it; -1 for other names, and for absurdly long ones."""
        text = self.path[-1]
        return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1

    @cached_property
    def contents(self) -> tuple[Any, ...]:
        """The totals of it and of its children: equal for the layers of a model."""
        return self.totals, {step: one.contents for step, one in self.below.items()}


def modules(tensors: Iterable[dict[str, Any]], depth: int) -> Module:
    """Return the root module of all tensors, with the modules below it down to a depth."""
    root = Module(())
    for tensor in tensors:
        at = root
        at.tensors.append(tensor)
        for step in _steps(tensor["name"], depth):
            at = at.below.setdefault(step, Module((*at.path, step)))
            at.tensors.append(tensor)
    return root


def descendants(module: Module) -> Iterator[Module]:
    """Yield all modules below one, each before those below it."""
    for one in module.below.values():
        yield one
        yield from descendants(one)


def rows(module: Module, indent: int = 0) -> Iterator[tuple[str, dict[str, int], int]]:
    """Yield rows: a name, its totals, and the number of equal modules that the row stands for.

    Modules with consecutive numbers and the same contents, such as layers, share a row.
    """
    # Some files have their tensors in the order of their names, where 10 comes before 2.
    siblings = sorted(module.below.values(), key=lambda one: one.number)
    for _, group in itertools.groupby(enumerate(siblings), key=_group):
        alike = [one for _, one in group]
        names = [one.path[-1] for one in alike]
        name = names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"
        yield "  " * indent + name, alike[0].totals, len(alike)
        yield from rows(alike[0], indent + 1)


def _group(numbered: tuple[int, Module]) -> tuple[object, ...]:
    """Return what siblings that share a row have in common, of a module and its place."""
    place, module = numbered
    return (None, place) if module.number < 0 else (module.number - place, module.contents)


def _steps(name: str | list[str | int], depth: int) -> list[str]:
    """Return the steps to the module of a tensor, at most ``depth``."""
    steps: list[str] = []
    for part in (name,) if isinstance(name, str) else name:
        # The rest counts as the tensor's own name.
        steps += str(part).removeprefix(".").split(".", depth)
        if len(steps) > depth:
            break
    return steps[:-1][:depth]
