"""The report of each machine's records, and the tables in the documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cases import ALL

from harness.case import is_ours
from harness.process import ROOT
from harness.records import NEWEST, RECORDS, Row, Run, by_case

README = ROOT / "README.md"
PAGE = ROOT / "docs/explanation/benchmarks.md"
CPU, H100, EMULATED = "2-core-x86_64", "nvidia-h100-80gb-hbm3", "emulated-h100-0"
#: Rows of the README: what is done, the records, the case, and our engine if it is not the first.
SHORT = (
    ("Load a file in the page cache", CPU, "tensors/read"),
    ("Use it in place (`mmap=True`)", CPU, "tensors/mapped"),
    ("Load it from a cold disk", CPU, "tensors/cold"),
    ("Load it over HTTP", CPU, "tensors/http"),
    ("Load it from S3", CPU, "tensors/s3"),
    ("Load it encrypted", CPU, "tensors/decrypt"),
    ("Save it, synced", CPU, "tensors/save"),
    ("Upload it to S3", CPU, "tensors/upload"),
    ("`from_pretrained` of a local folder", CPU, "formats/pretrained", "tensorizer.transformers"),
    ("The same over HTTP", CPU, "formats/pretrained-http"),
    ("Load 8 GB in the page cache onto an H100", H100, "device/load"),
)
#: Rows of the page: what is done, the records and the case.
DECISIONS = (
    ("Load 8 GB onto an H100", H100, "device/load"),
    ("Load from S3", CPU, "tensors/s3"),
    ("Load over HTTP", CPU, "tensors/http"),
    ("Load from a cold disk", CPU, "tensors/cold"),
    ("Load from the page cache", CPU, "formats/large"),
    ("Load and verify SHA-256", CPU, "tensors/verify"),
    ("`from_pretrained` over HTTP", CPU, "formats/pretrained-http"),
    ("Save, synced", CPU, "tensors/save"),
    ("Save a checkpoint, 2 ranks", CPU, "dcp/save-2"),
    ("One S3 download for 4 ranks", CPU, "ranks/s3-4"),
)
#: Figures in which less is better, beside the time.
TIMES = ("again s", "first tensor s")


def ours_of(rows: list[Row]) -> Row | None:
    """Return the row that others are compared with: the first of this package."""
    return next((row for row in rows if is_ours(row["engine"]) and "median" in row), None)


def peers_of(rows: list[Row]) -> list[Row]:
    """Return the rows of other packages."""
    return [r for r in rows if not is_ours(r["engine"]) and not r["baseline"] and "median" in r]


def seconds(value: float) -> str:
    """Return seconds with three digits, or as microseconds if they are few."""
    return f"{value:.3f}" if value >= 0.01 else f"{value * 1e6:.0f} µs"


def number(value: float) -> str:
    """Return a count, or another number with three digits."""
    return f"{value:,.0f}" if value == int(value) or value >= 1000 else f"{value:.3g}"


def table(rows: list[Row]) -> str:
    """Return a table of a case; ratios are of medians, bold where the other engine is faster."""
    ours = ours_of(rows)
    names = list(dict.fromkeys(name for row in rows for name in row.get("figures", {})))
    head = ["engine", "rounds", "median s", "range s", "call s", "CPU s", "GB/s", "ratio",
            "extra MB", *names]  # fmt: skip
    lines = []
    for row in rows:
        median, size = row.get("median"), row.get("bytes")
        ratio = ""
        if ours is not None and median is not None and row is not ours:
            # Baselines move other numbers of bytes, so rates are compared.
            scale = ours["bytes"] / size if row["baseline"] and size and ours.get("bytes") else 1
            ratio = f"{scale * median / ours['median']:.2f}"
            ratio = f"**{ratio}**" if row in peers_of(rows) and median < ours["median"] else ratio
        ends = seconds(row["max"]) if row.get("n") != 1 and "max" in row else ""
        ends = f"{seconds(row['min'])} to {ends}" if ends else ""
        extra, cpu, figures = row.get("extra_bytes"), row.get("cpu_seconds"), row.get("figures", {})
        lines.append([
            f"baseline: {row['engine']}" if row["baseline"] else row["engine"],
            str(row.get("n", "")), "" if median is None else seconds(median), ends,
            seconds(row["call_median"]) if "call_median" in row else "",
            f"{cpu:.2f}" if cpu else "",
            f"{size / median / 1e9:.2f}" if size and median else "", ratio,
            f"{extra / 1e6:.0f}" if extra else "",
            *(number(figures[name]) if name in figures else "" for name in names),
        ])  # fmt: skip
    used = [at for at in range(len(head)) if any(line[at] for line in lines)]
    return "\n".join(
        f"| {' | '.join(line[at] for at in used)} |" for line in (head, ["---"] * len(head), *lines)
    )


def about(machine: Row) -> str:
    """Return what a table was measured on."""
    on = " beside ".join(machine[name] for name in ("device", "cpu") if name in machine)
    commit = f", commit {machine['commit']}" if "commit" in machine else ""
    versions = ", ".join(f"{name} {known}" for name, known in machine["versions"].items())
    return f"{machine['date'][:10]}{commit}, on {on}; {versions}"


def page(folder: Path) -> str:
    """Return the report of a machine's newest records."""
    found = by_case(folder / NEWEST)
    machines = list(dict.fromkeys(about(machine) for machine, _ in found.values()))
    lines = [
        f"# Figures of {folder.name}", "",
        "Times as long as the first engine: “ratio”, bold below 1 for other packages. Runs:", "",
        *(f"{number}. {text}" for number, text in enumerate(machines, 1)),
    ]  # fmt: skip
    for name in sorted(found, key=list(ALL).index):
        machine, rows = found[name]
        title = ALL[name].title[0].upper() + ALL[name].title[1:]
        size = f", {rows[0]['bytes'] / 1e9:.3g} GB" if rows[0].get("bytes") else ""
        lines += ["", f"## {name}", "", f"{title}{size}. Run "
                  f"{machines.index(about(machine)) + 1}.", "", table(rows)]  # fmt: skip
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Loss:
    """A row in which another package needs less time."""

    case: str
    engine: str
    rounds: int
    ratio: float
    fastest: str

    def line(self) -> str:
        """Return the row of the list."""
        return (
            f"| {self.case} | {self.engine} | {self.rounds} | {self.ratio:.2f} | {self.fastest} |"
        )


