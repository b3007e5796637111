"""The options that several functions share: each is named, described and checked once."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, TypeVar

from typing_extensions import Unpack

from .._native import Call
from .._numbers import check_number
from .._types import Hashes, VerifyHash
from . import hints
from .arguments import checked_memory_limit, checked_verification
from .encryption import DecryptionParams, EncryptionParams, native_decryption

_Function = TypeVar("_Function", bound=Callable[..., Any])


class ReadOptions(TypedDict, total=False):
    """Options of all calls that read a file.

    Attributes:
        encryption: The key or passphrase of an encrypted file.
        verify_hash: Compare every tensor with the hashes in the file. A tensor without hashes
            raises an error, and so does a file of a format without hashes. ``"crc32"`` compares the
            CRC-32 only, which finds accidental damage and costs little. With True, the bytes of
            files of a hub (``hf://``) are compared with the SHA-256 that it publishes, as those of
            ``sha256`` are.
        sha256: The SHA-256 that the file must have, in hexadecimal; or those of several files by
            name, such as an index and its shards. Other bytes are a ``DamagedFileError``, and no
            tensor is returned before the whole file was compared: while it is read or, if less than
            half of it is wanted, before that. Not with ``group``, nor for :func:`iterate`.
        num_readers: The number of threads that read at once. None for as many as help.
        memory_limit: The most bytes that the load has in flight in addition to the tensors: buffers
            of connections, staging memory, batches of a group, gaps between tensors that are read
            along. As many connections and batches are used as fit. :func:`iterate` counts its
            tensors that are loaded or being read, too. None for the value of
            ``TENSORIZER_MEMORY_LIMIT_MB``.
        cache_dir: A folder that caches data from an HTTP server or S3 for the next load of the same
            file; None for the folder in ``TENSORIZER_CACHE``. A folder that cannot be used is an
            ``OSError``. See ``docs/how-to/cache.md``.
        stale_if_error: Use a complete copy of the cache, with a warning, if its server cannot be
            reached, or fails. Otherwise that is an error, as the copy may not be current.
        max_bytes_per_second: The most bytes per second that the call receives from servers; None
            for the value of ``TENSORIZER_MAX_BYTES_PER_SECOND``.
        headers: Header fields of the requests to the server of the address; not sent to another
            host after a redirect.
        timeout: The seconds that the whole call may take, opening included; then it is a
            ``TimeoutError``, which says what was waited for. An object that reads later, such as a
            :class:`TensorDeserializer` with ``lazy_load``, gives each later read as much time; that
            of :func:`iterate` counts until its last tensor. None for no limit.
        skip_objects: Load a file of ``torch.save`` without its objects of classes that torch's
            restricted unpickler does not allow, instead of raising an error. Nothing of them runs.
            A warning names the tensors inside them, which are not loaded.

    """

    encryption: DecryptionParams | None
    verify_hash: VerifyHash | None
    sha256: str | Mapping[str, str] | None
    num_readers: int | None
    memory_limit: int | None
    cache_dir: str | os.PathLike[Any] | None
    stale_if_error: bool
    max_bytes_per_second: int | None
    headers: Mapping[str, str] | None
    timeout: float | None
    skip_objects: bool


class IterateOptions(ReadOptions, total=False):
    """Options of :func:`tensorizer.iterate`: those of :class:`ReadOptions`, and one.

    Attributes:
        mmap: True to use tensors in place in a private mapping of their file instead of reading
            them into memory of their own. Opening then takes no time, and bytes come into memory
            when they are first touched. Changes to such a tensor are private to it. The file
            must not be changed while the tensors live: opening it for writing (``open(path,
            "wb+")`` to save over it), copying over it or truncating it destroys the tensors, and
            touching them may end the process (SIGBUS). A serializer refuses to write to such a file
            of this process that was opened without truncating it. Replacing the file by a rename,
            as serializers do with paths, is safe. Tensors whose data are not aligned (files of
            older writers) are always read.

    """

    mmap: bool


class LoadOptions(IterateOptions, total=False):
    """Options of all calls that load a file as a whole: those of :class:`IterateOptions`, and one.

    Attributes:
        clone: On CUDA, give each tensor its own storage. Otherwise tensors below 1 MiB are views of
            shared storages of at most 64 MiB, which is faster. Such a storage is freed with its
            last tensor, and ``torch.save`` of one tensor writes the whole storage. On the CPU each
            tensor has its own storage in any case; tensors below 1 MiB share blocks of memory, each
            of which is freed with its last tensor.

    """

    clone: bool


class SaveOptions(TypedDict, total=False):
    """Options of all calls that save a file.

    Attributes:
        encryption: A key to encrypt the tensors' data with; the tensors stay as they are.
        alignment: Each tensor's data begin at a multiple of this many bytes in the file, a power
            of two. 64 lets tensors be used in place from a mapping; 1 gives the same bytes as
            version 2.12.1 of the package.
        hashes: The hashes of each tensor to store: ``"all"`` (CRC-32 and SHA-256) or ``"crc32"``,
            which finds accidental damage and costs little. Readers verify those that a file has.
        metadata: Strings by name, up to 100,000,000 bytes of them, which
            :func:`tensorizer.info` returns and old releases do not see. They are authenticated only
            in an encrypted file with a manifest.
        clear_metadata: True if an encrypted file may have metadata, which is not encrypted.
        memory_limit: The most bytes that a write has in flight in addition to the tensors: copies
            that are encrypted and hashed, staging memory, parts of an upload, and the beginning of
            its object. As many threads and connections are used as fit. None for the value of
            ``TENSORIZER_MEMORY_LIMIT_MB``.
        max_bytes_per_second: The most bytes per second that the call sends to servers; None for the
            value of ``TENSORIZER_MAX_BYTES_PER_SECOND``.
        headers: Header fields of the requests to the server of the address.
        timeout: The seconds that the whole call may take; then it is a ``TimeoutError``, which says
            what was waited for, and there is no new file. A :class:`TensorSerializer` gives each
            call as much time. None for no limit.

    """

    encryption: EncryptionParams | None
    alignment: int
    hashes: Hashes
    metadata: Mapping[str, str] | None
    clear_metadata: bool
    memory_limit: int | None
    max_bytes_per_second: int | None
    headers: Mapping[str, str] | None
    timeout: float | None


#: The defaults that are not None.
_DEFAULTS: dict[str, Any] = {
    "verify_hash": False,
    "mmap": False,
    "clone": False,
    "alignment": 64,
    "hashes": "all",
    "clear_metadata": False,
    "stale_if_error": False,
    "skip_objects": False,
}


def takes(options: type) -> Callable[[_Function], _Function]:
    """Show the ``options`` of a function, its ``**options``, in its signature; refuse others.

    A function with ``**kwargs`` has others, too.
    """
    shown = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_DEFAULTS.get(name),
            annotation=getattr(annotation, "__forward_arg__", annotation),
        )
        for name, annotation in options.__annotations__.items()
    ]

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        *own, rest = signature.parameters.values()
        others = [rest] if rest.name == "kwargs" else []
        known = {one.name for one in (*own, *shown)}
        name_of_function = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs:
                if name not in known and not others:
                    raise TypeError(
                        f"{function.__qualname__}() got an unexpected keyword argument {name!r}"
                        f"{hints.of_option(name, known)}"
                    )
            # Warnings of the function count the frames up to its caller.
            with Call(name_of_function, kwargs.get("timeout"), options is SaveOptions):
                return function(*args, **kwargs)

        checked.__signature__ = signature.replace(parameters=[*own, *shown, *others])  # type: ignore[attr-defined]
        return checked  # type: ignore[return-value]

    return decorate


def split_options(options: type, arguments: dict[str, Any]) -> dict[str, Any]:
    """Take the ``options`` out of the arguments of a call."""
    return {name: arguments.pop(name) for name in options.__annotations__ if name in arguments}


def refuse_hash_of_group(group: Any, options: Mapping[str, Any]) -> None:
    """Refuse to compare the hash of a file that a group reads.

    Raises:
        ValueError: There are both.

    """
    if group is not None and options.get("sha256") is not None:
        raise ValueError("sha256= with group=: each member would have to read the whole file")


def stated_hashes(sha256: str | Mapping[str, str] | None) -> dict[str, bytes] | None:
    """Return the hashes that files must have, by name; ``""`` for a single file.

    Raises:
        ValueError: One has not 64 hexadecimal digits.

    """
    if sha256 is None:
        return None
    found = {}
    for name, digits in ({"": sha256} if isinstance(sha256, str) else sha256).items():
        if not isinstance(digits, str) or not re.fullmatch("[0-9a-fA-F]{64}", digits):
            raise ValueError(f"sha256 must have 64 hexadecimal digits, not {digits!r} {name}")
        found[name] = bytes.fromhex(digits)
    return found


def check_reading(**options: Unpack[ReadOptions]) -> None:
    """Refuse options with which no file could be read.

    Raises:
        TypeError, ValueError: See :class:`ReadOptions`.

    """
    Call("", options.get("timeout"))  # refuses a time limit that is not positive
    check_number("num_readers", options.get("num_readers"), hint=": None chooses automatically")
    checked_verification(options.get("verify_hash"))
    native_decryption(options.get("encryption"))
    checked_memory_limit(options.get("memory_limit"))
    cache_dir = options.get("cache_dir")
    check_number("max_bytes_per_second", options.get("max_bytes_per_second"), wanted="positive")
    headers = options.get("headers") or {}
    if not isinstance(headers, Mapping) or not all(
        isinstance(text, str) for pair in headers.items() for text in pair
    ):
        raise TypeError(f"headers must be strings by name or None, not {headers!r}")
    if cache_dir is not None and not isinstance(cache_dir, (str, bytes, os.PathLike)):
        raise TypeError(f"cache_dir must be the path of a folder or None, not {cache_dir!r}")
