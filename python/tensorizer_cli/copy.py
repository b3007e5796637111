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
#: The name of what each command has done.
_DONE = {"cp": "copied", "encrypt": "encrypted", "decrypt": "decrypted", "rekey": "encrypted anew"}


def copy(options: argparse.Namespace) -> int:
    """Copy a file, or what a model has beside its weights."""
    command = options.command
    if command == "cp" and options.no_weights:
        from . import without_weights

        return without_weights.copy(options)
    prefix = {"encrypt": "", "rekey": "new-"}.get(command)
    encryption = None if prefix is None else keys.encryption(options, prefix)
    params = None
    if command != "encrypt":
        params = keys.decryption(options, needed=command == "decrypt")
    report = Report(options)
    begun = time.monotonic()
    target = targets.resolve(options)
    loads_all = is_safetensors_target(target, None)
    if options.max_shard_size is not None and not loads_all:
        raise ValueError("--max-shard-size is for targets that end with .safetensors")
    with open_file(options.file, options, params, mmap=loads_all) as source:
        if command == "encrypt":
            source.check_key("use rekey, which takes its key and the new one")
        source.check_key()
        source.refuse_unreached(options.skip_objects)
        if options.verify and not source.reader.seekable:
            raise ValueError(
                f"--verify reads {source.shown} twice, but it can only be read once, front to back"
            )
        if options.verify:
            _verify_hub_checksum(source)
        if options.drop_metadata:
            source.metadata = {}
        in_clear = encryption is not None and not options.clear_metadata
        if in_clear and source.metadata and not source.reader.encrypted:
            raise ValueError(
                f"{source.shown} has metadata, which are not encrypted in an encrypted file: "
                "--clear-metadata copies them unencrypted, --drop-metadata leaves them out"
            )
        made = _Copy(source, encryption, options)
        # Of shards the index is what is read again.
        target = made.store(target, is_decrypted=params is not None)
        seconds = time.monotonic() - begun
        shown = "the standard output" if target == targets.STREAM else without_password(target)
        found = made.differences(target, report) if options.verify else []
    rate = source.total / max(seconds, 1e-6)
    report.done(
        f"{_DONE[command]}: {plural(len(source), 'tensor')}, {size(source.total)} in "
        f"{seconds:.2f} s, {size(rate)}/s, to {shown}"
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


cp = encrypt = decrypt = rekey = copy


def _verify_hub_checksum(source: BatchedFile) -> None:
    """Compare a file's bytes with the hash that its hub publishes, if it publishes one."""
    try:
        source.load([], "all")
    except DamagedFileError:
        raise
    except HashMismatchError:
        # Neither the file nor its server has a hash.
        return


class _Copy:
    """A copy of a file, perhaps encrypted."""

    def __init__(
        self,
        source: BatchedFile,
        encryption: EncryptionParams | None,
        options: argparse.Namespace,
    ) -> None:
        self._source, self._encryption, self._options = source, encryption, options

    def store(self, target: str, is_decrypted: bool) -> Any:
        """Write the copy; return where it is read again from.

        The standard output and Redis get the copy of a file without a name, which vanishes with
        this process: the index comes before the tensors, and keys contain positions, but both are
        known only when all tensors are written.
        """
        if target == targets.STREAM:
            with tempfile.TemporaryFile() as file:
                self._write(file.fileno())
                file.seek(0)
                copy_to_output(file)
        elif targets.is_redis_address(target):
            source, options = self._source, self._options
            unchanged = self._encryption is None and options.alignment is None
            unchanged = unchanged and not is_decrypted and not options.drop_metadata
            with targets.redis_server(target) as server, contextlib.ExitStack() as opened:
                if not unchanged or source.reader.format != "tensors":
                    file = opened.enter_context(tempfile.TemporaryFile())
                    self._write(file.fileno())
                    source = BatchedFile(file.fileno(), memory_limit=options.memory_limit)
                    opened.enter_context(source)
                every, limit = range(len(source)), source.memory_limit
                copy_to_redis(source.reader, every, *server, force=True, memory_limit=limit)
        else:
            return self._write(target)
        return target

    def _write(self, target: str | int) -> Any:
        """Write a file; return where it is read again from."""
        source, options = self._source, self._options
        uploads = isinstance(target, str) and is_address(target) and local_path(target) is None
        # A copy has new hashes, also of damaged data; the CRC-32 finds that, and costs little.
        verify = "all" if options.verify else "crc32"
        if source.reader.format not in ("tensors", "checkpoint"):
            verify = "nothing"
        names = [source.reader.name(n) for n in range(len(source))]
        min_memory = minimum_save_memory(uploads, self._encryption is not None)
        with Progress(options) as progress:
            progress.total = source.total
            if is_safetensors_target(target, None):
                if self._encryption is not None or options.alignment is not None:
                    raise ValueError("safetensors files are neither encrypted nor aligned")
                # All at once, because the header of that format comes first.
                rest = source.reserve_memory_for_all(min_memory)
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
            limit = source.memory_limit
            if options.verify and limit is not None:
                # Once it is written, tensors of the copy are held too.
                min_memory = max(min_memory, source.largest + source.file.min_memory())
            most, beside = source.reserve_memory(min_memory)
            with FileWriter(
                target,
                encryption=self._encryption,
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

    def differences(self, target: str, report: Report) -> list[dict[str, Any]]:
        """Read the copy again from its target, and return the differences."""
        source, options, params = self._source, self._options, None
        if self._encryption is not None:
            key, sealed = self._encryption.key, options.manifest
            params = DecryptionParams.from_key(key, require_manifest=sealed)
        found: list[dict[str, Any]] = []
        try:
            with (
                Progress(options) as progress,
                open_file(target, options, params, progress=progress) as copy,
            ):
                for difference, line in differences(source, copy, copied=True):
                    report.line(line)
                    found.append(difference)
        except DAMAGES as error:
            report.line(str(error))
            found.append({"name": None, "difference": "damage", "message": str(error)})
        return found
