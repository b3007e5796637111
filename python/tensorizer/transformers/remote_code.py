"""Fetches Python files of a model's folder, for models whose code is not part of the library."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .fetching import FetchedFiles

#: The name of a module without folders, as a configuration may state it.
_MODULE = re.compile(r"[A-Za-z_]\w*")
#: Imports of modules in the same folder, in the forms that transformers finds.
_RELATIVE = re.compile(r"(?m)^\s*(?:from\s+\.(\w+)\s+import|import\s+\.(\w+))")
#: The most modules of one model.
_MOST = 100


def fetch_code(files: FetchedFiles, configs: Iterable[str], given: Any = None) -> None:
    """Fetch the modules that configurations name in ``auto_map``, and those that they import.

    References to other repositories (``org/repo--module.Class``) are left to the library.

    Args:
        files: The files of the folder, with the configurations.
        configs: The names of the configurations.
        given: A configuration that the program passes, or None: an object, or a dictionary.

    Raises:
        ValueError: A configuration is not a JSON object, a module's name is invalid, or there are
            too many modules.
        OSError, FormatError: See :meth:`FetchedFiles.fetch`.

    """
    found = _named(entry(given, "auto_map"), "config=")
    for name in configs:
        if files.has(name):
            found |= _named(read_json(files.path / name).get("auto_map"), name)
    left = set(found)
    while left:
        files.fetch(f"{module}.py" for module in sorted(left))
        imported = {
            first or second
            for module in left
            if files.has(f"{module}.py")
            for first, second in _RELATIVE.findall(
                (files.path / f"{module}.py").read_text("utf-8", "replace")
            )
        }
        left = imported - found
        found |= left
        if len(found) > _MOST:
            raise ValueError(f"the code of the model has more than {_MOST} modules")


def _named(auto_map: Any, config: str) -> set[str]:
    """Return the modules of an ``auto_map``, whose values are references or lists of them."""
    found: set[str] = set()
    values = auto_map.values() if isinstance(auto_map, dict) else ()
    for value in values:
        for reference in value if isinstance(value, (list, tuple)) else [value]:
            if not isinstance(reference, str) or "--" in reference:
                continue
            module = reference.partition(".")[0]
            if not _MODULE.fullmatch(module):
                raise ValueError(f"expected module.Class in auto_map of {config}: {reference!r}")
            found.add(module)
    return found


def entry(config: Any, name: str) -> Any:
    """Return an entry of a dictionary, or an attribute of a configuration, or None."""
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file.

    Raises:
        ValueError: The file is not a JSON object.

    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path.name}: expected a JSON object, found {type(found).__name__}")
    return found
