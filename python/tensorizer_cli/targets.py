"""The targets of copies: their paths and addresses, and servers of Redis."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorizer._native import local_path

from .output import without_password

#: The argument for the standard input or output.
STREAM = "-"
#: Endings that a copy in a folder keeps; an encrypted copy keeps only the first.
_ENDINGS = (".tensors", ".safetensors")


def resolve(options: argparse.Namespace) -> str:
    """Return the path or address of a copy; in a folder, it has the name of the file.

    Raises:
        ValueError: The file has no name to use for it, or the standard output has another use.

    """
    target: str = options.target
    if target == STREAM:
        if options.json or options.verify:
            option = "--json" if options.json else "--verify"
            raise ValueError(f"{option} and a copy to the standard output exclude each other")
        return target
    if not target:
        raise ValueError("expected a path or an address to copy to, found an empty one")
    source_path, target_path = local_path(options.file), local_path(target)
    is_folder = target_path is not None and Path(target_path).is_dir()
    if not target.endswith("/") and not is_folder:
        return target
    # The query of an address is no part of its name.
    source = options.file.partition("?")[0] if source_path is None else source_path
    name = source.rstrip("/").rpartition("/")[2].removesuffix(".index.json")
    if name in ("", ".", "..", "stdin"):
        raise ValueError(f"{target} is a folder, and {options.file} has no name for a file in it")
    endings = _ENDINGS if options.command in ("cp", "decrypt") else _ENDINGS[:1]
    if not name.lower().endswith(endings):
        is_pickled = name.lower().endswith((".bin", ".pt", ".pth"))
        name = f"{Path(name).stem if is_pickled else name}.tensors"
    folder = target if target_path is None else target_path
    # The name of an object may have an empty component.
    found = f"{folder.removesuffix('/')}/{name}"
    both_local = source_path is not None and target_path is not None
    if both_local and Path(found).exists() and Path(found).samefile(source):
        raise ValueError(f"{found} is the file itself: name another target")
    return found


@contextlib.contextmanager
def redis_server(target: str) -> Iterator[tuple[Any, str]]:
    """Yield a client of a Redis server, and the prefix that an address names.

    Raises:
        ImportError: The Redis client is not installed.
        OSError: The server cannot be reached, or refuses.
        ValueError: The address lacks a prefix, or is not understood.

    """
    try:
        import redis
    except ImportError:
        raise ImportError(
            "copies to redis:// need the Redis client: pip install 'redis>=5.3'"
        ) from None
    scheme, _, rest = target.partition("://")
    location, _, query = rest.partition("?")
    server, _, prefix = location.partition("/")
    shown = without_password(target)
    if not prefix:
        raise ValueError(f"{shown}: expected a prefix of keys, as in redis://host/prefix")
    if "#" in target:
        raise ValueError(f"{shown}: expected a prefix of keys without `#`, which ends an address")
    address = f"{scheme.lower()}://{server}" + (f"?{query}" if query else "")
    try:
        with redis.Redis.from_url(address) as client:
            # Connect before anything is read, which may take long.
            client.connection_pool.release(client.connection_pool.get_connection())
            yield client, prefix
    except redis.RedisError as error:
        raise OSError(f"{shown}: {error}") from error
