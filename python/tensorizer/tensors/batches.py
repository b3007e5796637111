"""Batches of tensors, which bound the bytes that are held at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

#: A tensor of a batch: its number, its name, or itself.
_Item = TypeVar("_Item")


def in_batches(
    items: Iterable[_Item], length: Callable[[_Item], int], most: int
) -> Iterator[list[_Item]]:
    """Split tensors into lists of at most ``most`` bytes together, or of one longer tensor."""
    batch: list[_Item] = []
    size = 0
    for item in items:
        if batch and size + length(item) > most:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += length(item)
    if batch:
        yield batch
