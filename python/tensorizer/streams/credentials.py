"""What a configuration file of ``s3cmd`` says, for scripts that ask."""

from __future__ import annotations

import configparser
import os
from pathlib import Path
from typing import NamedTuple


class _ParsedCredentials(NamedTuple):
    """What was found; None for what is not there."""

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

    Kept for scripts: streams find their credentials themselves, from AWS's chain too.

    Args:
        s3_access_key_id: The access key, or None for that of the file.
        s3_secret_access_key: Its secret key, or None for that of the file.
        s3_config_path: A file to use instead of ``~/.s3cfg``.

    Raises:
        FileNotFoundError: ``s3_config_path`` is not there.
        ValueError: A key is missing, or the file has another form.

    """
    if s3_access_key_id is not None and s3_secret_access_key is not None:
        return _ParsedCredentials(None, None, s3_access_key_id, s3_secret_access_key, None)
    path = Path(os.fsdecode(s3_config_path)) if s3_config_path else Path.home() / ".s3cfg"
    if not path.exists():
        if s3_config_path:
            raise FileNotFoundError(f"s3_config_path is not there: {os.fspath(path)!r}")
        raise ValueError(f"two keys of S3 are needed: none were given, and there is no {path}")
    file = configparser.ConfigParser(interpolation=None)
    try:
        file.read_string(path.read_text(), str(path))
    except configparser.Error as error:
        raise ValueError(f"{path} is no configuration file: {error}") from None
    found = dict(file["default"]) if file.has_section("default") else {}
    access = s3_access_key_id or found.get("access_key")
    secret = s3_secret_access_key or found.get("secret_key")
    for name, key in (("access_key", access), ("secret_key", secret)):
        if not key:
            raise ValueError(f"two keys of S3 are needed: {name} is neither given nor in {path}")
    https = {"true": True, "false": False}.get(found.get("use_https", "").lower())
    return _ParsedCredentials(str(path), found.get("host_base") or None, access, secret, https)
