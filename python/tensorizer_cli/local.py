"""``tensorizer cache``, ``keygen`` and ``completion``: commands about this machine alone."""

from __future__ import annotations

import argparse
import functools
import os
import secrets
import time
from pathlib import Path

from . import native
from .arguments import command_parser
from .file_description import size
from .output import Report, plural, print_line

#: Bytes of a key of XSalsa20-Poly1305 (``crypto_secretbox_KEYBYTES`` of libsodium).
_KEY_BYTES = 32
#: The scripts that a wheel has, by the name of the shell.
_SCRIPTS = Path(__file__).with_name("completions")
#: The names of arguments that are files, for which shells complete paths.
_FILES = ("FILE", "OTHER", "TARGET", "KEY", "F", "DIR")


def cache(options: argparse.Namespace) -> int:
    """List the cached files of servers, or remove them."""
    report = Report(options)
    removes = options.action == "clear"
    core = native.module()
    found = (core.clear_cache if removes else core.cache_entries)(options.folder)
    if not removes:
        for uri, length, here, used in found:
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(used))
            report.line(f"{when}  {here / length:4.0%} of {size(length):<9}  {uri}")
    together = size(sum(here for _, _, here, _ in found))
    report.summary(f"{'removed ' * removes}{plural(len(found), 'file')}, {together}")
    names = ("uri", "bytes", "cached", "used")
    rows = [dict(zip(names, row, strict=True)) for row in found]
    report.result(**{"removed" if removes else "files": rows})
    return 0


def keygen(options: argparse.Namespace) -> int:
    """Write a random key to a new file that its owner alone may read, or print it.

    Raises:
        FileExistsError: There is a file of this name, perhaps a key in use.
        ValueError: The name is a misspelled address, or begins with ``~/``.

    """
    report = Report(options)
    key = secrets.token_bytes(_KEY_BYTES)
    if options.key == "-":
        report.line(key.hex())
        report.result(key=key.hex())
        return 0
    native.module().check_target(options.key)
    opener = functools.partial(os.open, mode=0o600)
    file = open(options.key, "xb", opener=opener)  # noqa: SIM115
    try:
        with file:
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


def completion(options: argparse.Namespace) -> int:
    """Print the script by which a shell completes the command, made now if none was built."""
    built = _SCRIPTS / options.shell
    print_line(built.read_text() if built.exists() else completion_script(options.shell))
    return 0


def completion_script(shell: str) -> str:
    """Make the script of a shell.

    Raises:
        ImportError: The package shtab is not installed.

    """
    try:
        import shtab
    except ImportError:
        raise ImportError(
            "this build of tensorizer has no completion scripts, and shtab, which makes them, is "
            "not installed: pip install shtab"
        ) from None
    parser, _ = command_parser()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                for argument in one._actions:
                    if argument.metavar in _FILES:
                        argument.complete = shtab.FILE
    return str(shtab.complete(parser, shell))
