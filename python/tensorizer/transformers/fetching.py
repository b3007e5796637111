"""Fetches small files of a folder, such as its configuration, as local files."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import cast

from .._errors import FormatError
from .._native import Call, check_wait, hub_is_offline, time_left
from ..streams.open import open_stream
from ..streams.remote import RemoteFile
from .folders import ModelFolder

#: The most bytes of a configuration, and of any other small file.
CONFIG_BYTES = 10 << 20
FILE_BYTES = 200 << 20
#: Requests at a time.
_CONCURRENT_REQUESTS = 6
#: Seconds between two looks at what ends the call.
_PAUSE = 0.05


class FetchedFiles:
    """The small files of a folder that have been fetched so far.

    Args:
        folder: The folder that they are in.
        path: The local folder itself, or a temporary one that they are written to.
        headers: Header fields of the requests.

    Attributes:
        folder, path: The same.
        refused: Errors of files that may be there, but were not given out, by name.

    """

    def __init__(
        self, folder: ModelFolder, path: Path, headers: Mapping[str, str] | None = None
    ) -> None:
        self.folder, self._headers = folder, headers
        self.path = path
        self.refused: dict[str, OSError] = {}
        self._requested: set[str] = set()

    def fetch(self, names: Iterable[str]) -> None:
        """Fetch files that were not asked for before, several at a time.

        Missing files are skipped. In a local folder nothing is done. From the hub, files are
        fetched one by one until one of them has told the commit; then the others are fetched from
        that commit.

        Args:
            names: Names of files of the folder, from this package or checked by it.

        Raises:
            FormatError: A file is larger than its bound.
            OSError: The server cannot be reached, or fails.

        """
        wanted = [name for name in dict.fromkeys(names) if name not in self._requested]
        self._requested.update(wanted)
        if self.folder.path is not None:
            return
        while wanted and self.folder.needs_pinning:
            self._fetch_concurrently([wanted.pop(0)])
        self._fetch_concurrently(wanted)

    def _fetch_concurrently(self, names: list[str]) -> None:
        if not names:
            return
        left = time_left()

        def fetch(name: str) -> tuple[str, bytes | None]:
            # The caller's own limit passes first.
            with Call("fetching", None if left is None else left + 0.1):
                return self._fetch_one(name)

        # The threads of this pool are daemons: one that hangs does not delay the program's end.
        with ThreadPool(min(_CONCURRENT_REQUESTS, len(names))) as pool:
            fetched = pool.imap_unordered(fetch, names)
            for _ in names:
                while True:
                    check_wait(f"fetching {', '.join(names)} of `{self.folder.shown}`")
                    with contextlib.suppress(multiprocessing.TimeoutError):
                        name, data = fetched.next(_PAUSE)
                        break
                if data is not None:
                    target = self.path / name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(data)

    def _fetch_one(self, name: str) -> tuple[str, bytes | None]:
        """Return a file's name and content; None if the server has none, or does not give it."""
        bound = CONFIG_BYTES if name.endswith("config.json") else FILE_BYTES
        try:
            opened = open_stream(self.folder.join(name), headers=self._headers)
        except FileNotFoundError as error:
            if self.folder.is_of_hub and hub_is_offline():
                # The hub may have it: the error says why it was not asked.
                self.refused[name] = error
            return name, None
        except PermissionError as error:
            # Object stores answer 403 for a missing name to clients that may not list names.
            self.refused[name] = error
            return name, None
        # An error from here on is no missing file: a part of it must not count as all of it.
        with contextlib.closing(cast("RemoteFile", opened)) as stream:
            self.folder.pin(name, stream.name)
            data = stream.read(bound + 1)
        if len(data) > bound:
            raise FormatError(
                f"{self.folder.show(name)} is larger than {bound:,} bytes, the bound of such a file"
            )
        return name, data

    def has(self, name: str) -> bool:
        """Tell whether a file is there."""
        return (self.path / name).is_file()

    def found(self) -> list[str]:
        """Return the names of the files that were asked for, and that there are."""
        return sorted(filter(self.has, self._requested))


@contextlib.contextmanager
def fetched_files(
    folder: ModelFolder, headers: Mapping[str, str] | None = None
) -> Iterator[FetchedFiles]:
    """Yield the small files of a folder; the temporary folder of an address is removed.

    The temporary folder is ``tensorizer-<random>/<folder>-<digest of the address>``. The library
    names modules of remote code after the last part, so that each load of an address uses the same
    place of its cache.
    """
    if folder.path is not None:
        yield FetchedFiles(folder, folder.path)
        return
    with tempfile.TemporaryDirectory(prefix="tensorizer-", ignore_cleanup_errors=True) as path:
        inner = Path(path, _name_of(folder.shown))
        inner.mkdir()
        yield FetchedFiles(folder, inner, headers)


def _name_of(shown: str) -> str:
    """Return a name for an address: the same each time, and valid as a module's name."""
    last = re.sub(r"\W", "_", shown.rstrip("/").rpartition("/")[2], flags=re.ASCII)[:40]
    return f"{last or 'model'}_{hashlib.sha256(shown.encode('utf-8', 'replace')).hexdigest()[:16]}"
