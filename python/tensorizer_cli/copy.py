"""``tensorizer cp``, ``encrypt``, ``decrypt`` and ``rekey``."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from typing import TYPE_CHECKING, Any

from tensorizer import (
    DamagedFileError,
    DecryptionParams,
    FormatError,
    HashMismatchError,
    TensorType,
)
from tensorizer._native import local_path, minimum_save_memory
from tensorizer.file.file_writer import FileWriter
from tensorizer.file.progress import ProgressReporter
from tensorizer.file.to_redis import copy_to_redis
from tensorizer.file.to_safetensors import is_safetensors_target, save_safetensors
from tensorizer.streams.addresses import is_address

from . import keys, targets
from .compare import differences
from .file import DAMAGES, BatchedFile, open_file, stated_hashes
from .file_description import size, text
from .output import Report, copy_to_output, plural, without_password
from .parts import one_part
from .progress import Progress

if TYPE_CHECKING:
    from .model_folders import ModelCopy

_ALIGNMENT = 64
_DIFFERENT = 1
#: The most names in a message.
_SHOWN = 4
#: The name of what each command has done.
_DONE = {"cp": "copied", "encrypt": "encrypted", "decrypt": "decrypted", "rekey": "encrypted anew"}


def copy(options: argparse.Namespace) -> int:
    """Copy a file, or a model's folder."""
    if options.command != "cp":
        return _copy(options, None)
    from . import model_folders  # imports transformers' loaders

    if options.no_weights:
        return model_folders.copy(options)
    with model_folders.whole_model(options) or contextlib.nullcontext() as model:
        return _copy(options, model)


def _copy(options: argparse.Namespace, model: ModelCopy | None) -> int:
    command = options.command
    _find_keys(options)
    report = Report(options)
    begun = time.monotonic()
    target = targets.resolve(options)
    loads_all = is_safetensors_target(target, None)
    if options.max_shard_size is not None and not loads_all:
        raise ValueError("--max-shard-size is for targets that end with .safetensors")
    found: list[dict[str, Any]] = []
    more: dict[str, Any] = {"key": options.key, "mmap": loads_all}
    # Local files are mapped, and their bytes are read when they are written.
    passes = 1 if loads_all and local_path(options.file) is not None else 2
    more |= stated_hashes(options) if command == "cp" else {}
    with (
        Progress(options, passes=passes) as progress,
        open_file(
            options.file,
            options,
            options.decryption,
            progress=progress if passes > 1 else None,
            **more,
        ) as source,
    ):
        _check(source, options)
        part = one_part(source) if loads_all else None
        if part is not None:
            source.use_part(part[1])
        progress.total = passes * source.total
        if model is not None:
            model.make_folder()
        # Of shards the index is what is read again.
        written = _store(source, target, options, progress)
        progress.finish()
        seconds = time.monotonic() - begun
        shown = "the standard output" if target == targets.STREAM else without_password(written)
        if options.verify:
            found = _differences(source, written, options, report)
    files = [] if model is None or found else model.write_files()[0]
    rate = source.total / max(seconds, 1e-6)
    report.done(
        f"{_DONE[command]}: {plural(len(source), 'tensor')}, {size(source.total)} in "
        f"{seconds:.2f} s, {size(rate)}/s, to {shown}"
    )
    if files:
        report.done(f"also copied: {', '.join(files)}")
    if part is not None:
        report.done(
            f"the names are those below {part[0]}: safetensors has no nested ones (see --key)"
        )
    if source.left_out:
        names = ", ".join(source.left_out[:_SHOWN]) + (", ..." * (len(source.left_out) > _SHOWN))
        report.done(f"left out (not tensors): {plural(len(source.left_out), 'object')} ({names})")
    for line in source.unreached:
        report.done(f"left out: {line}")
    without_data = source.without_data()
    for name in without_data:
        report.done(f"{text(name)} has no data, as in {source.shown}")
    if found:
        report.done(f"{plural(len(found), 'difference')} between {source.shown} and {shown}")
    elif options.verify:
        report.done(f"verified: {shown} has the same tensors and metadata")
    report.result(
        file=source.shown,
        target=shown,
        tensors=len(source),
        bytes=source.total,
        seconds=round(seconds, 6),
        bytes_per_second=round(rate),
        without_data=without_data,
        **({"files": files} if files else {}),
        **({"verified": not found, "differences": found} if options.verify else {}),
    )
    return _DIFFERENT if found else 0


cp = encrypt = decrypt = rekey = copy


def _find_keys(options: argparse.Namespace) -> None:
    """Add the keys of the file and of its copy to the options."""
    command = options.command
    prefix = {"encrypt": "", "rekey": "new-"}.get(command)
    options.encryption = None if prefix is None else keys.encryption(options, prefix)
    options.decryption = None
    if command != "encrypt":
        options.decryption = keys.decryption(options, needed=command == "decrypt")


