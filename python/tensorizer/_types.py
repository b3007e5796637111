"""Small types that the public modules share."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

from typing_extensions import TypeVar

#: A tensor's name: ``str`` for a path of one string, else a tuple of keys and list indices.
Name: TypeAlias = "str | tuple[str | int, ...]"

#: Names as a caller gives them, and gets them back. Where none are given they are strings for type
#: checkers: those of nested structures, which are tuples, are given as such, in ``names=``.
NameT = TypeVar("NameT", bound=Name, default=str)

#: Which hashes a load compares: True for all, ``"crc32"`` for the cheap one.
VerifyHash: TypeAlias = "bool | Literal['crc32']"
#: Which hashes of each tensor a save stores.
Hashes: TypeAlias = Literal["all", "crc32"]
#: Formats that ``save`` writes.
FileFormat: TypeAlias = Literal["tensors", "safetensors"]

#: Decides for each tensor whether it is wanted. Called with a ``str`` for a path of one string,
#: else with a ``tuple`` of components; so that a function of strings fits too, the type takes both.
FilterFuncType: TypeAlias = Callable[[Any], "bool | Any"]


#: What a process has learnt by opening an address, for others: the address as it is shown, size,
#: ETag, date, what the server said, and the first bytes.
Head: TypeAlias = "tuple[str, int, str | None, str | None, list[tuple[str, str]], bytes]"


class OpenOptions(TypedDict, total=False):
    """The options of the native code for a source or a sink; None is the same as no entry."""

    #: The name of a descriptor, an object or bytes in messages.
    uri: str
    #: Position of the first byte of the file.
    base: int
    #: Size of an object that can seek.
    size: int | None
    #: True if the address of a folder stands for a file in it; local folders always do.
    model: bool
    #: True for a path, also if it looks like an address.
    path: bool
    heads: Sequence[Head] | None
    #: A folder for what servers send.
    cache: str | None
    headers: list[tuple[str, str]]
    #: A file or folder of trusted certificates.
    certificates: str | None
    trust_all: bool
    access_key: str | None
    secret_key: str | None
    endpoint: str | None
    #: The endpoint where nothing else names one.
    default_endpoint: str | None
    config_path: str | None
    force_http: bool | None
    region: str | None


#: A tensor's number, and first index and end in each dimension; None for the whole tensor.
Slice = tuple[int, Sequence[tuple[int, int]] | None]


class TensorType(enum.IntEnum):
    """What a tensor was in the object that was saved."""

    PARAM = 0
    BUFFER = 1
    STATE_DICT = 2


class HashType(enum.IntEnum):
    """The hash algorithms of the format."""

    CRC32 = 0
    SHA256 = 1
