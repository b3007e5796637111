"""Small types that the public modules share."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, TypeAlias

#: A tensor's name: ``str`` for a path of one string, else a tuple of keys and list indices.
Name: TypeAlias = "str | tuple[str | int, ...]"

#: Decides for each tensor whether it is wanted. Called with a ``str`` for a path of one string,
#: else with a ``tuple`` of components; so that a function of strings fits too, the type takes both.
FilterFuncType: TypeAlias = Callable[[Any], "bool | Any"]


#: What a process has learnt by opening an address, for others: the address as it is shown, size,
#: ETag, date, what the server said, and the first bytes.
Head: TypeAlias = "tuple[str, int, str | None, str | None, list[tuple[str, str]], bytes]"


class TensorType(enum.IntEnum):
    """What a tensor was in the object that was saved."""

    PARAM = 0
    BUFFER = 1
    STATE_DICT = 2


class HashType(enum.IntEnum):
    """The hash algorithms of the format."""

    CRC32 = 0
    SHA256 = 1
