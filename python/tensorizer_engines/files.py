"""Finds the files that hold the weights of a model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from tensorizer.streams.addresses import is_address


def is_model_name(model: str) -> bool:
    """Tell whether a model is known by name only, and not by an address or a path.

    Raises:
        ValueError: It is an address of an unknown kind.

    """
    return not is_address(model) and not Path(model).exists()


def weights_file(model: str) -> str | None:
    """Return an address or file itself; of a folder ``model.tensors``, else its only ``*.tensors``.

    Raises:
        ValueError: There are several, and none of them is called ``model.tensors``; or it is an
            address of an unknown kind.

    """
    if is_address(model) or Path(model).is_file():
        return model
    found = sorted(Path(model).glob("*.tensors"))
    named = [path for path in found if path.name == "model.tensors"] or found
    if len(named) > 1:
        names = ", ".join(path.name for path in named)
        raise ValueError(
            f"{model} holds several files of tensors, {names}: name one of them as uri"
        )
    return str(named[0]) if named else None


def index_of_shards(files: Sequence[str]) -> list[str]:
    """Return the index of files that are its shards, which are then read as one; else the files."""
    # Links of folders are followed once, so that all files are of one version.
    folders = {folder: folder.resolve() for folder in {Path(file).parent for file in files}}
    files = [str(folders[Path(file).parent] / Path(file).name) for file in files]
    names = {Path(file).name for file in files}
    if len(names) > 1:
        for index in sorted(Path(files[0]).parent.glob("*.index.json")):
            # A file that cannot be read is not an index of these.
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
                if set(json.loads(index.read_bytes())["weight_map"].values()) == names:
                    return [str(index)]
    return sorted(files)
