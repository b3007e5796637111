"""The list of faster engines, made from all tables of docs/explanation/benchmarks.md.

Every kind of table on that page is known here, by the first cells of its head. A table of another
kind is an error, so that no table is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

HEAD = [
    "| case | ours | faster | ours is faster by | fastest of ours |",
    "|---|---|---|---|---|",
]
#: Rows that are no engines: baselines, and loads of ours from servers that do not fail.
BASELINES = ("baseline: ", "the same from ", "requests for ranges")
#: Tables without other engines: the first cells of their heads.
OURS_ONLY = (
    ("", "seconds"),
    ("case", "seconds"),
    ("file", "two bare `preadv` loops"),
    ("three processes", "bytes from the disk / file"),
    ("load", "default, s"),
    ("load", "readers"),
)
#: Comparisons of the hub: first loads, and loads of what was downloaded before.
HUB = {
    "huggingface_hub + safetensors": ("hf://", "hf://, verified", "hf://, kept by cache_dir"),
    "huggingface_hub + safetensors, again": (
        *("hf://, kept, again", "hf:// from that cache"),
        *("hf:// from that cache, mapped", "hf:// from that cache, verified"),
    ),
}
#: Columns of the emulated device, and the engines of ours that do the same as the others.
DEVICE = {
    "host alone, GB/s": ("`load`", "`iterate`", "`load`, a safetensors file"),
    "s at 5 GB/s": ("`load`", "`iterate`", "`load`, a safetensors file"),
    "again": ("`load`", "`iterate`", "`load`, a safetensors file"),
    "first tensor, ms": ("`iterate`",),
}
#: The column of the time until the first tensor is there.
FIRST = "first tensor, s"
UNITS = {"host alone, GB/s": "GB/s", "first tensor, ms": "ms"}


@dataclass
class Table:
    """A table of a page, with the heading that a link leads to, and a title."""

    heading: str
    title: str
    head: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def column(self, name: str) -> dict[str, str]:
        """Return the cells of a column by those of the first."""
        at = self.head.index(name)
        return {row[0]: row[at] for row in self.rows}


@dataclass(frozen=True)
class Loss:
    """Another engine that needs less time than ours; figures may be rates."""

    ours: tuple[str, str]
    other: tuple[str, str]
    #: The part of a table that is compared; shown after its title.
    part: str = ""
    unit: str = "s"
    #: Our fastest engine in the same table, with its figure.
    fastest: str = ""
    #: The ratio in the table, if any: it is more exact than that of rounded figures.
    ratio: str = ""

    def line(self, table: Table) -> str:
        """Return the row of the list."""
        ratio = number(self.other[1]) / number(self.ours[1])
        ratio = 1 / ratio if self.unit == "GB/s" else ratio
        mine, theirs = (f"{name} {figure} {self.unit}" for name, figure in (self.ours, self.other))
        anchor = re.sub(r"[^\w -]", "", table.heading.lower()).replace(" ", "-")
        case = f"[{table.title}](#{anchor}){self.part and ', '}{self.part}"
        return f"| {case} | {mine} | {theirs} | {self.ratio or f'{ratio:.2f}'} | {self.fastest} |"


def number(cell: str) -> float:
    """Return the first number of a cell."""
    return float(cell.split(maxsplit=1)[0].replace(",", ""))


def cells(line: str) -> list[str]:
    """Return the cells of a row."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables(page: str) -> Iterator[Table]:
    """Yield the tables of a page."""
    heading = title = ""
    table: Table | None = None
    for line in page.splitlines():
        if line.startswith("|"):
            if table is None:
                table = Table(heading, title or heading, cells(line))
            elif not line.startswith("|---"):
                table.rows.append(cells(line))
            continue
        if table is not None:
            yield table
            table = None
        if found := re.match(r"###? (.+)", line):
            heading, title = found[1], ""
        elif found := re.match(r"\*\*(.+)\*\* \(", line) or re.match(r"([^|`]+):$", line):
            title = found[1]
    if table is not None:
        yield table


def is_ours(name: str) -> bool:
    """True if a row is ours, or a baseline."""
    return name.startswith(("ours", *BASELINES))