def losses(found: dict[str, Run], where: str) -> Iterator[Loss]:
    """Yield the rows of a machine in which another package needs less time."""
    for case in sorted(found, key=list(ALL).index):
        rows = found[case][1]
        ours = ours_of(rows)
        if ours is None:
            continue
        mine = [row for row in rows if is_ours(row["engine"]) and "median" in row]
        for other in peers_of(rows):
            if other["median"] < ours["median"]:
                best = min(mine, key=lambda row: row["median"])
                words = best["engine"].removeprefix("tensorizer").strip(", ")
                ratio = other["median"] / best["median"]
                fastest = "" if best is ours else f"{ratio:.2f} {words}"
                yield Loss(f"{case}{where}", other["engine"], other["n"],
                           other["median"] / ours["median"], fastest)  # fmt: skip
            for figure in TIMES:
                yield from loss_by_figure(case + where, figure, mine, other)


def loss_by_figure(case: str, figure: str, mine: list[Row], other: Row) -> Iterator[Loss]:
    """Yield a loss by another time than the whole.

    It is compared with the first of ours that has the time, and an iterator with ours too.
    """
    theirs = other.get("figures", {}).get(figure)
    found = [row for row in mine if figure in row.get("figures", {})]
    iterators = [row for row in found if TIMES[1] in row["figures"]]
    beside = [*found[:1], *(iterators[:1] if TIMES[1] in other.get("figures", {}) else ())]
    slowest = max((row["figures"][figure] for row in beside), default=0)
    if theirs is not None and theirs < slowest:
        name = f"{case}, {figure.removesuffix(' s')}"
        yield Loss(name, other["engine"], other["n"], theirs / slowest, "")


