"""``tensorizer cp``, ``encrypt``, ``decrypt`` and ``rekey``."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from typing import Any

from tensorizer import (
    DamagedFileError,
    DecryptionParams,
    EncryptionParams,
    FormatError,
    HashMismatchError,
    TensorType,
)
from tensorizer._native import local_path, minimum_save_memory
from tensorizer.file.file_writer import FileWriter
from tensorizer.file.to_redis import copy_to_redis
from tensorizer.file.to_safetensors import is_safetensors_target, save_safetensors
from tensorizer.streams.addresses import is_address

from . import keys, targets
from .compare import differences
from .file import DAMAGES, BatchedFile, open_file
from .file_description import plain, size, text
from .output import Report, copy_to_output, plural, without_password
from .progress import Progress

_ALIGNMENT = 64
_DIFFERENT = 1
#: The most names in a message.
_SHOWN = 4


def cp(options: argparse.Namespace) -> int:
    """Copy a file, or what a model has beside its weights."""
    if options.no_weights:
        from . import without_weights

        return without_weights.copy(options)
    return _copy(options, keys.decryption(options), None, "copied")


def encrypt(options: argparse.Namespace) -> int:
    """Copy a file, encrypted."""
    hint = "use rekey, which takes its key and the new one"
    return _copy(options, None, keys.encryption(options), "encrypted", hint)


def decrypt(options: argparse.Namespace) -> int:
    """Copy an encrypted file as plain data."""
    return _copy(options, keys.needed_decryption(options), None, "decrypted")


def rekey(options: argparse.Namespace) -> int:
    """Copy an encrypted file under another key."""
    encryption = keys.encryption(options, "new-")
    return _copy(options, keys.decryption(options), encryption, "encrypted anew")


def _copy(
    options: argparse.Namespace,
    params: DecryptionParams | None,
    encryption: EncryptionParams | None,
    done: str,
    *hint: str,
) -> int:
    report = Report(options)
    begun = time.monotonic()
    target = targets.resolve(options)
    loads_all = is_safetensors_target(target, None)
    if options.max_shard_size is not None and not loads_all:
        raise ValueError("--max-shard-size is for targets that end with .safetensors")
    reading = {"num_readers": options.readers, "memory_limit": options.memory_limit}
    with open_file(options.file, params, mmap=loads_all, **reading) as source:
        source.check_key(*hint)
        source.refuse_unreached(options.skip_objects)
        if options.verify and not source.reader.seekable:
            raise ValueError(
                f"--verify reads {source.shown} twice, but it can only be read once, front to back"
            )
        if options.verify:
            _verify_hub_checksum(source)
        if options.drop_metadata:
            source.metadata = {}
        elif encryption is not None and not options.clear_metadata:
            _refuse_clear_metadata(source)
        as_it_is = params is None and encryption is None and not options.drop_metadata
        # Of shards the index is what is read again.
        target = _write_target(source, target, encryption, options, as_it_is)
        seconds = time.monotonic() - begun
        shown = "the standard output" if target == targets.STREAM else without_password(target)
        found = []
        if options.verify:
            found = _differences_of_copy(source, target, encryption, options, report)
    rate = source.total / max(seconds, 1e-6)
    report.done(
        f"{done}: {plural(len(source), 'tensor')}, {size(source.total)} in {seconds:.2f} s, "
        f"{size(rate)}/s, to {shown}"
    )
    if source.left_out:
        names = ", ".join(source.left_out[:_SHOWN]) + (", ..." * (len(source.left_out) > _SHOWN))
        report.done(f"left out (not tensors): {plural(len(source.left_out), 'object')} ({names})")
    for line in source.unreached:
        report.done(f"left out: {line}")
    without_data = source.without_data()
    for name in without_data:
        report.done(f"{text(name)} has no data, as in {source.shown}")
    if options.verify:
        report.done(
            f"{plural(len(found), 'difference')} between {source.shown} and {shown}"
            if found
            else f"verified: {shown} has the same tensors and metadata"
        )
    report.result(
        file=source.shown,
        target=shown,
        tensors=len(source),
        bytes=source.total,
        seconds=round(seconds, 6),
        bytes_per_second=round(rate),
        without_data=[plain(name) for name in without_data],
        **({"verified": not found, "differences": found} if options.verify else {}),
    )
    return _DIFFERENT if found else 0


def _verify_hub_checksum(source: BatchedFile) -> None:
    """Compare a file's bytes with the hash that its hub publishes, if it publishes one."""
    try:
        source.load([], "all")
    except DamagedFileError:
        raise
    except HashMismatchError:
        # Neither the file nor its server has a hash.
        return


