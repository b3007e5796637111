"""``tensorizer cp``, ``encrypt``, ``decrypt`` and ``rekey``."""

from __future__ import annotations

import argparse

from tensorizer import EncryptionParams, TensorDeserializer, TensorSerializer
from tensorizer._types import TensorType

from . import keys
from .file import File
from .output import Progress


def _copy(file: File, target: str, encryption: EncryptionParams | None, alignment: int) -> None:
    with (
        TensorSerializer(target, encryption=encryption, alignment=alignment) as serializer,
        Progress(file.total) as progress,
    ):
        identity = file.reader.pair_id
        if identity is not None and serializer._writer is not None:
            # A copy is as good a half of a saved object.
            serializer._writer.set_pair(identity)
        for batch in file.batches():
            tensors, modules = file.load(batch, "nothing")
            serializer._write(
                [file.reader.name(n) for n in batch],
                [TensorType(file.kinds[n]) for n in batch],
                modules,
                tensors,
            )
            progress.add(sum(file.data_lens[n] for n in batch))


def cp(options: argparse.Namespace) -> int:
    """Copy a file."""
    if options.target.lower().startswith(("redis://", "rediss://")):
        import redis

        address, _, prefix = options.target.split("?")[0].rpartition("/")
        query = options.target.partition("?")[2]
        client = redis.Redis.from_url(address + (f"?{query}" if query else ""))
        with TensorDeserializer(options.file, "cpu", lazy_load=True) as file, client:
            file.to_redis(client, prefix, force=True)
        return 0
    with File(options.file, keys.decryption(options), options.readers) as source:
        _copy(source, options.target, None, options.alignment)
    return 0


def encrypt(options: argparse.Namespace) -> int:
    """Copy a file, encrypted."""
    encryption = keys.encryption(options, "")
    with File(options.file, None, options.readers) as source:
        _copy(source, options.target, encryption, options.alignment)
    return 0


def decrypt(options: argparse.Namespace) -> int:
    """Copy an encrypted file as plain data."""
    params = keys.decryption(options)
    if params is None:
        raise ValueError("how to decrypt is missing: --key-file or so")
    with File(options.file, params, options.readers) as source:
        _copy(source, options.target, None, options.alignment)
    return 0


def rekey(options: argparse.Namespace) -> int:
    """Copy an encrypted file under another key."""
    encryption = keys.encryption(options, "new_")
    with File(options.file, keys.decryption(options), options.readers) as source:
        _copy(source, options.target, encryption, options.alignment)
    return 0
