"""Files on HTTP and Redis servers."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from typing import Any

from .._types import OpenOptions
from .certificates import CAInfo, certificate_options
from .remote import RemoteFile


class CURLStreamFile(RemoteFile):
    """A file on an HTTP server, for reading. The old package ran ``curl``; the name is unchanged.

    Args:
        uri: An ``http://`` or ``https://`` address.
        begin: Position in the file at which the stream begins to be read.
        end: Position at which the stream ends, or None for the end of the file.
        headers: Extra header fields of the requests. They are not sent to another host after a
            redirect.
        buffer_size: Bytes requested at a time; None for a default.
        certificate_handling: The certificates to trust.
        timeout: The seconds that opening, and each later call, may take; None for no limit.

    Raises:
        OSError: The file cannot be opened: ``FileNotFoundError`` if there is none,
            ``PermissionError`` for refused credentials and certificates, ``ConnectionError``,
            ``TimeoutError``.
        ValueError: ``begin`` and ``end`` are not a range.
        TypeError: ``certificate_handling`` is not a :class:`CAInfo`.

    Attributes:
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
        timeout: float | None = None,
    ) -> None:
        _check_scheme(uri, "http", "https")
        options: OpenOptions = {
            "headers": [(name, str(value)) for name, value in (headers or {}).items()],
            "timeout": timeout,
            **certificate_options(certificate_handling),
        }
        self._begin(uri, options, begin, end, buffer_size)

    @property
    def response_headers(self) -> http.client.HTTPMessage:
        """The headers of the server's response."""
        found = http.client.HTTPMessage()
        for name, value in self._headers:
            found.add_header(name, value)
        return found

    @property
    def http_response_latencies(self) -> list[float]:
        """The seconds of each request, the one that opened the file first."""
        return [self._setup_seconds, *self._latencies]

    @property
    def popen_latencies(self) -> list[float]:
        """An empty list: no process is started."""
        return []


class RedisStreamFile(RemoteFile):
    """A file that :meth:`tensorizer.TensorDeserializer.to_redis` stored, for reading.

    Args:
        uri: ``redis://[user:password@]host[:port]/prefix[?db=number]``, or ``rediss://`` for TLS.
        begin: Position in the file at which the stream begins to be read.
        end: Position at which the stream ends, or None for the end of the file.
        buffer_size: Bytes requested at a time; None for a default.
        certificate_handling: The certificates to trust.
        timeout: The seconds that opening, and each later call, may take; None for no limit.

    Raises:
        OSError: The server cannot be read: ``FileNotFoundError`` if no key has the prefix,
            ``PermissionError`` for refused users and certificates, ``ConnectionError``,
            ``TimeoutError``.
        ValueError: The address is not one of Redis, or ``begin`` and ``end`` are not a range.
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
        timeout: float | None = None,
    ) -> None:
        options: OpenOptions = {"timeout": timeout, **certificate_options(certificate_handling)}
        _check_scheme(uri, "redis", "rediss")
        self._begin(uri, options, begin, end, buffer_size)

    @property
    def setup_latency(self) -> float:
        """The seconds that it took to connect and to find the keys."""
        return self._setup_seconds

    @property
    def response_latencies(self) -> list[float]:
        """The seconds of each request."""
        return self._latencies


def _check_scheme(uri: str, one: str, other: str) -> None:
    found = uri.split("://", maxsplit=1)[0]
    if "://" not in uri or found.lower() not in {one, other}:
        raise ValueError(f"expected {one}:// or {other}://, found {found!r}")
