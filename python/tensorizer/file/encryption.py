"""The parameters of encryption: :class:`EncryptionParams` and :class:`DecryptionParams`."""

from __future__ import annotations

import contextlib
import enum
from typing import Any

from .._native import Decryption, Encryption

_KEY_LENGTH = 32
_SALT_LENGTH = 16
#: libsodium's limits for Argon2id.
_OPSLIMITS = (1, (1 << 32) - 1)
_MEMLIMITS = (8192, 4398046510080)


class _OpsLimit(enum.IntEnum):
    """Passes over the memory. More take longer, for attackers too."""

    MIN = 1
    INTERACTIVE = 2
    MODERATE = 3
    SENSITIVE = 4


class _MemLimit(enum.IntEnum):
    """Bytes of memory."""

    MIN = 8192
    INTERACTIVE = 64 << 20
    MODERATE = 256 << 20
    SENSITIVE = 1 << 30


def _encoded(source: str | bytes, encoding: str) -> bytes:
    if isinstance(source, str):
        source = source.encode(encoding)
    if not isinstance(source, (bytes, bytearray, memoryview)):
        raise TypeError(f"source must be a str or bytes, not {type(source).__name__}")
    if not source:
        raise ValueError("source must not be empty")
    return bytes(source)


def key_of(key: Any, source: str = "key") -> bytes:
    """Return the 32 bytes of a key, which may also be given as 64 hexadecimal digits.

    Raises:
        TypeError: The key is not bytes.
        ValueError: It is neither; the message begins with ``source``.

    """
    if not isinstance(key, (bytes, bytearray, memoryview)):
        raise TypeError(f"key must be bytes, not {type(key).__name__}")
    found = bytes(key)
    if len(found) != _KEY_LENGTH:
        with contextlib.suppress(ValueError):
            found = bytes.fromhex(found.decode().strip())
    if len(found) != _KEY_LENGTH:
        raise ValueError(
            f"{source}: expected {_KEY_LENGTH} bytes or {2 * _KEY_LENGTH} hexadecimal digits, "
            f"found {len(key)} bytes"
        )
    return found


def _limit(value: int | None, kind: type[enum.IntEnum], name: str, bounds: tuple[int, int]) -> int:
    if value is None:
        return int(kind["MODERATE"])
    if isinstance(value, enum.Enum) and not isinstance(value, kind):
        raise TypeError(f"{name} must not be a {type(value).__name__.strip('_')}")
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int or None, not {type(value).__name__}")
    if not bounds[0] <= value <= bounds[1]:
        raise ValueError(f"{name} must be {bounds[0]} to {bounds[1]}, not {value}")
    return int(value)


class EncryptionParams:
    """A key for :class:`tensorizer.TensorSerializer`; pickles contain it, and ``repr()`` does not.

    Args:
        key: 32 bytes, or 64 hexadecimal digits as bytes.
        manifest: Also authenticate (seal) the names, shapes and order of tensors, their hashes and
            tags, which the format's own encryption does not. Old readers ignore the seal;
            ``DecryptionParams(require_manifest=True)`` demands it.

    Raises:
        TypeError: The key is not bytes.
        ValueError: It has neither 32 bytes nor 64 hexadecimal digits.

    """

    OpsLimit = _OpsLimit
    MemLimit = _MemLimit

    def __init__(self, key: bytes, *, manifest: bool = False) -> None:
        self._native = Encryption.from_key(key_of(key), bool(manifest))

    @classmethod
    def _of(cls, native: Encryption) -> EncryptionParams:
        params = cls.__new__(cls)
        params._native = native
        return params

    @classmethod
    def random(cls, *, manifest: bool = False) -> EncryptionParams:
        """Return a random key; keep its ``key`` to read the file."""
        return cls._of(Encryption.random(bool(manifest)))

    @classmethod
    def from_string(
        cls,
        source: str | bytes,
        opslimit: int | None = None,
        memlimit: int | None = None,
        salt: bytes | None = None,
        *,
        encoding: str = "utf-8",
        manifest: bool = False,
    ) -> EncryptionParams:
        """Derive a key from a passphrase by Argon2id 1.3.

        Args:
            source: The passphrase.
            opslimit: Passes over the memory; None for ``OpsLimit.MODERATE``, which is 3 as in
                libsodium.
            memlimit: Bytes of memory; None for ``MemLimit.MODERATE``, which is 256 MiB as in
                libsodium.
            salt: 16 bytes; None for random ones, so that equal passphrases give different keys.
            encoding: The encoding of a ``str``.
            manifest: See the class.

        Raises:
            TypeError: An argument is of another type, or the two limits were swapped.
            ValueError: The passphrase is empty, a limit out of range, the salt of another length.
            MemoryError: There is not enough memory.

        """
        source = _encoded(source, encoding)
        ops = _limit(opslimit, _OpsLimit, "opslimit", _OPSLIMITS)
        mem = _limit(memlimit, _MemLimit, "memlimit", _MEMLIMITS)
        if isinstance(salt, str):
            salt = salt.encode(encoding)
        if salt is not None:
            if not isinstance(salt, (bytes, bytearray, memoryview)):
                raise TypeError(f"salt must be bytes, not {type(salt).__name__}")
            if len(salt) != _SALT_LENGTH:
                raise ValueError(f"salt must have {_SALT_LENGTH} bytes, found {len(salt)}")
            salt = bytes(salt)
        return cls._of(Encryption.derive(source, ops, mem, salt, bool(manifest)))

    @property
    def key(self) -> bytes:
        """The 32 bytes."""
        return self._native.key

    @property
    def salt(self) -> bytes:
        """The salt of a derived key; raises ``ValueError`` for another key."""
        derivation = self._native.derivation
        if derivation is None:
            raise ValueError("the key was not derived from a string, and has no salt")
        return derivation[2]

    def __getstate__(self) -> tuple[Any, ...]:
        return self._native.key, self._native.manifest, self._native.derivation

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._native = Encryption.from_key(*state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EncryptionParams) and self._native.same(other._native)

    __hash__ = None  # type: ignore[assignment]


