"""Batches of tensors, which bound the bytes that are held at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

#: The keys of tensors: numbers or names.
_Key = TypeVar("_Key", int, str)


def in_batches(
    numbers: Iterable[_Key], length: Callable[[_Key], int], most: int
) -> Iterator[list[_Key]]:
    """Split tensors into lists of at most ``most`` bytes together, or of one longer tensor."""
    batch: list[_Key] = []
    size = 0
    for number in numbers:
        if batch and size + length(number) > most:
            yield batch
            batch, size = [], 0
        batch.append(number)
        size += length(number)
    if batch:
        yield batch
