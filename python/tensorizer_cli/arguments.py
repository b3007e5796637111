"""The arguments of the command ``tensorizer``. They are parsed without torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

from .help_texts import epilog
from .output import print_error, print_line, report_error

#: The options that name the source of a key or passphrase, without their prefix.
SECRETS = ("key-file", "key-env", "passphrase-file", "passphrase-env", "prompt")
#: Shells that complete the command.
SHELLS = ("bash", "zsh", "fish")
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


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else -1


def _number(least: int, most: int, kind: str = "whole number") -> Callable[[str], int]:
    """Return a function that reads a number within bounds, perhaps only a power of two."""

    def parsed(text: str) -> int:
        number = _whole(text)
        fits = kind == "whole number" or number & (number - 1) == 0
        if not (least <= number <= most and fits):
            raise argparse.ArgumentTypeError(
                f"expected a {kind} from {least} to {most}, found {text!r}"
            )
        return number

    return parsed


def _bytes(text: str) -> int:
    number = text.rstrip("KMGiB")
    power = {"": 0, "KiB": 1, "MiB": 2, "GiB": 3}.get(text[len(number) :], -1)
    if power < 0 or not 1 <= (count := _whole(number)) < _MOST_BYTES >> 10 * power:
        raise argparse.ArgumentTypeError(f"expected bytes as in 67108864 or 64MiB, found {text!r}")
    return count << 10 * power


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


def _decrypts(command: argparse.ArgumentParser, title: str) -> None:
    _flag(command, "--require-manifest", "refuse files without a manifest")
    _secrets(command, "", title)


def _encrypts(command: argparse.ArgumentParser, prefix: str, title: str) -> None:
    _flag(command, "--manifest", "authenticate names, shapes and order")
    _secrets(command, prefix, title)


def _loads(command: argparse.ArgumentParser) -> None:
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


#: What adds the commands to their parser.
_Commands: TypeAlias = "argparse._SubParsersAction[_Parser]"


def _command(
    commands: _Commands, name: str, run: str, text: str, *files: str
) -> argparse.ArgumentParser:
    made = commands.add_parser(
        name,
        help=text,
        description=text,
        epilog=epilog(name),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for file in files:
        made.add_argument(file, metavar=file.upper(), type=str if file == "target" else _file)
    made.set_defaults(run=run, quiet=False, json=False)
    if name != "completion":
        _flag(made, "--json", "print one JSON object")
    if name in {"load", "verify", "diff", "cp", "encrypt", "decrypt", "rekey"}:
        _loads(made)
    if name in {"diff", "cp", "encrypt"}:
        _flag(
            made,
            "--skip-objects",
            "leave out tensors of a torch.save checkpoint that no name reaches, as those "
            "inside objects; without it they are an error",
        )
    return made


def _copies(commands: _Commands, name: str, text: str) -> argparse.ArgumentParser:
    made = _command(commands, name, f"copy.{name}", text, "file", "target")
    made.add_argument(
        "--alignment",
        type=_number(1, _LARGEST_ALIGNMENT, "power of two"),
        metavar="N",
        help="of tensors' data, in bytes; 64",
    )
    _flag(made, "--verify", "read both again and compare them, with status 1 if they differ")
    made.set_defaults(clear_metadata=False, max_shard_size=None, skip_objects=False)
    metadata = made.add_mutually_exclusive_group()
    _flag(metadata, "--drop-metadata", "leave the file's metadata out")
    if name in {"encrypt", "rekey"}:
        _flag(
            metadata,
            "--clear-metadata",
            "copy the metadata of a plain file, although they are not encrypted; "
            "without one of these two, a file with metadata is refused",
        )
    return made


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

    _command(commands, "ls", "describe.ls", "List the tensors of a file.", "file")
    info = _command(
        commands,
        "info",
        "describe.info",
        "Show what a file is, what it holds and where it lies.",
        "file",
    )
    shown = _number(0, 100)
    info.add_argument(
        "--depth", type=shown, default=3, metavar="N", help="levels of modules; 3, and 0 for none"
    )
    info.add_argument("--largest", type=shown, default=5, metavar="N", help="largest tensors; 5")
    load = _command(
        commands,
        "load",
        "load.load",
        "Load a file, and report how fast it came and what held it back.",
        "file",
    )
    _flag(load, "--report", "the same: it always reports")
    load.add_argument("--device", default="cpu", metavar="D", help="such as cuda:0; cpu")
    _flag(load, "--verify", "compare tensors with their hashes")
    _flag(load, "--mmap", "use a local file in place")
    _decrypts(load, "the key, if it is encrypted, one of")
    verify = _command(
        commands, "verify", "verify.verify", "Compare tensors with their hashes.", "file"
    )
    _decrypts(verify, "the key, one of")
    diff = _command(
        commands, "diff", "compare.diff", "Compare two files, tensor by tensor.", "file", "other"
    )
    _decrypts(diff, "the key of those that are encrypted, one of")
    _secrets(diff, "other-", "the key of OTHER, if it has one of its own, one of")
    cp = _copies(commands, "cp", "Copy a file, laid out anew, as plain data.")
    cp.add_argument(
        "--max-shard-size",
        metavar="N",
        help="split a safetensors file beyond so many bytes of tensors, as in 5GB",
    )
    _flag(
        cp,
        "--no-weights",
        "copy the configuration and the tokenizer of a model's folder instead, into a folder",
    )
    _decrypts(cp, "the key, if it is encrypted, one of")
    _encrypts(_copies(commands, "encrypt", "Copy a file, encrypted."), "", "the key, one of")
    _decrypts(
        _copies(commands, "decrypt", "Copy an encrypted file as plain data."), "the key, one of"
    )
    rekey = _copies(
        commands, "rekey", "Copy an encrypted file under another key, with its metadata."
    )
    _decrypts(rekey, "the old key, one of")
    _encrypts(rekey, "new-", "the new key, one of")
    cache = _command(
        commands,
        "cache",
        "local.cache",
        "List the cache of servers' files, or remove those that are not in use.",
    )
    cache.add_argument("action", choices=("ls", "clear"), metavar="ls|clear")
    cache.add_argument("--folder", metavar="DIR", help="the folder of the cache; TENSORIZER_CACHE")
    _command(
        commands,
        "keygen",
        "local.keygen",
        "Write a random key of 32 bytes to a new file; - prints it in hex.",
    ).add_argument("key", metavar="KEY")
    completion = _command(
        commands,
        "completion",
        "local.completion",
        "Print the script by which a shell completes the command.",
    )
    completion.add_argument("shell", choices=SHELLS, metavar="|".join(SHELLS))
    return parser
