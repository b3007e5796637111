"""The report of ``formats.py``, in Markdown, made from the newest records of a machine.

python benchmarks/format_report.py benchmarks/records/MACHINE
"""

from __future__ import annotations

import sys
from pathlib import Path

import targets
from figures import newest, note, table
from format_cases import CASES, Case

#: How the names of these records begin.
PREFIX = "formats-"


def case_table(case: Case, rows: list[dict]) -> str:
    """Return the table of a case, and below it that of its targets."""
    lines = targets.lines(case.name, case.asked, rows)
    return "\n".join([table(case, rows), *(["", *targets.HEAD, *lines] if lines else [])])


def found(folder: Path) -> tuple[dict[str, dict], dict[Case, list[dict]]]:
    """Return, of a machine's newest figures, the machine by case name and the rows by case."""
    machines, rows = newest(folder, f"{PREFIX}*.jsonl")
    by_case = {case: [row for row in rows if row["case"] == case.name] for case in CASES}
    return machines, {case: mine for case, mine in by_case.items() if mine}


def report(folder: Path) -> str:
    """Return the report of a machine's newest figures: a table for each case."""
    machines, rows = found(folder)
    machine = max(machines.values(), key=lambda machine: machine["date"])
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        "# Files that others write",
        "",
        f"`benchmarks/formats.py`, commit {machine['commit']}, on {machine['cpu']}, "
        f"{machine['memory']}, kernel {machine['kernel']}, with {versions}. Engines in turns, each "
        "in a process of its own, every byte compared with what was written. CPU only. "
        "`benchmarks/README.md` says what the engines are.",
    ]
    for case, mine in rows.items():
        title = case.title[0].upper() + case.title[1:]
        parts = (case.name, f"{mine[0]['n']} rounds", machines[case.name]["date"][:10])
        lines += ["", f"**{title}** ({', '.join(parts)})", "", table(case, mine)]
        lines += note(folder, case.name, machines[case.name]["date"])
    return "\n".join(lines) + "\n"


def goals(folder: Path) -> list[str]:
    """Return the table of targets of a machine's newest figures."""
    rows = found(folder)[1]
    return [
        *targets.HEAD,
        *(line for c, mine in rows.items() for line in targets.lines(c.name, c.asked, mine)),
    ]


def write(folder: Path, date: str) -> Path:
    """Write the report beside the records."""
    path = folder / f"{PREFIX}{date[:10]}.md"
    path.write_text(report(folder))
    return path


if __name__ == "__main__":
    print(report(Path(sys.argv[1])), end="")
