"""The arguments of the command ``tensorizer``. They are parsed without torch."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from .help_texts import EPILOGS, SHELLS
from .output import error_line, report_error, shown
from .standard_streams import flush, print_error, print_line

#: The options that name the source of a key or passphrase, without their prefix.
SECRETS = ("key-file", "key-env", "passphrase-file", "passphrase-env", "prompt")
#: The most threads; a larger number is a mistake.
_MOST_READERS = 4096
#: The most levels of modules, and the most tensors, that are shown.
_MOST_SHOWN = 100
#: The largest alignment that the core writes.
_LARGEST_ALIGNMENT = 2 << 20
#: More bytes than any memory has.
_MOST_BYTES = 1 << 62


class _UsageError(Exception):
    """The arguments are wrong; it holds the message and the usage."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise a usage error."""
        raise _UsageError(message, self.format_usage())

    def print_help(self, file: object = None) -> None:
        """Print the help on the standard output."""
        print_line(self.format_help().rstrip("\n"))
        flush()


class _Version(argparse.Action):
    """Prints the version, which is looked up only when it is requested."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        """Print the version and end."""
        print_line(f"tensorizer {_version()}")
        flush()
        parser.exit()


def _version() -> str:
    import importlib.metadata  # takes a tenth of a second

    try:
        return importlib.metadata.version("tensorizer")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options.

    Raises:
        SystemExit: After ``--help`` and ``--version`` (0), and for wrong arguments, or where help
            and version cannot be written (2).

    """
    json_wanted = "--json" in (sys.argv[1:] if arguments is None else arguments)
    try:
        return _parser().parse_args(arguments)
    except _UsageError as error:
        message, usage = error.args
        if json_wanted:
            print_error(error_line("UsageError", message, True))
        else:
            # The message quotes an argument, which may be a file's name with control characters.
            print_error(f"{usage}tensorizer: error: {shown(message)}")
    except OSError as error:
        report_error(error, json_wanted)
    raise SystemExit(2)


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else -1


def _read(text: str) -> str:
    return "/dev/stdin" if text == "-" else text


def _readers(text: str) -> int:
    if not 1 <= (count := _whole(text)) <= _MOST_READERS:
        raise argparse.ArgumentTypeError(
            f"expected a whole number from 1 to {_MOST_READERS}, found {text!r}"
        )
    return count


def _count(text: str) -> int:
    if not 0 <= (count := _whole(text)) <= _MOST_SHOWN:
        raise argparse.ArgumentTypeError(
            f"expected a whole number from 0 to {_MOST_SHOWN}, found {text!r}"
        )
    return count


def _alignment(text: str) -> int:
    count = _whole(text)
    if not 1 <= count <= _LARGEST_ALIGNMENT or count & (count - 1):
        raise argparse.ArgumentTypeError(
            f"expected a power of two from 1 to {_LARGEST_ALIGNMENT}, found {text!r}"
        )
    return count


def _bytes(text: str) -> int:
    number = text.rstrip("KMGiB")
    power = {"": 0, "KiB": 1, "MiB": 2, "GiB": 3}.get(text[len(number) :], -1)
    if power < 0 or not 1 <= (count := _whole(number)) < _MOST_BYTES >> 10 * power:
        raise argparse.ArgumentTypeError(f"expected bytes as in 67108864 or 64MiB, found {text!r}")
    return count << 10 * power


def _secrets(command: argparse.ArgumentParser, prefix: str, title: str) -> None:
    group = command.add_argument_group(title)
    group.add_argument(f"--{prefix}key-file", metavar="F", help="32 bytes, or 64 hex digits")
    group.add_argument(f"--{prefix}key-env", metavar="NAME", help="64 hex digits")
    group.add_argument(f"--{prefix}passphrase-file", metavar="F")
    group.add_argument(f"--{prefix}passphrase-env", metavar="NAME")
    group.add_argument(f"--{prefix}prompt", action="store_true", help="ask for a passphrase")


def _decrypts(command: argparse.ArgumentParser, title: str) -> None:
    command.add_argument(
        "--require-manifest", action="store_true", help="refuse files without a manifest"
    )
    _secrets(command, "", title)


def _encrypts(command: argparse.ArgumentParser, prefix: str, title: str) -> None:
    command.add_argument(
        "--manifest", action="store_true", help="authenticate names, shapes and order"
    )
    _secrets(command, prefix, title)


