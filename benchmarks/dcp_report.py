"""Cases of distributed checkpoints, their targets, and the report in Markdown.

python benchmarks/dcp_report.py benchmarks/records/MACHINE
"""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import targets
from figures import newest, note, table
from format_cases import Asked

#: How the names of these records begin.
PREFIX = "dcp-"
#: Whether torch's FsspecWriter can write to S3 here.
HAS_S3FS = "BENCHMARK_S3FS" in os.environ or importlib.util.find_spec("s3fs") is not None
LOCAL = ("ours", "ours crc32", "FileSystem", "FileSystem tuned", "HuggingFace")
#: Loads with nothing in the page cache; the saves before them are not measured once more.
COLD = ("ours", "FileSystem", "HuggingFace")
#: HuggingFaceStorageWriter has no other file system than the local one.
REMOTE = ("ours", "ours crc32", *(("Fsspec",) if HAS_S3FS else ()))


@dataclass(frozen=True)
class Case:
    """One comparison; the first engine is ours."""

    name: str
    title: str
    world: int
    engines: tuple[str, ...] = LOCAL
    cold: bool = False
    s3: bool = False
    save_baselines: tuple[str, ...] = field(default=())
    load_baselines: tuple[str, ...] = field(default=())


CASES = [
    case
    for world in (1, 2, 4)
    for ranks in (f"{world} rank{'s' * (world > 1)}",)
    for case in (
        Case(f"disk-{world}", f"{ranks}, a disk, loads from the page cache", world,
             save_baselines=("write", "write-direct"), load_baselines=("copy-read",)),
        Case(f"cold-{world}", f"{ranks}, a disk, nothing in the page cache", world, COLD,
             cold=True, load_baselines=("direct",)),
        Case(f"s3-{world}", f"{ranks}, S3 on this machine", world, REMOTE, s3=True),
    )
]  # fmt: skip


def asked(rows: list[dict]) -> list[Asked]:
    """Return the targets: one of both, as fast as the others, or near to the baseline."""
    others = [r["engine"] for r in rows if not r["baseline"] and not r["engine"].startswith("ours")]
    baselines = [row["engine"] for row in rows if row["baseline"]]
    return [
        *(Asked("speed", 1.5, "ours", name) for name in others),
        *(Asked("rate", 0.9, "ours", name) for name in baselines),
    ]


def split(case: Case, rows: list[dict]) -> dict[str, list[dict]]:
    """Return the rows of saves, and of loads."""
    return {
        what: [row for row in rows if row["case"] == f"{case.name} {what}"]
        for what in ("save", "load")
    }


def case_tables(case: Case, rows: list[dict]) -> str:
    """Return the tables of a case."""
    lines = []
    for what, mine in split(case, rows).items():
        if mine:
            shown = table(case, mine)
            goal = targets.lines(f"{case.name} {what}", asked(mine), mine)
            lines += [f"{what}:", "", shown, "", *targets.HEAD, *goal, ""]
    return "\n".join(lines)


def report(folder: Path) -> str:
    """Return the report of a machine's newest figures."""
    machines, rows = newest(folder, f"{PREFIX}*.jsonl")
    machine = max(machines.values(), key=lambda machine: machine["date"])
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        "# Distributed checkpoints",
        "",
        f"`benchmarks/dcp.py`, commit {machine['commit']}, on {machine['cpu']}, "
        f"{machine['memory']}, kernel {machine['kernel']}, with {versions}. Parameters and both "
        "moments of Adam, float32, 1.0 GB in all, cut among the ranks in the first dimension. "
        "Engines in turns; each saves, and loads what it has saved, every byte compared. All "
        "saves to disk are synced. `benchmarks/README.md` says what the engines are.",
    ]
    for case in CASES:
        for what, mine in split(case, rows).items():
            if mine:
                name = f"{case.name} {what}"
                date = machines[name]["date"][:10]
                head = f"**{what.capitalize()}, {case.title}** ({mine[0]['n']} rounds, {date})"
                lines += ["", head, "", table(case, mine), *note(folder, name, date)]
    return "\n".join(lines) + "\n"


def goals(folder: Path) -> list[str]:
    """Return the table of targets of a machine's newest figures."""
    rows = newest(folder, f"{PREFIX}*.jsonl")[1]
    found = [(case.name, split(case, rows)) for case in CASES]
    return [
        *targets.HEAD,
        *(
            line
            for name, both in found
            for what, mine in both.items()
            for line in targets.lines(f"{name} {what}", asked(mine), mine)
        ),
    ]


def write(folder: Path, date: str) -> Path:
    """Write the report beside the records."""
    path = folder / f"{PREFIX}{date[:10]}.md"
    path.write_text(report(folder))
    return path


if __name__ == "__main__":
    print(report(Path(sys.argv[1])), end="")
