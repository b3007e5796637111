"""``tensorizer ls``."""

from __future__ import annotations

import argparse
from typing import Any

from . import native
from .describe import open_description
from .file_description import FileDescription, plain, size, text
from .output import Report, brief, plural, shown

_HEAD = ("name", "dtype", "shape", "bytes", "type")


def run(options: argparse.Namespace) -> int:
    """List the tensors of a file."""
    report = Report(options)
    with open_description(options.file) as file:
        rows = _rows(file)
        for line in _table(file, rows):
            report.finding(line)
        metadata = _metadata(file, report)
        encrypted = ", encrypted" if file.reader.encrypted else ""
        report.finding(
            f"{plural(len(file), 'tensor')}, {size(file.total)}, {_format(file)}{encrypted}"
        )
        for name in file.left_out:
            report.finding(f"{shown(name)} is no tensor")
        for line in file.unreached:
            report.finding(f"not loaded: {line}")
        objects = {"objects": file.left_out} if file.left_out else {}
        report.result(
            file=file.shown,
            **objects,
            **({"unreached": file.unreached} if file.unreached else {}),
            format=file.reader.format,
            files=file.reader.files(),
            metadata=metadata,
            version=file.reader.version,
            encrypted=file.reader.encrypted,
            bytes=file.total,
            tensors=rows,
        )
    return 0


def _metadata(file: FileDescription, report: Report) -> dict[str, str] | None:
    """List and return the metadata; None if they are damaged."""
    try:
        found = dict(file.reader.metadata or ())
    except ValueError as error:
        report.finding(f"metadata  {error}")
        return None
    for name, value in found.items():
        report.finding(f"metadata  {brief(name)} = {brief(value)}")
    return found


def _format(file: FileDescription) -> str:
    if file.reader.version is not None:
        return f"data version {file.reader.version}"
    count = len(file.reader.files())
    return file.reader.format if count == 1 else f"{file.reader.format}, {count} files"


def _rows(file: FileDescription) -> list[dict[str, Any]]:
    offsets = file.reader.offsets()
    rows: list[dict[str, Any]] = []
    for number in range(len(file)):
        dtype, shape, _ = file.reader.describe(number)
        rows.append(
            {
                "name": plain(file.reader.name(number)),
                "dtype": dtype,
                "shape": shape,
                "bytes": file.data_lens[number],
                "offset": offsets[number][1],
                "type": native.module().KINDS[file.kinds[number]],
            }
        )
    return rows


def _table(file: FileDescription, rows: list[dict[str, Any]]) -> list[str]:
    table = [
        (
            shown(text(file.reader.name(number))),
            row["dtype"],
            str(row["shape"]),
            f"{row['bytes']:,}",
            row["type"],
        )
        for number, row in enumerate(rows)
    ]
    widths = [max(len(line[i]) for line in [_HEAD, *table]) for i in range(len(_HEAD))]
    lines: list[str] = []
    for line in [_HEAD, *table]:
        cells = [
            cell.rjust(width) if title == "bytes" else cell.ljust(width)
            for title, cell, width in zip(_HEAD, line, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
