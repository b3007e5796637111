"""Redis as the target of a copy."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

from tensorizer.file.to_redis import copy_to_redis

from .file import BatchedFile
from .output import without_password


def is_redis_address(target: str) -> bool:
    """Tell whether a target is the address of a Redis server."""
    return target.lower().startswith(("redis://", "rediss://"))


def store(source: BatchedFile, target: str) -> None:
    """Store a file unchanged.

    Raises:
        ImportError: The Redis client is not installed.
        OSError: The server cannot be reached, or refuses.
        ValueError: The address lacks a prefix, or is not understood.

    """
    with _connected(target) as (client, prefix):
        _copy(source, client, prefix)


@contextlib.contextmanager
def converted_file(target: str, memory_limit: int | None) -> Iterator[int]:
    """Yield the descriptor of a file that is stored on the server at the end.

    The keys contain positions, which are known only when all tensors are written. The file has no
    name, and vanishes with this process.
    """
    with _connected(target) as (client, prefix), tempfile.TemporaryFile() as file:
        yield file.fileno()
        file.seek(0)
        with BatchedFile(file.fileno(), memory_limit=memory_limit) as source:
            _copy(source, client, prefix)


def _copy(source: BatchedFile, client: Any, prefix: str) -> None:
    every, limit = range(len(source)), source.memory_limit
    copy_to_redis(source.reader, every, client, prefix, force=True, memory_limit=limit)


@contextlib.contextmanager
def _connected(target: str) -> Iterator[tuple[Any, str]]:
    """Yield a client of the server, and the prefix that an address names."""
    try:
        import redis
    except ImportError:
        raise ImportError(
            "copies to redis:// need the Redis client: pip install 'tensorizer[redis]'"
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
