"""Requests: the tensors of a file that a call wants, parts of them, and their devices or memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .._types import FilterFuncType, Name
from ..tensors.sharding import Shard
from .arguments import DeviceOf, DeviceType
from .open_file import OpenFile


@dataclass(frozen=True)
class Request:
    """The wishes of one call, which :class:`LoadPlan` looks up in a file.

    Attributes:
        names: The names of the tensors. Without names and numbers: those of ``out`` or ``like``,
            else all of the file.
        numbers: The numbers of the tensors instead, which are then the keys of ``out`` and
            ``like`` too.
        filter_func: Called with each tensor's name; a tensor is left out if it returns something
            false. Not for ``numbers``.
        slices: The parts of some tensors, by name, as :func:`tensorizer.load` takes them.
        shard: The rank whose parts are wanted.
        out: The tensors to fill, by name or number. Of a DTensor, its local part is filled.
        like: Tensors of the wanted devices and placements, by name or number.
        device: The device of all tensors, or a function of their names; None for those of
            ``like``, or torch's default device.

    Raises:
        ValueError: More than one of ``out``, ``like`` and ``shard`` is given.

    """

    names: Sequence[Name] | None = None
    numbers: Sequence[int] | None = None
    filter_func: FilterFuncType | None = None
    slices: Mapping[Any, Any] = field(default_factory=dict)
    shard: Shard | None = None
    out: Mapping[Any, torch.Tensor] | None = None
    like: Mapping[Any, Any] | None = None
    device: DeviceType | DeviceOf = None

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.out, self.like, self.shard)) > 1:
            raise ValueError("out=, like= and shard= exclude each other")

    def wanted_names(self) -> list[Name] | None:
        """Return the names of the tensors; None for all of the file."""
        if self.names is not None:
            return list(self.names)
        if self.out is not None:
            return list(self.out)
        if self.like is not None:
            return [name for name, one in self.like.items() if isinstance(one, torch.Tensor)]
        return None

    def find(self, file: OpenFile) -> dict[Any, int]:
        """Return the numbers of the tensors in a file, by the keys under which they are returned.

        Raises:
            KeyError: The file lacks a tensor.

        """
        if self.numbers is not None:
            return dict(zip(self.numbers, self.numbers, strict=True))
        names = self.wanted_names()
        if names is None:
            every = range(len(file))
            found = dict(zip(file.reader.names(every), every, strict=True))
        else:
            found = file.find_all(names)
        wants = self.filter_func
        if wants is not None:
            found = {name: n for name, n in found.items() if wants(file.reader.name(n))}
        return found
