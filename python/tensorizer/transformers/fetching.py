"""Small files of a folder, such as its configuration, as local files."""

from __future__ import annotations

import contextlib
import functools
import queue
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from .._errors import FormatError
from ..streams.open import open_stream
from .folders import Folder

#: Bytes that a configuration may have, and any other small file.
CONFIG_BYTES = 10 << 20
FILE_BYTES = 200 << 20
#: Requests at a time.
_AT_ONCE = 6
#: Bytes read at a time, between which a fetch can be given up.
_CHUNK = 1 << 20

T = TypeVar("T")


class Fetched:
    """The small files of a folder that have been fetched so far.

    Args:
        folder: The folder that they are in.
        path: The local folder itself, or a temporary one that they are written to.

    Attributes:
        path: The same.
        in_place: True if that is the local folder itself.
        refused: Errors of files that the server does not give out, by name.

    """

    def __init__(self, folder: Folder, path: Path) -> None:
        self._folder = folder
        self.path = path
        self.in_place = folder.path is not None
        self.refused: dict[str, PermissionError] = {}
        self._asked: set[str] = set()

    def fetch(self, names: Iterable[str]) -> None:
        """Fetch files that were not asked for before, several at a time.

        Those that are missing are left out. In a local folder nothing is done.

        Args:
            names: Names of files of the folder, from this package or checked by it.

        Raises:
            FormatError: A file is larger than its bound.
            OSError: The server cannot be reached, or fails.

        """
        wanted = [name for name in dict.fromkeys(names) if name not in self._asked]
        self._asked.update(wanted)
        if self._folder.path is not None:
            return
        ended = threading.Event()
        try:
            together({name: functools.partial(self._one, name, ended) for name in wanted})
        finally:
            ended.set()

    def _one(self, name: str, ended: threading.Event) -> None:
        bound = CONFIG_BYTES if name.endswith("config.json") else FILE_BYTES
        try:
            with contextlib.closing(open_stream(self._folder.join(name))) as stream:
                self._folder.pin(name, stream.name)
                target = self.path / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as file:
                    while not ended.is_set() and (chunk := stream.read(_CHUNK)):
                        if file.tell() + len(chunk) > bound:
                            raise FormatError(
                                f"{self._folder.show(name)} is larger than {bound:,} bytes, "
                                "the bound of such a file"
                            )
                        file.write(chunk)
        except FileNotFoundError:
            pass
        except PermissionError as error:
            # Object stores refuse names that are missing to those that may not list them.
            self.refused[name] = error

    def has(self, name: str) -> bool:
        """Return True if a file is there."""
        return (self.path / name).is_file()


@contextlib.contextmanager
def fetched(folder: Folder) -> Iterator[Fetched]:
    """Lend the small files of a folder; the temporary folder of an address is removed."""
    if folder.path is not None:
        yield Fetched(folder, folder.path)
        return
    with tempfile.TemporaryDirectory(prefix="tensorizer-", ignore_cleanup_errors=True) as path:
        yield Fetched(folder, Path(path))


def together(jobs: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """Run jobs on a few threads, which Ctrl-C does not wait for.

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

    # Daemons, so that a request that hangs does not hold up the end of the program.
    threads = [
        threading.Thread(target=work, name="tensorizer-fetch", daemon=True)
        for _ in range(min(_AT_ONCE, len(jobs)))
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
