"""The arguments of the command ``tensorizer``. They are parsed without torch."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from .help_texts import epilog
from .output import print_error, print_line, report_error

#: The options that name the source of a key or passphrase, without their prefix.
SECRETS = ("key-file", "key-env", "passphrase-file", "passphrase-env", "prompt")
#: Shells that complete the command.
SHELLS = ("bash", "zsh", "fish")
#: The module of each command, which runs it by a function of its name; its arguments; its purpose.
COMMANDS = {
    "ls": ("describe", "file", "List the tensors of a file."),
    "info": ("describe", "file", "Show what a file is, what it holds and where it lies."),
    "load": ("load", "file", "Load a file, and report how fast it came and what held it back."),
    "verify": ("verify", "file", "Compare tensors with their hashes."),
    "diff": ("compare", "file other", "Compare two files, tensor by tensor."),
    "cp": ("copy", "file target", "Copy a file, laid out anew, as plain data."),
    "encrypt": ("copy", "file target", "Copy a file, encrypted."),
    "decrypt": ("copy", "file target", "Copy an encrypted file as plain data."),
    "rekey": (
        "copy",
        "file target",
        "Copy an encrypted file under another key, with its metadata.",
    ),
    "cache": (
        "local",
        "",
        "List the cache of servers' files, or remove those that are not in use.",
    ),
    "keygen": ("local", "key", "Write a random key of 32 bytes to a new file; - prints it in hex."),
    "completion": ("local", "", "Print the script by which a shell completes the command."),
}
#: The title of the key that commands decrypt with.
_DECRYPTING = {
    "load": "the key, if it is encrypted, one of",
    "verify": "the key, one of",
    "diff": "the key of those that are encrypted, one of",
    "cp": "the key, if it is encrypted, one of",
    "decrypt": "the key, one of",
    "rekey": "the old key, one of",
}
#: The prefix and the title of the key that commands encrypt with.
_ENCRYPTING = {"encrypt": ("", "the key, one of"), "rekey": ("new-", "the new key, one of")}
#: The values of options that a command lacks.
_DEFAULTS = {
    "quiet": False,
    "json": False,
    "skip_objects": False,
    "clear_metadata": False,
    "max_shard_size": None,
    "readers": None,
    "memory_limit": None,
}
#: The largest alignment that the core writes.
_LARGEST_ALIGNMENT = 2 << 20
#: More bytes than any memory has.
_MOST_BYTES = 1 << 62


class UsageError(Exception):
    """The arguments are wrong; it holds the message and the usage."""

    def __str__(self) -> str:
        return str(self.args[0])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise a usage error."""
        raise UsageError(message, self.format_usage())

    def print_help(self, file: object = None) -> None:
        """Print the help on the standard output."""
        print_line(self.format_help().rstrip("\n"))


class _Version(argparse.Action):
    """Prints the version, which is looked up only when it is requested."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        """Print the version and end."""
        import importlib.metadata  # takes a tenth of a second

        try:
            version = importlib.metadata.version("tensorizer")
        except importlib.metadata.PackageNotFoundError:
            version = "(not installed)"
        print_line(f"tensorizer {version}")
        parser.exit()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options.

    Raises:
        SystemExit: After ``--help`` and ``--version`` (0), and for wrong arguments, or where help
            and version cannot be written (2).

    """
    json_wanted = "--json" in (sys.argv[1:] if arguments is None else arguments)
    try:
        return command_parser().parse_args(arguments)
    except (UsageError, OSError) as error:
        if isinstance(error, UsageError) and not json_wanted:
            print_error(error.args[1].rstrip("\n"))
        report_error(error, json_wanted)
    raise SystemExit(2)


def _number(least: int, most: int, kind: str = "whole number") -> Callable[[str], int]:
    """Return a function that reads a number within bounds, perhaps only a power of two."""

    def parsed(text: str) -> int:
        number = int(text) if re.fullmatch("[0-9]{1,18}", text) else -1
        fits = kind == "whole number" or number & (number - 1) == 0
        if not (least <= number <= most and fits):
            raise argparse.ArgumentTypeError(
                f"expected a {kind} from {least} to {most}, found {text!r}"
            )
        return number

    return parsed


def _bytes(text: str) -> int:
    found = re.fullmatch("([0-9]{1,18})(|KiB|MiB|GiB)", text)
    count = int(found[1]) << 10 * ("", "KiB", "MiB", "GiB").index(found[2]) if found else 0
    if not 1 <= count < _MOST_BYTES:
        raise argparse.ArgumentTypeError(f"expected bytes as in 67108864 or 64MiB, found {text!r}")
    return count


