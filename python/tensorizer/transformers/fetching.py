"""Fetches small files of a folder, such as its configuration, as local files."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import queue
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from .._errors import FormatError
from .._locks import ForkSafeLock
from ..streams.open import open_stream
from ..streams.remote import RemoteFile
from .folders import ModelFolder

#: The most bytes of a configuration, and of any other small file.
CONFIG_BYTES = 10 << 20
FILE_BYTES = 200 << 20
#: Requests at a time.
_CONCURRENT_REQUESTS = 6
#: Bytes read at a time; a fetch can be given up between two reads.
_CHUNK = 8 << 20

T = TypeVar("T")


class FetchedFiles:
    """The small files of a folder that have been fetched so far.

    Args:
        folder: The folder that they are in.
        path: The local folder itself, or a temporary one that they are written to.

    Attributes:
        path: The same.
        in_place: True if that is the local folder itself.
        refused: Errors of files that the server does not give out, by name.

    """

    def __init__(self, folder: ModelFolder, path: Path) -> None:
        self._folder = folder
        self.path = path
        self.in_place = folder.path is not None
        self.refused: dict[str, PermissionError] = {}
        self._requested: set[str] = set()
        # Held while a file is created, so that no file is created while the temporary folder is
        # removed.
        self._creating = ForkSafeLock()

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
        if self._folder.path is not None:
            return
        while wanted and self._folder.needs_pinning:
            self._fetch_concurrently([wanted.pop(0)])
        self._fetch_concurrently(wanted)

    def _fetch_concurrently(self, names: list[str]) -> None:
        ended = threading.Event()
        try:
            run_jobs({name: functools.partial(self._fetch_one, name, ended) for name in names})
        finally:
            with self._creating.current():
                ended.set()

    def _fetch_one(self, name: str, ended: threading.Event) -> None:
        bound = CONFIG_BYTES if name.endswith("config.json") else FILE_BYTES
        try:
            opened = open_stream(self._folder.join(name), buffer_size=_CHUNK)
        except FileNotFoundError:
            return
        except PermissionError as error:
            # Object stores answer 403 for a missing name to clients that may not list names.
            self.refused[name] = error
            return
        # An error from here on is no missing file: a part of it must not count as all of it.
        with contextlib.closing(cast("RemoteFile", opened)) as stream:
            self._folder.pin(name, stream.name)
            file = self._created(name, ended)
            if file is None:
                return
            with file:
                while not ended.is_set() and (chunk := stream.read1()):
                    if file.tell() + len(chunk) > bound:
                        raise FormatError(
                            f"{self._folder.show(name)} is larger than {bound:,} bytes, "
                            "the bound of such a file"
                        )
                    file.write(chunk)

    def _created(self, name: str, ended: threading.Event) -> BinaryIO | None:
        """Create a file of the temporary folder; None if the fetch was given up."""
        with self._creating.current():
            if ended.is_set():
                return None
            target = self.path / name
            try:
                if target.parent != self.path:
                    target.parent.mkdir(parents=True, exist_ok=True)
                return target.open("wb")
            except FileNotFoundError:
                # The folder was removed, after the fetch was given up.
                return None

    def has(self, name: str) -> bool:
        """Tell whether a file is there."""
        return (self.path / name).is_file()

    def found(self) -> list[str]:
        """Return the names of the files that were asked for, and that there are."""
        return sorted(filter(self.has, self._requested))


@contextlib.contextmanager
def fetched_files(folder: ModelFolder) -> Iterator[FetchedFiles]:
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
        yield FetchedFiles(folder, inner)


def _name_of(shown: str) -> str:
    """Return a name for an address: the same each time, and valid as a module's name."""
    last = re.sub(r"\W", "_", shown.rstrip("/").rpartition("/")[2], flags=re.ASCII)[:40]
    return f"{last or 'model'}_{hashlib.sha256(shown.encode('utf-8', 'replace')).hexdigest()[:16]}"


def run_jobs(jobs: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """Run jobs on a few threads; Ctrl-C does not wait for them.

    Returns:
        Their results by name, in the order of the jobs.

    Raises:
        Exception: The first error of a job.

    """
    waiting: queue.SimpleQueue[tuple[str, Callable[[], T]]] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[str, T | None, BaseException | None]] = queue.SimpleQueue()
    for item in jobs.items():
        waiting.put(item)

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                name, job = waiting.get_nowait()
                try:
                    done.put((name, job(), None))
                except BaseException as error:
                    done.put((name, None, error))

    # Daemon threads, so that a request that hangs does not delay the end of the program.
    threads = [
        threading.Thread(target=work, name="tensorizer-fetch", daemon=True)
        for _ in range(min(_CONCURRENT_REQUESTS, len(jobs)))
    ]
    for thread in threads:
        thread.start()
    results: dict[str, T] = {}
    try:
        for _ in jobs:
            name, result, error = done.get()
            if error is not None:
                raise error
            results[name] = result  # type: ignore[assignment]
    except BaseException:
        with contextlib.suppress(queue.Empty):
            while True:
                waiting.get_nowait()
        raise
    for thread in threads:
        thread.join()
    return {name: results[name] for name in jobs}
