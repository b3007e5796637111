"""The tensors in an unpickled object, by name."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from .._errors import FormatError
from .._native import MAX_DEPTH
from .._types import Name
from .nesting import Path, find_tensors

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_CONTAINERS = (dict, list, tuple, set, frozenset, Mapping)
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


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(container, Mapping):
        return container.items()
    if isinstance(container, (set, frozenset)):
        # Members of a set have no names.
        return ((None, member) for member in container)
    return enumerate(container) if isinstance(container, _CONTAINERS) else ()


def _is_index(key: Any) -> bool:
    """Tell whether a key is an integer that can be part of a name."""
    return type(key) is int and 0 <= key < 1 << 64


def _found(tree: Any, uri: str, size: int) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield tensors, each with its path: for each key the ``id`` of its container, and the key."""
    budget = _MIN_BUDGET + _COST_PER_BYTE * size

    def items(container: Any, path: Path) -> Iterator[tuple[Any, Any]]:
        nonlocal budget
        above = sum(_cost(key) for _, key in path)
        for key, value in _items(container):
            is_tensor = isinstance(value, torch.Tensor)
            budget -= 1 + (above + _cost(key)) * is_tensor
            if budget < 0:
                raise FormatError(
                    f"the pickle repeats its containers: its {size} bytes expand to far more "
                    f"names of tensors than are allowed ({uri})"
                )
            if is_tensor or isinstance(value, _CONTAINERS):
                yield (id(container), key), value

    def refuse(path: Path, is_loop: bool) -> NoReturn:
        place = shown(tuple(key for _, key in path))
        if is_loop:
            raise FormatError(f"the container at {place} contains itself ({uri})")
        raise NotImplementedError(f"nested more than {MAX_DEPTH} levels deep below {place} ({uri})")

    return find_tensors(tree, items, refuse)


def _cost(key: Any) -> int:
    """Return the characters that a key takes in a name."""
    return len(key) + 4 if isinstance(key, str) else 8


def named_tensors(
    tree: Any, uri: str, size: int
) -> tuple[list[tuple[Name, torch.Tensor]], list[tuple[tuple[Any, ...], torch.Tensor]]]:
    """Return names and tensors of nested containers, and paths and tensors of those without name.

    A tensor by itself has the empty name. Containers are mappings, lists, tuples and sets. Objects
    that are neither containers nor tensors are skipped. A path is no name if it has other keys than
    strings and indices. Of a mapping that has tensors under strings and under integers, those under
    integers have no names.

    Args:
        tree: The unpickled object.
        uri: The path or address of its file.
        size: Bytes of the pickle.

    Raises:
        NotImplementedError: A tensor is not plain and strided.
        FormatError: There are far more paths than is usual for a pickle of its size.

    """
    if isinstance(tree, torch.Tensor):
        return [("", _checked(tree, "", uri))], []
    # All tensors are found, and containers marked, before the first one is named.
    found = list(_found(tree, uri, size))
    #: The containers that have tensors with possible names under strings.
    with_strings: set[int] = set()
    for path, _ in found:
        if all(isinstance(key, str) or _is_index(key) for _, key in path):
            with_strings.update(container for container, key in path if isinstance(key, str))
    named: list[tuple[Name, torch.Tensor]] = []
    unnamed = []
    for path, tensor in found:
        keys = tuple(key for _, key in path)
        if not all(
            isinstance(key, str) or (_is_index(key) and container not in with_strings)
            for container, key in path
        ):
            unnamed.append((keys, tensor))
            continue
        name = keys[0] if len(keys) == 1 and isinstance(keys[0], str) else keys
        named.append((name, _checked(tensor, name, uri)))
    return named, unnamed


def description_of_left_out(paths: Sequence[tuple[Any, ...]], records: Sequence[str]) -> str:
    """Describe the tensors of a file that cannot be named; empty if there are none.

    Args:
        paths: The paths of those in containers.
        records: The records of the other storages that no named tensor uses: those of tensors
            inside of objects, and storages by themselves.

    """
    texts = []
    if paths:
        some = [shown(path) for path in paths[:_MAX_SHOWN_PATHS]]
        cut = [text[:_MAX_PATH_CHARS] + "..." * (len(text) > _MAX_PATH_CHARS) for text in some]
        texts.append(
            f"{_counted(paths, 'tensor')} that cannot be named: "
            f"{_listed(cut, len(paths))} (names consist of strings and list indices; in a dict "
            "with integer keys too, only its string keys count)"
        )
    if records:
        texts.append(
            f"{_counted(records, 'storage')} that no name reaches (of tensors inside objects): "
            + _listed(records[:_MAX_SHOWN_RECORDS], len(records))
        )
    return " and ".join(texts)


def _counted(some: Sequence[Any], what: str) -> str:
    return f"{len(some):,} {what}" + "s" * (len(some) != 1)


def _listed(some: Sequence[str], count: int) -> str:
    return ", ".join(some) + ", ..." * (count > len(some))


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
