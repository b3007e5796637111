"""``tensorizer verify``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from tensorizer import CryptographyError, DamagedFileError, FormatError

from . import keys
from .file import DAMAGES, BatchedFile, open_file, stated_hashes
from .file_description import text
from .output import Report, plural
from .progress import Progress

_DAMAGED = 1
#: The number of tensors tried with a key; one that fits none of them is the wrong key.
_TRIED = 16


def verify(options: argparse.Namespace) -> int:
    """Compare tensors with their hashes, and metadata with their checksum."""
    report = Report(options)
    damaged: list[dict[str, object]] = []

    def add(name: object, error: Exception) -> None:
        report.line(str(error))
        damaged.append({"name": name, "message": str(error)})

    with (
        Progress(options) as progress,
        open_file(
            options.file,
            options,
            keys.decryption(options),
            progress=progress,
            key=options.key,
            **stated_hashes(options),
        ) as file,
    ):
        file.check_key()
        try:
            # Refuses a file of a format without hashes, which is not damage.
            file.load([], "all")
        except DamagedFileError as damage:
            add(None, damage)
            good = 0
        else:
            if file.reader.encrypted and file.reader.seekable:
                _check_fit(file)
            for batch in _batches(file):
                for number, error in _damages(file, batch):
                    add(file.names[number], error)
            good = len(file) - len(damaged)
            for left_out in file.left_out:
                try:
                    file.check_object(left_out)
                except DAMAGES as error:
                    add(left_out, error)
    without_data = file.without_data()
    for name in without_data:
        report.line(f"{text(name)} has no data: a load gives zeros")
    try:
        _ = file.metadata
    except FormatError as error:
        add(None, error)
    are = "is as it was written" if 1 in (good, len(file)) else "are as they were written"
    report.summary(f"{good:,} of {plural(len(file), 'tensor')} {are}")
    report.result(
        file=file.shown,
        tensors=len(file),
        bytes=file.total,
        without_data=without_data,
        damaged=damaged,
    )
    return _DAMAGED if damaged else 0


def _check_fit(file: BatchedFile) -> None:
    """Refuse a key that fits no tensor; a wrong key is not damage."""
    with_data = [number for number, length in enumerate(file.data_lens) if length]
    step = -(-len(with_data) // _TRIED) or 1
    # The smallest first: if it can be decrypted, no other is read.
    tried = sorted(with_data[::step], key=file.data_lens.__getitem__)
    loaded = (file.load_undamaged([number], "nothing")[0] for number in tried)
    if not tried or not all(isinstance(one, CryptographyError) for one in loaded):
        return
    count = len(tried)
    could = "its tensor could not" if count == 1 else f"none of {count} tensors could"
    raise CryptographyError(f"the key does not fit {file.shown}: {could} be decrypted with it")


def _batches(file: BatchedFile) -> Iterator[list[int]]:
    """Return numbers of tensors; one at a time, in order, if the file can be read only once."""
    if file.reader.seekable:
        return file.batches(file.reserve_memory()[0])
    offsets = file.reader.offsets()
    return ([number] for number in sorted(range(len(file)), key=offsets.__getitem__))


def _damages(file: BatchedFile, batch: list[int]) -> list[tuple[int, Exception]]:
    """Load a batch; return its damaged tensors with their errors, and free the others."""
    loaded = zip(batch, file.load_undamaged(batch, "all"), strict=True)
    return [(number, one) for number, one in loaded if isinstance(one, Exception)]
