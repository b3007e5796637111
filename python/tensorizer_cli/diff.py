"""``tensorizer diff``."""

from __future__ import annotations

import argparse
from typing import Any

from tensorizer import CryptographyError

from . import keys
from .checkpoint import open_file
from .compare import differences
from .file import BatchedFile
from .output import Report, plural
from .progress import ProgressBar

_DIFFERENT = 1


def run(options: argparse.Namespace) -> int:
    """Compare two files, tensor by tensor."""
    report = Report(options)
    all_found: list[dict[str, Any]] = []
    limit = options.memory_limit
    with (
        open_file(options.file, None, options.readers, memory_limit=limit) as file,
        open_file(options.other, None, options.readers, memory_limit=limit) as other,
    ):
        for one in (file, other):
            one.refuse_unreached(options.skip_objects)
        _decrypt(file, other, options)
        with ProgressBar(file.total, options) as progress:
            for found, line in differences(file, other, progress):
                report.finding(line)
                all_found.append(found)
    count = plural(len(all_found), "difference")
    report.summary(count if all_found else "the tensors are the same")
    report.result(file=file.shown, other=other.shown, same=not all_found, differences=all_found)
    return _DIFFERENT if all_found else 0


def _decrypt(file: BatchedFile, other: BatchedFile, options: argparse.Namespace) -> None:
    """Give each file its key."""
    params, others = keys.decryption(options), keys.decryption(options, "other-")
    if others is not None:
        other.decrypt(others)
        if params is not None:
            file.decrypt(params)
    elif params is not None:
        # One of them may be the plain copy; it is refused only if files must have a seal.
        encrypted = [one for one in (file, other) if one.reader.encrypted]
        if not encrypted:
            raise CryptographyError(f"neither {file.shown} nor {other.shown} is encrypted")
        for one in (file, other) if options.require_manifest else encrypted:
            one.decrypt(params)
    file.check_key()
    other.check_key("give its key, for example with --other-key-file")
