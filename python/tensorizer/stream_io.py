"""Files behind addresses, as Python file objects.

:func:`open_stream` opens local paths and ``http://``, ``https://`` and ``s3://`` addresses. A
stream that is handed to :class:`tensorizer.TensorDeserializer` is not read through Python: its
tensors are fetched by parallel requests, straight into their memory.
"""

from __future__ import annotations

import http.client
import io
import os
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

from ._native import DEFAULT_S3_ENDPOINT, Source

__all__ = ["CAInfo", "CURLStreamFile", "open_stream"]

#: Where objects are read from if nothing says otherwise.
default_s3_read_endpoint = DEFAULT_S3_ENDPOINT
#: Bytes that a stream asks of its server at a time when it is read from Python.
_READ_AHEAD = 8 << 20
_MODES = ("rb", "wb", "ab", "xb", "rb+", "wb+", "ab+", "xb+")


class _Trust(TypedDict):
    ca_file: str | None
    ca_folder: str | None
    trust_all: bool


class CAInfo:
    """Which certificates to trust, instead of those that the system trusts.

    Args:
        cacert: A file of certificates in PEM format.
        capath: A folder of such files (``*.pem``, ``*.crt`` or ``*.0``).
        allow_untrusted: Trust every certificate.

    Raises:
        ValueError: None or several of them are given, or there is no such file or folder.

    """

    def __init__(
        self,
        *,
        cacert: str | os.PathLike[str] | None = None,
        capath: str | os.PathLike[str] | None = None,
        allow_untrusted: bool = False,
    ) -> None:
        if (cacert is not None) + (capath is not None) + bool(allow_untrusted) != 1:
            raise ValueError("exactly one of cacert, capath and allow_untrusted must be given")
        if cacert is not None and not Path(cacert).is_file():
            raise ValueError(f"cacert is not a file: {os.fspath(cacert)!r}")
        if capath is not None and not Path(capath).is_dir():
            raise ValueError(f"capath is not a directory: {os.fspath(capath)!r}")
        self.cacert = None if cacert is None else os.fspath(cacert)
        self.capath = None if capath is None else os.fspath(capath)
        self.allow_untrusted = bool(allow_untrusted)

    def _key(self) -> tuple[str | None, str | None, bool]:
        return self.cacert, self.capath, self.allow_untrusted

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CAInfo) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        given = (("cacert", self.cacert), ("capath", self.capath))
        shown = [f"{name}={value!r}" for name, value in given if value is not None]
        return f"CAInfo({', '.join(shown) or 'allow_untrusted=True'})"


def _trust(certificate_handling: CAInfo | None) -> _Trust:
    """Return what the native code is told about certificates."""
    if certificate_handling is None:
        return {"ca_file": None, "ca_folder": None, "trust_all": False}
    if not isinstance(certificate_handling, CAInfo):
        raise TypeError(
            f"certificate_handling must be a CAInfo, not {type(certificate_handling).__name__}"
        )
    given = certificate_handling
    return {
        "ca_file": given.cacert,
        "ca_folder": given.capath,
        "trust_all": given.allow_untrusted,
    }


def _check_range(begin: int | None, end: int | None) -> None:
    if begin is not None and begin < 0:
        raise ValueError(f"begin must not be negative, but is {begin}")
    if end is not None and end <= (begin or 0):
        raise ValueError(f"end must be larger than begin, but they are {end} and {begin or 0}")


