"""Copies a file into the values of a Redis server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .._native import Reader, split_tensor_memory
from ..tensors.batches import in_batches

#: The longest value that Redis accepts (``proto-max-bulk-len``).
_MAX_VALUE_BYTES = 512 << 20
#: Bytes and commands that are sent before their replies are read.
_BATCH_BYTES = 8 << 20
_BATCH_COMMANDS = 1000
#: Batches in memory: one that is being read, with a copy, and one that is being sent, with a copy.
_HELD_BATCHES = 4
#: More bytes than any limit.
_UNLIMITED = 1 << 60
#: The shortest values into which a memory limit may split tensors.
_MIN_VALUE_BYTES = 64 << 10

_Value = tuple[str, int, int]


def copy_to_redis(
    reader: Reader,
    numbers: Sequence[int],
    client: Any,
    prefix: str,
    *,
    force: bool,
    limit: int | None,
    report: Callable[[int], None] | None = None,
) -> None:
    """Store some of a file's tensors under ``<prefix>:<name>:<position in the file>``.

    The header of the file is stored last, so that a copy that failed is not taken for a file. With
    a ``limit`` of memory, values are no longer than a fourth of the memory that it leaves.
    ``report`` is called with the bytes of tensor data that are stored.

    Raises:
        ValueError: The limit is too small for one value.
        NotImplementedError: The client is that of a cluster, or of one of its servers.

    """
    if not isinstance(prefix, str):
        raise TypeError(f"the prefix of the keys must be a str, not {type(prefix).__name__}")
    if not hasattr(client, "pipeline"):
        raise TypeError(f"expected a client such as redis.Redis, not {type(client).__name__}")
    if _is_of_cluster(client):
        raise NotImplementedError(
            "to_redis: a Redis cluster is not supported: each server would have only some of the "
            "keys of a file, and an address names one; use a server outside of a cluster"
        )
    min_memory = reader.minimum_memory(False, False)
    least = _HELD_BATCHES * _MIN_VALUE_BYTES
    held, _ = split_tensor_memory(limit, _UNLIMITED, least, min_memory)
    longest = min(_MAX_VALUE_BYTES, held // _HELD_BATCHES)
    head = reader.head_of(numbers)
    wanted = numbers if force else _missing(reader, numbers, client, prefix)
    with ThreadPoolExecutor(1) as pool:
        most = min(_BATCH_BYTES, longest)
        # Each command counts at least so much that a batch has no more than its number of commands.
        batches = in_batches(
            _values(reader, wanted, prefix, longest),
            lambda value: max(value[2], most // _BATCH_COMMANDS),
            most,
        )
        # While one batch is sent, the next one is read.
        next_batch, stored = pool.submit(_read, reader, next(batches, [])), 0
        while batch := next_batch.result():
            next_batch = pool.submit(_read, reader, next(batches, []))
            pipeline = client.pipeline(transaction=False)
            for key, value in batch:
                pipeline.set(key, value)
                stored += len(value)
            pipeline.execute()
            if report is not None:
                report(stored)
    client.set(f"{prefix}:header:0", head)


def _is_of_cluster(client: Any) -> bool:
    """Tell whether keys are on several servers."""
    if hasattr(client, "nodes_manager"):
        return True  # redis.RedisCluster
    try:
        found = client.execute_command("CLUSTER INFO")
    except Exception:
        # Servers outside of clusters do not know it, and users may not be allowed to ask.
        return False
    return int(found.get("cluster_size", 0)) > 1


def _key(prefix: str, name: str, offset: int) -> str:
    return f"{prefix}:{name}:{offset}"


def _missing(reader: Reader, numbers: Sequence[int], client: Any, prefix: str) -> list[int]:
    """Return the tensors whose headers are not stored yet."""
    offsets = reader.offsets()
    missing: list[int] = []
    for start in range(0, len(numbers), _BATCH_COMMANDS):
        some = numbers[start : start + _BATCH_COMMANDS]
        pipeline = client.pipeline(transaction=False)
        for number in some:
            pipeline.exists(_key(prefix, reader.stored_name(number), offsets[number][0]))
        missing += [
            number for number, found in zip(some, pipeline.execute(), strict=True) if not found
        ]
    return missing


def _values(reader: Reader, numbers: Sequence[int], prefix: str, longest: int) -> Iterator[_Value]:
    """Yield key, position and length of each value, in the order of the file."""
    offsets, lens = reader.offsets(), reader.data_lens()
    for number in sorted(numbers, key=offsets.__getitem__):
        header, data = offsets[number]
        name = reader.stored_name(number)
        yield _key(prefix, name, header), header, data - header
        # Tensors without data have no value: it would share the next one's position.
        for at in range(data, data + lens[number], longest):
            length = min(longest, data + lens[number] - at)
            yield _key(prefix, name, at), at, length


def _read(reader: Reader, batch: list[_Value]) -> list[tuple[str, bytes]]:
    return [(key, reader.raw(offset, length)) for key, offset, length in batch]
