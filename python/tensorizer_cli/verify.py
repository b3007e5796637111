"""``tensorizer verify``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from tensorizer import CryptographyError, DamagedFileError, FormatError

from . import keys
from .checkpoint import open_file
from .compare import DAMAGES
from .file import BatchedFile
from .file_description import plain, text
from .output import Report, plural
from .progress import ProgressBar

_DAMAGED = 1
#: The number of tensors tried with a key; one that fits none of them is the wrong key.
_TRIED = 16


def run(options: argparse.Namespace) -> int:
    """Compare tensors with their hashes, and metadata with their checksum."""
    report = Report(options)
    damaged: list[dict[str, object]] = []
    damaged_objects: list[dict[str, object]] = []
    with (
        open_file(
            options.file,
            keys.decryption(options),
            options.readers,
            memory_limit=options.memory_limit,
        ) as file,
        ProgressBar(file.total, options) as progress,
    ):
        file.check_key()
        whole = None
        try:
            # Refuses a file of a format without hashes, which is not damage.
            file.load([], "all")
        except DamagedFileError as damage:
            whole = str(damage)
            report.finding(whole)
            damaged.append({"name": None, "message": whole})
        if whole is None and file.reader.encrypted and file.reader.seekable:
            _check_fit(file)
        for name, error in file.damaged_objects() if whole is None else ():
            report.finding(str(error))
            damaged_objects.append({"name": name, "message": str(error)})
        for batch in _batches(file) if whole is None else ():
            for number, error in _damages(file, batch):
                report.finding(str(error))
                damaged.append({"name": plain(file.reader.name(number)), "message": str(error)})
            progress.add(file.size(batch))
    without_data = [file.reader.name(number) for number in file.without_data()]
    for name in without_data:
        report.finding(f"{text(name)} has no data: a load gives zeros")
    good = len(file) - len(damaged) if whole is None else 0
    damaged += damaged_objects
    try:
        _ = file.metadata
    except FormatError as error:
        report.finding(str(error))
        damaged.append({"name": None, "message": str(error)})
    are = "is as it was written" if 1 in (good, len(file)) else "are as they were written"
    report.summary(f"{good:,} of {plural(len(file), 'tensor')} {are}")
    report.result(
        file=file.shown,
        tensors=len(file),
        bytes=file.total,
        without_data=[plain(name) for name in without_data],
        damaged=damaged,
    )
    return _DAMAGED if damaged else 0


def _check_fit(file: BatchedFile) -> None:
    """Refuse a key that fits no tensor; a wrong key is not damage."""
    with_data = [number for number, length in enumerate(file.data_lens) if length]
    if not with_data:
        return
    step = -(-len(with_data) // _TRIED)
    tried = {
        min(with_data, key=file.data_lens.__getitem__): None,
        **dict.fromkeys(with_data[::step]),
    }
    for number in tried:
        try:
            file.load([number], "nothing")
        except CryptographyError:
            continue
        except FormatError:
            pass
        return
    raise CryptographyError(
        f"the key does not fit {file.shown}: {_none_of(len(tried))} be decrypted with it"
    )


def _none_of(count: int) -> str:
    return "its tensor could not" if count == 1 else f"none of {count} tensors could"


def _batches(file: BatchedFile) -> Iterator[list[int]]:
    """Yield numbers of tensors; one at a time, in order, if the file can be read only once."""
    if file.reader.seekable:
        yield from file.batches(file.reserve_memory()[0])
        return
    offsets = file.reader.offsets()
    for number in sorted(range(len(file)), key=offsets.__getitem__):
        yield [number]


def _damages(file: BatchedFile, batch: list[int]) -> Iterator[tuple[int, Exception]]:
    """Load a batch, and yield its damaged tensors with their errors."""
    try:
        file.load(batch, "all")
    except DAMAGES as error:
        if len(batch) == 1:
            yield batch[0], error
            return
        for number in batch:
            yield from _damages(file, [number])
