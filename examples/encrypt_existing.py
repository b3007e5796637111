"""Encrypts a file that is there already, or decrypts one, tensor by tensor.

python examples/encrypt_existing.py add random --keyfile NEW --infile IN --outfile OUT
python examples/encrypt_existing.py add exact --keyfile KEY --infile IN --outfile OUT
python examples/encrypt_existing.py add pwhash --keyfile PASSPHRASE --opslimit MODERATE \
    --memlimit MODERATE --infile IN --outfile OUT
python examples/encrypt_existing.py remove exact --keyfile KEY --infile IN --outfile OUT
python examples/encrypt_existing.py remove pwhash --keyfile PASSPHRASE --infile IN --outfile OUT

A key is a file of 32 bytes; ``add random`` makes one, which must not be there yet. ``pwhash``
derives the key from a passphrase by Argon2id. IN may be an address, OUT one of S3, Google or
Azure. A tensor is let go once it is written. ``tensorizer encrypt``, ``decrypt`` and ``rekey`` do
the same and more.
"""

import argparse
import os
from pathlib import Path

from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer

LIMITS = "{SENSITIVE,MODERATE,INTERACTIVE,MIN} or a number"


def limit(text: str, names: type) -> int:
    """Return the limit that a name or a number stands for."""
    return int(text) if text.isdecimal() else names[text.upper()]


def read_secret(args: argparse.Namespace) -> bytes:
    """Return what the key file holds; a passphrase without the end of its line."""
    secret = Path(args.keyfile).read_bytes()
    strip = args.method == "pwhash" and not args.no_strip_trailing_newlines
    return secret.rstrip(b"\r\n") if strip else secret


def make_random_key(path: str) -> bytes:
    """Write a new key to a file that only its owner can read, and return it."""
    key = EncryptionParams.random().key
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key)
    return key


def encryption_of(args: argparse.Namespace) -> EncryptionParams:
    if args.method == "random":
        return EncryptionParams(make_random_key(args.keyfile))
    if args.method == "exact":
        return EncryptionParams(read_secret(args))
    params = EncryptionParams.from_string(
        read_secret(args),
        opslimit=limit(args.opslimit, EncryptionParams.OpsLimit),
        memlimit=limit(args.memlimit, EncryptionParams.MemLimit),
        salt=bytes.fromhex(args.salt) if args.salt else None,
    )
    print(f"salt: {params.salt.hex()}")
    return params


def decryption_of(args: argparse.Namespace) -> DecryptionParams:
    secret = read_secret(args)
    derived = args.method == "pwhash"
    return DecryptionParams.from_string(secret) if derived else DecryptionParams.from_key(secret)


def copy(args: argparse.Namespace) -> None:
    adding = args.action == "add"
    decryption = None if adding else decryption_of(args)
    # The file is opened first: without one, or with a wrong key, nothing is written.
    with TensorDeserializer(
        args.infile, "cpu", lazy_load=True, verify_hash=True, encryption=decryption
    ) as source:
        encryption = encryption_of(args) if adding else None
        with TensorSerializer(args.outfile, encryption=encryption) as target:
            for number, (module, kind, name, tensor) in enumerate(source.read_tensors(), 1):
                if not isinstance(name, str):
                    raise SystemExit(f"{args.infile} is nested: `tensorizer encrypt` can do that")
                target.write_tensor(module, name, kind, tensor)
                tensor.data = tensor.data.new_empty(0)
                if not args.quiet:
                    print(f"{args.action} {number}: {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Add encryption to a file, or remove it.")
    actions = parser.add_subparsers(dest="action", required=True)
    for action, methods in (
        ("add", ("pwhash", "exact", "random")),
        ("remove", ("pwhash", "exact")),
    ):
        chosen = actions.add_parser(action).add_subparsers(dest="method", required=True)
        for method in methods:
            options = chosen.add_parser(method)
            options.add_argument("--keyfile", required=True)
            options.add_argument("--infile", required=True)
            options.add_argument("--outfile", required=True)
            options.add_argument("-q", "--quiet", action="store_true")
            if method == "pwhash":
                options.add_argument("--no-strip-trailing-newlines", action="store_true")
            if (action, method) == ("add", "pwhash"):
                options.add_argument("--opslimit", metavar=LIMITS, required=True)
                options.add_argument("--memlimit", metavar=LIMITS, required=True)
                options.add_argument("--salt", metavar="32 hex digits")
    args = parser.parse_args()
    if args.infile == args.outfile:
        parser.error("--infile and --outfile are the same")
    copy(args)


if __name__ == "__main__":
    main()
