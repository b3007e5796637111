"""``tensorizer ls`` and ``tensorizer info``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from . import facts
from .file_description import FileDescription, open_without_torch, size, text
from .modules import modules
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
    distributed checkpoints, for input that can be read only once, and for ``--key``.
    """
    found = None if options.key is not None else open_without_torch(options.file, with_heads)
    if found is not None:
        return found
    from .file import open_file

    heads = () if with_heads else None
    file = open_file(options.file, options, names_only=True, key=options.key, heads=heads)
    if options.skip_objects:
        file.unreached = []
    return file


def ls(options: argparse.Namespace) -> int:
    """List the tensors of a file."""
    report = Report(options)
    with _open(options) as file:
        tensors = facts.tensors_of(file)
        head = ("name", "dtype", "shape", "bytes", "type")
        cells = (
            (text(one["name"]), one["dtype"], str(one["shape"]), f"{one['bytes']:,}", one["type"])
            for one in tensors
        )
        report.lines(columns([head, *cells], "<<<><"))
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
    lists = {"objects": file.left_out, "unreached": file.unreached}
    there = {name: found for name, found in lists.items() if found}
    return {"file": file.shown, **there, "format": file.reader.format}


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
        tensors, (hashes, line_of_hashes) = facts.tensors_of(file), facts.hashes(file)
        (metadata, metadata_lines), root = _metadata(file), modules(tensors, options.depth)
        largest = sorted(tensors, key=lambda one: -one["bytes"])[: options.largest]
        fields = ("name", "dtype", "shape", "bytes")
        found = {
            **_head(file),
            "version": file.reader.version,
            "encrypted": file.reader.encrypted,
            **facts.totals(tensors),
            "dtypes": facts.by_dtype(tensors),
            "hashes": hashes,
            "alignment": facts.alignment(file),
            "metadata": metadata,
            "files": facts.locations(file),
            "modules": [{"path": one.path, **one.totals} for one in root.descendants()],
            "largest": [{field: one[field] for field in fields} for one in largest],
        }
    version, aligned, files = found["version"], found["alignment"], found["files"]
    counts = plural(len(file), "tensor"), plural(found["parameters"], "parameter")
    encryption = "XSalsa20-Poly1305: its data need a key" if found["encrypted"] else "none"
    begin = f"data begin at multiples of {size(aligned)}" if aligned else "no data"
    shown = {
        "format": [found["format"] + (f", data version {version}" if version else "")],
        "holds": [", ".join((*counts, size(file.total)))],
        "objects": _objects(file.left_out),
        "not loaded": file.unreached,
        "dtypes": _dtypes(found["dtypes"], file.total) or ["none"],
        "encryption": [encryption],
        "hashes": [line_of_hashes],
        "alignment": [begin],
        "metadata": metadata_lines or ["none"],
        "read from": _read_from(files) or ["none"],
    }
    report.line(title=file.shown)
    for title, lines in shown.items():
        for number, line in enumerate(lines):
            report.line(line, f"  {'' if number else title:<12}", DIM)
    if len(files) > 1:
        _show(report, ["files"], map(_file_cells, files), "<>><", _MOST_FILES)
    head = ["modules", "tensors", "parameters", "bytes"]
    _show(report, head, map(_module_cells, root.rows()), "<>>><", _MOST_MODULES)
    cells = (_tensor_cells(one, file.total) for one in largest)
    _show(report, ["largest tensors"], cells, "<<<>>", len(largest))
    report.result(**found)
    return 0


def _objects(names: Sequence[str]) -> list[str]:
    more = len(names) - _MOST_OBJECTS
    named = ", ".join(map(brief, names[:_MOST_OBJECTS]))
    return [named + (f" and {more:,} more" if more > 0 else "")] if names else []


def _dtypes(dtypes: dict[str, dict[str, int]], total: int) -> list[str]:
    cells = [
        (dtype, _share(of["bytes"], total), size(of["bytes"]), plural(of["tensors"], "tensor"))
        for dtype, of in dtypes.items()
    ]
    return columns(cells, "<>>>")


def _read_from(files: Sequence[dict[str, Any]]) -> list[str]:
    """Return lines about the file, or about all files."""
    if len(files) > 1:
        lengths = [file["bytes"] for file in files]
        together = "" if None in lengths else f", {size(sum(lengths))}"
        return [f"{plural(len(files), 'file')}{together}"]
    found: list[str] = []
    for file in files:
        of_machine = "a pipe" if file["bytes"] is None else "a file of this machine"
        name = of_machine if file["local"] else file["file"]
        said = [file["etag"] and f"ETag {file['etag']}"]
        said += [file["modified"] and f"changed {file['modified']}"]
        lines = [name, _length(file)], said, [_cached(file)]
        found += filter(None, (", ".join(filter(None, parts)) for parts in lines))
    return found


def _file_cells(file: dict[str, Any]) -> tuple[str, ...]:
    last = "  ".join(filter(None, [file["etag"], _cached(file)]))
    return file["file"], plural(file["tensors"], "tensor"), _length(file), last


def _length(file: dict[str, Any]) -> str:
    return "" if file["bytes"] is None else size(file["bytes"])


def _cached(file: dict[str, Any]) -> str:
    """Return the share of a file that is in the cache; empty without a cache."""
    if file["cached"] is None:
        return ""
    return f"{file['cached'] / (file['bytes'] or 1):.0%} in the cache"


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
    report: Report, head: list[str], cells: Iterable[tuple[str, ...]], sides: str, most: int
) -> None:
    """Show a title and rows below it, and the number of rows that are left out."""
    every = list(cells)
    if every:
        title, *lines = columns([[*head, *[""] * (len(sides) - len(head))], *every[:most]], sides)
        report.line()
        report.line(title=title)
        report.lines(lines)
        if len(every) > most:
            report.line(title=f"... and {len(every) - most:,} more", style=DIM)
