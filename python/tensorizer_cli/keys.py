"""Keys and passphrases, from where the options say."""

from __future__ import annotations

import argparse
import getpass
import os
from pathlib import Path

from tensorizer import DecryptionParams, EncryptionParams


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


def decryption(options: argparse.Namespace) -> DecryptionParams | None:
    """Return what the file is decrypted with; None if nothing is given."""
    secret = _secret(options, "")
    if secret is None:
        return None
    make = DecryptionParams.from_key if secret[0] == "key" else DecryptionParams.from_string
    return make(secret[1], require_manifest=options.require_manifest)


def encryption(options: argparse.Namespace, prefix: str) -> EncryptionParams:
    """Return what the copy is encrypted with."""
    secret = _secret(options, prefix)
    if secret is None:
        raise ValueError(f"how to encrypt is missing: --{prefix.replace('_', '-')}key-file or so")
    if secret[0] == "key":
        return EncryptionParams(secret[1], manifest=options.manifest)
    return EncryptionParams.from_string(secret[1], manifest=options.manifest)
