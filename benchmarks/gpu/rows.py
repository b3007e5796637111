"""Results of a run so far, as lines of JSON; a unit of work that has a row is not done again.

A unit of work has a key. ``{"begin": key}`` is written before it, a row with its key, a status and
what it found after it. Lines are appended in one write each and synced, so that whatever ends the
run loses the unit that was under way and no other.

``status`` is ``ok``, ``absent`` (what it needs is not there, which is no failure) or ``failed``,
with ``why``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

Row = dict[str, object]


def append(path: Path, line: Row) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, (json.dumps(line) + "\n").encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def mend(path: Path) -> None:
    """End a line that a crash of the machine left unfinished."""
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")


class Rows:
    """The file and what is in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        mend(path)
        self.load()

    def load(self) -> None:
        """Read it again: other processes add to it."""
        self.machines: list[Row] = []
        self.ends: dict[str, Row] = {}
        self.begins: dict[str, int] = {}
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            try:
                self._take(json.loads(line))
            except ValueError:
                continue  # it was cut off

    def _take(self, row: Row) -> None:
        if "begin" in row:
            key = str(row["begin"])
            self.begins[key] = self.begins.get(key, 0) + 1
        elif "key" in row:
            self.ends[str(row["key"])] = row
        else:
            self.machines.append(row)

    def add(self, row: Row) -> None:
        append(self.path, row)
        self._take(row)

    def begin(self, key: str) -> None:
        self.add({"begin": key})

    def end(self, key: str, row: Row) -> None:
        self.add({"key": key} | row)

    def times_begun(self, key: str) -> int:
        """Return how often a unit was begun."""
        return self.begins.get(key, 0)

    def unfinished(self, prefix: str) -> list[str]:
        """Return the keys that were begun and did not end."""
        return [key for key in self.begins if key.startswith(prefix) and key not in self.ends]

    def of(self, step: str, **fields: object) -> list[Row]:
        """Return the rows of a step that have these fields."""
        wanted = {"step": step} | fields
        return [row for row in self.ends.values() if wanted.items() <= row.items()]

    def failures(self) -> list[Row]:
        return [row for row in self.ends.values() if row.get("status") == "failed"]
