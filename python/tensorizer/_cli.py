"""The command ``tensorizer``: lists, verifies, compares, copies and encrypts files."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

from ._errors import CryptographyError, HashMismatchError
from ._terminal import Progress, say, shown
from ._types import Name, TensorType
from .file.encryption import DecryptionParams, EncryptionParams
from .file.file_writer import FileWriter
from .file.reader import TensorDeserializer
from .file.tensor_file import TensorFile
from .utils import convert_bytes

#: Bytes of tensors that are held at a time.
_BATCH_BYTES = 256 << 20
_DIFFERENT, _FAILED, _INTERRUPTED = 1, 2, 130
#: Dtype, shape, and whether numpy lacks the dtype.
_Description = tuple[str, list[int], bool]


class _File:
    """An open file, read in batches."""

    def __init__(
        self, uri: str, params: DecryptionParams | None = None, readers: int | None = None
    ) -> None:
        self.uri = uri
        self._file = TensorFile(uri, encryption=params, num_readers=readers, key_needed=False)
        self.reader = self._file.reader
        self.kinds = self.reader.kinds()
        self.memory_lens = self.reader.memory_lens()
        self.data_lens = self.reader.data_lens()
        self.total = sum(self.data_lens)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self.reader)

    def batches(self) -> Iterator[list[int]]:
        batch: list[int] = []
        size = 0
        for number, length in enumerate(self.data_lens):
            if batch and size + length > _BATCH_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(number)
            size += length
        if batch:
            yield batch

    def load(self, numbers: list[int], verify: str) -> tuple[list[torch.Tensor], list[int]]:
        """Return tensors, those without data on the ``meta`` device, and module indices."""
        with_data = [n for n in numbers if not self._is_meta(n)]
        loaded = self._file.read(with_data, torch.device("cpu"), verify)
        found = dict(zip(with_data, zip(*loaded, strict=True), strict=True))
        tensors = [found[n][0] if n in found else self._meta(n) for n in numbers]
        return tensors, [found[n][1] if n in found else 0 for n in numbers]

    def _is_meta(self, number: int) -> bool:
        return self.data_lens[number] == 0 < self.memory_lens[number]

    def _meta(self, number: int) -> torch.Tensor:
        dtype, shape, _ = self.reader.describe(number)
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def _text(name: Name) -> str:
    return name if isinstance(name, str) else json.dumps(list(name))


def _secret(options: argparse.Namespace, prefix: str) -> tuple[str, bytes] | None:
    """Return ``("key" or "passphrase", its bytes)`` from where the options say."""
    given = {
        what: getattr(options, f"{prefix}{what}")
        for what in ("key_file", "key_env", "passphrase_file", "passphrase_env", "prompt")
    }
    named = {what: place for what, place in given.items() if place}
    if not named:
        return None
    if len(named) > 1:
        raise ValueError(f"give only one of: {', '.join(sorted(named))}")
    ((what, place),) = named.items()
    if what == "prompt":
        label = "New passphrase: " if prefix else "Passphrase: "
        return "passphrase", getpass.getpass(label).encode()
    if what.endswith("env"):
        if place not in os.environ:
            raise ValueError(f"the environment variable {place} is not set")
        data = os.environ[place].encode()
    else:
        data = Path(place).read_bytes()
    if what.startswith("passphrase"):
        return "passphrase", data.rstrip(b"\r\n")
    if len(data) != 32:
        try:
            data = bytes.fromhex(data.decode().strip())
        except ValueError:
            data = b""
    if len(data) != 32:
        raise ValueError(f"{what} {place}: expected 32 bytes or 64 hexadecimal digits")
    return "key", data


def _decryption(options: argparse.Namespace) -> DecryptionParams | None:
    secret = _secret(options, "")
    if secret is None:
        return None
    make = DecryptionParams.from_key if secret[0] == "key" else DecryptionParams.from_string
    return make(secret[1], require_manifest=options.require_manifest)


def _encryption(options: argparse.Namespace, prefix: str) -> EncryptionParams:
    secret = _secret(options, prefix)
    if secret is None:
        raise ValueError(f"how to encrypt is missing: --{prefix.replace('_', '-')}key-file or so")
    if secret[0] == "key":
        return EncryptionParams(secret[1], manifest=options.manifest)
    return EncryptionParams.from_string(secret[1], manifest=options.manifest)


def _ls(options: argparse.Namespace) -> int:
    with _File(options.file) as file:
        offsets = file.reader.offsets()
        rows: list[dict[str, Any]] = []
        for number in range(len(file)):
            name = file.reader.name(number)
            dtype, shape, _ = file.reader.describe(number)
            rows.append(
                {
                    "name": name if isinstance(name, str) else list(name),
                    "dtype": dtype,
                    "shape": shape,
                    "bytes": file.data_lens[number],
                    "offset": offsets[number][1],
                    "type": TensorType(file.kinds[number]).name.lower(),
                }
            )
        if options.json:
            # The one control character that JSON leaves as it is.
            print(json.dumps(rows, indent=1).replace("\x7f", "\\u007f"))
            return 0
        table = [
            (
                shown(_text(row["name"])),
                row["dtype"],
                str(row["shape"]),
                f"{row['bytes']:,}",
                row["type"],
            )
            for row in rows
        ]
        head = ("name", "dtype", "shape", "bytes", "type")
        widths = [max(len(line[i]) for line in [head, *table]) for i in range(len(head))]
        for line in [head, *table]:
            cells = [
                cell.rjust(width) if i == 3 else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            say("  ".join(cells).rstrip())
        encrypted = ", encrypted" if file.reader.encrypted else ""
        print(
            f"{len(file)} tensors, {convert_bytes(file.total)}, "
            f"data version {file.reader.version}{encrypted}"
        )
    return 0


def _verify(options: argparse.Namespace) -> int:
    bad = 0
    with (
        _File(options.file, _decryption(options), options.readers) as file,
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
    return _DIFFERENT if bad else 0


def _copy(file: _File, target: str, encryption: EncryptionParams | None, alignment: int) -> None:
    with (
        FileWriter(target, encryption=encryption, alignment=alignment) as writer,
        Progress(file.total) as progress,
    ):
        identity = file.reader.pair_id
        if identity is not None:
            # A copy is as good a half of a saved object.
            writer.set_pair(identity)
        for batch in file.batches():
            tensors, modules = file.load(batch, "nothing")
            writer.write(
                [file.reader.name(n) for n in batch],
                [TensorType(file.kinds[n]) for n in batch],
                modules,
                tensors,
            )
            progress.add(sum(file.data_lens[n] for n in batch))


def _cp(options: argparse.Namespace) -> int:
    if options.target.lower().startswith(("redis://", "rediss://")):
        import redis

        address, _, prefix = options.target.split("?")[0].rpartition("/")
        query = options.target.partition("?")[2]
        client = redis.Redis.from_url(address + (f"?{query}" if query else ""))
        with TensorDeserializer(options.file, "cpu", lazy_load=True) as file, client:
            file.to_redis(client, prefix, force=True)
        return 0
    with _File(options.file, _decryption(options), options.readers) as source:
        _copy(source, options.target, None, options.alignment)
    return 0


def _encrypt(options: argparse.Namespace) -> int:
    encryption = _encryption(options, "")
    with _File(options.file, None, options.readers) as source:
        _copy(source, options.target, encryption, options.alignment)
    return 0


def _decrypt(options: argparse.Namespace) -> int:
    params = _decryption(options)
    if params is None:
        raise ValueError("how to decrypt is missing: --key-file or so")
    with _File(options.file, params, options.readers) as source:
        _copy(source, options.target, None, options.alignment)
    return 0


def _rekey(options: argparse.Namespace) -> int:
    encryption = _encryption(options, "new_")
    with _File(options.file, _decryption(options), options.readers) as source:
        _copy(source, options.target, encryption, options.alignment)
    return 0


def _diff(options: argparse.Namespace) -> int:
    params = _decryption(options)
    different = 0
    with (
        _File(options.file, params, None) as left,
        _File(options.target, params, None) as right,
        Progress(left.total) as progress,
    ):
        for name in map(right.reader.name, range(len(right))):
            if left.reader.find(name) is None:
                say(f"only in {right.uri}: {_text(name)}")
                different += 1
        for batch in left.batches():
            pairs: list[tuple[int, int]] = []
            for number in batch:
                name = left.reader.name(number)
                same = right.reader.find(name)
                if same is None:
                    say(f"only in {left.uri}: {_text(name)}")
                    different += 1
                else:
                    pairs.append((number, same))
            ours, _ = left.load([a for a, _ in pairs], "nothing")
            theirs, _ = right.load([b for _, b in pairs], "nothing")
            for (a, b), one, other in zip(pairs, ours, theirs, strict=True):
                what = _difference(left.reader.describe(a), one, right.reader.describe(b), other)
                if what:
                    say(f"{_text(left.reader.name(a))}: {what}")
                    different += 1
            progress.add(sum(left.data_lens[n] for n in batch))
    print(f"{different} differences" if different else "the tensors are the same")
    return _DIFFERENT if different else 0


def _difference(
    mine: _Description, one: torch.Tensor, theirs: _Description, other: torch.Tensor
) -> str | None:
    if mine[:2] != theirs[:2]:
        return f"{mine[0]} {mine[1]} and {theirs[0]} {theirs[1]}"
    if one.is_meta != other.is_meta:
        return "only one has data"
    if one.is_meta or one.numel() == 0:
        return None
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)]
    count = int((flat[0] != flat[1]).sum())
    return f"{count:,} of {flat[0].numel():,} bytes differ" if count else None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Quote what was given, which may be the name of a file."""
        super().error(shown(message))


