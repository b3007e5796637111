"""The arguments of the command ``tensorizer``. They are parsed without torch."""

from __future__ import annotations

import argparse
import difflib
import functools
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from .output import print_error, print_line, report_error

#: The options that name the source of a key or passphrase, without their prefix.
SECRETS = ("key-file", "key-env", "passphrase-file", "passphrase-env", "prompt")
#: Shells that complete the command.
SHELLS = ("bash", "zsh", "fish")
#: The module of each command, which runs it by a function of its name, and its arguments.
COMMANDS = {
    "ls": ("describe", "file"),
    "info": ("describe", "file"),
    "load": ("load", "file"),
    "verify": ("verify", "file"),
    "diff": ("compare", "file other"),
    "cp": ("copy", "file target"),
    "encrypt": ("copy", "file target"),
    "decrypt": ("copy", "file target"),
    "rekey": ("copy", "file target"),
    "cache": ("local", ""),
    "keygen": ("local", "key"),
    "completion": ("local", ""),
}
#: What other programs call a command.
_OTHER_COMMANDS = {"convert": "cp", "copy": "cp", "list": "ls", "show": "info", "help": "--help"}
#: Texts of the commands' helps: the purpose, an empty line, and the end with examples.
_HELP = Path(__file__).with_name("help")
#: Commands that read tensors, and those of them that copy a file.
_READING = "load verify diff cp encrypt decrypt rekey"
_COPYING = "cp encrypt decrypt rekey"
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
#: Options that are None for a command without them.
_OPTIONAL = (
    "quiet json key skip_objects allow_class clear_metadata max_shard_size num_readers memory_limit"
)
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
    """Prints the version of the build."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        """Print the version and end."""
        build = Path(__file__).parents[1] / "tensorizer/_build.py"
        found = dict(re.findall('(\\w+) = "(.+)"', build.read_text() if build.exists() else ""))
        torch = f" for torch {found['TORCH_MINOR']}" if found else ""
        print_line(f"tensorizer {found.get('VERSION', '(not built)')}{torch}")
        parser.exit()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options.

    Raises:
        SystemExit: After ``--help`` and ``--version`` (0), and for wrong arguments, or where help
            and version cannot be written (2).

    """
    arguments = sys.argv[1:] if arguments is None else arguments
    json_wanted = "--json" in arguments
    try:
        parser, commands = command_parser()
        if not arguments:
            parser.print_help()
            raise SystemExit(0)
        first = arguments[0]
        if first not in (*commands, "-h", "--help", "--version"):
            meant = _OTHER_COMMANDS.get(first) or _close(first, [*commands, "--help", "--version"])
            parser.error(f"unknown: {first}" + (f" (did you mean {meant}?)" if meant else ""))
        options, unknown = parser.parse_known_args(arguments)
        if unknown:
            # The parser of the command shows its own usage.
            commands[options.command].error(_unknown(unknown, commands[options.command]))
        return options
    except (UsageError, OSError) as error:
        if isinstance(error, UsageError) and not json_wanted:
            print_error(error.args[1].rstrip("\n"))
        report_error(error, json_wanted)
    raise SystemExit(2)


def _unknown(arguments: list[str], command: argparse.ArgumentParser) -> str:
    """Return the message for arguments that a command does not take."""
    wrong = [one for one in arguments if one.startswith("-")] or arguments
    close = _close(wrong[0].partition("=")[0], command._option_string_actions)
    return f"unknown: {' '.join(wrong)}" + (f" (did you mean {close}?)" if close else "")


def _close(word: str, known: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, list(known), 1, 0.7)), None)


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


def _secrets(command: argparse.ArgumentParser, prefix: str, title: str) -> None:
    group = command.add_argument_group(title)
    group.add_argument(f"--{prefix}key-file", metavar="F", help="32 bytes, or 64 hex digits")
    group.add_argument(f"--{prefix}key-env", metavar="NAME", help="64 hex digits")
    group.add_argument(f"--{prefix}passphrase-file", metavar="F")
    group.add_argument(f"--{prefix}passphrase-env", metavar="NAME")
    group.add_argument(f"--{prefix}prompt", action="store_true", help="ask for a passphrase")


