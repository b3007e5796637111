"""Tables and the plot of the README, made from the newest records of a machine.

python benchmarks/report.py benchmarks/records/MACHINE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cases import CASES, FULL, Case

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
LIMITS = {
    "read": "limit: two-thread read",
    "sha256": "limit: two-thread SHA-256",
    "secretbox": "limit: two-thread XSalsa20-Poly1305",
    "read-secretbox": "limit: two-thread read and XSalsa20-Poly1305",
    "write": "limit: two threads that write memory, synced",
    "send": "limit: two connections that send memory",
    "direct": "limit: four-thread O_DIRECT",
    "write-direct": "limit: four threads that write with O_DIRECT and sync",
    "copy-read": "limit: two-thread read into touched memory",
    "ideal": "limit: 16 connections at full rate",
    "clean": "the same from nginx, which does not fail",
    "curl": "limit: two curl processes that keep nothing",
    "receive": "limit: two sockets received into fresh memory",
}


def table(case: Case, rows: list[dict]) -> str:
    """Return a Markdown table; ratios are of median times, above 1 where ours is faster."""
    ours = next(row for row in rows if row["engine"] == case.engines[0])
    lines = [
        "| engine | median s | min to max | the call alone s | CPU s | GB/s | ours is faster by "
        "| memory beyond tensors |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        rate = f"{row['bytes'] / row['median'] / 1e9:.2f}" if row["bytes"] else "-"
        name = LIMITS.get(row["engine"], row["engine"]) if row["limit"] else row["engine"]
        # Limits move other numbers of bytes, so rates are compared.
        if row["limit"]:
            ratio = (ours["bytes"] / ours["median"]) / (row["bytes"] / row["median"])
            shown = f"{ratio:.2f} of it"
        else:
            shown = "-" if row is ours else f"{row['median'] / ours['median']:.2f}"
        cpu = f"{row['cpu_seconds']:.2f}" if row["cpu_seconds"] else "-"
        extra = f"{row['extra_bytes'] / 1e6:.0f} MB" if not row["limit"] and row["bytes"] else "-"
        lines.append(
            f"| {name} | {row['median']:.3f} | {row['min']:.3f} to {row['max']:.3f} "
            f"| {row.get('call_median', row['median']):.3f} | {cpu} | {rate} | {shown} | {extra} |"
        )
    return "\n".join(lines)


def newest(folder: Path, pattern: str) -> tuple[dict[str, dict], list[dict]]:
    """Return, by case, the machine of the newest record that has it, and those rows."""
    machines: dict[str, dict] = {}
    found: dict[str, list[dict]] = {}
    texts = (path.read_text().splitlines() for path in folder.glob(pattern))
    records = [[json.loads(line) for line in lines] for lines in texts]
    for machine, *rows in sorted(records, key=lambda record: record[0]["date"]):
        for case in {row["case"] for row in rows}:
            machines[case] = machine
            found[case] = [row for row in rows if row["case"] == case]
    return machines, [row for rows in found.values() for row in rows]


def render(folder: Path) -> None:
    """Renew the part of the README that is between the two marks, and the plot."""
    # Records of other programs begin with their names.
    machines, rows = newest(folder, "[0-9]*.jsonl")
    machine = max(machines.values(), key=lambda machine: machine["date"])
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    out = [
        BEGIN,
        f"Measured on {machine['cpu']}, {machine['memory']}, kernel {machine['kernel']}, with "
        f"{versions}. Engines in turns, each in a process of its own, every byte compared with "
        "what was written. CPU only.",
        "",
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
        title = case.title[0].upper() + case.title[1:]
        out += [f"**{title}** ({', '.join(parts)})", "", table(case, mine), ""]
    out += ["![rates of loading](benchmarks/records/load.svg)", "", END]
    text = README.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    README.write_text(head + "\n".join(out) + tail)
    plot(rows, HERE / "records/load.svg")


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
    figure, axes = pyplot.subplots(
        1, max(len(names), 1), figsize=(3.6 * max(len(names), 1), 3.4), squeeze=False
    )
    for axis, name in zip(axes[0], names, strict=False):
        mine = [row for row in rows if row["case"] == name]
        labels = [LIMITS.get(r["engine"], r["engine"]) if r["limit"] else r["engine"] for r in mine]
        rates = [row["bytes"] / row["median"] / 1e9 for row in mine]
        colors = [
            "#bbbbbb" if r["limit"] else "#d62728" if "ours" in r["engine"] else "#1f77b4"
            for r in mine
        ]
        axis.barh(labels, rates, color=colors)
        axis.invert_yaxis()
        axis.set_title(next(case.title for case in CASES if case.name == name), fontsize=9)
        axis.set_xlabel("GB/s", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    render(Path(sys.argv[1]))
