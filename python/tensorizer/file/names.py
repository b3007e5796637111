"""The tree that the names of tensors form, built from as many of them as are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .._types import Name

#: Stands in a tree for what was left out of it.
LEFT_OUT: Any = object()

_Path = tuple[str | int, ...]


def path_of(name: Name) -> _Path:
    """Return the path that a name stands for."""
    return (name,) if isinstance(name, str) else name


def nested(leaves: Iterable[tuple[_Path, Any]]) -> dict[Any, Any]:
    """Return nested dicts of values, given by path, in their order."""
    top: dict[Any, Any] = {}
    for path, value in leaves:
        node = top
        for step in path[:-1]:
            below = node.get(step)
            if below is None:
                below = node[step] = {}
            node = below
        node[path[-1]] = value
    return top


def converted(tree: dict[Any, Any], convert: Callable[[dict[Any, Any]], Any]) -> Any:
    """Replace every dict of a tree, those inside others first, by what it is converted to."""
    whole = {None: tree}
    # Not by recursion: paths may be longer than what is left of the interpreter's stack.
    places: list[tuple[dict[Any, Any], Any]] = [(whole, None)]
    for parent, key in places:
        node = parent[key]
        places += [(node, step) for step, child in node.items() if type(child) is dict]
    for parent, key in reversed(places):
        parent[key] = convert(parent[key])
    return whole[None]


def plain_or_dict(node: dict[Any, Any]) -> Any:
    """Return the same of what may have been a dict: the indices of a list have no gaps."""
    first = next(iter(node))
    if isinstance(first, int) and set(node) != set(range(len(node))):
        return {key: value for key, value in node.items() if value is not LEFT_OUT} or LEFT_OUT
    return plain(node)


def plain(node: dict[Any, Any]) -> Any:
    """Return a dict without what was left out, or the list of what its indices stand for."""
    kept = {key: value for key, value in node.items() if value is not LEFT_OUT}
    if not kept:
        return LEFT_OUT
    # The keys of a level are of one kind.
    if isinstance(next(iter(kept)), int):
        return [kept[index] for index in sorted(kept)]
    return kept
