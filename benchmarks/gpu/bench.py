"""State that all steps of a run share: rows, deadline, folders, and the runner of a unit."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from models import OUT, make_room, missing
from processes import Ended, run
from rows import Row, Rows

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
#: Seconds past the deadline that a unit under way is given.
GRACE = 20.0
#: The least seconds of the first unit of a call: on a busy machine torch's import takes half of it.
FIRST_SECONDS = 60.0
#: Seconds that writing a model may take.
MODEL_LIMIT = 590.0
#: The reason of a unit that is not tried again.
STARTED_TWICE = "it was started twice, and never finished"
Command = list[str]


class OutOfTimeError(Exception):
    """The deadline of this run has passed; run the program again to resume from its rows."""


class Clock:
    """The deadline of this call. The first unit has a minute at least: each call gets on."""

    def __init__(self, minutes: float | None) -> None:
        self.deadline = math.inf if minutes is None else time.monotonic() + minutes * 60
        self.begun = 0

    def need(self, seconds: float) -> None:
        """Begin something that takes so long, or raise."""
        if self.begun and time.monotonic() + seconds > self.deadline:
            raise OutOfTimeError
        self.begun += 1

    def left(self) -> float:
        least = FIRST_SECONDS if self.begun < 2 else -math.inf
        return max(least, self.deadline - time.monotonic() + GRACE)


@dataclass(frozen=True)
class Place:
    """A folder for models, on a disk or in memory."""

    folder: Path
    in_memory: bool


@dataclass(frozen=True)
class Model:
    """Tensors of float16, all of one size."""

    name: str
    count: int
    total: int


@dataclass
class Bench:
    """A run."""

    rows: Rows
    clock: Clock
    env: dict[str, str]
    places: dict[str, Place]
    models: dict[str, Model]
    rounds: int
    toy: bool
    #: Seconds that a unit may take.
    limit: float
    engines: list[str]
    tests: str
    #: Folders with packages for one engine only, by engine.
    sites: dict[str, str] = field(default_factory=dict)

    def unit(self, key: str, fields: Row, guess: float, work: Callable[[], Row]) -> None:
        """Do a unit of work, if that was not done yet, and add its row."""
        if key in self.rows.ends:
            return
        self.clock.need(guess)
        if self.rows.times_begun(key) >= 2:
            row: Row = {"status": "failed", "why": STARTED_TWICE}
        else:
            self.rows.begin(key)
            began = time.monotonic()
            row = work()
            row["took"] = round(time.monotonic() - began, 3)
        self.rows.end(key, fields | row)
        why = f": {str(row['why']).splitlines()[-1][-200:]}" if row.get("why") else ""
        print(f"  {key}: {row['status']}{why}", flush=True)

    def process(self, command: Command, limit: float | None = None, **env: str) -> Ended:
        """Run a program with what was unpacked; raise if the time of this call ends it."""
        limit = limit or self.limit
        ended = run(command, self.env | env, min(limit, self.clock.left()), str(ROOT))
        if ended.timed_out and ended.seconds < limit:
            raise OutOfTimeError
        return ended

    def program(self, name: str, *arguments: object, **env: str) -> Ended:
        """Run a program of this folder."""
        python = [sys.executable, str(HERE / name)]
        limit = MODEL_LIMIT if name == "models.py" else None
        return self.process([*python, *map(str, arguments)], limit, **env)

    def need_model(self, place: Place, model: Model, formats: tuple[str, ...]) -> None:
        """Write a model in these formats, where it is not there, and have room for OUT.

        Raises:
            RuntimeError: there is no room, or a format could not be written
        """
        place.folder.mkdir(parents=True, exist_ok=True)
        size = (model.name, model.count, model.total)
        left = missing(place.folder, *size, formats)
        if not left:
            return
        why = make_room(place.folder, model.name, model.total, (left, formats), place.in_memory)
        if why is not None:
            raise RuntimeError(why)
        left = [suffix for suffix in left if suffix != OUT]
        if not left:
            return
        # Written at 300 MB/s, and made before that.
        self.clock.need(20 + model.total * (1 + len(left)) / 3e8)
        print(f"  making {place.folder}/{model.name}: {', '.join(left)}", flush=True)
        ended = self.program("models.py", place.folder, *size, *left)
        # If one format cannot be written, the others still are.
        for suffix in missing(place.folder, *size, left) if ended.code != 0 else ():
            ended = self.program("models.py", place.folder, *size, suffix)
            if ended.code != 0 and suffix == "tensors":
                raise RuntimeError(f"{suffix} could not be written: {ended.why()}")
            if ended.code != 0:
                row: Row = {"step": "models", "status": "failed", "why": ended.why()}
                self.rows.end(f"models/{place.folder}/{model.name}.{suffix}", row)

    def engine(self, name: str, place: Place, model: Model, loads: int = 2, **env: str) -> Row:
        """Let an engine load or save a model; return its row."""
        if "2.12.1" in name:
            python = os.environ.get("TENSORIZER_OLD_PYTHON")
            if python is None:
                return {"status": "absent", "why": "TENSORIZER_OLD_PYTHON names no Python with it"}
            env["PYTHONPATH"] = ""
        else:
            python = sys.executable
        if site := self.sites.get(name):
            env["PYTHONPATH"] = ":".join(filter(None, [site, self.env.get("PYTHONPATH")]))
        command = [python, str(HERE / "engine.py"), name, str(place.folder), model.name, str(loads)]
        ended = self.process(command, **env)
        if ended.code != 0 or not ended.out.strip():
            return {"status": "failed", "why": ended.why()}
        try:
            found = json.loads(ended.out.splitlines()[-1])
        except ValueError:
            return {"status": "failed", "why": f"its last line was {ended.out.splitlines()[-1]!r}"}
        if "absent" in found:
            status = "failed" if name.startswith("ours") and "=" not in name else "absent"
            return {"status": status, "why": found["absent"]}
        if not found["verified"]:
            return {"status": "failed", "why": "other bytes than were written", **found}
        return {"status": "ok", **found, "rate": found["bytes"] / found["seconds"]}