def _parser() -> argparse.ArgumentParser:
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

    ls = command("ls", _ls, "List the tensors of a file.", "file")
    ls.add_argument("--json", action="store_true")
    secrets(command("verify", _verify, "Compare tensors with their hashes.", "file"), "", "the key")
    two = ("file", "target")
    secrets(command("cp", _cp, "Copy a file, laid out anew, as plain data.", *two), "", "the key")
    secrets(command("diff", _diff, "Compare two files, tensor by tensor.", *two), "", "the key")
    secrets(command("decrypt", _decrypt, "Copy an encrypted file as plain data.", *two), "", "key")
    seal = "seal names, shapes and order too"
    encrypt = command("encrypt", _encrypt, "Copy a file, encrypted.", *two)
    encrypt.add_argument("--manifest", action="store_true", help=seal)
    secrets(encrypt, "", "the key")
    rekey = command("rekey", _rekey, "Copy an encrypted file under another key.", *two)
    rekey.add_argument("--manifest", action="store_true", help=seal)
    secrets(rekey, "", "the old key")
    secrets(rekey, "new-", "the new key")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, 1 for differences, 2 for errors, 130 if it is interrupted."""
    try:
        return _run(_parser().parse_args(arguments))
    except KeyboardInterrupt:
        if arguments is None:
            # The interpreter takes a moment to end, in which a second one needs no traceback.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        say("tensorizer: interrupted", sys.stderr)
        return _INTERRUPTED


def _run(options: argparse.Namespace) -> int:
    try:
        return int(options.run(options))
    except BrokenPipeError:
        # Whoever read the list has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, ValueError, RuntimeError, MemoryError, CryptographyError,
            HashMismatchError, ImportError) as error:  # fmt: skip
        say(f"tensorizer: error: {error}", sys.stderr)
        return _FAILED
