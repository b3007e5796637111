"""Tables of landing.py in Markdown: a row for each engine, then targets and ratios."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from landing_files import LARGE, Model

#: Figures of one engine, by key; None or absent where it has none.
Row = Mapping[str, float | None]
#: Medians of what was measured, by the name of the row and the part of it.
Found = Mapping[tuple[str, str], Row]
#: Names of the peer's rows.
PREFETCH = "safetensors prefetch"
PREFETCH_ALL = "safetensors prefetch, all kept"
GET_TENSOR = "safetensors get_tensor"


@dataclass(frozen=True)
class Column:
    """A figure, with the target for rows of ours whose names begin with one of `rows`."""

    key: str
    title: str
    form: str
    target: float | None = None
    rows: tuple[str, ...] = ()
    #: False if the figure of the peer means something else.
    compared: bool = True

    def cell(self, value: float | None) -> str:
        return "-" if value is None else format(value, self.form)

    def target_cell(self) -> str:
        if self.target is None:
            return "-"
        one = f" ({self.rows[0]})" if len(self.rows) == 1 else ""
        return f"{self.cell(self.target)}{one}"

    def worst(self, rows: Mapping[str, Row]) -> str:
        """Return the largest of our figures as a share of the target."""
        if self.target is None:
            return "-"
        ours = [row.get(self.key) for name, row in rows.items() if name.startswith(self.rows)]
        found = [value for value in ours if value is not None]
        return f"{max(found) / self.target:.2f}" if found else "-"

    def ratio(self, ours: Row, theirs: Row) -> str:
        """Return our figure as a share of the peer's."""
        mine, other = ours.get(self.key), theirs.get(self.key)
        return f"{mine / other:.2f}" if self.compared and mine is not None and other else "-"


def _table(columns: list[Column], rows: Mapping[str, Row], pairs: list[tuple[str, str]]) -> str:
    """Return a table; `pairs` name rows, ours and the peer's, whose ratios are shown."""
    cells = {
        name: [column.cell(row.get(column.key)) for column in columns] for name, row in rows.items()
    }
    cells["target"] = [column.target_cell() for column in columns]
    cells["our worst / target"] = [column.worst(rows) for column in columns]
    for ours, theirs in pairs:
        ratios = [column.ratio(rows[ours], rows[theirs]) for column in columns]
        cells[f"{ours} / {theirs}"] = ratios
    lines = [f"| | {' | '.join(column.title for column in columns)} |"]
    lines.append("|---|" + "---|" * len(columns))
    lines += [f"| {name} | {' | '.join(values)} |" for name, values in cells.items()]
    return "\n".join(lines)


def _names(found: Found, missing: list[str]) -> list[str]:
    """Return the names of rows: ours, the peer's, and those of a peer that was not measured."""
    names = list(dict.fromkeys(name for name, _ in found))
    return sorted(names, key=lambda name: name.startswith("safetensors")) + [
        f"{name} (not measured: no --peer)" for name in missing if name not in names
    ]


def _large_row(found: Found, name: str, bus: int) -> Row:
    plain = found.get((name, "plain"), {})
    limited = found.get((name, "limited"), {})
    row: dict[str, float | None] = dict(plain)
    if plain:
        row["bus_share"] = plain["bus_busy"] / plain["seconds"]
        row["cpu_per_gb"] = plain["cpu"] / LARGE.total_bytes * 1e9
    if plain and plain["first"] is not None:
        row["first_ms"] = plain["first"] * 1e3
        row["first_mb"] = plain["first_bytes"] / 1e6
        row["beyond_ms"] = row["first_ms"] - plain["first_bytes"] / bus / 1e3
    if limited:
        row["device_mb"] = limited["device_peak"] / 1e6
        # The peer's device memory is not torch's.
        row["tensors_mb"] = limited["tensors_peak"] / 1e6 or None
    row["consumer"] = found.get((name, "consumer"), {}).get("seconds")
    return row


def large_table(found: Found, bus: int, buffer: int) -> str:
    """Return the table of the large file at a bus of so many MB/s.

    The targets of 2 GB/s are left out for other buses.
    """
    slow = bus == 2000
    iterate, load = ("iterate",), ("load",)
    peak = (buffer + LARGE.first_bytes) / 1e6
    transfer = LARGE.first_bytes / bus / 1e3
    columns = [
        Column("first_ms", "first tensor, ms", ".1f", transfer + 15 if slow else None, iterate),
        Column("first_mb", "of MB", ".0f"),
        Column("beyond_ms", "beyond its transfer, ms", ".1f", 15 if slow else None, iterate),
        Column("seconds", "all, s", ".3f"),
        Column("consumer", "with a consumer, s", ".3f", 1.45 if slow else None, iterate),
        Column("device_mb", "peak of device memory, MB", ".0f", peak, iterate),
        Column("tensors_mb", "of torch's tensors, MB", ".0f", peak, iterate),
        Column("bus_share", "bus busy", ".0%"),
        Column("driver_calls", "driver calls", ",.0f", compared=False),
        Column("calls", "all calls", ",.0f", 10_000 if slow else None, load),
        Column("cpu_per_gb", "CPU s/GB", ".3f", 0.13 if slow else None, load),
    ]
    rows = {name: _large_row(found, name, bus) for name in _names(found, [PREFETCH, PREFETCH_ALL])}
    pairs = [("iterate, .safetensors", PREFETCH), ("load, .safetensors", PREFETCH_ALL)]
    return _table(columns, rows, [pair for pair in pairs if pair[1] in rows])


def _small_row(found: Found, name: str, count: int) -> Row:
    device, host = found.get((name, "cuda"), {}), found.get((name, "cpu"), {})
    row: dict[str, float | None] = dict(device)
    if device:
        row["device_us"] = device["cpu"] / count * 1e6
    if host:
        row["host_us"] = host["cpu"] / count * 1e6
        row["host_seconds"] = host["seconds"]
    return row


def small_table(found: Found, model: Model) -> str:
    """Return the table of a file of small tensors."""
    # Those with memory of their own; the others are views of larger blocks.
    ours = ("iterate", "load(clone=True)", "load(out=)")
    calls = 5000 if model.count == 20_000 else None
    each = 6 if model.count == 100_000 else None
    columns = [
        Column("driver_calls", "driver calls", ",.0f", calls, ours, compared=False),
        Column("calls", "all calls", ",.0f"),
        Column("device_us", "CPU µs each", ".2f"),
        Column("seconds", "all, s", ".3f"),
        Column("host_us", "CPU µs each, to the CPU", ".2f", each, ours),
        Column("host_seconds", "all, s, to the CPU", ".3f"),
    ]
    names = _names(found, [PREFETCH, GET_TENSOR])
    rows = {name: _small_row(found, name, model.count) for name in names}
    pairs = [
        ("load, .safetensors", PREFETCH),
        ("iterate, .safetensors", PREFETCH),
        ("iterate, .safetensors", GET_TENSOR),
    ]
    return _table(columns, rows, [pair for pair in pairs if pair[1] in rows])
