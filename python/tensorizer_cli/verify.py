"""``tensorizer verify``."""

from __future__ import annotations

import argparse

from tensorizer._errors import CryptographyError, HashMismatchError

from . import keys
from .file import File
from .output import Progress, say

_DAMAGED = 1


def run(options: argparse.Namespace) -> int:
    """Compare tensors with their hashes."""
    bad = 0
    with (
        File(options.file, keys.decryption(options), options.readers) as file,
        Progress(file.total) as progress,
    ):
        for batch in file.batches():
            try:
                file.load(batch, "all")
            except (HashMismatchError, CryptographyError):
                for number in batch:
                    try:
                        file.load([number], "all")
                    except (HashMismatchError, CryptographyError) as error:
                        say(str(error))
                        bad += 1
            progress.add(sum(file.data_lens[n] for n in batch))
        print(f"{len(file) - bad} of {len(file)} tensors are as they were written")
    return _DAMAGED if bad else 0
