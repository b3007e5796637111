"""Nested mappings and sequences of tensors, flattened to paths and tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from .._native import MAX_DEPTH
from .._types import Name


def _is_container(value: Any) -> bool:
    text = (str, bytes, bytearray, memoryview)
    return isinstance(value, Mapping) or (
        isinstance(value, Sequence) and not isinstance(value, text)
    )


def flatten(state_dict: Any) -> Iterator[tuple[tuple[str | int, ...], torch.Tensor]]:
    """Yield the paths and tensors of nested mappings and sequences.

    Raises:
        TypeError: A key is not a string, a leaf not a tensor, or the argument not a container.
        ValueError: A container contains itself.

    """
    if not _is_container(state_dict):
        hint = ""
        if isinstance(state_dict, torch.nn.Module):
            hint = ": write_module takes modules; their state_dict() is a mapping"
        elif isinstance(state_dict, torch.Tensor):
            hint = ": give it a name, as in {'name': tensor}"
        elif isinstance(state_dict, (str, os.PathLike)):
            hint = ": save(tensors, uri) takes the tensors first"
        raise TypeError(f"expected a mapping or a sequence, not {type(state_dict).__name__}{hint}")
    if isinstance(state_dict, Mapping):
        rest = {}
        for key, value in state_dict.items():
            if isinstance(key, tuple) and isinstance(value, torch.Tensor):
                yield _checked_path(key), value
            else:
                rest[key] = value
        state_dict = rest
    yield from _flatten(state_dict)


def _checked_path(path: tuple[Any, ...]) -> tuple[str | int, ...]:
    if not path:
        raise ValueError("a path is empty")
    for step in path:
        if not isinstance(step, (str, int)) or isinstance(step, bool):
            raise TypeError(f"a path has strings and integers, found {step!r} in {path!r}")
    return path


def _flatten(top: Any) -> Iterator[tuple[tuple[str | int, ...], torch.Tensor]]:
    # The containers from the top to the current one, each with its remaining items, and the path of
    # the current item.
    open_ = [(top, _items(top, []))]
    above = {id(top)}
    path: list[str | int] = [""]
    while open_:
        container, items = open_[-1]
        for path[-1], value in items:
            if isinstance(value, torch.Tensor):
                yield tuple(path), value
                continue
            if not _is_container(value):
                raise TypeError(f"expected a tensor at {path}, found {type(value).__name__}")
            if id(value) in above:
                raise ValueError(f"the container at {path} contains itself")
            if len(path) == MAX_DEPTH:
                raise ValueError(
                    f"nested too deeply: expected at most {MAX_DEPTH} levels, below {path[:9]}"
                )
            above.add(id(value))
            open_.append((value, _items(value, path)))
            path.append("")
            break
        else:
            above.discard(id(container))
            open_.pop()
            path.pop()


def _items(container: Any, path: list[str | int]) -> Iterator[tuple[str | int, Any]]:
    if not isinstance(container, Mapping):
        yield from enumerate(container)
        return
    for key, value in container.items():
        if not isinstance(key, str):
            raise TypeError(f"keys must be str, found {key!r} at {path[:-1]}")
        yield key, value


def named_leaves(state_dict: Any) -> tuple[list[Name], list[torch.Tensor]]:
    """Return names and tensors; the name of a tensor at the top is its key.

    Raises:
        TypeError, ValueError: See :func:`flatten`.

    """
    names: list[Name] = []
    tensors: list[torch.Tensor] = []
    for path, tensor in flatten(state_dict):
        first = path[0]
        names.append(first if len(path) == 1 and isinstance(first, str) else path)
        tensors.append(tensor)
    return names, tensors