def by_engine(table: Table) -> Iterator[Loss]:
    """Yield the losses of a table with one engine a row, the first of which is ours."""
    yield from by_total_time(table)
    if FIRST in table.head:
        shown = {name: cell for name, cell in table.column(FIRST).items() if cell != "-"}
        ours = next((name for name in shown if is_ours(name)), None)
        for name, cell in shown.items():
            if ours is not None and number(cell) < number(shown[ours]):
                yield Loss((ours, shown[ours]), (name, cell), part="first tensor")


def by_total_time(table: Table) -> Iterator[Loss]:
    """Yield the losses of a table with one engine a row by the time until all is loaded."""
    medians = table.column("median s")
    first = next(iter(medians))
    mine = [name for name in medians if name.startswith("ours")]
    best = min(mine, key=lambda name: number(medians[name]))
    fastest = "" if best == first else f"{best} {medians[best]} s"
    name_of_ratio = "ours is faster by"
    ratios = table.column(name_of_ratio) if name_of_ratio in table.head else {}
    for name, cell in medians.items():
        if not is_ours(name) and number(cell) < number(medians[first]):
            pair = (first, medians[first]), (name, cell)
            yield Loss(*pair, fastest=fastest, ratio=ratios.get(name, ""))


def of_hub(table: Table) -> Iterator[Loss]:
    """Yield the losses of the table of Hugging Face's hub."""
    medians = table.column("seconds (median)")
    for other, mine in HUB.items():
        best = min(mine, key=lambda name: number(medians[name]))
        for name in mine:
            if number(medians[other]) < number(medians[name]):
                pair = (name, medians[name]), (other, medians[other])
                yield Loss(*pair, fastest=f"{best} {medians[best]} s")


def of_clouds(table: Table) -> Iterator[Loss]:
    """Yield the losses of a table of a cloud's clients, which load and save."""
    medians = {(row[0], row[1]): row[2] for row in table.rows}
    for (what, client), cell in medians.items():
        ours = medians[what, "tensorizer"]
        if not is_ours(client) and number(cell) < number(ours):
            yield Loss(("tensorizer", ours), (client, cell), part=what)


def of_device(table: Table) -> Iterator[Loss]:
    """Yield the losses of a table of the emulated device."""
    for column, mine in DEVICE.items():
        found, unit = table.column(column), UNITS.get(column, "s")
        sign = -1 if unit == "GB/s" else 1
        for ours in mine:
            for other, cell in found.items():
                theirs = not other.startswith(("`load`", "`iterate`"))
                if theirs and sign * number(cell) < sign * number(found[ours]):
                    pair = (ours, number(found[ours])), (other, number(cell))
                    shown = [(name, f"{figure:g}") for name, figure in pair]
                    yield Loss(*shown, part=column.split(",")[0], unit=unit)


def of_single_tensors(table: Table) -> Iterator[Loss]:
    """Yield the losses of the table of single tensors, which has a column for each engine."""
    other = table.head[2].removesuffix(", µs")
    for size, mine, theirs, _ in table.rows:
        if number(theirs) < number(mine):
            yield Loss(("ours", mine), (other, theirs), part=f"{size} MiB", unit="µs")


def of_table(table: Table) -> Iterator[Loss]:
    """Yield the losses of any table of the page.

    Raises:
        ValueError: The table is of a kind that is not known.

    """
    kind = (table.head[0], table.head[1])
    if kind in OURS_ONLY:
        return iter(())
    if kind in {("engine", "median s"), ("load", "median s")}:
        return by_engine(table) if is_ours(table.rows[0][0]) else iter(())
    kinds = {
        ("case", "seconds (median)"): of_hub,
        ("", "client"): of_clouds,
        ("engine", "host alone, GB/s"): of_device,
        ("MiB", "ours, µs"): of_single_tensors,
    }
    if kind not in kinds:
        raise ValueError(f"a table of a kind that losses.py does not know: {table.head}")
    return kinds[kind](table)


def losses(page: str) -> str:
    """Return the list for a page, without its own table."""
    found = [
        loss.line(table)
        for table in tables(page)
        if table.head != cells(HEAD[0])
        for loss in of_table(table)
    ]
    return "\n".join([*HEAD, *found])
