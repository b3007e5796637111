"""The modules in the names of tensors, and the totals of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .file_facts import TensorFacts, Totals

if TYPE_CHECKING:
    from tensorizer._types import Name

#: The name of a module, as the steps to it.
Path = tuple[str, ...]


@dataclass
class ModuleTotals:
    """A module: its totals, with those of modules below it, and its children down to a depth."""

    path: Path
    totals: Totals = field(default_factory=Totals)
    below: dict[str, ModuleTotals] = field(default_factory=dict)

    def has_same_contents(self, other: ModuleTotals) -> bool:
        """Return True if two modules have the same totals and children, as layers of a model do."""
        return (
            self.totals == other.totals
            and self.below.keys() == other.below.keys()
            and all(one.has_same_contents(other.below[step]) for step, one in self.below.items())
        )


def modules(tensors: Iterable[TensorFacts], depth: int) -> ModuleTotals:
    """Return the root module of all tensors, with the modules below it down to a depth."""
    root = ModuleTotals(())
    for tensor in tensors:
        at = root
        at.totals.add(tensor)
        for step in _steps(tensor.name, depth):
            at = at.below.setdefault(step, ModuleTotals((*at.path, step)))
            at.totals.add(tensor)
    return root


def descendants(module: ModuleTotals) -> Iterator[ModuleTotals]:
    """Yield all modules below one, each before those below it."""
    for one in module.below.values():
        yield one
        yield from descendants(one)


def rows(module: ModuleTotals, indent: int = 0) -> Iterator[tuple[str, Totals, int]]:
    """Yield rows: a name, its totals, and the number of equal modules that the row stands for.

    Modules with consecutive numbers and the same contents, such as layers, share a row.
    """
    # Some files have their tensors in the order of their names, where 10 comes before 2.
    siblings = sorted(module.below.values(), key=_order)
    for group in _groups(siblings):
        first, last = group[0].path[-1], group[-1].path[-1]
        name = first if len(group) == 1 else f"{first}-{last}"
        yield "  " * indent + name, group[0].totals, len(group)
        yield from rows(group[0], indent + 1)


def _groups(siblings: list[ModuleTotals]) -> Iterator[list[ModuleTotals]]:
    group: list[ModuleTotals] = []
    for one in siblings:
        if group and not (_follows(group[-1], one) and group[-1].has_same_contents(one)):
            yield group
            group = []
        group.append(one)
    if group:
        yield group


def _follows(one: ModuleTotals, other: ModuleTotals) -> bool:
    number = _number(one)
    return number is not None and _number(other) == number + 1


def _order(module: ModuleTotals) -> int:
    number = _number(module)
    return -1 if number is None else number


def _number(module: ModuleTotals) -> int | None:
    """Return the number that names a module; None for other names, and for absurdly long ones."""
    text = module.path[-1]
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _steps(name: Name, depth: int) -> list[str]:
    """Return the steps to the module of a tensor, at most ``depth``."""
    steps: list[str] = []
    for part in (name,) if isinstance(name, str) else name:
        # The rest counts as the tensor's own name.
        steps += str(part).removeprefix(".").split(".", depth)
        if len(steps) > depth:
            break
    return steps[:-1][:depth]
