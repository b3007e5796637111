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


def _value(options: argparse.Namespace, option: str) -> str | bool | None:
    value: str | bool | None = getattr(options, option.replace("-", "_"))
    return value


def _secret(options: argparse.Namespace, prefix: str) -> tuple[bool, bytes] | None:
    """Return True and a key, or False and a passphrase; None if neither is given."""
    named = [what for what in SECRETS if _value(options, prefix + what)]
    if not named:
        return None
    if len(named) > 1:
        raise ValueError(f"give only one of {_names(prefix, named)}")
    what = named[0]
    place = str(_value(options, prefix + what))
    if what == "prompt":
        return False, _asked(_PROMPTS[prefix])
    if what.endswith("env"):
        if place not in os.environ:
            raise ValueError(f"the environment variable {place} is not set")
        data = os.environb[os.fsencode(place)]
    else:
        with Path(place).open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError(
                f"--{prefix}{what} {place}: expected a file of at most {_MOST_BYTES} bytes"
            )
    if what.startswith("passphrase"):
        return False, data.rstrip(b"\r\n")
    return True, key_of(data, f"--{prefix}{what} {place}")


def _names(prefix: str, whats: tuple[str, ...] | list[str]) -> str:
    return ", ".join(f"--{prefix}{what}" for what in whats)


def _asked(label: str) -> bytes:
    try:
        return getpass.getpass(label).encode()
    except EOFError:
        raise ValueError("no passphrase was given at the prompt") from None


def decryption(options: argparse.Namespace, prefix: str = "") -> DecryptionParams | None:
    """Return the parameters to decrypt a file with; None if no key is given.

    Raises:
        ValueError: Files without a seal are to be refused, and no key is given.

    """
    secret = _secret(options, prefix)
    if secret is None:
        if options.require_manifest and not prefix:
            raise ValueError(f"--require-manifest needs one of {_names(prefix, SECRETS)}")
        return None
    make = DecryptionParams.from_key if secret[0] else DecryptionParams.from_string
    return make(secret[1], require_manifest=options.require_manifest)


def needed_decryption(options: argparse.Namespace) -> DecryptionParams:
    """Return the parameters to decrypt a file with, for which a key is required.

    Raises:
        ValueError: No key is given.

    """
    params = decryption(options)
    if params is None:
        raise ValueError(f"the key to decrypt with is missing: give one of {_names('', SECRETS)}")
    return params


def encryption(options: argparse.Namespace, prefix: str = "") -> EncryptionParams:
    """Return the parameters to encrypt the copy with.

    Raises:
        ValueError: No key is given.

    """
    secret = _secret(options, prefix)
    if secret is None:
        raise ValueError(
            f"the key to encrypt with is missing: give one of {_names(prefix, SECRETS)}"
        )
    make = EncryptionParams if secret[0] else EncryptionParams.from_string
    return make(secret[1], manifest=options.manifest)