class CURLStreamFile(io.BufferedIOBase):
    """A file of an HTTP server, for reading. The name is kept from the time when it ran ``curl``.

    Args:
        uri: An ``http://`` or ``https://`` address.
        begin: Position in the file at which the stream begins to be read.
        end: Position at which the stream ends, or None for the end of the file.
        headers: Extra fields that are sent with requests, but not to other hosts.
        buffer_size: Bytes asked for at a time; None for a default.
        certificate_handling: Which certificates to trust.

    Raises:
        OSError: The file cannot be opened: ``FileNotFoundError`` if there is none,
            ``PermissionError`` for refused credentials and certificates, ``ConnectionError``,
            ``TimeoutError``.
        ValueError: ``begin`` and ``end`` are not a range.
        TypeError: ``certificate_handling`` is not a :class:`CAInfo`.

    Attributes:
        response_headers: What the server sent along.
        bytes_read: Bytes that were read from this object.

    """

    def __init__(
        self,
        uri: str,
        begin: int | None = None,
        end: int | None = None,
        headers: Mapping[str, Any] | None = None,
        *,
        buffer_size: int | None = None,
        certificate_handling: CAInfo | None = None,
    ) -> None:
        trust = _trust(certificate_handling)
        _check_range(begin, end)
        fields = [(name, str(value)) for name, value in (headers or {}).items()]
        self._over(Source.http(uri, fields, **trust), begin, end, buffer_size)

    def _over(
        self, source: Source, begin: int | None, end: int | None, buffer_size: int | None
    ) -> None:
        self._source = source
        self._end = end
        self._position = begin or 0
        self._ahead = buffer_size or _READ_AHEAD
        self._kept = b""
        self._kept_at = 0
        self._context: list[str] = []
        self.bytes_read = 0
        self.bytes_skipped = 0
        self.read_operations = 0
        self.response_headers = http.client.HTTPMessage()
        for name, value in self._source.headers():
            self.response_headers.add_header(name, value)

    @property
    def name(self) -> str:
        """The address, without its secrets."""
        return self._source.uri

    mode = "rb"

    def _native_source(self) -> Source | None:
        """Return what the native code reads, unless this stream stops before the file does."""
        return None if self._end is not None or self.closed else self._source

    def register_error_context(self, msg: str) -> None:
        """Have a text added to the errors of later reads."""
        self._context.append(msg)

    def readable(self) -> bool:
        """Tell that this can be read."""
        self._check_open()
        return True

    def seekable(self) -> bool:
        """Tell whether the server sends ranges, so that this can be read anywhere."""
        self._check_open()
        return self._source.size is not None

    def tell(self) -> int:
        """Return the position of the next byte in the file."""
        self._check_open()
        return self._position

    def seek(self, position: int, whence: int = os.SEEK_SET, /) -> int:
        """Move to another position in the file and return it."""
        self._check_open()
        if whence == os.SEEK_CUR:
            position += self._position
        elif whence == os.SEEK_END:
            size = self._source.size
            if size is None and self._end is None:
                raise io.UnsupportedOperation(f"the size of {self.name} is not known")
            position += min(n for n in (size, self._end) if n is not None)
        elif whence != os.SEEK_SET:
            raise ValueError(f"unknown whence: {whence}")
        if position < 0:
            raise ValueError(f"cannot seek to {position}")
        self._position = position
        return position

    def read(self, size: int | None = -1, /) -> bytes:
        """Return ``size`` bytes, fewer at the end only; all that are left if it is negative."""
        self._check_open()
        parts = []
        left = None if size is None or size < 0 else size
        while left is None or left > 0:
            part = self._some(left)
            if not part:
                break
            parts.append(part)
            left = None if left is None else left - len(part)
        return b"".join(parts)

    def read1(self, size: int = -1, /) -> bytes:
        """Return some bytes, at most ``size`` unless it is negative."""
        self._check_open()
        return self._some(None if size < 0 else size)

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer, except at the end, and return the number of bytes."""
        with memoryview(buffer).cast("B") as view:
            data = self.read(len(view))
            view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close the stream. Closing again does nothing."""
        if not self.closed:
            self._source.close()
            self._kept = b""
        super().close()

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"I/O operation on closed file {self.name}")

    def _some(self, most: int | None) -> bytes:
        """Return some bytes at the position, and keep what was read beyond them."""
        at = self._position - self._kept_at
        if not 0 <= at < len(self._kept):
            wanted = self._ahead if most is None else max(most, self._ahead)
            if self._end is not None:
                wanted = min(wanted, max(0, self._end - self._position))
            try:
                self._kept = self._source.read(self._position, wanted)
            except OSError as error:
                if self._context:
                    raise type(error)(f"{error} ({'; '.join(self._context)})") from error
                raise
            self._kept_at, at = self._position, 0
            self.read_operations += 1
        part = self._kept[at:] if most is None else self._kept[at : at + most]
        self._position += len(part)
        self.bytes_read += len(part)
        return part


