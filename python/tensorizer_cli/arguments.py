"""The arguments of the command."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from . import copy, diff, ls, verify
from .output import shown


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Quote what was given, which may be the name of a file."""
        super().error(shown(message))


def parser() -> argparse.ArgumentParser:
    """Return what parses the arguments."""
    parser = _Parser(
        prog="tensorizer",
        description="Works on .tensors files: local paths, http(s)://, s3:// and redis:// "
        "addresses. Keys and passphrases come from files, environment variables or a prompt.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def secrets(command: argparse.ArgumentParser, prefix: str, which: str) -> None:
        group = command.add_argument_group(f"{which}, one of")
        group.add_argument(f"--{prefix}key-file", metavar="F", help="32 bytes, or 64 hex digits")
        group.add_argument(f"--{prefix}key-env", metavar="NAME", help="64 hex digits")
        group.add_argument(f"--{prefix}passphrase-file", metavar="F")
        group.add_argument(f"--{prefix}passphrase-env", metavar="NAME")
        group.add_argument(f"--{prefix}prompt", action="store_true", help="ask for a passphrase")

    def command(name: str, run: Any, text: str, *files: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        for file in files:
            made.add_argument(file)
        made.set_defaults(run=run)
        if name != "ls":
            made.add_argument("--readers", type=int, help="threads that read at once")
            made.add_argument(
                "--require-manifest", action="store_true", help="refuse files without a seal"
            )
        if "target" in files and name != "diff":
            made.add_argument("--alignment", type=int, default=64, help="bytes; default 64")
        return made

    listing = command("ls", ls.run, "List the tensors of a file.", "file")
    listing.add_argument("--json", action="store_true")
    secrets(
        command("verify", verify.run, "Compare tensors with their hashes.", "file"), "", "the key"
    )
    two = ("file", "target")
    secrets(
        command("cp", copy.cp, "Copy a file, laid out anew, as plain data.", *two), "", "the key"
    )
    secrets(command("diff", diff.run, "Compare two files, tensor by tensor.", *two), "", "key")
    secrets(
        command("decrypt", copy.decrypt, "Copy an encrypted file as plain data.", *two), "", "key"
    )
    seal = "seal names, shapes and order too"
    encrypting = command("encrypt", copy.encrypt, "Copy a file, encrypted.", *two)
    encrypting.add_argument("--manifest", action="store_true", help=seal)
    secrets(encrypting, "", "key")
    rekeying = command("rekey", copy.rekey, "Copy an encrypted file under another key.", *two)
    rekeying.add_argument("--manifest", action="store_true", help=seal)
    secrets(rekeying, "", "the old key")
    secrets(rekeying, "new-", "the new key")
    return parser
