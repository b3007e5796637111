"""Nested containers of tensors, flattened to paths and tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import torch

from .._native import MAX_DEPTH
from .._types import Name
from .name_tree import name_of

#: The keys that lead from the top to a tensor or a container.
Path: TypeAlias = tuple[Any, ...]


def find_tensors(
    top: Any,
    items: Callable[[Any, Path], Iterator[tuple[Any, Any]]],
    refuse: Callable[[Path, bool], NoReturn],
) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield the paths and tensors in nested containers.

    A container without tensors is looked at once, however often it occurs.

    Args:
        top: The outermost container.
        items: Returns the keys and values of a container at a path; none of another object.
        refuse: Raises an error for a path of too many keys or, if the argument beside it is true,
            for that of a container that contains itself.

    """
    above: set[int] = set()
    #: By ``id``; they are kept, so that no ``id`` is reused.
    without_tensors: dict[int, Any] = {}

    def walk(container: Any, path: Path) -> Generator[tuple[Path, torch.Tensor], None, bool]:
        has_tensors = False
        above.add(id(container))
        for key, value in items(container, path):
            below = (*path, key)
            if isinstance(value, torch.Tensor):
                has_tensors = True
                yield below, value
            elif id(value) not in without_tensors:
                if id(value) in above or len(below) == MAX_DEPTH:
                    refuse(below, id(value) in above)
                if (yield from walk(value, below)):
                    has_tensors = True
        above.discard(id(container))
        if not has_tensors:
            without_tensors[id(container)] = container
        return has_tensors

    return walk(top, ())


def _items(container: Any, path: Path) -> Iterator[tuple[Any, Any]]:
    if not _is_container(container):
        raise TypeError(f"expected a tensor at {list(path)}, found {type(container).__name__}")
    if not isinstance(container, Mapping):
        return enumerate(container)
    for key in container:
        if not isinstance(key, str):
            raise TypeError(f"keys must be str, found {key!r} at {list(path)}")
    return iter(container.items())


def _refuse(path: Path, is_loop: bool) -> NoReturn:
    if is_loop:
        raise ValueError(f"the container at {list(path)} contains itself")
    raise ValueError(
        f"nested too deeply: expected at most {MAX_DEPTH} levels, below {list(path[:9])}"
    )


def _is_container(value: Any) -> bool:
    text = (str, bytes, bytearray, memoryview)
    return isinstance(value, (Mapping, Sequence)) and not isinstance(value, text)


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
    yield from find_tensors(state_dict, _items, _refuse)


def _checked_path(path: tuple[Any, ...]) -> tuple[str | int, ...]:
    if not path:
        raise ValueError("a path is empty")
    for step in path:
        if not isinstance(step, (str, int)) or isinstance(step, bool):
            raise TypeError(f"a path has strings and integers, found {step!r} in {path!r}")
    return path


def named_leaves(state_dict: Any) -> tuple[list[Name], list[torch.Tensor]]:
    """Return names and tensors; the name of a tensor at the top is its key.

    Raises:
        TypeError, ValueError: See :func:`flatten`.

    """
    leaves = list(flatten(state_dict))
    return [name_of(path) for path, _ in leaves], [tensor for _, tensor in leaves]