def _file(text: str) -> str:
    return "/dev/stdin" if text == "-" else text


def _flag(command: argparse._ActionsContainer, option: str, text: str) -> None:
    command.add_argument(option, action="store_true", help=text)


def _secrets(command: argparse.ArgumentParser, prefix: str, title: str) -> None:
    group = command.add_argument_group(title)
    group.add_argument(f"--{prefix}key-file", metavar="F", help="32 bytes, or 64 hex digits")
    group.add_argument(f"--{prefix}key-env", metavar="NAME", help="64 hex digits")
    group.add_argument(f"--{prefix}passphrase-file", metavar="F")
    group.add_argument(f"--{prefix}passphrase-env", metavar="NAME")
    _flag(group, f"--{prefix}prompt", "ask for a passphrase")


def _reads(command: argparse.ArgumentParser) -> None:
    """Add the options of commands that read tensors."""
    command.add_argument(
        "--readers", type=_number(1, 4096), metavar="N", help="threads that read at once; automatic"
    )
    command.add_argument(
        "--memory-limit",
        type=_bytes,
        metavar="N",
        help="most bytes in flight, such as 64MiB, including the tensors of a copy",
    )
    command.add_argument("-q", "--quiet", action="store_true", help="no progress and no summary")


def _copies(command: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Add the options of commands that copy a file; return the group of those for metadata."""
    alignment = _number(1, _LARGEST_ALIGNMENT, "power of two")
    command.add_argument(
        "--alignment", type=alignment, metavar="N", help="of tensors' data, in bytes; 64"
    )
    _flag(command, "--verify", "read both again and compare them, with status 1 if they differ")
    metadata = command.add_mutually_exclusive_group()
    _flag(metadata, "--drop-metadata", "leave the file's metadata out")
    return metadata


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; ``run`` is the module and the function of each."""
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
    made: dict[str, argparse.ArgumentParser] = {}
    for name, (module, files, text) in COMMANDS.items():
        made[name] = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=epilog(name),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for file in files.split():
            is_read = file in ("file", "other")
            made[name].add_argument(file, metavar=file.upper(), type=_file if is_read else str)
        made[name].set_defaults(module=module, **_DEFAULTS)
        if name != "completion":
            _flag(made[name], "--json", "print one JSON object")
    for name in ("load", "verify", "diff", "cp", "encrypt", "decrypt", "rekey"):
        _reads(made[name])
    for name in ("diff", "cp", "encrypt"):
        _flag(
            made[name],
            "--skip-objects",
            "leave out tensors of a torch.save checkpoint that no name reaches, as those "
            "inside objects; without it they are an error",
        )
    metadata = {name: _copies(made[name]) for name in ("cp", "encrypt", "decrypt", "rekey")}
    for name in ("encrypt", "rekey"):
        _flag(
            metadata[name],
            "--clear-metadata",
            "copy the metadata of a plain file, although they are not encrypted; "
            "without one of these two, a file with metadata is refused",
        )
    _options_of_each(made)
    for name, title in _DECRYPTING.items():
        _flag(made[name], "--require-manifest", "refuse files without a manifest")
        _secrets(made[name], "", title)
    _secrets(made["diff"], "other-", "the key of OTHER, if it has one of its own, one of")
    for name, (prefix, title) in _ENCRYPTING.items():
        _flag(made[name], "--manifest", "authenticate names, shapes and order")
        _secrets(made[name], prefix, title)
    return parser


def _options_of_each(made: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the options that one command alone has."""
    for option, default, text in (
        ("--depth", 3, "levels of modules; 3, and 0 for none"),
        ("--largest", 5, "largest tensors; 5"),
    ):
        made["info"].add_argument(
            option, type=_number(0, 100), default=default, metavar="N", help=text
        )
    load, cp = made["load"], made["cp"]
    _flag(load, "--report", "the same: it always reports")
    load.add_argument("--device", default="cpu", metavar="D", help="such as cuda:0; cpu")
    _flag(load, "--verify", "compare tensors with their hashes")
    _flag(load, "--mmap", "use a local file in place")
    sharding = "split a safetensors file beyond so many bytes of tensors, as in 5GB"
    cp.add_argument("--max-shard-size", metavar="N", help=sharding)
    without = "copy the configuration and the tokenizer of a model's folder instead, into a folder"
    _flag(cp, "--no-weights", without)
    made["cache"].add_argument("action", choices=("ls", "clear"), metavar="ls|clear")
    folder = "the folder of the cache; TENSORIZER_CACHE"
    made["cache"].add_argument("--folder", metavar="DIR", help=folder)
    made["completion"].add_argument("shell", choices=SHELLS, metavar="|".join(SHELLS))
