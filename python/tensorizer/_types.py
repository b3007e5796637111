"""Small types that the public modules share."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

from typing_extensions import TypeVar

#: A tensor's name: ``str`` for a path of one string, else a tuple of keys and list indices.
Name: TypeAlias = "str | tuple[str | int, ...]"

#: The type of names that a caller passes, and gets back. For type checkers it is ``str`` by
#: default; names of nested structures are tuples, and typed by the argument ``names=``.
NameT = TypeVar("NameT", bound=Name, default=str)

#: The hashes that a load compares: True for all, ``"crc32"`` for CRC-32 only, which costs little.
VerifyHash: TypeAlias = "bool | Literal['crc32']"
#: The hashes of each tensor that a save stores.
Hashes: TypeAlias = Literal["all", "crc32"]
#: Formats that ``save`` writes.
FileFormat: TypeAlias = Literal["tensors", "safetensors"]

#: A function that returns True for a tensor to load. It is called with a ``str`` for a path of one
#: string, else with a ``tuple`` of components; ``Any`` accepts functions of strings too.
FilterFuncType: TypeAlias = Callable[[Any], "bool | Any"]


#: The cached header of a file on a server, with which other processes open it without a request:
#: the address as shown in messages, size, ETag, modification date, response headers, and the first
#: bytes.
Head: TypeAlias = "tuple[str, int, str | None, str | None, list[tuple[str, str]], bytes]"


class OpenOptions(TypedDict, total=False):
    """Options of the native code for a source or a sink; None means the same as no entry."""

    #: The name that messages use for a descriptor, an object or bytes.
    uri: str
    #: Position of the first byte of the file.
    base: int
    #: Size of a seekable object, in bytes.
    size: int | None
    #: True if the address of a folder means a file in it. Paths of local folders always do.
    model: bool
    #: True if the name is a path, even if it looks like an address.
    path: bool
    heads: Sequence[Head] | None
    #: A folder that caches data from servers.
    cache: str | None
    #: True if a copy there may be used when its server fails.
    stale_if_error: bool | None
    max_bytes_per_second: int | None
    headers: list[tuple[str, str]]
    #: A file or folder of trusted certificates.
    certificates: str | None
    trust_all: bool
    access_key: str | None
    secret_key: str | None
    endpoint: str | None
    #: The endpoint to use if nothing else sets one.
    default_endpoint: str | None
    config_path: str | None
    force_http: bool | None
    region: str | None
    session_token: str | None
    #: Seconds for opening, and for each later call.
    timeout: float | None
    #: ``"auto"``, ``"path"`` or ``"virtual"``.
    addressing_style: str | None
    #: The server's encryption of uploads, and the id of its key.
    encryption: str | None
    kms_key_id: str | None
    #: ``"requester"`` if not the owner of the bucket pays.
    payer: str | None


#: A tensor's number, and the start and end index in each dimension; None for the whole tensor.
Slice = tuple[int, Sequence[tuple[int, int]] | None]


class TensorType(enum.IntEnum):
    """The role of a tensor in the saved object: parameter, buffer, or entry of a state dict."""

    PARAM = 0
    BUFFER = 1
    STATE_DICT = 2


class HashType(enum.IntEnum):
    """The hash algorithms of the format."""

    CRC32 = 0
    SHA256 = 1
