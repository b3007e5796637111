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


def drop_tokenizer_files(path: Path) -> None:
    """Remove entries that name files from the configuration of a tokenizer.

    The library finds the files of the folder by itself. Positional arguments (``init_inputs``) are
    removed too: they are the same files without names.

    Args:
        path: ``tokenizer_config.json`` or ``special_tokens_map.json``, which is rewritten.

    Raises:
        ValueError: The file is not a JSON object.

    """
    _rewrite(path, _names_vocabulary)


def drop_processor_files(path: Path) -> None:
    """Remove entries that name files of this machine from the configuration of a processor.

    Other names are those of the hub, such as the ``repo_path`` of OneFormer.

    Args:
        path: ``preprocessor_config.json`` or one like it, which is rewritten.

    Raises:
        ValueError: The file is not a JSON object.

    """
    _rewrite(path, _names_path)


def _rewrite(path: Path, names_file: Callable[[str, Any], bool]) -> None:
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


def _names_vocabulary(key: str, value: Any) -> bool:
    is_files = isinstance(value, list) and key.endswith("files")
    return key == "init_inputs" or (
        (isinstance(value, str) or is_files) and bool(_VOCABULARY.search(key))
    )


def _names_path(key: str, value: Any) -> bool:
    return isinstance(value, str) and bool(_PROCESSOR.search(key)) and _is_here(value)


def _is_here(value: str) -> bool:
    """Tell whether it is a path of this machine; a name of the hub is relative, and not here."""
    try:
        return value.startswith(("/", "~", "\\", ".")) or Path(value).exists()
    except (OSError, ValueError):
        return False
