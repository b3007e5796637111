"""Parts of files: the tensors below a key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tensorizer.file.name_tree import name_of, path_of

if TYPE_CHECKING:
    from tensorizer._types import Name

    from .file_description import FileDescription

#: The most keys in a message.
_SHOWN = 8


def below(names: Sequence[Name], key: str, shown: str) -> dict[int, Name]:
    """Return the tensors below a key by number, each with the rest of its name.

    Args:
        names: The names of all tensors.
        key: A key at the top, or several with dots between them.
        shown: The file, for messages.

    Raises:
        ValueError: There are none.

    """
    rests = {number: _rest(path_of(name), key) for number, name in enumerate(names)}
    found = {number: name_of(rest) for number, rest in rests.items() if rest is not None}
    if not found:
        tops = list(dict.fromkeys(str(path_of(name)[0]) for name in names))
        more = ", ..." * (len(tops) > _SHOWN)
        raise ValueError(
            f"{shown} has no tensors below {key!r}, but below {', '.join(tops[:_SHOWN])}{more}"
        )
    if len(set(found.values())) < len(found):
        raise ValueError(f"{shown}: two tensors below {key!r} would have the same name")
    return found


def one_part(file: FileDescription) -> tuple[str, dict[int, Name]] | None:
    """Return the key below which all names are strings, and these; None if all are strings.

    Raises:
        ValueError: There is no such key.

    """
    paths = [path_of(name) for name in file.names]
    above = dict.fromkeys(path[:-1] for path in paths)
    if len(above) == 1 and all(isinstance(path[-1], str) for path in paths):
        key = ".".join(map(str, *above))
        names = {number: name_of(path[-1:]) for number, path in enumerate(paths)}
        return (key, names) if key else None
    if any(above):
        some = list(dict.fromkeys(str(path[0]) for path in above if path))[:_SHOWN]
        raise ValueError(
            f"safetensors files cannot hold nested names, as {file.shown} has: --key takes a part, "
            f"such as {' or '.join(some)}; .tensors files hold all of them"
        )
    return None


def _rest(path: tuple[Any, ...], key: str) -> tuple[Any, ...] | None:
    """Return what follows a key in a path; the last step for the key of a tensor itself."""
    for number, step in enumerate(map(str, path), 1):
        if key == step:
            return path[number:] or path[-1:]
        if step.startswith(f"{key}."):
            return (step[len(key) + 1 :], *path[number:])
        if not key.startswith(f"{step}."):
            return None
        key = key[len(step) + 1 :]
    return None
