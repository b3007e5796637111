"""Targets of our figures, and what was found: tables for targets.md and for the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from figures import BASELINES
from format_cases import Asked

HEAD = ["| case | asked | found | reached |", "|---|---|---|---|"]


def judged(asked: Asked, rows: list[dict]) -> tuple[str, str, bool] | None:
    """Return what was asked, what was found, and whether that is enough."""
    found = {row["engine"]: row for row in rows}
    if asked.engine not in found or (asked.beside and asked.beside not in found):
        return None
    mine, bound = found[asked.engine], asked.bound
    name = asked.engine
    if asked.kind == "memory":
        extra = mine["extra_bytes"]
        text = f"{name}: at most {bound / 1e6:.0f} MB beyond what the caller keeps"
        return text, f"{extra / 1e6:.0f} MB", extra <= bound
    other = found[asked.beside]
    times = mine["median"] / other["median"]
    if asked.kind == "time":
        text = f"{name}: at most {bound:g} of the time of {asked.beside}"
        return text, f"{times:.2f}", times <= bound
    if asked.kind == "speed":
        text = f"{name}: at least {bound:g} times as fast as {asked.beside}"
        return text, f"{1 / times:.2f}", 1 / times >= bound
    rate = mine["bytes"] / other["bytes"] / times
    text = f"{name}: at least {bound:g} of the rate of the {BASELINES[asked.beside]}"
    return text, f"{rate:.2f}", rate >= bound


def lines(case: str, asked: Iterable[Asked], rows: list[dict]) -> list[str]:
    """Return lines of the table of targets."""
    return [
        f"| {case} | {text} | {value} | {'yes' if enough else '**no**'} |"
        for text, value, enough in filter(None, (judged(one, rows) for one in asked))
    ]