def _loads(command: argparse.ArgumentParser, skips_objects: bool) -> None:
    command.add_argument(
        "--readers", type=_readers, metavar="N", help="threads that read at once; automatic"
    )
    command.add_argument(
        "--memory-limit",
        type=_bytes,
        metavar="N",
        help="most bytes in flight, such as 64MiB, including the tensors of a copy",
    )
    command.add_argument("-q", "--quiet", action="store_true", help="no progress and no summary")
    if skips_objects:
        command.add_argument(
            "--skip-objects",
            action="store_true",
            help="leave out tensors of a torch.save checkpoint that no name reaches, as those "
            "inside objects; without it they are an error",
        )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tensorizer",
        description="Works on .tensors files, and reads those of safetensors, their shards and "
        "torch.save: local paths, http(s)://, s3://, gs://, az://, hf:// and redis:// addresses. "
        "Keys and passphrases come from files, environment variables or a prompt.",
        epilog="It returns 0; 1 where tensors differ or are damaged; 2 for errors; 130 when "
        "Ctrl-C ends it.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, *files: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=EPILOGS[name],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for file in files:
            is_read = file in ("file", "other")
            made.add_argument(file, metavar=file.upper(), type=_read if is_read else str)
        made.set_defaults(quiet=False, json=False, skip_objects=False)
        if name != "completion":
            made.add_argument("--json", action="store_true", help="print one JSON object")
        if name not in {"ls", "info", "cache", "keygen", "completion"}:
            _loads(made, name in {"cp", "encrypt", "diff"})
        return made

    def copies(name: str, text: str) -> argparse.ArgumentParser:
        made = command(name, text, "file", "target")
        made.add_argument(
            "--alignment", type=_alignment, metavar="N", help="of tensors' data, in bytes; 64"
        )
        made.add_argument(
            "--verify",
            action="store_true",
            help="read both again and compare them, with status 1 if they differ",
        )
        made.set_defaults(clear_metadata=False, max_shard_size=None)
        metadata = made.add_mutually_exclusive_group()
        metadata.add_argument(
            "--drop-metadata", action="store_true", help="leave the file's metadata out"
        )
        if name in {"encrypt", "rekey"}:
            metadata.add_argument(
                "--clear-metadata",
                action="store_true",
                help="copy the metadata of a plain file, although they are not encrypted; "
                "without one of these two, a file with metadata is refused",
            )
        return made

    command("ls", "List the tensors of a file.", "file")
    info = command("info", "Show what a file is, what it holds and where it lies.", "file")
    info.add_argument(
        "--depth", type=_count, default=3, metavar="N", help="levels of modules; 3, and 0 for none"
    )
    info.add_argument("--largest", type=_count, default=5, metavar="N", help="largest tensors; 5")
    load = command(
        "load", "Load a file, and report how fast it came and what held it back.", "file"
    )
    load.add_argument("--report", action="store_true", help="the same: it always reports")
    load.add_argument("--device", default="cpu", metavar="D", help="such as cuda:0; cpu")
    load.add_argument("--verify", action="store_true", help="compare tensors with their hashes")
    load.add_argument("--mmap", action="store_true", help="use a local file in place")
    _decrypts(load, "the key, if it is encrypted, one of")
    _decrypts(command("verify", "Compare tensors with their hashes.", "file"), "the key, one of")
    diff = command("diff", "Compare two files, tensor by tensor.", "file", "other")
    _decrypts(diff, "the key of those that are encrypted, one of")
    _secrets(diff, "other-", "the key of OTHER, if it has one of its own, one of")
    cp = copies("cp", "Copy a file, laid out anew, as plain data.")
    cp.add_argument(
        "--max-shard-size",
        metavar="N",
        help="split a safetensors file beyond so many bytes of tensors, as in 5GB",
    )
    cp.add_argument(
        "--no-weights",
        action="store_true",
        help="copy the configuration and the tokenizer of a model's folder instead, into a folder",
    )
    _decrypts(cp, "the key, if it is encrypted, one of")
    _encrypts(copies("encrypt", "Copy a file, encrypted."), "", "the key, one of")
    _decrypts(copies("decrypt", "Copy an encrypted file as plain data."), "the key, one of")
    rekey = copies("rekey", "Copy an encrypted file under another key, with its metadata.")
    _decrypts(rekey, "the old key, one of")
    _encrypts(rekey, "new-", "the new key, one of")
    cache = command(
        "cache", "List the cache of servers' files, or remove those that are not in use."
    )
    cache.add_argument("action", choices=("ls", "clear"), metavar="ls|clear")
    cache.add_argument("--folder", metavar="DIR", help="the folder of the cache; TENSORIZER_CACHE")
    command("keygen", "Write a random key of 32 bytes to a new file; - prints it in hex.", "key")
    completion = command("completion", "Print the script by which a shell completes the command.")
    completion.add_argument("shell", choices=SHELLS, metavar="|".join(SHELLS))
    return parser


def options_of_commands() -> dict[str, dict[str, str]]:
    """Return the options of each command, with their help texts."""
    found: dict[str, dict[str, str]] = {}
    for action in _parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, parser in action.choices.items():
                found[name] = {
                    option: one.help or ""
                    for one in parser._actions
                    for option in one.option_strings
                }
    return found
