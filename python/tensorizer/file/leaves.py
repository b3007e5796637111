"""The tensors in an unpickled object, by name."""

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
#: The most steps and characters of names, for each byte of a pickle, and the least that is always
#: allowed. A pickle can name one container in many places, so that a short one has more paths than
#: memory could hold.
_FOR_EACH_BYTE, _AT_LEAST = 16, 1 << 20
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxtuple = 16
#: The most paths of tensors without a name in a message, and the most characters of each.
_MOST_SHOWN, _LONGEST_SHOWN = 8, 100


@dataclass
class _Open:
    """A container on the path from the top to the current one.

    Attributes:
        container: The container itself.
        items: Its items that were not visited yet.
        path: Its path from the top.
        cost: Characters of the path.
        above: The container that holds it; None at the top.
        holds: True if there are tensors in it.
        has_strings: True if tensors that can be named are under string keys of it.

    """

    container: Any
    items: Iterator[tuple[Any, Any]]
    path: tuple[Any, ...]
    cost: int
    above: _Open | None
    holds: bool = False
    has_strings: bool = False

    def steps_to(self, key: Any) -> Iterator[tuple[_Open, Any]]:
        """Yield each container on the way up from a key of this one, with the key in it."""
        level, step = self, key
        yield level, step
        while level.above is not None:
            level, step = level.above, level.path[-1]
            yield level, step


@dataclass
class Unnamed:
    """The tensors of a file that cannot be named, as text for a message.

    Attributes:
        count: How many there are.
        some: The paths of the first ones.

    """

    count: int = 0
    some: list[str] = field(default_factory=list)

    def add(self, path: tuple[Any, ...]) -> None:
        """Add a tensor."""
        self.count += 1
        if self.count <= _MOST_SHOWN:
            text = shown(path)
            cut = "..." * (len(text) > _LONGEST_SHOWN)
            self.some.append(text[:_LONGEST_SHOWN] + cut)

    def __str__(self) -> str:
        tensors = "1 tensor" if self.count == 1 else f"{self.count:,} tensors"
        more = ", ..." * (self.count > len(self.some))
        return (
            f"{tensors} that cannot be named: {', '.join(self.some)}{more} (names have strings and "
            "indices, and of a dict with both only its strings)"
        )


def named_tensors(
    tree: Any, uri: str, size: int
) -> tuple[list[tuple[Name, torch.Tensor]], Unnamed]:
    """Return names and tensors of nested containers; a tensor by itself has the empty name.

    Containers are mappings, lists and tuples. Objects that are neither containers nor tensors are
    skipped. Tensors are left out if their paths have other keys than strings and indices. Of a
    mapping that has tensors under strings and under integers, those under integers are left out.

    Args:
        tree: The unpickled object.
        uri: The path or address of its file.
        size: Bytes of the pickle.

    Raises:
        NotImplementedError: A tensor is not plain and strided, or no tensor can be named.
        FormatError: There are far more paths than is usual for a pickle of its size.

    """
    if isinstance(tree, torch.Tensor):
        return [("", _checked(tree, "", uri))], Unnamed()
    named: list[tuple[Name, torch.Tensor]] = []
    unnamed = Unnamed()
    # ``list`` visits, and so marks, all tensors before the first one is named.
    for level, key, tensor in list(_leaves(tree, uri, size)):
        path = (*level.path, key)
        if not all(_is_named(*step) for step in level.steps_to(key)):
            unnamed.add(path)
            continue
        name = path[0] if len(path) == 1 and isinstance(key, str) else path
        named.append((name, _checked(tensor, name, uri)))
    if unnamed.count and not named:
        raise NotImplementedError(f"{uri} has only {unnamed}; torch.load it")
    return named, unnamed


def _leaves(tree: Any, uri: str, size: int) -> Iterator[tuple[_Open, Any, torch.Tensor]]:
    """Yield each tensor with the container that holds it and its key there."""
    if not _is_container(tree):
        return
    left = _AT_LEAST + _FOR_EACH_BYTE * size
    #: Containers without tensors, by ``id``; the tree keeps them, so that no ``id`` is reused.
    barren: set[int] = set()
    open_ = [_Open(tree, _items(tree), (), 0, None)]
    above = {id(tree)}
    while open_:
        here = open_[-1]
        for key, value in here.items:
            left -= 1
            if isinstance(value, torch.Tensor):
                left -= here.cost + _cost(key)
                _mark(here, key)
                yield here, key, value
            elif _is_container(value) and id(value) not in barren:
                path = (*here.path, key)
                if id(value) in above:
                    raise FormatError(f"the container at {shown(path)} contains itself ({uri})")
                if len(path) == MAX_DEPTH:
                    raise NotImplementedError(
                        f"nested more than {MAX_DEPTH} levels deep below {shown(path)} ({uri})"
                    )
                above.add(id(value))
                open_.append(_Open(value, _items(value), path, here.cost + _cost(key), here))
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


def _is_container(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple, set, frozenset))


def _items(container: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(container, Mapping):
        return iter(container.items())
    if isinstance(container, (set, frozenset)):
        # Members of a set have no names.
        return ((None, member) for member in container)
    return iter(enumerate(container))


def _cost(key: Any) -> int:
    return len(key) + 4 if isinstance(key, str) else 8


def _mark(level: _Open, key: Any) -> None:
    """Mark all containers above a tensor as holding it."""
    can_be_named = all(isinstance(step, str) or _is_index(step) for _, step in level.steps_to(key))
    for above, step in level.steps_to(key):
        above.holds = True
        above.has_strings |= can_be_named and isinstance(step, str)


def _is_named(level: _Open, step: Any) -> bool:
    """Tell whether a key can be part of a name; all tensors must be marked before."""
    return isinstance(step, str) or (_is_index(step) and not level.has_strings)


def _is_index(step: Any) -> bool:
    return type(step) is int and 0 <= step < 1 << 64


def shown(value: Any) -> str:
    """Return a value out of a file, shortened for a message: it may be of any size."""
    return _SHORT.repr(value)


def _checked(tensor: torch.Tensor, name: Name, uri: str) -> torch.Tensor:
    """Return the tensor if it is plain and strided, and on the ``meta`` device; else raise."""
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