def lost(root: Path) -> str:
    """Return the table of all losses."""
    head = ["| case | faster | rounds | ratio | fastest of ours |", "|---|---|---|---|---|"]
    names = {CPU: "", H100: " (H100)", EMULATED: " (emulated)"}
    others = sorted(path.parent.name for path in root.glob(f"*/{NEWEST}"))
    names |= {name: f" ({name})" for name in others if name not in names}
    every = (loss for name, where in names.items()
             for loss in losses(by_case(root / name / NEWEST), where))  # fmt: skip
    return "\n".join([*head, *(loss.line() for loss in every)])


def decisions(root: Path) -> str:
    """Return the table of the page: ours beside the two fastest others."""
    lines = ["| | tensorizer | others take | rounds |", "|---|---|---|---|"]
    for what, machine, case in DECISIONS:
        rows = by_case(root / machine / NEWEST)[case][1]
        ours = ours_of(rows)
        assert ours is not None
        others = sorted(peers_of(rows), key=lambda row: row["median"])[:2]
        texts = [f"{row['engine']} {row['median'] / ours['median']:.2f}x" for row in others]
        rounds = sorted({row["n"] for row in (ours, *others)})
        lines.append(f"| {what} | {ours['median']:.2f} s | {', '.join(texts)} "
                     f"| {' or '.join(map(str, rounds))} |")  # fmt: skip
    return "\n".join(lines)


def cell(row: Row | None, ours: Row, column: str = "") -> str:
    """Return a cell of the README: the ratio, the range, and an engine unlike its column."""
    if row is None:
        return "-"
    ends = f"{row['min']:.2f} to {row['max']:.2f} s"
    if row is ours:
        return ends
    name = "" if row["engine"] == column else f", {row['engine']}"
    ratio = row["median"] / ours["median"]
    return f"**{ratio:.{1 if ratio >= 1.05 else 2}f}x** ({ends}{name})"


def short(root: Path) -> str:
    """Return the table of the README: ours, the predecessor, safetensors, the fastest other."""
    lines = [
        "| | tensorizer 3 | tensorizer 2.12.1 | safetensors | fastest other | rounds |",
        "|---|---|---|---|---|---|",
    ]
    machines: dict[str, set[str]] = {}
    for what, folder, case, *engine in SHORT:
        machine, rows = by_case(root / folder / NEWEST)[case]
        on = machine["cpu"].replace(" x ", " cores of ") if folder == CPU else machine["device"]
        machines.setdefault(on, set()).add(machine["date"][:10])
        ours = ours_of([row for row in rows if row["engine"] in engine] or rows)
        peers = peers_of(rows)
        assert ours is not None
        old = next((row for row in peers if "2.12.1" in row["engine"]), None)
        safe = next((row for row in peers if row["engine"].startswith("safetensors")), None)
        rest = [row for row in peers if row is not old and row is not safe]
        fastest = min(rest, key=lambda row: row["median"], default=None)
        cells = [cell(ours, ours), cell(old, ours, "tensorizer 2.12.1"),
                 cell(safe, ours, "safetensors"), cell(fastest, ours)]  # fmt: skip
        rounds = sorted({row["n"] for row in (ours, old, safe, fastest) if row is not None})
        lines.append(f"| {what} | {' | '.join(cells)} | {' or '.join(map(str, rounds))} |")
    models = "A model of 2.2 GB in 201 tensors; for transformers, a Llama of 1.08 GB."
    on = "; ".join(f"{' and '.join(sorted(days))} on {where}" for where, days in machines.items())
    where = f"Measured {on}. Servers were on the same machine."
    return "\n".join([*lines, "", f"{models} {where}"])


def between(text: str, name: str, content: str) -> str:
    """Return a text with other content between the marks of a name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, _, rest = text.partition(begin)
    return f"{head}{begin}\n{content}\n{end}{rest.partition(end)[2]}"


def texts() -> dict[Path, str]:
    """Return what the documents and reports are with the newest figures in them."""
    document = between(PAGE.read_text(), "decisions", decisions(RECORDS))
    reports = {path.parent / "report.md": page(path.parent) for path in RECORDS.glob(f"*/{NEWEST}")}
    return {
        README: between(README.read_text(), "benchmarks", short(RECORDS)),
        PAGE: between(document, "losses", lost(RECORDS)),
        **reports,
    }


def render() -> None:
    """Renew the documents and reports."""
    for path, text in texts().items():
        path.write_text(text)
