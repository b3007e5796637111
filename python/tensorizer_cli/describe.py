"""``tensorizer ls`` and ``tensorizer info``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from . import facts
from .file_description import FileDescription, open_without_torch, size, text
from .modules import descendants, modules, rows as module_rows
from .output import DIM, Report, brief, columns, plural

#: The most files of a model, and the most modules, that are shown.
_MOST_FILES, _MOST_MODULES = 16, 60
#: The most objects of a checkpoint that are named.
_MOST_OBJECTS = 8
#: The most characters of a name.
_NAME = 72


def _open(options: argparse.Namespace, *, with_heads: bool = False) -> FileDescription:
    """Open a file to describe it.

    torch is imported only for checkpoints of ``torch.save``, whose pickles it reads, for folders of
    distributed checkpoints, and for input that can be read only once.
    """
    found = open_without_torch(options.file, with_heads)
    if found is None:
        from .file import open_file

        heads = () if with_heads else None
        found = open_file(options.file, options, names_only=True, heads=heads)
    return found


def ls(options: argparse.Namespace) -> int:
    """List the tensors of a file."""
    report = Report(options)
    with _open(options) as file:
        tensors = facts.tensors_of(file)
        cells = [("name", "dtype", "shape", "bytes", "type")]
        for one in tensors:
            shape, nbytes = str(one["shape"]), f"{one['bytes']:,}"
            cells.append((text(one["name"]), one["dtype"], shape, nbytes, one["type"]))
        report.lines(columns(cells, "<<<><"))
        metadata, lines = _metadata(file)
        report.lines(f"metadata  {line}" for line in lines)
        files, version = file.reader.files(), file.reader.version
        form = file.reader.format if version is None else f"data version {version}"
        form += f", {len(files)} files" if version is None and len(files) != 1 else ""
        form += ", encrypted" if file.reader.encrypted else ""
        report.line(f"{plural(len(file), 'tensor')}, {size(file.total)}, {form}")
        report.lines(f"{name} is no tensor" for name in file.left_out)
        report.lines(f"not loaded: {line}" for line in file.unreached)
        report.result(
            **_head(file),
            files=files,
            metadata=metadata,
            version=version,
            encrypted=file.reader.encrypted,
            bytes=file.total,
            tensors=tensors,
        )
    return 0


def _head(file: FileDescription) -> dict[str, Any]:
    """Return the first fields for JSON."""
    found: dict[str, Any] = {"file": file.shown}
    if file.left_out:
        found["objects"] = file.left_out
    if file.unreached:
        found["unreached"] = file.unreached
    return found | {"format": file.reader.format}


def _metadata(file: FileDescription) -> tuple[dict[str, str] | None, list[str]]:
    """Return the metadata, or None if they are damaged, and a line about each, or the damage."""
    try:
        found = dict(file.reader.metadata or ())
    except ValueError as error:
        return None, [str(error)]
    return found, [f"{brief(name)} = {brief(value)}" for name, value in found.items()]


def info(options: argparse.Namespace) -> int:
    """Show the format of a file, its content and its location."""
    report = Report(options)
    with _open(options, with_heads=True) as file:
        version, encrypted = file.reader.version, file.reader.encrypted
        tensors, places = facts.tensors_of(file), facts.locations(file)
        every, dtypes = facts.totals(tensors), facts.by_dtype(tensors)
        hashes, line_of_hashes = facts.hashes(file)
        alignment, (metadata, metadata_lines) = facts.alignment(file), _metadata(file)
        root = modules(tensors, options.depth)
        largest = sorted(tensors, key=lambda one: -one["bytes"])[: options.largest]
        counts = plural(len(file), "tensor"), plural(every["parameters"], "parameter")
        aligned = (
            "no data" if alignment is None else f"data begin at multiples of {size(alignment)}"
        )
        shown = {
            "format": [file.reader.format + (f", data version {version}" if version else "")],
            "holds": [", ".join((*counts, size(file.total)))],
            "objects": list(_objects(file)),
            "not loaded": file.unreached,
            "dtypes": _dtypes(dtypes, file.total) or ["none"],
            "encryption": ["XSalsa20-Poly1305: its data need a key" if encrypted else "none"],
            "hashes": [line_of_hashes],
            "alignment": [aligned],
            "metadata": metadata_lines or ["none"],
            "read from": _read_from(places) or ["none"],
        }
        report.line(title=file.shown)
        for title, lines in shown.items():
            for number, line in enumerate(lines):
                report.line(line, f"  {'' if number else title:<12}", DIM)
        if len(places) > 1:
            _show(report, ("files", "", "", ""), map(_file_cells, places), "<>><", _MOST_FILES)
        head = ("modules", "tensors", "parameters", "bytes", "")
        _show(report, head, map(_module_cells, module_rows(root)), "<>>><", _MOST_MODULES)
        cells = (_tensor_cells(one, file.total) for one in largest)
        _show(report, ("largest tensors", "", "", "", ""), cells, "<<<>>", len(largest))
        report.result(
            **_head(file),
            version=version,
            encrypted=encrypted,
            **every,
            dtypes=dtypes,
            hashes=hashes,
            alignment=alignment,
            metadata=metadata,
            files=places,
            modules=[{"path": list(one.path), **one.totals} for one in descendants(root)],
            largest=[
                {name: one[name] for name in ("name", "dtype", "shape", "bytes")} for one in largest
            ],
        )
    return 0


def _objects(file: FileDescription) -> Iterator[str]:
    if file.left_out:
        more = len(file.left_out) - _MOST_OBJECTS
        named = ", ".join(map(brief, file.left_out[:_MOST_OBJECTS]))
        yield named + (f" and {more:,} more" if more > 0 else "")


def _dtypes(dtypes: dict[str, dict[str, int]], total: int) -> list[str]:
    cells = [
        (dtype, _share(of["bytes"], total), size(of["bytes"]), plural(of["tensors"], "tensor"))
        for dtype, of in dtypes.items()
    ]
    return columns(cells, "<>>>")


def _read_from(places: Sequence[dict[str, Any]]) -> list[str]:
    """Return lines about the file, or about all files."""
    lengths = [place["bytes"] for place in places]
    if len(places) > 1:
        together = "" if None in lengths else f", {size(sum(lengths))}"
        return [f"{plural(len(places), 'file')}{together}"]
    lines: list[str] = []
    for place in places:
        name = place["file"]
        if place["local"]:
            name = "a pipe" if place["bytes"] is None else "a file of this machine"
        said = [f"ETag {place['etag']}"] if place["etag"] else []
        said += [f"changed {place['modified']}"] if place["modified"] else []
        first = name if place["bytes"] is None else f"{name}, {size(place['bytes'])}"
        lines += filter(None, [first, ", ".join(said), _cached(place)])
    return lines


def _file_cells(place: dict[str, Any]) -> tuple[str, ...]:
    length = "" if place["bytes"] is None else size(place["bytes"])
    last = "  ".join(filter(None, [place["etag"], _cached(place)]))
    return place["file"], plural(place["tensors"], "tensor"), length, last


def _cached(place: dict[str, Any]) -> str:
    """Return the share of a file that is in the cache; empty without a cache."""
    if place["cached"] is None:
        return ""
    return f"{place['cached'] / (place['bytes'] or 1):.0%} in the cache"


def _module_cells(row: tuple[str, dict[str, int], int]) -> tuple[str, ...]:
    name, of, count = row
    each = f"each of {count:,}" if count > 1 else ""
    numbers = f"{of['tensors']:,}", f"{of['parameters']:,}", size(of["bytes"])
    return brief(name, _NAME), *numbers, each


def _tensor_cells(one: dict[str, Any], total: int) -> tuple[str, ...]:
    name, share = brief(text(one["name"]), _NAME), _share(one["bytes"], total)
    return name, one["dtype"], str(one["shape"]), size(one["bytes"]), share


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _show(
    report: Report, head: tuple[str, ...], cells: Iterable[tuple[str, ...]], sides: str, most: int
) -> None:
    """Show a title and rows below it, and the number of rows that are left out."""
    every = list(cells)
    if every:
        title, *lines = columns([head, *every[:most]], sides)
        report.line()
        report.line(title=title)
        report.lines(lines)
        if len(every) > most:
            report.line(title=f"... and {len(every) - most:,} more", style=DIM)
