"""Find sizes that suit a device: one at a time around the defaults, then the best of them together.

Each load is a process of its own; all settings take turns within a round. A setting is better by
its score: the geometric mean, over both models, over the first load and the later ones, of how much
faster than the defaults its median is.
"""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path

from bench import Bench
from rows import Row

STEP = "sweep"
DEFAULTS = "defaults"
TOGETHER = "the best together"
#: Values beside the default of each variable.
VALUES = {
    "TENSORIZER_STAGING_KB": (4096, 8192, 16384),
    "TENSORIZER_IN_FLIGHT_MB": (16, 32),
    "TENSORIZER_STREAMS": (1, 3, 4, 8),
    "TENSORIZER_READERS": (2, 4, 8, 16),
}
MODELS = ("large", "20k")
#: Loads in a process.
LOADS = 4
#: A value is better than the default if it is at least this much faster.
MIN_SPEEDUP = 1.02
Setting = dict[str, int]


def supported_variables(bench: Bench) -> set[str]:
    """Return which variables the library that is measured knows: their names are in it."""
    find = "from importlib.util import find_spec; print(find_spec('tensorizer').origin)"
    found = bench.process([sys.executable, "-c", find])
    if found.code != 0:
        return set()
    folder = Path(found.out.strip()).parent
    texts = [path.read_bytes() for path in folder.rglob("*.so")]
    return {name for name in VALUES if any(name.encode() in text for text in texts)}


def label(setting: Setting) -> str:
    return ", ".join(f"{name}={value}" for name, value in setting.items()) or DEFAULTS


def settings(bench: Bench) -> list[Setting]:
    """Return the settings to try, the defaults first; a row for each variable that is not known."""
    there = supported_variables(bench)
    for name in VALUES.keys() - there:
        why = "the library that is measured does not know it"
        bench.rows.end(f"{STEP}/{name}", {"step": STEP, "status": "absent", "why": why})
    tried = ((name, values[:1] if bench.toy else values) for name, values in VALUES.items())
    return [{}, *({name: value} for name, values in tried if name in there for value in values)]


def measure(bench: Bench, tried: list[Setting], phase: str, models: tuple[str, ...]) -> None:
    """Let settings take turns."""
    place = bench.places["tmpfs"]
    for round_ in range(bench.rounds):
        for name in models:
            model = bench.models[name]
            for setting in tried:
                key = f"{STEP}/{phase}/{name}/{label(setting)}/{round_}"
                if key in bench.rows.ends:
                    continue
                # Writes nothing if the files exist: a run resumed elsewhere may lack them.
                bench.need_model(place, model, ("tensors",))
                env = {variable: str(value) for variable, value in setting.items()}
                fields: Row = {
                    "step": STEP, "phase": phase, "model": name, "setting": label(setting),
                    "values": setting, "round": round_,
                }  # fmt: skip
                bench.unit(
                    key,
                    fields,
                    5 if bench.toy else 20,
                    lambda model=model, env=env: bench.engine("ours", place, model, LOADS, **env),
                )


def times(rows: list[Row]) -> tuple[float, float]:
    """Return the medians of first and of later loads."""
    again = [float(seconds) for row in rows for seconds in row["again"]]
    return statistics.median(float(row["seconds"]) for row in rows), statistics.median(again)


def scores(bench: Bench, phase: str) -> dict[str, float]:
    """Return how much faster than the defaults each setting is."""
    found: dict[str, list[float]] = {}
    rows = bench.rows.of(STEP, phase=phase, status="ok")
    for model in {row["model"] for row in rows}:
        mine: dict[str, list[Row]] = {}
        for row in rows:
            if row["model"] == model:
                mine.setdefault(str(row["setting"]), []).append(row)
        if DEFAULTS not in mine:
            continue
        usual = times(mine[DEFAULTS])
        for setting, of in mine.items():
            ratios = [before / now for before, now in zip(usual, times(of), strict=True)]
            found.setdefault(setting, []).extend(ratios)
    return {setting: math.prod(ratios) ** (1 / len(ratios)) for setting, ratios in found.items()}


def best(tried: list[Setting], found: dict[str, float]) -> Setting:
    """Return the best value of each variable that is better than its default."""
    chosen: Setting = {}
    reached: dict[str, float] = {}
    for setting in tried:
        score = found.get(label(setting), 0)
        for name, value in setting.items():
            if score >= max(MIN_SPEEDUP, reached.get(name, 0)):
                chosen[name], reached[name] = value, score
    return chosen


def sweep(bench: Bench) -> None:
    """Find the best values and recommend them, or the defaults."""
    models = MODELS[1:] if bench.toy else MODELS
    key = f"{STEP}/recommended"
    before = bench.rows.ends.get(key)
    if before is not None and int(before["rounds"]) >= bench.rounds:
        return
    print("sweep", flush=True)
    tried = settings(bench)
    try:
        measure(bench, tried, "alone", models)
        found = scores(bench, "alone")
        chosen = best(tried, found)
        if chosen:
            measure(bench, [{}, chosen], TOGETHER, models)
    except RuntimeError as error:
        bench.rows.end(f"{STEP}/model", {"step": STEP, "status": "failed", "why": str(error)})
        print(f"  {error}", flush=True)
        return
    together = scores(bench, TOGETHER).get(label(chosen), 0) if chosen else 0
    row: Row = {"step": STEP, "status": "ok", "scores": found, "together": together}
    if DEFAULTS not in found:
        row |= {"status": "failed", "why": "the defaults were not measured"}
    values = chosen if together >= MIN_SPEEDUP else {}
    bench.rows.end(key, row | {"values": values, "rounds": bench.rounds})
    print(f"recommended: {label(values)}", flush=True)