def _check(source: BatchedFile, options: argparse.Namespace) -> None:
    """Refuse a file that cannot be copied as requested; drop its metadata if that is requested."""
    if options.command == "encrypt":
        source.check_key("use rekey, which takes its key and the new one")
    source.check_key()
    source.refuse_unreached(options.skip_objects)
    if options.verify:
        if not source.reader.seekable:
            raise ValueError(
                f"--verify reads {source.shown} twice, but it can only be read once, front to back"
            )
        try:
            # Compares a file of a hub with the hash that the hub publishes, if there is one.
            source.load([], "all")
        except HashMismatchError as error:
            if isinstance(error, DamagedFileError):
                raise
    if options.drop_metadata:
        source.metadata = {}
    in_clear = options.encryption is not None and not options.clear_metadata
    if in_clear and source.metadata and not source.reader.encrypted:
        raise ValueError(
            f"{source.shown} has metadata, which are not encrypted in an encrypted file: "
            "--clear-metadata copies them unencrypted, --drop-metadata leaves them out"
        )


def _store(
    source: BatchedFile, target: str, options: argparse.Namespace, progress: ProgressReporter
) -> Any:
    """Write the copy; return where it is read again from.

    The standard output and Redis get the copy of a file without a name, which vanishes with this
    process: the index comes before the tensors, and keys contain positions, but both are known only
    when all tensors are written.
    """
    with contextlib.ExitStack() as opened:
        if target == targets.STREAM:
            file = opened.enter_context(tempfile.TemporaryFile())
            _write(source, file.fileno(), options, progress)
            file.seek(0)
            copy_to_output(file)
        elif target.lower().startswith(("redis://", "rediss://")):
            server = opened.enter_context(targets.redis_server(target))
            changes = options.decryption, options.encryption, options.alignment
            is_changed = options.drop_metadata or any(one is not None for one in changes)
            if is_changed or source.reader.format != "tensors":
                file = opened.enter_context(tempfile.TemporaryFile())
                _write(source, file.fileno(), options, progress)
                source = BatchedFile(file.fileno(), memory_limit=options.memory_limit)
                opened.enter_context(source)
                report = None
            else:
                report = progress.part()
            copy_to_redis(
                source.reader,
                range(len(source)),
                *server,
                force=True,
                limit=source.memory_limit,
                # A byte that is stored was read, too.
                report=report and (lambda stored: report(2 * stored)),
            )
        else:
            return _write(source, target, options, progress)
    return target


def _write(
    source: BatchedFile, target: str | int, options: argparse.Namespace, progress: ProgressReporter
) -> Any:
    """Write a file; return where it is read again from."""
    encryption = options.encryption
    # A copy has new hashes, also of damaged data; the CRC-32 finds that, and costs little.
    verify = "all" if options.verify else "crc32"
    if source.reader.format not in ("tensors", "checkpoint"):
        verify = "nothing"
    min_memory = minimum_save_memory(is_address(target), encryption is not None)
    if is_safetensors_target(target, None):
        if encryption is not None or options.alignment is not None:
            raise ValueError("safetensors files are neither encrypted nor aligned")
        # All at once, because the header of that format comes first.
        rest = source.reserve_memory_for_all(min_memory)
        tensors, _ = source.load(list(range(len(source))), verify)
        return save_safetensors(
            dict(zip(source.names, tensors, strict=True)),
            target,
            metadata=source.metadata or None,
            max_shard_size=options.max_shard_size,
            progress=progress,
            memory_limit=rest,
        )
    if not len(source):
        raise FormatError(f"{source.shown} holds no tensors, and a .tensors file has at least one")
    limit = source.memory_limit
    if options.verify and limit is not None:
        # Once it is written, tensors of the copy are held too.
        min_memory = max(min_memory, source.largest + source.file.min_memory())
    most, beside = source.reserve_memory(min_memory)
    batches = list(source.batches(most))
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
        room_for_more=len(batches) > 1,
    ) as writer:
        if source.reader.pair_id is not None:
            # A copy is as good a storage file of a saved object.
            writer.set_pair_id(source.reader.pair_id)
        for batch in batches:
            tensors, modules = source.load(batch, verify)
            kinds = [TensorType(source.kinds[n]) for n in batch]
            writer.write([source.names[n] for n in batch], kinds, modules, tensors)
            # Freed here, not while the next ones are loaded.
            del tensors
    return target


def _differences(
    source: BatchedFile, target: str, options: argparse.Namespace, report: Report
) -> list[dict[str, Any]]:
    """Read the copy again from its target, and return the differences."""
    params = None
    if options.encryption is not None:
        key = options.encryption.key
        params = DecryptionParams.from_key(key, require_manifest=options.manifest)
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
