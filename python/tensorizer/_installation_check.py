"""Detects files of the old package of the same name in this package's folder.

pip removes the old package before it installs this one. ``--ignore-installed``, conda beside pip,
and copying do not: then files of both lie in one folder, and some of ours may have been replaced.
"""

from __future__ import annotations

import base64
import hashlib
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import Distribution

#: A file that every release of the old package has, and no release of this one.
_OLD = "_version.py"
_REPAIR = (
    "run `pip uninstall -y {names}` until it finds none, remove the folder {folder}, and install "
    "one of them again"
)


def _check(folder: Path) -> None:
    """Look for the old package in a folder of this one, and warn about it; costs one ``stat``.

    Raises:
        ImportError: The old package has replaced files of this one.

    """
    old = folder / _OLD
    if not old.is_file():
        return
    found = re.search(r"\d+\.[\w.]+", old.read_text(errors="replace"))
    version = found[0] if found else "2"
    ours = _ours(folder)
    # This package may have been given another name.
    names = "tensorizer" if ours is None else " ".join(sorted({"tensorizer", ours.name}))
    repair = _REPAIR.format(names=names, folder=folder)
    replaced = [] if ours is None else _replaced(folder, ours)
    if replaced:
        raise ImportError(
            f"tensorizer {version} was installed over this package, without removing it, and has "
            f"replaced {', '.join(replaced)}: {repair}"
        )
    warnings.warn(
        f"files of tensorizer {version} are mixed with those of this package, which seem complete; "
        f"removing or upgrading one of the two removes files of the other: {repair}",
        RuntimeWarning,
        stacklevel=4,
    )


def _ours(folder: Path) -> Distribution | None:
    """Return the distribution that installed this package; None if it is not known."""
    # Imported here because it takes longer than all the rest.
    from importlib.metadata import distributions

    for distribution in distributions(path=[str(folder.parent)]):
        if "tensorizer/_native.py" in map(str, distribution.files or []):
            return distribution
    return None


def _replaced(folder: Path, ours: Distribution) -> list[str]:
    """Return the modules that differ from the hashes recorded at installation."""
    recorded = [file for file in ours.files or [] if file.suffix == ".py" and file.hash]
    hashes = {folder.parent / file: file.hash for file in recorded}
    there = [path for path in hashes if path.is_file()]
    return [one.name for one in there if getattr(hashes[one], "value", "") != _sha256(one)]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256(path.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


_check(Path(__file__).parent)
