"""The keys of a configuration file of ``s3cmd``, for scripts that read them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from .._native import s3cfg


class _ParsedCredentials(NamedTuple):
    """The keys and their server; None for a value that is missing."""

    config_file: str | None
    s3_endpoint: str | None
    s3_access_key: str | None
    s3_secret_key: str | None
    use_https: bool | None


def _infer_credentials(
    s3_access_key_id: str | None,
    s3_secret_access_key: str | None,
    s3_config_path: str | bytes | os.PathLike[str] | None = None,
) -> _ParsedCredentials:
    """Return two keys as they are given, or complete them from a file.

    Kept for scripts of the old package: streams find their credentials themselves, from AWS's chain
    too.

    Args:
        s3_access_key_id: The access key, or None for that of the file.
        s3_secret_access_key: Its secret key, or None for that of the file.
        s3_config_path: A file to use instead of ``~/.s3cfg``.

    Raises:
        FileNotFoundError: There is no file ``s3_config_path``.
        ValueError: A key is missing, or the file has another form.

    """
    if s3_access_key_id is not None and s3_secret_access_key is not None:
        return _ParsedCredentials(None, None, s3_access_key_id, s3_secret_access_key, None)
    path = Path(os.fsdecode(s3_config_path)) if s3_config_path else Path.home() / ".s3cfg"
    if not path.exists():
        if s3_config_path:
            raise FileNotFoundError(f"s3_config_path does not exist: {os.fspath(path)!r}")
        raise ValueError(
            f"S3 needs an access key and a secret key: none were given, and there is no {path}"
        )
    found_access, found_secret, host, https = s3cfg(os.fspath(path))
    access, secret = s3_access_key_id or found_access, s3_secret_access_key or found_secret
    for name, key in (("access_key", access), ("secret_key", secret)):
        if not key:
            raise ValueError(
                f"S3 needs an access key and a secret key: {name} is neither given nor in {path}"
            )
    return _ParsedCredentials(str(path), host, access, secret, https)
