"""The modules in the names of tensors, and the totals of each."""

from __future__ import annotations

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

    @cached_property
    def number(self) -> int | None:
        """The number that names it; None for other names, and for absurdly long ones."""
        text = self.path[-1]
        return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None

    def has_same_contents(self, other: Module) -> bool:
        """Return True if two modules have the same totals and children, as layers of a model do."""
        return (
            self.totals == other.totals
            and self.below.keys() == other.below.keys()
            and all(one.has_same_contents(other.below[step]) for step, one in self.below.items())
        )


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
    groups: list[list[Module]] = []
    # Some files have their tensors in the order of their names, where 10 comes before 2.
    for one in sorted(
        module.below.values(), key=lambda one: -1 if one.number is None else one.number
    ):
        last = groups[-1][-1] if groups else None
        follows = last is not None and last.number is not None and one.number == last.number + 1
        if last is not None and follows and last.has_same_contents(one):
            groups[-1].append(one)
        else:
            groups.append([one])
    for group in groups:
        first, end = group[0].path[-1], group[-1].path[-1]
        name = first if len(group) == 1 else f"{first}-{end}"
        yield "  " * indent + name, group[0].totals, len(group)
        yield from rows(group[0], indent + 1)


def _steps(name: str | list[str | int], depth: int) -> list[str]:
    """Return the steps to the module of a tensor, at most ``depth``."""
    steps: list[str] = []
    for part in (name,) if isinstance(name, str) else name:
        # The rest counts as the tensor's own name.
        steps += str(part).removeprefix(".").split(".", depth)
        if len(steps) > depth:
            break
    return steps[:-1][:depth]
