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
    _rewrite(path, lambda config: _without_vocabularies(config, ("init_inputs",)))


def drop_processor_files(path: Path) -> None:
    """Remove entries that name files of this machine from the configuration of a processor.

    Other names are those of the hub, such as the ``repo_path`` of OneFormer.

    Args:
        path: ``preprocessor_config.json`` or one like it, which is rewritten.

    Raises:
        ValueError: The file is not a JSON object.

    """
    _rewrite(path, _without_paths)


def _rewrite(path: Path, changed: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    config = read_json(path)
    sanitized = changed(config)
    if sanitized != config:
        path.write_text(json.dumps(sanitized), "utf-8")


def _without_vocabularies(config: dict[str, Any], more: tuple[str, ...] = ()) -> dict[str, Any]:
    sanitized = {}
    for key, value in config.items():
        names_files = bool(_VOCABULARY.search(key)) and (
            isinstance(value, str) or (isinstance(value, list) and key.endswith("files"))
        )
        if not names_files and key not in more:
            is_options = key.endswith("_kwargs") and isinstance(value, dict)
            sanitized[key] = _without_vocabularies(value) if is_options else value
    return sanitized


def _without_paths(config: dict[str, Any]) -> dict[str, Any]:
    sanitized: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            sanitized[key] = _without_paths(value)
        elif not (isinstance(value, str) and _PROCESSOR.search(key) and _is_here(value)):
            sanitized[key] = value
    return sanitized


def _is_here(value: str) -> bool:
    """Tell whether it is a path of this machine; a name of the hub is relative, and not here."""
    try:
        return value.startswith(("/", "~", "\\", ".")) or Path(value).exists()
    except (OSError, ValueError):
        return False
