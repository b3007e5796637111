"""Reloads of new weights into a model: which of them have changed since the load before."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tensorizer.file.open_file import OpenFile
    from tensorizer.group.members import FreeGroup

    from .options import LoaderOptions

_log = logging.getLogger("tensorizer.engines")


class LoadedWeights:
    """The weights that a model holds.

    Attributes:
        path: The path of the model at its first load.
        files: The files that were loaded, the prefixes of their names, and their identities.
        hashes: The SHA-256 of the weights; None if no headers were read for them yet.

    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.files: list[tuple[str, str, list[str | None]]] = []
        self.hashes: dict[str, str | None] | None = None


_loaded: weakref.WeakKeyDictionary[torch.nn.Module, LoadedWeights] = weakref.WeakKeyDictionary()


def loaded_weights(model: torch.nn.Module, path: str) -> LoadedWeights:
    """Return what a model holds; if it is new, its path is remembered."""
    return _loaded.setdefault(model, LoadedWeights(path))


class Reload:
    """One load of a model. If it is not the first, only weights that have changed are read.

    Until it has ended, the model counts as one whose weights are unknown.

    Args:
        loaded: The weights that the model holds.
        options: The options of the load.
        part_of: Returns the part of the model to which a weight belongs, by its name. A part is
            loaded as a whole or not at all.
        reads_all: True if all weights are read.

    """

    def __init__(
        self,
        loaded: LoadedWeights,
        options: LoaderOptions,
        part_of: Callable[[str], str],
        *,
        reads_all: bool = False,
    ) -> None:
        self._loaded, self._options, self._part_of = loaded, options, part_of
        self._files_before, self._before = loaded.files, loaded.hashes
        self._reads_all = reads_all or not loaded.files
        self._files: list[tuple[str, str, list[str | None]]] = []
        self._hashes: dict[str, str | None] = {}
        #: The identities of the file whose hashes were compared last.
        self._compared: list[str | None] | None = None
        loaded.files, loaded.hashes = [], None

    def end(self) -> None:
        """Remember the weights, all of which were loaded."""
        self._loaded.files = self._files
        self._loaded.hashes = None if self._reads_all else self._hashes

    def opened(self, file: str, prefix: str, iterator: Any) -> None:
        """Remember a file that is being loaded.

        Raises:
            OSError: It is another one than that whose hashes were compared.

        """
        identities = iterator._file.reader.identities()
        compared, self._compared = self._compared, None
        if compared is not None and compared != identities:
            raise OSError(
                f"{file} was replaced while its hashes were compared: reload the weights once more"
            )
        self._files.append((file, prefix, identities))

    def filter_for(
        self, file: str, prefix: str, group: FreeGroup | None
    ) -> Callable[[str], bool] | None:
        """Return a function that tells which weights of a file are loaded; None for all.

        The first rank of a group compares the hashes, for all of them. If one rank does not know
        what it holds, all ranks load all weights.
        """
        self._compared = None
        if group is None:
            same = self._unchanged(file, prefix)
        else:
            from tensorizer.group.members import Members

            reads_all = self._reads_all
            with Members.of(group) as members:
                _, told = members.run_on_all(
                    lambda: (reads_all, None if members.rank else self._unchanged(file, prefix)),
                    lambda found: found,
                )
                members.complete()
            same = None if any(reads_all for reads_all, _ in told) else told[0][1]
        if same is None:
            return None
        return lambda name: self._part_of(f"{prefix}{name}") not in same

    def _unchanged(self, file: str, prefix: str) -> set[str] | None:
        """Return the parts of the model that a file does not change; None if that is not known."""
        if self._reads_all:
            return None
        before = self._hashes_before()
        with self._open(file) as opened:
            identities = opened.reader.identities()
            is_same_file = (
                None not in identities and (file, prefix, identities) in self._files_before
            )
            now = {} if is_same_file else _hashes_of(opened, prefix)
        self._hashes |= now
        are_known = any(now.values()), any(before.values())
        changed = {
            self._part_of(name)
            for name, sha in now.items()
            if sha is None or before.get(name) != sha
        }
        is_same_path = any(file == old for old, _, _ in self._files_before)
        if is_same_file or (all(are_known) and is_same_path and not changed):
            # The same weights are wanted again, because those in memory are lost.
            self._reads_all = True
            return None
        if not all(are_known):
            which = "the file that was loaded before" if are_known[0] else file
            _log.warning("all weights are read again, as the hashes of %s are not known", which)
            return None
        self._compared = identities
        return set(map(self._part_of, now)) - changed

    def _hashes_before(self) -> dict[str, str | None]:
        """Return the SHA-256 of the weights that the model holds, as far as they are known."""
        if self._before is None:
            self._before = {}
            for file, prefix, identities in self._files_before:
                # The file may be gone, or another one by now.
                with contextlib.suppress(OSError), self._open(file) as opened:
                    if None not in identities and opened.reader.identities() == identities:
                        self._before |= _hashes_of(opened, prefix)
        return self._before

    def _open(self, file: str) -> OpenFile:
        from tensorizer.file.open_file import OpenFile

        return OpenFile(file, key_needed=False, **self._options.reading())


def _hashes_of(file: OpenFile, prefix: str) -> dict[str, str | None]:
    """Return the SHA-256 of each weight of a file; None for one that has none."""
    from tensorizer.file.unchanged import sha256_of

    numbers = range(len(file))
    rows = zip(file.reader.names(numbers), sha256_of(file.reader, numbers), strict=True)
    return {f"{prefix}{name}": sha for name, sha in rows}
