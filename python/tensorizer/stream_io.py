"""Files behind addresses, as Python file objects.

:func:`open_stream` opens local paths and ``http://``, ``https://``, ``s3://``, ``redis://`` and
``rediss://`` addresses. A stream that is handed to :class:`tensorizer.TensorDeserializer` or
:class:`tensorizer.TensorSerializer` is not read or written through Python: tensors travel by
parallel requests, straight into and out of their memory.
"""

from __future__ import annotations

import http.client
import io
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

from ._native import (
    DEFAULT_S3_READ_ENDPOINT,
    DEFAULT_S3_WRITE_ENDPOINT,
    Sink,
    Source,
    local_path,
)
from ._streams import AtomicRandom, AtomicWriter, RemoteFile, UploadFile, check_range

__all__ = ["CAInfo", "CURLStreamFile", "RedisStreamFile", "open_stream"]

#: Where objects are read from if nothing says otherwise.
default_s3_read_endpoint = DEFAULT_S3_READ_ENDPOINT
#: Where objects are written to if nothing says otherwise.
default_s3_write_endpoint = DEFAULT_S3_WRITE_ENDPOINT
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


class CURLStreamFile(RemoteFile):
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
        check_range(begin, end)
        fields = [(name, str(value)) for name, value in (headers or {}).items()]
        self._over(Source.http(uri, fields, trust), begin, end, buffer_size)

    def _over(
        self, source: Source, begin: int | None, end: int | None, buffer_size: int | None
    ) -> None:
        super().__init__(source, begin, end, buffer_size)
        self.response_headers = http.client.HTTPMessage()
        for name, value in source.headers():
            self.response_headers.add_header(name, value)


class RedisStreamFile(RemoteFile):
    """The file that :meth:`tensorizer.TensorDeserializer.to_redis` stored, for reading.

    Args:
        uri: ``redis://[user:password@]host[:port]/prefix[?db=number]``, or ``rediss://`` for TLS.
        begin: Position in the file at which the stream begins to be read.
        end: Position at which the stream ends, or None for the end of the file.
        buffer_size: Bytes asked for at a time; None for a default.
        certificate_handling: Which certificates to trust.

    Raises:
        OSError: The server cannot be read: ``FileNotFoundError`` if no key has the prefix,
            ``PermissionError`` for refused users and certificates, ``ConnectionError``,
            ``TimeoutError``.
        ValueError: The address is none of Redis, or ``begin`` and ``end`` are not a range.
        TypeError: ``certificate_handling`` is not a :class:`CAInfo`.

    Attributes:
        bytes_read: Bytes that were read from this object.

    """

    def __init__(
        self,
        uri: str,
        *,
        begin: int | None = None,
        end: int | None = None,
        buffer_size: int | None = None,
        certificate_handling: CAInfo | None = None,
    ) -> None:
        trust = _trust(certificate_handling)
        check_range(begin, end)
        if not uri.lower().startswith(("redis://", "rediss://")):
            raise ValueError(
                f"expected redis:// or rediss://, found {uri.split('://', maxsplit=1)[0]!r}"
            )
        super().__init__(Source.redis(uri, trust), begin, end, buffer_size)


class _S3Options(TypedDict):
    access_key: str | None
    secret_key: str | None
    endpoint: str | None
    config_path: str | None
    force_http: bool | None
    region: str | None


def _s3_options(  # noqa: PLR0917  # the order is that of open_stream
    access_key: str | None,
    secret_key: str | None,
    endpoint: str | None,
    config_path: str | os.PathLike[Any] | None,
    force_http: bool | None,
    region: str | None,
    signature: str | None,
) -> _S3Options:
    if signature not in (None, "v4", "s3v4"):
        raise ValueError(f"signature version {signature!r} is not supported, only 'v4' is")
    return {
        "access_key": access_key,
        "secret_key": secret_key,
        "endpoint": endpoint,
        "config_path": None if config_path is None else os.fspath(config_path),
        "force_http": force_http,
        "region": region,
    }


