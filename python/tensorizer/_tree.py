"""The tree that the names of a file form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._types import Name


def top_level(names: list[Name], selection: list[int]) -> dict[Any, Any]:
    """Return nested dicts of keys, whose leaves are the numbers of tensors."""
    top: dict[Any, Any] = {}
    for number in selection:
        name = names[number]
        if isinstance(name, str):
            top[name] = number
            continue
        node = top
        for component in name[:-1]:
            node = node.setdefault(component, {})
        node[name[-1]] = number
    return top


def leaves(node: int | Mapping[Any, Any]) -> list[int]:
    """Return the numbers of all tensors below a node, in the order of the file's keys."""
    if isinstance(node, int):
        return [node]
    return [leaf for child in node.values() for leaf in leaves(child)]