def command_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of all commands, and that of each."""
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
    for name, (module, files) in COMMANDS.items():
        purpose, _, end = (_HELP / f"{name}.txt").read_text("utf-8").partition("\n\n")
        made[name] = commands.add_parser(
            name,
            help=purpose,
            description=purpose,
            epilog=end,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for file in files.split():
            is_read = file in ("file", "other")
            made[name].add_argument(file, metavar=file.upper(), type=_file if is_read else str)
        made[name].set_defaults(module=module, **dict.fromkeys(_OPTIONAL.split()))
    _add_options(made)
    for name, title in _DECRYPTING.items():
        made[name].add_argument(
            "--require-manifest", action="store_true", help="refuse files without a manifest"
        )
        _secrets(made[name], "", title)
    _secrets(made["diff"], "other-", "the key of OTHER, if it has one of its own, one of")
    for name, (prefix, title) in _ENCRYPTING.items():
        made[name].add_argument(
            "--manifest", action="store_true", help="authenticate names, shapes and order"
        )
        _secrets(made[name], prefix, title)
    return parser, made


def _add_options(made: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the options of all commands except those about keys, in the order of their helps."""

    def add(names: str, option: str, text: str, **more: Any) -> None:
        for name in names.split():
            made[name].add_argument(*option.split(), help=text, **more)

    flag = functools.partial(add, action="store_true")
    flag(" ".join(made.keys() - {"completion"}), "--json", "print one JSON object")
    readers = "threads that read at once; automatic"
    add(_READING, "--num-readers", readers, type=_number(1, 4096), metavar="N")
    limit = "most bytes in flight, such as 64MiB, including the tensors of a copy"
    add(_READING, "--memory-limit", limit, type=_bytes, metavar="N")
    flag(_READING, "-q --quiet", "no progress and no summary")
    part = "only the tensors below a key such as state_dict or model.ema, and their names below it"
    add("ls info verify cp", "--key", part, metavar="NAME")
    flag(
        "ls info diff cp encrypt",
        "--skip-objects",
        "leave out tensors of a torch.save checkpoint that no name reaches, as those inside "
        "objects; without it, copies and comparisons refuse them",
    )
    allowed = "MODULE.NAME of a class that you trust in a torch.save checkpoint; may be repeated"
    add("ls info load diff cp encrypt", "--allow-class", allowed, action="append", metavar="NAME")
    alignment = _number(1, _LARGEST_ALIGNMENT, "power of two")
    add(_COPYING, "--alignment", "of tensors' data, in bytes; 64", type=alignment, metavar="N")
    flag(_COPYING, "--verify", "read both again and compare them, with status 1 if they differ")
    for name in _COPYING.split():
        metadata = made[name].add_mutually_exclusive_group()
        drop = "leave the file's metadata out"
        metadata.add_argument("--drop-metadata", action="store_true", help=drop)
        if name in _ENCRYPTING:
            metadata.add_argument(
                "--clear-metadata",
                action="store_true",
                help="copy the metadata of a plain file, although they are not encrypted; "
                "without one of these two, a file with metadata is refused",
            )
    count = {"type": _number(0, 100), "metavar": "N"}
    add("info", "--depth", "levels of modules; 3, and 0 for none", default=3, **count)
    add("info", "--largest", "largest tensors; 5", default=5, **count)
    add("load", "--device", "such as cuda:0; cpu", default="cpu", metavar="D")
    flag("load", "--verify-hash", "compare tensors with their hashes")
    flag("load", "--mmap", "use a local file in place")
    sharding = "split a safetensors file beyond so many bytes of tensors, as in 5GB"
    for name in ("verify", "cp"):
        stated = made[name].add_mutually_exclusive_group()
        stated.add_argument("--sha256", metavar="HEX", help="the SHA-256 that the file must have")
        sums = "a file of sha256sum: what the file, or each shard, must have, by name"
        stated.add_argument("--sums", metavar="FILE", help=sums)
    add("cp", "--max-shard-size", sharding, metavar="N")
    without = "copy the configuration and the tokenizer of a model's folder instead, into a folder"
    flag("cp", "--no-weights", without)
    made["cache"].add_argument("action", choices=("ls", "clear"), metavar="ls|clear")
    add("cache", "--folder", "the folder of the cache; TENSORIZER_CACHE", metavar="DIR")
    made["completion"].add_argument("shell", choices=SHELLS, metavar="|".join(SHELLS))
