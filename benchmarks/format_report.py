"""The report of ``formats.py``, in Markdown, made from the newest records of a machine.

python benchmarks/format_report.py benchmarks/records/MACHINE
"""

from __future__ import annotations

import sys
from pathlib import Path

from format_cases import CASES, Asked, Case
from report import LIMITS, newest, table

#: How the names of these records begin.
PREFIX = "formats-"
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
    text = f"{name}: at least {bound:g} of the rate of the {LIMITS[asked.beside]}"
    return text, f"{rate:.2f}", rate >= bound


def goals(case: Case, rows: list[dict]) -> list[str]:
    """Return lines of the table of goals."""
    found = [judged(asked, rows) for asked in case.asked]
    return [
        f"| {case.name} | {text} | {value} | {'yes' if enough else '**no**'} |"
        for text, value, enough in filter(None, found)
    ]


def case_table(case: Case, rows: list[dict]) -> str:
    """Return the table of a case, and below it that of its goals."""
    lines = goals(case, rows)
    return "\n".join([table(case, rows), *(["", *HEAD, *lines] if lines else [])])


def report(folder: Path) -> str:
    """Return the report of a machine's newest figures: all goals, then a table for each case."""
    machines, rows = newest(folder, f"{PREFIX}*.jsonl")
    found = {case: [row for row in rows if row["case"] == case.name] for case in CASES}
    found = {case: mine for case, mine in found.items() if mine}
    machine = max(machines.values(), key=lambda machine: machine["date"])
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        "# Files that others write",
        "",
        f"`benchmarks/formats.py`, commit {machine['commit']}, on {machine['cpu']}, "
        f"{machine['memory']}, kernel {machine['kernel']}, with {versions}. Engines in turns, each "
        "in a process of its own, every byte compared with what was written. CPU only. "
        "`benchmarks/README.md` says what the engines are.",
        "",
        *HEAD,
        *(line for case, mine in found.items() for line in goals(case, mine)),
    ]
    for case, mine in found.items():
        title = case.title[0].upper() + case.title[1:]
        parts = (case.name, f"{mine[0]['n']} rounds", machines[case.name]["date"][:10])
        lines += ["", f"**{title}** ({', '.join(parts)})", "", table(case, mine)]
    return "\n".join(lines) + "\n"


def write(folder: Path, date: str) -> Path:
    """Write the report beside the records."""
    path = folder / f"{PREFIX}{date[:10]}.md"
    path.write_text(report(folder))
    return path


if __name__ == "__main__":
    print(report(Path(sys.argv[1])), end="")
