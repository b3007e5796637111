"""Versions of packages and the commit, for the record of a measurement."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def commit() -> str:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return "none"
    return found.stdout.strip() or "none"