def _refuse_clear_metadata(source: BatchedFile) -> None:
    """Refuse to encrypt a file with metadata, unless the file is encrypted already."""
    if source.metadata and not source.reader.encrypted:
        raise ValueError(
            f"{source.shown} has metadata, which are not encrypted in an encrypted file: "
            "--clear-metadata copies them unencrypted, --drop-metadata leaves them out"
        )


def _differences_of_copy(
    source: BatchedFile,
    target: str,
    encryption: EncryptionParams | None,
    options: argparse.Namespace,
    report: Report,
) -> list[dict[str, Any]]:
    """Read the copy again from its target, and return the differences."""
    params = None
    if encryption is not None:
        params = DecryptionParams.from_key(encryption.key, require_manifest=options.manifest)
    all_found: list[dict[str, Any]] = []
    reading = {"num_readers": options.readers, "memory_limit": source.memory_limit}
    try:
        with (
            Progress(options) as progress,
            BatchedFile(target, params, progress=progress, **reading) as copy,
        ):
            progress.total = copy.total
            for found, line in differences(source, copy, copied=True):
                report.line(line)
                all_found.append(found)
    except DAMAGES as error:
        report.line(str(error))
        all_found.append({"name": None, "difference": "damage", "message": str(error)})
    return all_found


def _write_target(
    source: BatchedFile,
    target: str,
    encryption: EncryptionParams | None,
    options: argparse.Namespace,
    as_it_is: bool,
) -> Any:
    """Write the copy; return where it is read again from.

    The standard output and Redis get the copy of a file without a name, which vanishes with this
    process: the index comes before the tensors, and keys contain positions, but both are known only
    when all tensors are written.
    """
    if target == targets.STREAM:
        with tempfile.TemporaryFile() as file:
            _write(source, file.fileno(), encryption, options)
            file.seek(0)
            copy_to_output(file)
    elif targets.is_redis_address(target):
        with targets.redis_server(target) as (client, prefix), contextlib.ExitStack() as opened:
            copy = source
            if not (as_it_is and options.alignment is None and source.reader.format == "tensors"):
                file = opened.enter_context(tempfile.TemporaryFile())
                _write(source, file.fileno(), encryption, options)
                copy = BatchedFile(file.fileno(), memory_limit=options.memory_limit)
                opened.enter_context(copy)
            every, limit = range(len(copy)), copy.memory_limit
            copy_to_redis(copy.reader, every, client, prefix, force=True, memory_limit=limit)
    else:
        return _write(source, target, encryption, options)
    return target


def _write(
    source: BatchedFile,
    target: str | int,
    encryption: EncryptionParams | None,
    options: argparse.Namespace,
) -> Any:
    """Write a file; return where it is read again from."""
    uploads = isinstance(target, str) and is_address(target) and local_path(target) is None
    # A copy has new hashes, also of damaged data; the CRC-32 finds that and costs next to nothing.
    verify = "all" if options.verify else "crc32"
    if source.reader.format not in ("tensors", "checkpoint"):
        verify = "nothing"
    names = [source.reader.name(n) for n in range(len(source))]
    with Progress(options) as progress:
        progress.total = source.total
        if is_safetensors_target(target, None):
            if encryption is not None or options.alignment is not None:
                raise ValueError("safetensors files are neither encrypted nor aligned")
            # All at once, because the header of that format comes first.
            rest = source.reserve_memory_for_all(minimum_save_memory(uploads, False))
            tensors, _ = source.load(list(range(len(source))), verify)
            return save_safetensors(
                dict(zip(names, tensors, strict=True)),
                target,
                metadata=source.metadata or None,
                max_shard_size=options.max_shard_size,
                progress=progress,
                memory_limit=rest,
            )
        if not names:
            raise FormatError(
                f"{source.shown} holds no tensors, and a .tensors file has at least one"
            )
        min_memory = minimum_save_memory(uploads, encryption is not None)
        if options.verify and source.memory_limit is not None:
            # Once it is written, tensors of the copy are held too.
            min_memory = max(min_memory, source.largest + source.file.min_memory())
        most, beside = source.reserve_memory(min_memory)
        limit = source.memory_limit
        with FileWriter(
            target,
            encryption=encryption,
            alignment=options.alignment or _ALIGNMENT,
            metadata=source.metadata,
            clear_metadata=True,
            memory_limit=limit,
            reserved_memory=0 if limit is None else limit - beside,
            allow_meta=True,
            progress=progress,
        ) as writer:
            if source.reader.pair_id is not None:
                # A copy is as good a storage file of a saved object.
                writer.set_pair_id(source.reader.pair_id)
            for batch in source.batches(most):
                tensors, modules = source.load(batch, verify)
                kinds = [TensorType(source.kinds[n]) for n in batch]
                writer.write([names[n] for n in batch], kinds, modules, tensors)
                # Freed here, not while the next ones are loaded.
                del tensors
    return target
