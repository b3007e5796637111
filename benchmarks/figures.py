"""Records of measurements, and the tables that show them.

A baseline is a few lines of code that do a part of the work of a load or save, and no upper bound:
below a table stands which engines are faster than a baseline in it, and why they can be. Notes on
a table are in ``notes.json`` beside the records, under its date and case: a note is shown as long
as no newer record has that case.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol


class Case(Protocol):
    """One comparison. The first engine is ours."""

    @property
    def engines(self) -> tuple[str, ...]: ...


BASELINES = {
    "read": "baseline: two-thread read",
    "sha256": "baseline: two-thread SHA-256",
    "secretbox": "baseline: two-thread XSalsa20-Poly1305",
    "read-secretbox": "baseline: two-thread read and XSalsa20-Poly1305",
    "write": "baseline: two threads that write memory, synced",
    "send": "baseline: two connections that send memory",
    "direct": "baseline: four-thread O_DIRECT",
    "write-direct": "baseline: four threads that write with O_DIRECT and sync",
    "copy-read": "baseline: two-thread read into touched memory",
    "ideal": "baseline: 16 connections at full rate",
    "clean": "the same from nginx, which does not fail",
    "curl": "baseline: two curl processes that keep nothing",
    "receive": "baseline: two sockets received into fresh memory",
}
#: For each baseline, its work, and why an engine can be faster than it.
WHY_FASTER = {
    "read": "It is two plain threads that read the file into fresh memory. It is no upper "
    "bound: it waits where the machine gives fresh memory late, and engines that map the file copy "
    "nothing.",
    "sha256": "It is two threads that hash one block of memory. An engine that hashes two "
    "tensors at once on a core, or on more cores, is faster.",
    "secretbox": "It is two threads that decrypt memory. An engine with more threads is faster.",
    "read-secretbox": "It is two plain threads that read the file into fresh memory and "
    "decrypt it. It waits where the machine gives fresh memory late.",
    "write": "It is two plain threads that write one file through the page cache, and sync "
    "it at the end. A save that has the disk begin earlier, or whose threads write files of their "
    "own, can be faster.",
    "send": "It is two connections that send memory. An engine with more connections is faster.",
    "direct": "It is four plain threads that read 4 MiB at a time around the page cache. "
    "More reads in flight, or the kernel's read-ahead, can be faster, and the rate of the disk "
    "changes from minute to minute.",
    "write-direct": "It is four plain threads that write 8 MiB at a time around the page "
    "cache. More writes in flight can be faster, and the rate of the disk changes from minute to "
    "minute.",
    "copy-read": "It is two plain threads that read the file into memory that was touched. "
    "An engine that maps the file copies nothing.",
    "ideal": "It is computed: 16 connections at their full rate. More connections are faster.",
    "clean": "This row is the same load from a server that does not fail. Repeating what failed "
    "cost less than the rounds differ.",
    "curl": "It is two connections whose bytes are dropped. More connections are faster.",
    "receive": "It is two connections that are received into fresh memory. It waits where "
    "the machine gives fresh memory late.",
}


def rate(row: dict) -> float:
    """Return bytes a second; baselines may move another number of bytes."""
    return row["bytes"] / row["median"]


def table(case: Case, rows: list[dict]) -> str:
    """Return a Markdown table; ratios are of median times, above 1 where ours is faster.

    Below it stands which engines are faster than a baseline, and why.
    """
    ours = next(row for row in rows if row["engine"] == case.engines[0])
    lines = [
        "| engine | median s | min to max | the call alone s | CPU s | GB/s | ours is faster by "
        "| memory beyond tensors |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        gigabytes = f"{rate(row) / 1e9:.2f}" if row["bytes"] else "-"
        name = BASELINES[row["engine"]] if row["baseline"] else row["engine"]
        # Baselines move other numbers of bytes, so rates are compared.
        if row["baseline"]:
            shown = f"{rate(ours) / rate(row):.2f} of it"
        else:
            shown = "-" if row is ours else f"{row['median'] / ours['median']:.2f}"
        cpu = f"{row['cpu_seconds']:.2f}" if row["cpu_seconds"] else "-"
        extra = (
            f"{row['extra_bytes'] / 1e6:.0f} MB" if not row["baseline"] and row["bytes"] else "-"
        )
        lines.append(
            f"| {name} | {row['median']:.3f} | {row['min']:.3f} to {row['max']:.3f} "
            f"| {row.get('call_median', row['median']):.3f} | {cpu} | {gigabytes} | {shown} "
            f"| {extra} |"
        )
    for baseline in (row for row in rows if row["baseline"]):
        faster = [r["engine"] for r in rows if not r["baseline"] and rate(r) > rate(baseline)]
        if faster:
            name = BASELINES[baseline["engine"]].removeprefix("baseline: ")
            lines += [
                "",
                f"Faster than “{name}”: {', '.join(faster)}. {WHY_FASTER[baseline['engine']]}",
            ]
    return "\n".join(lines)


def read_records(folder: Path, pattern: str) -> list[tuple[dict, list[dict]]]:
    """Return the records of a folder in the order of their dates: the machine, and its rows."""
    texts = (path.read_text().splitlines() for path in folder.glob(pattern))
    records = [[json.loads(line) for line in lines] for lines in texts]
    ordered = sorted(records, key=lambda record: record[0]["date"])
    return [(machine, rows) for machine, *rows in ordered]


def newest(folder: Path, pattern: str) -> tuple[dict[str, dict], list[dict]]:
    """Return the machine of the newest record of each case, by case, and all rows of these."""
    machines: dict[str, dict] = {}
    found: dict[str, list[dict]] = {}
    for machine, rows in read_records(folder, pattern):
        for case in {row["case"] for row in rows}:
            machines[case] = machine
            found[case] = [row for row in rows if row["case"] == case]
    return machines, [row for rows in found.values() for row in rows]


def newest_session(folder: Path, patterns: tuple[str, ...], cases: set[str]) -> tuple[dict, list]:
    """Return the machine and the rows of the newest session that has all of some cases.

    A session is all records of one commit on one machine.

    Raises:
        ValueError: No session has all of them.

    """
    sessions: dict[tuple[str, str], dict[str, list[dict]]] = {}
    machines: dict[tuple[str, str], dict] = {}
    records = [record for pattern in patterns for record in read_records(folder, pattern)]
    for machine, rows in sorted(records, key=lambda record: record[0]["date"]):
        session = machine["commit"], machine["cpu"]
        machines[session] = machine
        by_case = sessions.setdefault(session, {})
        by_case |= {
            name: [r for r in rows if r["case"] == name] for name in {r["case"] for r in rows}
        }
    complete = [session for session, by_case in sessions.items() if cases <= by_case.keys()]
    if not complete:
        raise ValueError(f"no session has all of these cases: {sorted(cases)}")
    last = max(complete, key=lambda session: machines[session]["date"])
    return machines[last], [row for rows in sessions[last].values() for row in rows]


def note(folder: Path, case: str, date: str) -> list[str]:
    """Return the note on the table of a case and a date, as lines; none if there is none."""
    path = folder / "notes.json"
    notes = json.loads(path.read_text()) if path.exists() else {}
    text = notes.get(f"{date[:10]} {case}")
    return ["", text] if text else []
