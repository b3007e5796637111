"""Files on HTTP and Redis servers."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .certificates import CAInfo, certificate_options
from .remote import RemoteFile

if TYPE_CHECKING:
    from .._types import OpenOptions


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

    Raises:
        OSError: The file cannot be opened: ``FileNotFoundError`` if there is none,
            ``PermissionError`` for refused credentials and certificates, ``ConnectionError``,
            ``TimeoutError``.
        ValueError: ``begin`` and ``end`` are not a range.
        TypeError: ``certificate_handling`` is not a :class:`CAInfo`.

    Attributes:
        response_headers: The headers of the server's response.
        bytes_read: Bytes that were read from this object.
        http_response_latencies: The seconds in which the server answered each request of this
            object, the one that opened the file first.
        popen_latencies: Empty: no process is started.

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
        if not uri.lower().startswith(("http://", "https://")):
            raise ValueError(
                f"expected http:// or https://, found {uri.split('://', maxsplit=1)[0]!r}"
            )
        options: OpenOptions = {
            "headers": [(name, str(value)) for name, value in (headers or {}).items()],
            **certificate_options(certificate_handling),
        }
        self._begin(uri, options, begin, end, buffer_size)

    def _begin(
        self,
        uri: str,
        options: OpenOptions,
        begin: int | None,
        end: int | None,
        buffer_size: int | None,
    ) -> float:
        took = super()._begin(uri, options, begin, end, buffer_size)
        self.http_response_latencies = self._latencies
        self.http_response_latencies.append(took)
        self.popen_latencies: list[float] = []
        self.response_headers = http.client.HTTPMessage()
        for name, value in self._source.headers():
            self.response_headers.add_header(name, value)
        return took


class RedisStreamFile(RemoteFile):
    """A file that :meth:`tensorizer.TensorDeserializer.to_redis` stored, for reading.

    Args:
        uri: ``redis://[user:password@]host[:port]/prefix[?db=number]``, or ``rediss://`` for TLS.
        begin: Position in the file at which the stream begins to be read.
        end: Position at which the stream ends, or None for the end of the file.
        buffer_size: Bytes requested at a time; None for a default.
        certificate_handling: The certificates to trust.

    Raises:
        OSError: The server cannot be read: ``FileNotFoundError`` if no key has the prefix,
            ``PermissionError`` for refused users and certificates, ``ConnectionError``,
            ``TimeoutError``.
        ValueError: The address is not one of Redis, or ``begin`` and ``end`` are not a range.
        TypeError: ``certificate_handling`` is not a :class:`CAInfo`.

    Attributes:
        bytes_read: Bytes that were read from this object.
        setup_latency: The seconds that it took to connect and to find the keys.
        response_latencies: The seconds in which the server answered each request of this object.

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
        options = certificate_options(certificate_handling)
        if not uri.lower().startswith(("redis://", "rediss://")):
            raise ValueError(
                f"expected redis:// or rediss://, found {uri.split('://', maxsplit=1)[0]!r}"
            )
        self._begin(uri, options, begin, end, buffer_size)

    def _begin(
        self,
        uri: str,
        options: OpenOptions,
        begin: int | None,
        end: int | None,
        buffer_size: int | None,
    ) -> float:
        self.setup_latency = super()._begin(uri, options, begin, end, buffer_size)
        self.response_latencies = self._latencies
        return self.setup_latency
