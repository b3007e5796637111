"""Reads keys and passphrases from the sources that the options name."""

from __future__ import annotations

import argparse
import getpass
import os
from pathlib import Path

from tensorizer import DecryptionParams, EncryptionParams
from tensorizer.file.encryption import key_of

from .arguments import SECRETS

#: The most bytes of a file with a key or a passphrase.
_MOST_BYTES = 4096
_PROMPTS = {"": "Passphrase: ", "new-": "New passphrase: ", "other-": "Passphrase of the other: "}


def _secret(options: argparse.Namespace, prefix: str, missing: str) -> tuple[bool, bytes] | None:
    """Return True and a key, or False and a passphrase; None if neither is given.

    Raises:
        ValueError: None is given, and ``missing``, the beginning of the message, is not empty.

    """
    given = {
        f"--{prefix}{what}": getattr(options, f"{prefix}{what}".replace("-", "_"))
        for what in SECRETS
    }
    named = [option for option, value in given.items() if value]
    if not named:
        if missing:
            raise ValueError(f"{missing} one of {', '.join(given)}")
        return None
    if len(named) > 1:
        raise ValueError(f"give only one of {', '.join(named)}")
    option, place = named[0], str(given[named[0]])
    if option.endswith("prompt"):
        try:
            return False, getpass.getpass(_PROMPTS[prefix]).encode()
        except EOFError:
            raise ValueError("no passphrase was given at the prompt") from None
    if option.endswith("env"):
        if place not in os.environ:
            raise ValueError(f"the environment variable {place} is not set")
        data = os.environb[os.fsencode(place)]
    else:
        with Path(place).open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError(f"{option} {place}: expected a file of at most {_MOST_BYTES} bytes")
    if "passphrase" in option:
        return False, data.rstrip(b"\r\n")
    return True, key_of(data, f"{option} {place}")


def decryption(
    options: argparse.Namespace, prefix: str = "", *, needed: bool = False
) -> DecryptionParams | None:
    """Return the parameters to decrypt a file with; None if no key is given.

    Raises:
        ValueError: No key is given, and it is needed, or files without a seal are to be refused.

    """
    missing = "the key to decrypt with is missing: give" if needed else ""
    if options.require_manifest and not prefix:
        missing = "--require-manifest needs"
    secret = _secret(options, prefix, missing)
    if secret is None:
        return None
    make = DecryptionParams.from_key if secret[0] else DecryptionParams.from_string
    return make(secret[1], require_manifest=options.require_manifest)


def encryption(options: argparse.Namespace, prefix: str = "") -> EncryptionParams:
    """Return the parameters to encrypt the copy with.

    Raises:
        ValueError: No key is given.

    """
    secret = _secret(options, prefix, "the key to encrypt with is missing: give")
    assert secret is not None
    make = EncryptionParams if secret[0] else EncryptionParams.from_string
    return make(secret[1], manifest=options.manifest)
