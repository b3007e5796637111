"""Removes entries of configurations that would make a library open files of this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .remote_code import read_json

#: Names of a tokenizer's entries whose strings are paths that it would open.
_VOCABULARY = re.compile(r"vocab|merges|spm|sp_model|_files?$|_path$|_dir$|_dic$")
#: Names of such entries of a processor.
_PROCESSOR = re.compile(r"_file$|_path$|_dir$")


def drop_entries(path: Path, names_file: Callable[[str, Any], bool]) -> None:
    """Remove entries that name files from a configuration, which is rewritten.

    Args:
        path: The configuration, such as ``tokenizer_config.json``.
        names_file: Tells it of a name and a value: :func:`names_vocabulary` for a tokenizer,
            :func:`names_path` for a processor.

    Raises:
        ValueError: The file is not a JSON object.

    """
    config = read_json(path)
    sanitized = _without(config, names_file)
    if sanitized != config:
        path.write_text(json.dumps(sanitized), "utf-8")


def _without(config: dict[str, Any], names_file: Callable[[str, Any], bool]) -> dict[str, Any]:
    """Return a configuration without entries that name files, also in its objects."""
    return {
        key: _without(value, names_file) if isinstance(value, dict) else value
        for key, value in config.items()
        if not names_file(key, value)
    }


def names_vocabulary(key: str, value: Any) -> bool:
    """Tell whether an entry of a tokenizer names files, which its library finds by itself.

    Positional arguments (``init_inputs``) count too: they are the same files without names.
    """
    is_files = isinstance(value, list) and key.endswith("files")
    return key == "init_inputs" or (
        (isinstance(value, str) or is_files) and bool(_VOCABULARY.search(key))
    )


def names_path(key: str, value: Any) -> bool:
    """Tell whether an entry of a processor names a file of this machine.

    Other names are those of the hub, such as the ``repo_path`` of OneFormer.
    """
    return isinstance(value, str) and bool(_PROCESSOR.search(key)) and _is_here(value)


def _is_here(value: str) -> bool:
    """Tell whether it is a path of this machine; a name of the hub is relative, and not here."""
    try:
        return value.startswith(("/", "~", "\\", ".")) or Path(value).exists()
    except (OSError, ValueError):
        return False
