"""Files behind addresses, as Python file objects."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

from .._native import (
    DEFAULT_S3_READ_ENDPOINT,
    DEFAULT_S3_WRITE_ENDPOINT,
    Sink,
    Source,
    local_path,
)
from .atomic import AtomicRandom, AtomicWriter
from .certificates import CAInfo, trust_of
from .remote import check_range
from .servers import CURLStreamFile, RedisStreamFile
from .upload import UploadFile

#: Schemes of Google Cloud Storage and Azure.
_CLOUDS = ("gs", "az", "abfs", "abfss")
_MODES = ("rb", "wb", "ab", "xb", "rb+", "wb+", "ab+", "xb+")


def _check_writing(scheme: str, normal: str, mode: str) -> None:
    if normal[0] not in "wa":
        raise ValueError(f"{scheme}:// addresses can be opened with 'rb' and 'wb', not {mode!r}")


def _assigned_endpoint(reading: bool) -> str | None:
    """Return the default endpoint that the program has assigned, or None."""
    # That module imports this one.
    from .. import stream_io

    # By identity: a program that assigns the text of the default names it.
    if reading:
        found = stream_io.default_s3_read_endpoint
        return None if found is DEFAULT_S3_READ_ENDPOINT else found
    found = stream_io.default_s3_write_endpoint
    return None if found is DEFAULT_S3_WRITE_ENDPOINT else found


class _S3Options(TypedDict):
    access_key: str | None
    secret_key: str | None
    endpoint: str | None
    default_endpoint: str | None
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
    reading: bool,
) -> _S3Options:
    if signature not in (None, "v4", "s3v4"):
        raise ValueError(f"signature version {signature!r} is not supported, only 'v4' is")
    return {
        "access_key": access_key,
        "secret_key": secret_key,
        "endpoint": endpoint,
        "default_endpoint": _assigned_endpoint(reading),
        "config_path": None if config_path is None else os.fspath(config_path),
        "force_http": force_http,
        "region": region,
    }


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
        mode: A binary mode. ``s3://``, ``gs://`` and ``az://`` can be read or written; ``"ab"``
            does not append, but writes a new object, as before. Other addresses are for reading. A
            local file that is opened with ``"wb"`` or ``"wb+"`` appears when it is closed; if a
            ``with`` block raises, or it is never closed, the old one stays.
        s3_access_key_id: The access key. Without it the keys of ``~/.s3cfg`` are used, and then
            AWS's own chain: environment, shared files and profiles, web identity, instance roles.
            If nothing is found, or both keys are empty, the object is read anonymously.
        s3_secret_access_key: Its secret key.
        s3_endpoint: A host or an address. Without it the endpoint that is named by ``~/.s3cfg``,
            ``AWS_ENDPOINT_URL_S3``, ``AWS_ENDPOINT_URL``, the profile, ``default_s3_read_endpoint``
            or ``default_s3_write_endpoint`` of ``tensorizer.stream_io`` if the program has assigned
            them, or ``TENSORIZER_S3_ENDPOINT``. If none is named, credentials of AWS's chain go to
            AWS; all other keys, and anonymous reads, to the default of tensorizer 2.
        s3_config_path: A file to use instead of ``~/.s3cfg``; it must be there.
        buffer_size: Bytes that are read at a time.
        force_http: Use ``http://`` for S3. None decides by the endpoint: ``http://`` from the
            environment, a profile or an assigned default is taken, from ``s3_endpoint`` it is
            refused.
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
                normal == "rb",
            )
            trust = trust_of(certificate_handling)
            if normal == "rb":
                check_range(begin, end)
                uri = path_uri
                return CURLStreamFile.over(
                    lambda: Source.s3(uri, options, trust), begin, end, buffer_size
                )
            _check_writing(scheme, normal, mode)
            return UploadFile(Sink.s3(path_uri, options, trust))
        if scheme == "hf":
            if normal != "rb":
                raise ValueError(
                    f"hf:// addresses can only be opened for reading: {mode!r}; write a local "
                    "file, and upload it with huggingface_hub"
                )
            check_range(begin, end)
            uri, trust = path_uri, trust_of(certificate_handling)
            return CURLStreamFile.over(lambda: Source.hf(uri, trust), begin, end, buffer_size)
        if scheme in _CLOUDS:
            uri, trust = path_uri, trust_of(certificate_handling)
            if normal != "rb":
                _check_writing(scheme, normal, mode)
                return UploadFile(Sink.clouds(uri, trust))
            check_range(begin, end)
            return CURLStreamFile.over(lambda: Source.clouds(uri, trust), begin, end, buffer_size)
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
    s3_endpoint: str | None = None,
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
    s3_endpoint: str | None = None,
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
