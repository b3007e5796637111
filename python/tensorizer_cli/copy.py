"""``tensorizer cp``, ``encrypt``, ``decrypt`` and ``rekey``."""

from __future__ import annotations

import argparse
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
from tensorizer.file.to_safetensors import is_safetensors_target, save_safetensors
from tensorizer.streams.addresses import is_address

from . import keys, redis_target, targets
from .checkpoint import open_file
from .compare import DAMAGES, differences
from .file import BatchedFile
from .file_description import plain, size, text
from .output import Report, plural, without_password
from .progress import ProgressBar

_ALIGNMENT = 64
_DIFFERENT = 1
#: The most names in a message.
_SHOWN = 4


def cp(options: argparse.Namespace) -> int:
    """Copy a file, or what a model has beside its weights."""
    if options.no_weights:
        from . import without_weights

        return without_weights.copy(options)
    return _run(options, keys.decryption(options), None, "copied")


def encrypt(options: argparse.Namespace) -> int:
    """Copy a file, encrypted."""
    hint = "use rekey, which takes its key and the new one"
    return _run(options, None, keys.encryption(options), "encrypted", hint)


def decrypt(options: argparse.Namespace) -> int:
    """Copy an encrypted file as plain data."""
    return _run(options, keys.needed_decryption(options), None, "decrypted")


def rekey(options: argparse.Namespace) -> int:
    """Copy an encrypted file under another key."""
    encryption = keys.encryption(options, "new-")
    return _run(options, keys.decryption(options), encryption, "encrypted anew")


def _run(
    options: argparse.Namespace,
    params: DecryptionParams | None,
    encryption: EncryptionParams | None,
    done: str,
    *hint: str,
) -> int:
    report = Report(options)
    begun = time.monotonic()
    options.target = targets.resolve(options)
    if options.max_shard_size is not None and not is_safetensors_target(options.target, None):
        raise ValueError("--max-shard-size is for targets that end with .safetensors")
    loads_all = is_safetensors_target(options.target, None)
    limit = options.memory_limit
    with open_file(options.file, params, options.readers, loads_all, limit) as source:
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
        if encryption is not None and not options.clear_metadata:
            _refuse_clear_metadata(source)
        if options.target == targets.STREAM:
            with targets.standard_output() as file:
                _copy(source, file, encryption, options)
        elif not redis_target.is_redis_address(options.target):
            # Of shards the index is what is read again.
            options.target = _copy(source, options.target, encryption, options)
        elif _can_store_unchanged(source, params, encryption, options):
            redis_target.store(source, options.target)
        else:
            with redis_target.converted_file(options.target, limit) as file:
                _copy(source, file, encryption, options)
        seconds = time.monotonic() - begun
        found = _differences_of_copy(source, encryption, options, report) if options.verify else []
    rate = source.total / max(seconds, 1e-6)
    target = without_password(options.target)
    if target == targets.STREAM:
        target = "the standard output"
    report.done(
        f"{done}: {plural(len(source), 'tensor')}, {size(source.total)} in {seconds:.2f} s, "
        f"{size(rate)}/s, to {target}"
    )
    if source.left_out:
        names = ", ".join(source.left_out[:_SHOWN]) + (", ..." * (len(source.left_out) > _SHOWN))
        report.done(f"left out (not tensors): {plural(len(source.left_out), 'object')} ({names})")
    for line in source.unreached:
        report.done(f"left out: {line}")
    without_data = [source.reader.name(number) for number in source.without_data()]
    for name in without_data:
        report.done(f"{text(name)} has no data, as in {source.shown}")
    if options.verify:
        report.done(
            f"{plural(len(found), 'difference')} between {source.shown} and {target}"
            if found
            else f"verified: {target} has the same tensors and metadata"
        )
    checked = {"verified": not found, "differences": found} if options.verify else {}
    report.result(
        file=source.shown,
        target=target,
        tensors=len(source),
        bytes=source.total,
        seconds=round(seconds, 6),
        bytes_per_second=round(rate),
        without_data=[plain(name) for name in without_data],
        **checked,
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
    encryption: EncryptionParams | None,
    options: argparse.Namespace,
    report: Report,
) -> list[dict[str, Any]]:
    """Read the copy again from its target, and return the differences."""
    params = None
    if encryption is not None:
        params = DecryptionParams.from_key(encryption.key, require_manifest=options.manifest)
    all_found: list[dict[str, Any]] = []
    try:
        with (
            BatchedFile(
                options.target, params, options.readers, memory_limit=source.memory_limit
            ) as copy,
            ProgressBar(source.total, options) as progress,
        ):
            for found, line in differences(source, copy, progress, copied=True):
                report.finding(line)
                all_found.append(found)
    except DAMAGES as error:
        report.finding(str(error))
        all_found.append({"name": None, "difference": "damage", "message": str(error)})
    return all_found


