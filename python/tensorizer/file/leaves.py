"""The tensors in what a pickle holds, by name."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .._errors import FormatError
from .._native import MAX_DEPTH
from .._types import Name

_PLAIN = (torch.Tensor, torch.nn.Parameter)
#: Steps and characters of names for each byte of a pickle, and some for the smallest. A pickle can
#: name one container in many places, so that a short one has more paths than memory could hold.
_FOR_EACH_BYTE, _AT_LEAST = 16, 1 << 20
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxtuple = 16


@dataclass
class _Open:
    """A container on the way from the top to where we are.

    Attributes:
        container: It.
        items: What is left of it.
        path: How it is reached.
        cost: Characters of the path.
        kind: Of which type the keys of its tensors are.

    """

    container: Any
    items: Iterator[tuple[Any, Any]]
    path: tuple[Any, ...]
    cost: int
    kind: type | None = None
    holds: bool = field(default=False)


def named_tensors(tree: Any, uri: str, size: int) -> Iterator[tuple[Name, torch.Tensor]]:
    """Yield names and tensors of nested mappings, lists and tuples; the name of one alone is empty.

    What is neither is passed over.

    Args:
        tree: What was unpickled.
        uri: Where it came from.
        size: Bytes of the pickle.

    Raises:
        NotImplementedError: A tensor is not plain and strided, or its path is not one of strings
            and indices.
        FormatError: There are far more paths than a pickle of its size is made for.

    """
    if isinstance(tree, torch.Tensor):
        yield "", _checked(tree, "", uri)
        return
    if not _is_container(tree):
        return
    left = _AT_LEAST + _FOR_EACH_BYTE * size
    #: Containers without tensors; the tree keeps them, so that no address is used again.
    barren: set[int] = set()
    open_ = [_Open(tree, _items(tree), (), 0)]
    above = {id(tree)}
    while open_:
        here = open_[-1]
        for key, value in here.items:
            left -= 1
            if isinstance(value, torch.Tensor):
                path = (*here.path, key)
                left -= here.cost + _cost(key)
                for level, step in zip(open_, path, strict=True):
                    _check_step(level, step, path, uri)
                name = path[0] if len(path) == 1 and isinstance(key, str) else path
                yield name, _checked(value, name, uri)
            elif _is_container(value) and id(value) not in barren:
                path = (*here.path, key)
                if id(value) in above:
                    raise FormatError(f"the container at {shown(path)} contains itself ({uri})")
                if len(path) == MAX_DEPTH:
                    raise NotImplementedError(
                        f"nested more than {MAX_DEPTH} levels deep below {shown(path)} ({uri})"
                    )
                above.add(id(value))
                open_.append(_Open(value, _items(value), path, here.cost + _cost(key)))
                break
            if left < 0:
                raise FormatError(
                    f"the pickle names its tensors over and over: {size} bytes that stand for far "
                    f"more names ({uri})"
                )
        else:
            above.discard(id(here.container))
            open_.pop()
            if not here.holds:
                barren.add(id(here.container))
            elif open_:
                open_[-1].holds = True


def _is_container(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple, set, frozenset))


def _items(container: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(container, Mapping):
        return iter(container.items())
    if isinstance(container, (set, frozenset)):
        # Their members have no names.
        return ((None, member) for member in container)
    return iter(enumerate(container))


def _cost(key: Any) -> int:
    return len(key) + 4 if isinstance(key, str) else 8


def _check_step(level: _Open, step: Any, path: tuple[Any, ...], uri: str) -> None:
    """Refuse what can be no name."""
    level.holds = True
    index = type(step) is int and 0 <= step < 1 << 64
    if not isinstance(step, str) and not index:
        raise NotImplementedError(
            f"tensor {shown(path)}: names have strings and indices, and not {shown(step)} ({uri})"
        )
    kind = int if index else str
    if level.kind not in (None, kind):
        raise NotImplementedError(
            f"tensor {shown(path)}: beside it are strings and integers as keys, of which names "
            f"have only one kind ({uri})"
        )
    level.kind = kind


def shown(value: Any) -> str:
    """Return what a file has chosen, which may be of any size, for a message."""
    return _SHORT.repr(value)


def _checked(tensor: torch.Tensor, name: Name, uri: str) -> torch.Tensor:
    """Return a tensor that is nothing but elements of a storage."""
    if type(tensor) not in _PLAIN:
        what = f"of the class {type(tensor).__name__}"
    elif tensor.is_nested:
        what = "nested"
    elif tensor.layout != torch.strided:
        what = str(tensor.layout).removeprefix("torch.")
    elif tensor.is_quantized:
        what = "quantized"
    elif not tensor.is_meta:
        what = "not made from a storage of the file"
    else:
        return tensor.detach()
    raise NotImplementedError(
        f"tensor {shown(name)} is {what}: only plain, strided tensors can be loaded from {uri}; "
        "torch.load it"
    )
