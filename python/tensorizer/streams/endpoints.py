"""The default endpoints of S3 that a program has assigned."""

from __future__ import annotations

import sys

from .._native import DEFAULT_S3_READ_ENDPOINT, DEFAULT_S3_WRITE_ENDPOINT


def assigned_endpoint(reading: bool) -> str | None:
    """Return what the program has assigned to ``default_s3_read_endpoint`` or its twin, or None.

    Both are attributes of ``tensorizer.stream_io``, which imports this package: it is looked up
    where it was imported, and read at each call.
    """
    public = sys.modules.get("tensorizer.stream_io")
    name = "default_s3_read_endpoint" if reading else "default_s3_write_endpoint"
    default = DEFAULT_S3_READ_ENDPOINT if reading else DEFAULT_S3_WRITE_ENDPOINT
    found: str = getattr(public, name, default)
    # By identity: a program that assigns the text of the default names it.
    return None if found is default else found
