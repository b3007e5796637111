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
_COST_PER_BYTE, _MIN_BUDGET = 16, 1 << 20
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxtuple = 16
#: The most paths of tensors without a name in a message, and the most characters of each.
_MAX_SHOWN_PATHS, _MAX_PATH_CHARS = 8, 100
#: The most records in a message.
_MAX_SHOWN_RECORDS = 100


@dataclass
class _Level:
    """A container on the path from the top to the current one.

    Attributes:
        container: The container itself.
        items: Its items that were not visited yet.
        path: Its path from the top.
        cost: Characters of the path.
        above: The container that holds it; None at the top.
        has_tensors: True if there are tensors in it.
        has_strings: True if tensors that can be named are under string keys of it.

    """

    container: Any
    items: Iterator[tuple[Any, Any]]
    path: tuple[Any, ...]
    cost: int
    above: _Level | None
    has_tensors: bool = False
    has_strings: bool = False

    def steps_to(self, key: Any) -> Iterator[tuple[_Level, Any]]:
        """Yield each container on the way up from a key of this one, with the key in it."""
        level, step = self, key
        yield level, step
        while level.above is not None:
            level, step = level.above, level.path[-1]
            yield level, step


@dataclass
class UnnamedTensors:
    """The tensors of a file that cannot be named, as text for a message.

    Attributes:
        count: How many there are.
        some: The paths of the first ones.
        storages: The addresses of their storages.
        records: The records of the other storages that no named tensor uses: those of tensors
            inside of objects, and storages by themselves.

    """

    count: int = 0
    some: list[str] = field(default_factory=list)
    storages: set[int] = field(default_factory=set)
    records: list[str] = field(default_factory=list)

    def add(self, path: tuple[Any, ...], tensor: torch.Tensor) -> None:
        """Add a tensor."""
        self.count += 1
        if tensor.layout == torch.strided and not tensor.is_nested:
            self.storages.add(tensor.untyped_storage()._cdata)
        if self.count <= _MAX_SHOWN_PATHS:
            text = shown(path)
            cut = "..." * (len(text) > _MAX_PATH_CHARS)
            self.some.append(text[:_MAX_PATH_CHARS] + cut)

    def __bool__(self) -> bool:
        return self.count > 0 or bool(self.records)

    def __str__(self) -> str:
        return " and ".join(filter(None, (self._without_name(), self._unreached())))

    def _unreached(self) -> str:
        """Describe the storages that are of no tensor in a container."""
        if not self.records:
            return ""
        storages = "1 storage" if len(self.records) == 1 else f"{len(self.records):,} storages"
        shown_ones = ", ".join(self.records[:_MAX_SHOWN_RECORDS])
        more = ", ..." * (len(self.records) > _MAX_SHOWN_RECORDS)
        return f"{storages} that no name reaches (of tensors inside objects): {shown_ones}{more}"

    def _without_name(self) -> str:
        """Describe the tensors whose paths are no names."""
        if not self.count:
            return ""
        tensors = "1 tensor" if self.count == 1 else f"{self.count:,} tensors"
        more = ", ..." * (self.count > len(self.some))
        return (
            f"{tensors} that cannot be named: {', '.join(self.some)}{more} (names consist of "
            "strings "
            "and list indices; in a dict with integer keys too, only its string keys count)"
        )


def named_tensors(
    tree: Any, uri: str, size: int
) -> tuple[list[tuple[Name, torch.Tensor]], UnnamedTensors]:
    """Return names and tensors of nested containers; a tensor by itself has the empty name.

    Containers are mappings, lists and tuples. Objects that are neither containers nor tensors are
    skipped. Tensors are left out if their paths have other keys than strings and indices. Of a
    mapping that has tensors under strings and under integers, those under integers are left out.

    Args:
        tree: The unpickled object.
        uri: The path or address of its file.
        size: Bytes of the pickle.

    Raises:
        NotImplementedError: A tensor is not plain and strided.
        FormatError: There are far more paths than is usual for a pickle of its size.

    """
    if isinstance(tree, torch.Tensor):
        return [("", _checked(tree, "", uri))], UnnamedTensors()
    named: list[tuple[Name, torch.Tensor]] = []
    unnamed = UnnamedTensors()
    # ``list`` visits, and so marks, all tensors before the first one is named.
    for level, key, tensor in list(_visit(tree, uri, size)):
        path = (*level.path, key)
        if not all(_can_be_in_name(*step) for step in level.steps_to(key)):
            unnamed.add(path, tensor)
            continue
        name = path[0] if len(path) == 1 and isinstance(key, str) else path
        named.append((name, _checked(tensor, name, uri)))
    return named, unnamed


def _visit(tree: Any, uri: str, size: int) -> Iterator[tuple[_Level, Any, torch.Tensor]]:
    """Yield each tensor with the container that holds it and its key there."""
    if not _is_container(tree):
        return
    budget = _MIN_BUDGET + _COST_PER_BYTE * size
    #: Containers without tensors, by ``id``; the tree keeps them, so that no ``id`` is reused.
    without_tensors: set[int] = set()
    levels = [_Level(tree, _items(tree), (), 0, None)]
    above = {id(tree)}
    while levels:
        level = levels[-1]
        for key, value in level.items:
            budget -= 1
            if isinstance(value, torch.Tensor):
                budget -= level.cost + _cost(key)
                _mark_ancestors(level, key)
                yield level, key, value
            elif _is_container(value) and id(value) not in without_tensors:
                path = (*level.path, key)
                if id(value) in above:
                    raise FormatError(f"the container at {shown(path)} contains itself ({uri})")
                if len(path) == MAX_DEPTH:
                    raise NotImplementedError(
                        f"nested more than {MAX_DEPTH} levels deep below {shown(path)} ({uri})"
                    )
                above.add(id(value))
                levels.append(_Level(value, _items(value), path, level.cost + _cost(key), level))
                break
            if budget < 0:
                raise FormatError(
                    f"the pickle repeats its containers: its {size} bytes expand to far more names "
                    "of "
                    f"tensors than are allowed ({uri})"
                )
        else:
            above.discard(id(level.container))
            levels.pop()
            if not level.has_tensors:
                without_tensors.add(id(level.container))


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


def _mark_ancestors(level: _Level, key: Any) -> None:
    """Mark all containers above a tensor as holding it."""
    can_be_named = all(isinstance(step, str) or _is_index(step) for _, step in level.steps_to(key))
    for above, step in level.steps_to(key):
        above.has_tensors = True
        above.has_strings |= can_be_named and isinstance(step, str)


def _can_be_in_name(level: _Level, step: Any) -> bool:
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