def _can_store_unchanged(
    source: BatchedFile,
    params: DecryptionParams | None,
    encryption: EncryptionParams | None,
    options: argparse.Namespace,
) -> bool:
    """Tell whether a server is to store the bytes of the file unchanged."""
    same = params is None and encryption is None and options.alignment is None
    same = same and not options.drop_metadata
    return same and source.reader.format == "tensors"


def _copy(
    source: BatchedFile,
    target: str | int,
    encryption: EncryptionParams | None,
    options: argparse.Namespace,
) -> Any:
    """Write the copy; return where it is read again from."""
    if is_safetensors_target(target, None):
        return _to_safetensors(source, target, encryption, options)
    if not len(source):
        raise FormatError(f"{source.shown} holds no tensors, and a .tensors file has at least one")
    limit, min_memory = source.memory_limit, _min_save_memory(target, encryption)
    if options.verify and limit is not None:
        # Once it is written, tensors of the copy are held too.
        min_memory = max(min_memory, source.largest + source.min_memory)
    most, beside = source.reserve_memory(min_memory)
    kept = 0 if limit is None else limit - beside
    with (
        FileWriter(
            target,
            encryption=encryption,
            alignment=options.alignment or _ALIGNMENT,
            metadata=source.metadata,
            clear_metadata=True,
            memory_limit=limit,
            reserved_memory=kept,
            allow_meta=True,
        ) as writer,
        ProgressBar(source.total, options) as progress,
    ):
        identity = source.reader.pair_id
        if identity is not None:
            # A copy is as good a storage file of a saved object.
            writer.set_pair_id(identity)
        for batch in source.batches(most):
            tensors, modules = source.load(batch, _hashes(source, options))
            writer.write(
                [source.reader.name(n) for n in batch],
                [TensorType(source.kinds[n]) for n in batch],
                modules,
                tensors,
            )
            # Freed here, not while the next ones are loaded.
            del tensors
            progress.add(source.size(batch))
    return target


def _hashes(source: BatchedFile, options: argparse.Namespace) -> str:
    """Return which hashes of the source are compared: a copy has new ones, also of damaged data.

    The CRC-32 finds damage and costs next to nothing; ``--verify`` compares all.
    """
    if source.reader.format not in ("tensors", "checkpoint"):
        return "nothing"
    return "all" if options.verify else "crc32"


def _min_save_memory(target: str | int, encryption: EncryptionParams | None) -> int:
    """Return the smallest memory limit with which the copy can be written."""
    uploads = isinstance(target, str) and is_address(target) and local_path(target) is None
    return minimum_save_memory(uploads, encryption is not None)


def _to_safetensors(
    source: BatchedFile,
    target: str | int,
    encryption: EncryptionParams | None,
    options: argparse.Namespace,
) -> Any:
    """Write all tensors at once, because the header of that format comes first."""
    if encryption is not None or options.alignment is not None:
        raise ValueError("safetensors files are neither encrypted nor aligned")
    rest = source.reserve_memory_for_all(_min_save_memory(target, None))
    with ProgressBar(source.total, options) as progress:
        tensors, _ = source.load(list(range(len(source))), _hashes(source, options))
        names = [source.reader.name(n) for n in range(len(source))]
        written = save_safetensors(
            dict(zip(names, tensors, strict=True)),
            target,
            options.max_shard_size,
            metadata=source.metadata or None,
            memory_limit=rest,
        )
        progress.add(source.total)
    return written
