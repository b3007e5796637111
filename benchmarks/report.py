"""The documents that show figures: the README, docs/explanation/benchmarks.md, and targets.md.

python benchmarks/report.py benchmarks/records/MACHINE

Tables and the plot are made from the newest records of a machine. In the first two documents they
stand between marks.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import dcp_report
import format_report
from cases import CASES, FULL
from figures import newest, newest_session, note, table
from losses import losses

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
DOCUMENT = HERE.parent / "docs/explanation/benchmarks.md"
PLOT = DOCUMENT.with_name("load.svg")
TARGETS = HERE / "targets.md"
#: The table of the README: what is done, in which case of ``cases.py`` or ``format_cases.py``.
ROWS = {
    "Load a local file": "read",
    "Use it in place (`mmap=True`)": "mapped",
    "Load it from a cold disk": "cold",
    "Load it over HTTP": "http",
    "Load it from S3": "s3",
    "Load it encrypted": "decrypt",
    "Save it, synced": "save",
    "Upload it to S3": "upload",
    "transformers' `from_pretrained`": "pretrained",
    "The same over HTTP": "pretrained-http",
}
#: Reports of other programs, which stand beside the records under these names and a date.
REPORTS = (
    "formats", "dcp", "ranks-2", "ranks-4", "ranks-device-2", "cache", "hf", "clouds", "h100",
    "host-share", "emulated", "disk",
)  # fmt: skip


def cell(row: dict | None, ours: dict, named: bool = False) -> str:
    """Return a cell of the README: the ratio to ours, and the range in seconds."""
    if row is None:
        return "-"
    ends = f"{row['min']:.2f} to {row['max']:.2f} s"
    if row is ours:
        return ends
    name = f", {row['engine']}" if named else ""
    return f"**{row['median'] / ours['median']:.1f}x** ({ends}{name})"


def summary(folder: Path) -> str:
    """Return the table of the README: of each case ours, the old package, and others."""
    patterns = ("[0-9]*.jsonl", f"{format_report.PREFIX}*.jsonl")
    machine, all_rows = newest_session(folder, patterns, set(ROWS.values()))
    lines = [
        "| | tensorizer 3 | tensorizer 2.12.1 | safetensors | fastest other |",
        "|---|---|---|---|---|",
    ]
    for what, name in ROWS.items():
        rows = [row for row in all_rows if row["case"] == name and not row["baseline"]]
        ours, *others = rows
        old = next((row for row in others if "2.12.1" in row["engine"]), None)
        safe = next((row for row in others if row["engine"].startswith("safetensors")), None)
        rest = [
            row
            for row in others
            if not row["engine"].startswith("ours") and row is not old and row is not safe
        ]
        fastest = min(rest, key=lambda row: row["median"], default=None)
        cells = [cell(ours, ours), cell(old, ours), cell(safe, ours), cell(fastest, ours, True)]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    lines += [
        "",
        "A model of 2.2 GB in 201 tensors; for transformers, a Llama of 1.08 GB. "
        f"{all_rows[0]['n']} rounds in one session, {machine['date'][:10]}, on {machine['cpu']}, "
        "CPU only; servers on the same machine.",
    ]
    return "\n".join(lines)


def tables(folder: Path, machines: dict[str, dict], rows: list[dict]) -> str:
    """Return the tables of all cases, each with a heading."""
    machine = machines["read"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    out = [
        f"Measured on {machine['cpu']}, {machine['memory']}, kernel {machine['kernel']}, with "
        f"{versions}, where a table names no other machine. Engines in turns, each in a process of "
        "its own, every byte compared with what was written. CPU only.",
    ]
    for case in CASES:
        mine = [row for row in rows if row["case"] == case.name]
        # Old records may name engines that are measured no more.
        if case.engines[0] not in [row["engine"] for row in mine]:
            continue
        model = FULL[case.model]
        size = f"{model.count:,} tensors, {model.total_bytes / 1e9:.2f} GB"
        state = "cold cache" if case.cold else "warm cache"
        parts = [] if case.name == "import" else [size, state]
        parts += [f"{mine[0]['n']} rounds", machines[case.name]["date"][:10]]
        if machines[case.name]["cpu"] != machine["cpu"]:
            parts.append(f"on {machines[case.name]['cpu']}")
        title = case.title[0].upper() + case.title[1:]
        out += ["", f"### {title}", "", f"{', '.join(parts)}.", "", table(case, mine)]
        out += note(folder, case.name, machines[case.name]["date"])
    return "\n".join(out)


def reports(folder: Path) -> str:
    """Return the newest report of each other program, with headings of the second level.

    Those of devices are in folders of their own.
    """
    newest = [sorted(folder.parent.glob(f"*/{name}-[0-9]*.md"))[-1:] for name in REPORTS]
    texts = [path.read_text().strip() for paths in newest for path in paths]
    return "\n\n".join(re.sub(r"^#", "##", text, flags=re.MULTILINE) for text in texts)


def targets(folder: Path) -> str:
    """Return targets.md."""
    parts = [
        "# Targets",
        "What this project asks of its own speed, and what the newest records have: ratios of "
        "median times, or of rates. `docs/explanation/benchmarks.md` has their tables. `report.py` "
        "writes this page.",
        "## Files that others write",
        "\n".join(format_report.goals(folder)),
        "## Distributed checkpoints",
        "Asked is one of both: 1.5 times as fast as each of the others, or 0.9 of the rate of a "
        "baseline.",
        "\n".join(dcp_report.goals(folder)),
    ]
    return "\n\n".join(parts) + "\n"


def between(text: str, name: str, content: str) -> str:
    """Return a text with other content between the marks of a name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n{content}\n{end}{tail}"


def texts(folder: Path) -> dict[Path, str]:
    """Return what the documents are with the newest figures in them."""
    # Records of other programs begin with their names.
    machines, rows = newest(folder, "[0-9]*.jsonl")
    document = between(DOCUMENT.read_text(), "benchmarks", tables(folder, machines, rows))
    document = between(document, "reports", reports(folder))
    return {
        README: between(README.read_text(), "benchmarks", summary(folder)),
        DOCUMENT: between(document, "losses", losses(document)),
        TARGETS: targets(folder),
    }


def render(folder: Path) -> None:
    """Renew the documents and the plot."""
    for path, text in texts(folder).items():
        path.write_text(text)
    plot(newest(folder, "[0-9]*.jsonl")[1], PLOT)


def plot(rows: list[dict], path: Path) -> None:
    """Draw the loading rates of all engines."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tensorizer"
    from matplotlib import pyplot

    names = [
        name
        for name in ("read", "mapped", "load-3k", "load-20k", "cold", "http")
        if any(r["case"] == name for r in rows)
    ]
    figure, axes = pyplot.subplots(3, 2, figsize=(8.4, 8.4))
    for axis in axes.flat[len(names) :]:
        axis.remove()
    for axis, name in zip(axes.flat, names, strict=False):
        mine = [row for row in rows if row["case"] == name]
        labels = [f"baseline: {r['engine']}" if r["baseline"] else r["engine"] for r in mine]
        rates = [row["bytes"] / row["median"] / 1e9 for row in mine]
        colors = [
            "#bbbbbb" if r["baseline"] else "#d62728" if "ours" in r["engine"] else "#1f77b4"
            for r in mine
        ]
        axis.barh(labels, rates, color=colors)
        axis.invert_yaxis()
        axis.set_title(next(c.title for c in CASES if c.name == name), fontsize=9, loc="right")
        axis.set_xlabel("GB/s", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    render(Path(sys.argv[1]))
