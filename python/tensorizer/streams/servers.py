"""Files of HTTP and Redis servers."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from typing import Any

from .._native import Source
from .certificates import CAInfo, trust_of
from .remote import RemoteFile, check_range


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
        trust = trust_of(certificate_handling)
        check_range(begin, end)
        fields = [(name, str(value)) for name, value in (headers or {}).items()]
        self._begin(Source.http(uri, fields, trust), begin, end, buffer_size)

    @classmethod
    def over(
        cls, source: Source, begin: int | None, end: int | None, buffer_size: int | None
    ) -> CURLStreamFile:
        """Return the stream of a source that is open."""
        stream = cls.__new__(cls)
        stream._begin(source, begin, end, buffer_size)
        return stream

    def _begin(
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
        trust = trust_of(certificate_handling)
        check_range(begin, end)
        if not uri.lower().startswith(("redis://", "rediss://")):
            raise ValueError(
                f"expected redis:// or rediss://, found {uri.split('://', maxsplit=1)[0]!r}"
            )
        super().__init__(Source.redis(uri, trust), begin, end, buffer_size)
