"""The tree that the names of tensors form, built for those that are requested."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .._types import Name

#: A placeholder for a tensor that was left out of a tree.
LEFT_OUT: Any = object()

_Path = tuple[str | int, ...]


def path_of(name: Name) -> _Path:
    """Return the path of a name: a tuple of keys and indices."""
    return (name,) if isinstance(name, str) else name


def name_of(path: _Path) -> Name:
    """Return the name of a path: a key at the top stands for itself."""
    return path[0] if len(path) == 1 and isinstance(path[0], str) else path


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
    """Convert every dict of a tree, those inside others first; return the converted top."""
    whole = {None: tree}
    # Not recursive: paths may be longer than the interpreter's stack allows.
    places: list[tuple[dict[Any, Any], Any]] = [(whole, None)]
    for parent, key in places:
        node = parent[key]
        places += [(node, step) for step, child in node.items() if type(child) is dict]
    for parent, key in reversed(places):
        parent[key] = convert(parent[key])
    return whole[None]


def list_or_dict_with_gaps(node: dict[Any, Any]) -> Any:
    """Convert like :func:`plain`, but keep dicts whose integer keys have gaps."""
    first = next(iter(node))
    if isinstance(first, int) and set(node) != set(range(len(node))):
        return {key: value for key, value in node.items() if value is not LEFT_OUT} or LEFT_OUT
    return plain(node)


def plain(node: dict[Any, Any]) -> Any:
    """Return the dict without what was left out; as a list if its keys are indices."""
    kept = {key: value for key, value in node.items() if value is not LEFT_OUT}
    if not kept:
        return LEFT_OUT
    # All keys of a dict have the same type.
    if isinstance(next(iter(kept)), int):
        return [kept[index] for index in sorted(kept)]
    return kept
