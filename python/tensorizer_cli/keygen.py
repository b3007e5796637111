"""``tensorizer keygen``: a key for encrypted files."""

from __future__ import annotations

import argparse
import os
import secrets
from pathlib import Path

from . import native
from .output import Report
from .standard_streams import print_line

#: Bytes of a key of XSalsa20-Poly1305 (``crypto_secretbox_KEYBYTES`` of libsodium).
_KEY_BYTES = 32


def run(options: argparse.Namespace) -> int:
    """Write a random key to a new file that its owner alone may read, or print it.

    Raises:
        FileExistsError: There is a file of this name, perhaps a key in use.
        ValueError: The name is a misspelled address, or begins with ``~/``.

    """
    report = Report(options)
    key = secrets.token_bytes(_KEY_BYTES)
    if options.key == "-":
        if not options.json:
            print_line(key.hex())
        report.result(key=key.hex())
        return 0
    native.module().check_target(options.key)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(options.key, flags, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(key)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        # Half a key would be in the way of the next one.
        Path(options.key).unlink(missing_ok=True)
        raise
    report.done(f"a key of {_KEY_BYTES} bytes: {options.key}; without it, files are lost")
    report.result(key_file=options.key, bytes=_KEY_BYTES)
    return 0
