"""Opens files behind addresses, as Python file objects."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from .._calls import limited_save
from .._native import check_target, create, local_path, scheme
from .._numbers import check_number
from .._types import OpenOptions
from .atomic import AtomicRandom, AtomicWriter
from .certificates import CAInfo, certificate_options
from .endpoints import assigned_endpoint
from .servers import CURLStreamFile, RedisStreamFile
from .upload import UploadFile

#: Hints about other ways to write, by the schemes of addresses that can only be read.
_INSTEAD = {
    "hf": "; write a local file, and upload it with huggingface_hub",
    "redis": "; TensorDeserializer.to_redis writes them",
    "rediss": "; TensorDeserializer.to_redis writes them",
}
#: The options of S3, by the names of boto3.
_S3_SETTINGS = {
    "addressing_style": "addressing_style",
    "ServerSideEncryption": "encryption",
    "SSEKMSKeyId": "kms_key_id",
    "RequestPayer": "payer",
}
_MODES = ("rb", "wb", "ab", "xb", "rb+", "wb+", "ab+", "xb+")


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
    s3_session_token: str | None = None,
    s3: Mapping[str, str] | None = None,
    certificate_handling: CAInfo | None = None,
    headers: Mapping[str, str] | None = None,
    max_bytes_per_second: int | None = None,
    timeout: float | None = None,
) -> CURLStreamFile | RedisStreamFile | UploadFile | BinaryIO:
    """Open a local path or an address as a binary file.

    Args:
        path_uri: A local path, which an ``os.PathLike`` always is, or an address.
        mode: A binary mode. ``s3://``, ``gs://`` and ``az://`` can be read or written; ``"ab"``
            does not append, but writes a new object, as in the old package. Other addresses can
            only be read. A local file that is opened with ``"wb"`` or ``"wb+"`` appears when it is
            closed; if a ``with`` block raises, or it is never closed, the old file stays.
        s3_access_key_id: The access key. None for the keys of ``~/.s3cfg``, otherwise for those of
            AWS's default chain: environment, shared files and profiles, web identity, instance
            roles. If no keys are found, or both are empty, the object is read anonymously. One key
            without the other is an error.
        s3_secret_access_key: The secret key that belongs to the access key.
        s3_endpoint: A host or an address. None for the first endpoint that is set by
            ``~/.s3cfg``, ``AWS_ENDPOINT_URL_S3``, ``AWS_ENDPOINT_URL``, the profile,
            ``default_s3_read_endpoint`` or ``default_s3_write_endpoint`` of
            ``tensorizer.stream_io`` if the program has assigned them, or
            ``TENSORIZER_S3_ENDPOINT``. If none is set, AWS is asked if ``s3_region_name`` is given,
            with credentials of AWS's chain, and anonymously (but the bucket ``tensorized`` is read
            from the default server of tensorizer 2). Keys that are passed, or of ``~/.s3cfg``, go
            to that default server; if a variable or profile of AWS is set, they are an error.
        s3_config_path: A file to use instead of ``~/.s3cfg``; it must exist.
        buffer_size: The number of bytes that are read at a time.
        force_http: Use ``http://`` for S3. With None, an endpoint with ``http://`` is accepted from
            the environment, a profile or an assigned default, and refused from ``s3_endpoint``.
        begin: The position in bytes at which the stream begins.
        end: For servers: the position in bytes at which the stream ends.
        s3_region_name: The region; None for that of AWS's chain, or ``us-east-1`` if it has none.
        s3_signature_version: ``"v4"`` or ``"s3v4"``, which are the same.
        s3_session_token: The token of temporary keys; None for that of ``~/.s3cfg``.
        s3: Further settings of S3, by the names that boto3 gives them: ``addressing_style``
            (``"auto"``, ``"path"`` or ``"virtual"``: where addresses have the bucket),
            ``ServerSideEncryption`` and ``SSEKMSKeyId`` (of uploads), ``RequestPayer``
            (``"requester"``).
        certificate_handling: The certificates to trust.
        headers: Header fields of the requests to a server.
        max_bytes_per_second: The most bytes per second that are received from a server or sent to
            it; None for the value of ``TENSORIZER_MAX_BYTES_PER_SECOND``.
        timeout: For servers: the seconds that opening, and each later call, may take; then it is a
            ``TimeoutError``. None for no limit.

    Raises:
        ValueError: The mode is not allowed for the address, a path to write is a misspelled address
            (``s3:/bucket/key``) or begins with ``~/``, or the server of passed keys is not known.
        OSError: The file cannot be opened. An object is sent while it is written, so writing and
            closing can raise too; then no object appears.

    """
    normal = "".join(sorted(mode, key="rwxab+".find))
    if normal not in _MODES:
        raise ValueError(f"expected a binary mode such as 'rb', found {mode!r}")
    for name, position in (("begin", begin), ("end", end)):
        check_number(name, position, least=0)
    server = scheme(path_uri) if isinstance(path_uri, str) else None
    if isinstance(path_uri, str) and server is not None:
        if s3_signature_version not in (None, "v4", "s3v4"):
            raise ValueError(
                f"signature version {s3_signature_version!r} is not supported, only 'v4' is"
            )
        options: OpenOptions = {
            "access_key": s3_access_key_id,
            "secret_key": s3_secret_access_key,
            "endpoint": s3_endpoint,
            "default_endpoint": assigned_endpoint(normal == "rb"),
            "config_path": None if s3_config_path is None else os.fspath(s3_config_path),
            "force_http": force_http,
            "region": s3_region_name,
            "session_token": s3_session_token,
            "headers": list((headers or {}).items()),
            "max_bytes_per_second": max_bytes_per_second,
            "timeout": timeout,
            **_s3_options(s3 or {}),
            **certificate_options(certificate_handling),
        }
        name, writable = server
        if normal == "rb":
            reader: Any = RedisStreamFile if name.startswith("redis") else CURLStreamFile
            remote: CURLStreamFile | RedisStreamFile = reader.__new__(reader)
            remote._begin(path_uri, options, begin, end, buffer_size)
            return remote
        if writable and normal[0] not in "wa":
            raise ValueError(
                f"{name}:// addresses can be opened with 'rb' and 'wb', not {normal!r}"
            )
        check_writable(path_uri, normal)
        return UploadFile(create(path_uri, options))
    path_uri = (local_path(path_uri) or path_uri) if isinstance(path_uri, str) else path_uri
    path = Path(os.fsdecode(path_uri))
    if normal != "rb":
        check_target(os.fsdecode(path_uri))
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


def _s3_options(settings: Mapping[str, str]) -> OpenOptions:
    """Return the options of settings that have the names of boto3."""
    if unknown := settings.keys() - _S3_SETTINGS.keys():
        names = ", ".join(_S3_SETTINGS)
        raise ValueError(f"s3: expected settings among {names}, found {sorted(unknown)}")
    if settings.get("RequestPayer", "requester") != "requester":
        raise ValueError(
            f"s3: RequestPayer: expected 'requester', found {settings['RequestPayer']!r}"
        )
    return {_S3_SETTINGS[name]: value for name, value in settings.items()}  # type: ignore[return-value]


def check_writable(uri: str, mode: str = "wb") -> None:
    """Refuse the address of a server that can only be read.

    Raises:
        ValueError: It is one, or of an unknown kind.

    """
    server = scheme(uri)
    if server is not None and not server[1]:
        raise ValueError(
            f"{server[0]}:// addresses can only be opened for reading, not with {mode!r}"
            + _INSTEAD.get(server[0], "")
        )


@limited_save
def s3_upload(  # noqa: PLR0917  # the order is that of the old package
    path: str | os.PathLike[Any],
    target_uri: str,
    s3_access_key_id: str | None,
    s3_secret_access_key: str | None,
    s3_endpoint: str | None = None,
    s3_region_name: str | None = None,
    s3_signature_version: str | None = None,
    *,
    timeout: float | None = None,
) -> None:
    """Upload a local file; see :func:`open_stream`. An ``http://`` endpoint is accepted.

    ``timeout`` are the seconds of the whole call.
    """
    keys = s3_access_key_id, s3_secret_access_key
    s3 = {"s3_region_name": s3_region_name, "s3_signature_version": s3_signature_version}
    target = _open_s3(target_uri, "wb", keys, s3_endpoint, **s3)
    with target, Path(path).open("rb") as file:
        shutil.copyfileobj(file, target, 8 << 20)


def s3_download(  # noqa: PLR0917  # the order is that of the old package
    path_uri: str,
    s3_access_key_id: str | None,
    s3_secret_access_key: str | None,
    s3_endpoint: str | None = None,
    s3_region_name: str | None = None,
    s3_signature_version: str | None = None,
    buffer_size: int | None = None,
    begin: int | None = None,
    end: int | None = None,
    certificate_handling: CAInfo | None = None,
    *,
    timeout: float | None = None,
) -> CURLStreamFile:
    """Open an object for reading; see :func:`open_stream`. An ``http://`` endpoint is accepted."""
    keys = s3_access_key_id, s3_secret_access_key
    s3 = {"s3_region_name": s3_region_name, "s3_signature_version": s3_signature_version}
    part = {"begin": begin, "end": end, "buffer_size": buffer_size, "timeout": timeout}
    stream = _open_s3(
        path_uri, "rb", keys, s3_endpoint, certificate_handling=certificate_handling, **s3, **part
    )
    assert isinstance(stream, CURLStreamFile)
    return stream


def _open_s3(
    uri: str, mode: str, keys: tuple[str | None, str | None], endpoint: str | None, **more: Any
) -> Any:
    """Open an object; ``more`` are arguments of :func:`open_stream`."""
    is_plain = endpoint is not None and endpoint.lower().startswith("http://")
    return open_stream(uri, mode, *keys, endpoint, force_http=is_plain or None, **more)
