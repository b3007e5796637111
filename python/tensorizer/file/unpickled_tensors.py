"""The tensors in an unpickled object, by name."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import torch

from .._errors import FormatError
from .._native import MAX_DEPTH
from .._types import Name
from .name_tree import name_of
from .nesting import Path, find_tensors
from .placeholders import SPECIAL_TENSORS, Placeholder

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_CONTAINERS = (dict, list, tuple, set, frozenset, Mapping)
#: Functions that make arrays of NumPy, and tensors that only ``torch.load`` rebuilds.
_ARRAYS = {"_reconstruct", "_frombuffer", *SPECIAL_TENSORS}
#: The most steps and characters of names, for each byte of a pickle, and the least that is always
#: allowed. A pickle can name one container in many places, so that a short one has more paths than
#: memory could hold.
_COST_PER_BYTE, _MIN_BUDGET = 16, 1 << 20
#: Tensors with their paths, which are not their names.
Unnamed: TypeAlias = "list[tuple[tuple[Any, ...], torch.Tensor | None]]"
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxtuple = 16
#: The most paths of tensors without a name in a message, and the most characters of each.
_MAX_SHOWN_PATHS, _MAX_PATH_CHARS = 8, 100
#: The most records in a message.
_MAX_SHOWN_RECORDS = 100


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(container, Placeholder):
        # Itself is the key: it has no names.
        return ((container, value) for value in container.content or ())
    if isinstance(container, Mapping):
        return ((_key(key), value) for key, value in container.items())
    if isinstance(container, (set, frozenset)):
        # Members of a set have no names.
        return ((None, member) for member in container)
    return enumerate(container) if isinstance(container, _CONTAINERS) else ()


def _key(key: Any) -> Any:
    """Return a key of a mapping; the name for the placeholder of a class or function."""
    return key.name if isinstance(key, Placeholder) and key.content is None else key


def _is_index(key: Any) -> bool:
    """Tell whether a key is an integer that can be part of a name."""
    return type(key) is int and 0 <= key < 1 << 64


def _found(tree: Any, uri: str, size: int, arrays: list[Any]) -> Iterator[tuple[Path, Any]]:
    """Yield tensors, each with its path: for each key the ``id`` of its container, and the key.

    The paths of placeholders for arrays and for tensors are added to ``arrays``.
    """
    budget = _MIN_BUDGET + _COST_PER_BYTE * size
    #: Objects refer to each other in circles: below one, each container is looked into once.
    visited: set[int] = set()

    def items(container: Any, path: Path) -> Iterator[tuple[Any, Any]]:
        nonlocal budget
        visited.add(id(container))
        above = sum(_cost(key) for _, key in path)
        is_object = any(isinstance(key, Placeholder) for _, key in path)
        for key, value in _items(container):
            is_tensor = isinstance(value, torch.Tensor)
            budget -= 1 + (above + _cost(key)) * is_tensor
            if budget < 0:
                raise FormatError(
                    f"the pickle repeats its containers: its {size} bytes expand to far more "
                    f"names of tensors than are allowed ({uri})"
                )
            if isinstance(value, Placeholder) or (is_object and isinstance(value, _CONTAINERS)):
                if id(value) in visited or len(path) + 2 > MAX_DEPTH:
                    continue
                visited.add(id(value))
            if isinstance(value, Placeholder) and value.name.rpartition(".")[2] in _ARRAYS:
                arrays.append((*(key for _, key in path), key))
            if is_tensor or isinstance(value, (*_CONTAINERS, Placeholder)):
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
    tree: Any, uri: str, size: int, *, skip_objects: bool
) -> tuple[list[tuple[Name, torch.Tensor]], Unnamed, Unnamed]:
    """Return names and tensors of nested containers; those without a name; and special ones.

    Special ones are tensors that are not plain and strided, and NumPy's arrays, as placeholders.

    A tensor by itself has the empty name. Containers are mappings, lists, tuples and sets. Objects
    that are neither containers nor tensors are skipped. A path is no name if it has other keys than
    strings and indices. Of a mapping that has tensors under strings and under integers, those under
    integers have no names.

    Args:
        tree: The unpickled object.
        uri: The path or address of its file.
        size: Bytes of the pickle.
        skip_objects: Return tensors that are not plain and strided as special ones.

    Raises:
        NotImplementedError: A tensor is not plain and strided.
        FormatError: There are far more paths than is usual for a pickle of its size.

    """
    # All tensors are found, and containers marked, before the first one is named.
    found: list[tuple[Path, torch.Tensor]]
    arrays: list[tuple[Any, ...]] = []
    is_alone = isinstance(tree, torch.Tensor)
    found = [((), tree)] if is_alone else list(_found(tree, uri, size, arrays))
    #: The containers that have tensors with possible names under strings.
    with_strings: set[int] = set()
    for path, _ in found:
        if all(isinstance(key, str) or _is_index(key) for _, key in path):
            with_strings.update(container for container, key in path if isinstance(key, str))
    named: list[tuple[Name, torch.Tensor]] = []
    unnamed: Unnamed = []
    special: Unnamed = [(keys, None) for keys in arrays]
    for path, tensor in found:
        keys = tuple(key for _, key in path)
        if not all(
            isinstance(key, str) or (_is_index(key) and container not in with_strings)
            for container, key in path
        ):
            unnamed.append((keys, tensor))
            continue
        name = name_of(keys) or ""
        what = _speciality(tensor)
        if what is None:
            named.append((name, tensor.detach()))
        elif skip_objects:
            special.append((keys, tensor))
        else:
            raise NotImplementedError(
                f"tensor {shown(name)} is {what}: only plain, strided tensors can be loaded from "
                f"{uri}; torch.load it, or leave such tensors out (skip_objects=True, "
                "--skip-objects)"
            )
    return named, unnamed, special


def description_of_left_out(unnamed: Unnamed, special: Unnamed, records: Sequence[str]) -> str:
    """Describe the tensors of a file that cannot be named; empty if there are none.

    Args:
        unnamed: Those in containers, with their paths.
        special: Those that are not plain and strided, with their paths.
        records: The records of the other storages that no named tensor uses: those of tensors
            inside of objects, and storages by themselves.

    """
    texts = []
    if unnamed:
        texts.append(
            f"{_counted(unnamed, 'tensor')} that cannot be named: {_shown_paths(unnamed)} (names "
            "consist of strings and list indices; in a dict with integer keys too, only its string "
            "keys count; tensors in other objects have none)"
        )
    if special:
        texts.append(
            f"{len(special):,} tensors or arrays that only torch.load rebuilds: "
            f"{_shown_paths(special)}"
        )
    if records:
        texts.append(
            f"{_counted(records, 'storage')} that no name reaches (of tensors inside objects): "
            + _listed(records[:_MAX_SHOWN_RECORDS], len(records))
        )
    return " and ".join(texts)


def _shown_paths(tensors: Unnamed) -> str:
    some = [shown(path) for path, _ in tensors[:_MAX_SHOWN_PATHS]]
    cut = [text[:_MAX_PATH_CHARS] + "..." * (len(text) > _MAX_PATH_CHARS) for text in some]
    return _listed(cut, len(tensors))


def _counted(some: Sequence[Any], what: str) -> str:
    return f"{len(some):,} {what}" + "s" * (len(some) != 1)


def _listed(some: Sequence[str], count: int) -> str:
    return ", ".join(some) + ", ..." * (count > len(some))


def shown(value: Any) -> str:
    """Return a value out of a file, shortened for a message: it may be of any size."""
    return _SHORT.repr(value)


def _speciality(tensor: torch.Tensor) -> str | None:
    """Return what a tensor is that is not plain, strided and on the ``meta`` device, or None."""
    if type(tensor) not in _PLAIN:
        return f"of the class {type(tensor).__name__}"
    if tensor.is_nested:
        return "nested"
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    if tensor.is_quantized:
        return "quantized"
    return None if tensor.is_meta else "not made from a storage of the file"
