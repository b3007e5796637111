"""The default endpoints of S3 that a program has assigned."""

from __future__ import annotations

import sys

from .._native import DEFAULT_S3_READ_ENDPOINT, DEFAULT_S3_WRITE_ENDPOINT


def assigned_endpoint(reading: bool) -> str | None:
    """Return the value that the program assigned to ``default_s3_read_endpoint`` or its twin.

    None if it has assigned none. Both are attributes of ``tensorizer.stream_io``, which imports
    this package. So that module is looked up only if it was imported, and read at each call.
    """
    public = sys.modules.get("tensorizer.stream_io")
    name = "default_s3_read_endpoint" if reading else "default_s3_write_endpoint"
    default = DEFAULT_S3_READ_ENDPOINT if reading else DEFAULT_S3_WRITE_ENDPOINT
    found: str = getattr(public, name, default)
    # Compared by identity: a program may assign a text that is equal to the default.
    return None if found is default else found