def _over(
    source: Source, begin: int | None, end: int | None, buffer_size: int | None
) -> CURLStreamFile:
    stream = CURLStreamFile.__new__(CURLStreamFile)
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
) -> CURLStreamFile | RedisStreamFile | UploadFile | BinaryIO:
    """Open a local path or an address as a binary file.

    Args:
        path_uri: A local path, which an ``os.PathLike`` always is, or an address.
        mode: A binary mode. ``s3://`` can be read or written; ``"ab"`` does not append, but
            writes a new object, as before. Other addresses are for reading. A local file that is
            opened with ``"wb"`` or ``"wb+"`` appears when it is closed; if a ``with`` block raises,
            or it is never closed, the old one stays.
        s3_access_key_id: The access key. Without it the keys of ``~/.s3cfg`` are used, and then
            AWS's own chain: environment, shared files and profiles, web identity, instance roles.
            If nothing is found, or both keys are empty, the object is read as anybody may.
        s3_secret_access_key: Its secret key.
        s3_endpoint: A host or an address; without it ``~/.s3cfg``, ``AWS_ENDPOINT_URL_S3``,
            ``AWS_ENDPOINT_URL``, the profile, and at last :data:`default_s3_read_endpoint` or
            :data:`default_s3_write_endpoint`.
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
        OSError: The file cannot be opened. An object that is written is sent while it is
            written, so that writing and closing raise too; then nothing is published.

    """
    normal = "".join(sorted(mode, key="rwxab+".find))
    if normal not in _MODES:
        raise ValueError(f"expected a binary mode such as 'rb', found {mode!r}")
    if isinstance(path_uri, str):
        local = local_path(path_uri)
        scheme = path_uri.split(":", 1)[0].lower() if local is None else ""
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
        if scheme == "s3":
            options = _s3_options(
                s3_access_key_id,
                s3_secret_access_key,
                s3_endpoint,
                s3_config_path,
                force_http,
                s3_region_name,
                s3_signature_version,
            )
            trust = _trust(certificate_handling)
            if normal == "rb":
                check_range(begin, end)
                return _over(Source.s3(path_uri, options, trust), begin, end, buffer_size)
            if normal[0] not in "wa":
                raise ValueError(f"s3:// addresses can be opened with 'rb' and 'wb', not {mode!r}")
            return UploadFile(Sink.s3(path_uri, options, trust))
        if scheme in ("redis", "rediss"):
            if normal != "rb":
                raise ValueError(
                    f"{scheme}:// addresses can only be opened for reading: {mode!r}; "
                    "TensorDeserializer.to_redis writes them"
                )
            return RedisStreamFile(
                path_uri,
                begin=begin,
                end=end,
                buffer_size=buffer_size,
                certificate_handling=certificate_handling,
            )
        path_uri = local or path_uri
    path = Path(os.fsdecode(path_uri))
    if normal[0] in "wax":
        path.parent.mkdir(parents=True, exist_ok=True)
    buffering = io.DEFAULT_BUFFER_SIZE if buffer_size is None else buffer_size
    if normal in ("wb", "wb+") and buffering > 1:
        kind = AtomicRandom if normal == "wb+" else AtomicWriter
        stream = kind(str(path), buffering)
        stream.seek(begin or 0)
        return stream
    file = path.open(normal, buffering=buffering)
    file.seek(begin or 0)
    return file  # type: ignore[return-value]


def s3_upload(  # noqa: PLR0917  # the order is that of the old package
    path: str | os.PathLike[Any],
    target_uri: str,
    s3_access_key_id: str | None,
    s3_secret_access_key: str | None,
    s3_endpoint: str | None = default_s3_write_endpoint,
    s3_region_name: str | None = None,
    s3_signature_version: str | None = None,
) -> None:
    """Upload a local file; see :func:`open_stream`. An endpoint of ``http://`` is taken."""
    target = open_stream(
        target_uri,
        "wb",
        s3_access_key_id,
        s3_secret_access_key,
        s3_endpoint,
        force_http=_is_plain(s3_endpoint),
        s3_region_name=s3_region_name,
        s3_signature_version=s3_signature_version,
    )
    with target, Path(path).open("rb") as file:
        shutil.copyfileobj(file, target, 8 << 20)


def s3_download(  # noqa: PLR0917  # the order is that of the old package
    path_uri: str,
    s3_access_key_id: str | None,
    s3_secret_access_key: str | None,
    s3_endpoint: str | None = default_s3_read_endpoint,
    s3_region_name: str | None = None,
    s3_signature_version: str | None = None,
    buffer_size: int | None = None,
    begin: int | None = None,
    end: int | None = None,
    certificate_handling: CAInfo | None = None,
) -> CURLStreamFile:
    """Open an object for reading; see :func:`open_stream`. An endpoint of ``http://`` is taken."""
    stream = open_stream(
        path_uri,
        "rb",
        s3_access_key_id,
        s3_secret_access_key,
        s3_endpoint,
        None,
        buffer_size,
        _is_plain(s3_endpoint),
        begin=begin,
        end=end,
        s3_region_name=s3_region_name,
        s3_signature_version=s3_signature_version,
        certificate_handling=certificate_handling,
    )
    assert isinstance(stream, CURLStreamFile)
    return stream


def _is_plain(endpoint: str | None) -> bool | None:
    return True if endpoint is not None and endpoint.lower().startswith("http://") else None