def _open_s3(
    uri: str,
    begin: int | None,
    end: int | None,
    buffer_size: int | None,
    certificate_handling: CAInfo | None,
    *,
    signature: str | None,
    **given: Any,
) -> CURLStreamFile:
    if signature not in (None, "v4", "s3v4"):
        raise ValueError(f"signature version {signature!r} is not supported, only 'v4' is")
    _check_range(begin, end)
    stream = CURLStreamFile.__new__(CURLStreamFile)
    source = Source.s3(uri, **given, **_trust(certificate_handling))
    stream._over(source, begin, end, buffer_size)
    return stream


def open_stream(  # noqa: PLR0917  # the order is that of the old package
    path_uri: str | os.PathLike[Any],
    mode: str = "rb",
    s3_access_key_id: str | None = None,
    s3_secret_access_key: str | None = None,
    s3_endpoint: str | None = None,
    s3_config_path: str | os.PathLike[Any] | None = None,
    buffer_size: int | None = None,
    force_http: bool | None = None,
    *,
    begin: int | None = None,
    end: int | None = None,
    s3_region_name: str | None = None,
    s3_signature_version: str | None = None,
    certificate_handling: CAInfo | None = None,
) -> CURLStreamFile | BinaryIO:
    """Open a local path or an address as a binary file.

    Args:
        path_uri: A local path, which an ``os.PathLike`` always is, or an address.
        mode: A binary mode. Addresses of servers are for reading.
        s3_access_key_id: The access key. Without it the keys of ``~/.s3cfg`` are used, and then
            AWS's own chain: environment, shared files and profiles, web identity, instance roles.
            If nothing is found, or both keys are empty, the object is read as anybody may.
        s3_secret_access_key: Its secret key.
        s3_endpoint: A host or an address; without it ``~/.s3cfg``, ``AWS_ENDPOINT_URL_S3``,
            ``AWS_ENDPOINT_URL``, the profile, :data:`default_s3_read_endpoint`.
        s3_config_path: A file to use instead of ``~/.s3cfg``; it must be there.
        buffer_size: Bytes that are read at a time.
        force_http: Use ``http://`` for S3. None decides by the endpoint: ``http://`` from the
            environment or a profile is taken, from ``s3_endpoint`` it is refused.
        begin: Position at which to begin.
        end: For servers: position at which the stream ends.
        s3_region_name: The region; without it that of AWS's chain, else ``us-east-1``.
        s3_signature_version: ``"v4"`` or ``"s3v4"``, which are the same.
        certificate_handling: Which certificates to trust.

    Raises:
        ValueError: The mode does not fit.
        OSError: The file cannot be opened.
        NotImplementedError: Writing to ``s3://``, and ``redis://``, are not supported by this
            release.

    """
    normal = "".join(sorted(mode, key="rwxab+".find))
    if normal not in _MODES:
        raise ValueError(f"expected a binary mode such as 'rb', found {mode!r}")
    if isinstance(path_uri, str):
        scheme = urllib.parse.urlsplit(path_uri).scheme.lower() if "://" in path_uri else ""
        if scheme in ("http", "https"):
            if normal != "rb":
                raise ValueError(f"{scheme}:// addresses can only be opened for reading: {mode!r}")
            return CURLStreamFile(
                path_uri,
                begin,
                end,
                buffer_size=buffer_size,
                certificate_handling=certificate_handling,
            )
        if scheme == "s3" and normal == "rb":
            return _open_s3(
                path_uri,
                begin,
                end,
                buffer_size,
                certificate_handling,
                access_key=s3_access_key_id,
                secret_key=s3_secret_access_key,
                endpoint=s3_endpoint,
                config_path=None if s3_config_path is None else os.fspath(s3_config_path),
                force_http=force_http,
                region=s3_region_name,
                signature=s3_signature_version,
            )
        if scheme in ("s3", "redis", "rediss"):
            raise NotImplementedError(f"{scheme}:// addresses are not supported by this release")
    path = Path(os.fsdecode(path_uri))
    if normal[0] in "wax":
        path.parent.mkdir(parents=True, exist_ok=True)
    buffering = io.DEFAULT_BUFFER_SIZE if buffer_size is None else buffer_size
    file = path.open(normal, buffering=buffering)
    file.seek(begin or 0)
    return file  # type: ignore[return-value]