class DecryptionParams:
    """A key or a passphrase with which :class:`tensorizer.TensorDeserializer` decrypts.

    Pickles of it contain the key or passphrase; ``repr()`` does not.

    Args:
        key: 32 bytes, or 64 hexadecimal digits as bytes.
        source: A passphrase, as bytes.
        require_manifest: Refuse files whose names, shapes and order are not sealed; see
            :class:`EncryptionParams`. A seal that a file has is checked in any case.
        max_opslimit: The most Argon2 passes that a file may require; None for 16.
        max_memlimit: The most memory for Argon2 that a file may require, in bytes; None for 2 GiB.

    """

    def __init__(
        self,
        key: bytes | None = None,
        source: bytes | None = None,
        *,
        require_manifest: bool = False,
        max_opslimit: int | None = None,
        max_memlimit: int | None = None,
    ) -> None:
        self.key = None if key is None else key_of(key)
        self.source = source
        self.require_manifest = bool(require_manifest)
        self._options: dict[str, Any] = {
            "require_manifest": self.require_manifest,
            "max_opslimit": max_opslimit,
            "max_memlimit": max_memlimit,
        }
        self._native: Decryption | None = None
        if key is not None or source is not None:
            passphrase = None if source is None else _encoded(source, "utf-8")
            self._native = Decryption(key=self.key, source=passphrase, **self._options)

    def __getstate__(self) -> tuple[bytes | None, bytes | None, dict[str, Any]]:
        return self.key, self.source, self._options

    def __setstate__(self, state: tuple[bytes | None, bytes | None, dict[str, Any]]) -> None:
        key, source, options = state
        self.__init__(key, source, **options)  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"

    @classmethod
    def from_key(cls, key: bytes, **options: Any) -> DecryptionParams:
        """Return parameters with a key; ``options`` are keywords of the class.

        Raises:
            TypeError: The key is not bytes.
            ValueError: It has neither 32 bytes nor 64 hexadecimal digits.

        """
        return cls(key_of(key), **options)

    @classmethod
    def from_string(
        cls, source: str | bytes, *, encoding: str = "utf-8", **options: Any
    ) -> DecryptionParams:
        """Return parameters with a passphrase; ``options`` are keywords of the class.

        Raises:
            TypeError: The passphrase is neither ``str`` nor bytes.
            ValueError: It is empty.

        """
        return cls(None, _encoded(source, encoding), **options)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DecryptionParams) and self.__getstate__() == other.__getstate__()

    __hash__ = None  # type: ignore[assignment]


def native_encryption(params: EncryptionParams | None) -> Encryption | None:
    """Return the parameters for the native writer."""
    if params is None:
        return None
    if not isinstance(params, EncryptionParams):
        hint = ": EncryptionParams(key)" if isinstance(params, bytes) else ""
        raise TypeError(f"encryption must be EncryptionParams, not {type(params).__name__}{hint}")
    return params._native


def native_decryption(params: DecryptionParams | None) -> Decryption | None:
    """Return the parameters for the native reader."""
    if params is None:
        return None
    if not isinstance(params, DecryptionParams):
        key = "params.key" if isinstance(params, EncryptionParams) else "key"
        way = f"from_string({'passphrase'})" if isinstance(params, str) else f"from_key({key})"
        raise TypeError(
            f"encryption must be DecryptionParams, not {type(params).__name__}: "
            f"DecryptionParams.{way}"
        )
    if params._native is None:
        raise ValueError("DecryptionParams without a key: use from_key or from_string")
    return params._native
