"""The modules in the names of tensors, and the totals of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from .facts import totals


class Module:
    """A module: the totals of its tensors, with those below it, and its children.

    Args:
        path: The names of the modules above it, and its own.
        tensors: Its tensors, each with the path of the module that has it.

    """

    def __init__(
        self, path: tuple[str, ...], tensors: Sequence[tuple[list[str], dict[str, Any]]]
    ) -> None:
        self.path = path
        self.totals = totals([tensor for _, tensor in tensors])
        groups: dict[str, list[tuple[list[str], dict[str, Any]]]] = {}
        for steps, tensor in tensors:
            for step in steps[len(path) : len(path) + 1]:
                groups.setdefault(step, []).append((steps, tensor))
        self.below = {step: Module((*path, step), group) for step, group in groups.items()}
        #: The totals of it and of its children: equal for the layers of a model.
        self.contents: tuple[Any, ...] = (
            self.totals,
            {step: one.contents for step, one in self.below.items()},
        )

    @property
    def number(self) -> int:
        """The number that names it; -1 for other names, and for absurdly long ones."""
        text = self.path[-1]
        return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1

    def descendants(self) -> Iterator[Module]:
        """Yield all modules below it, each before those below that."""
        for one in self.below.values():
            yield one
            yield from one.descendants()

    def rows(self) -> Iterator[tuple[str, dict[str, int], int]]:
        """Yield rows: a name, its totals, and the number of equal modules that the row stands for.

        Modules with consecutive numbers and the same contents, such as layers, share a row.
        """
        # Some files have their tensors in the order of their names, where 10 comes before 2.
        siblings = sorted(self.below.values(), key=lambda one: one.number)
        for _, group in itertools.groupby(enumerate(siblings), key=_group):
            alike = [one for _, one in group]
            names = dict.fromkeys((alike[0].path[-1], alike[-1].path[-1]))
            yield "  " * len(self.path) + "-".join(names), alike[0].totals, len(alike)
            yield from alike[0].rows()


def modules(tensors: Sequence[dict[str, Any]], depth: int) -> Module:
    """Return the root module of all tensors, with the modules below it down to a depth."""
    return Module((), [(_steps(tensor["name"], depth), tensor) for tensor in tensors])


def _group(numbered: tuple[int, Module]) -> tuple[object, ...]:
    """Return what siblings that share a row have in common, of a module and its place."""
    place, module = numbered
    return (None, place) if module.number < 0 else (module.number - place, module.contents)


def _steps(name: str | Sequence[str | int], depth: int) -> list[str]:
    """Return the steps to the module of a tensor, at most ``depth``."""
    parts = (name,) if isinstance(name, str) else name
    # The rest counts as the tensor's own name.
    split = [str(part).removeprefix(".").split(".", depth) for part in parts]
    return [step for steps in split for step in steps][:-1][:depth]
