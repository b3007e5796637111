"""``tensorizer info``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from .describe import open_description
from .file_description import FileDescription, plain, size, text
from .file_facts import FileFacts, HashCounts, TensorFacts, Totals
from .file_locations import FileLocation, file_locations
from .modules import ModuleTotals, descendants, modules, rows as module_rows
from .output import Report, bold, brief, dim, plural, shown

#: The most files of a model, and the most modules, that are shown.
_MOST_FILES, _MOST_MODULES = 16, 60
#: The most objects of a checkpoint that are named.
_MOST_OBJECTS = 8
#: The most characters of a name.
_NAME = 72


def run(options: argparse.Namespace) -> int:
    """Show the format of a file, its content and its location."""
    report = Report(options)
    with open_description(options.file, with_heads=True) as file:
        facts, found = FileFacts(file), file_locations(file)
        root, largest = modules(facts.tensors, options.depth), facts.largest(options.largest)
        report.line(bold(file.shown))
        for title, line in _facts(file, facts, found):
            report.line("  ", dim(f"{title:<12}"), line)
        _show_files(report, found)
        _show_modules(report, root)
        _show_largest(report, facts, largest)
        report.result(
            file=file.shown,
            **({"objects": file.left_out} if file.left_out else {}),
            **({"unreached": file.unreached} if file.unreached else {}),
            format=file.reader.format,
            version=file.reader.version,
            encrypted=file.reader.encrypted,
            **_numbers(facts.all),
            dtypes={dtype: _numbers(of) for dtype, of in facts.dtypes.items()},
            hashes=_hashes_for_programs(facts.hashes),
            alignment=facts.alignment,
            metadata=facts.metadata,
            files=[location.as_json() for location in found],
            modules=[{"path": list(one.path), **_numbers(one.totals)} for one in descendants(root)],
            largest=[_for_programs(tensor) for tensor in largest],
        )
    return 0


def _numbers(of: Totals) -> dict[str, int]:
    return {"tensors": of.tensors, "parameters": of.parameters, "bytes": of.nbytes}


def _for_programs(tensor: TensorFacts) -> dict[str, object]:
    return {
        "name": plain(tensor.name),
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "bytes": tensor.nbytes,
    }


def _hashes_for_programs(hashes: HashCounts | None) -> dict[str, int] | None:
    return None if hashes is None else {**hashes.counts, "looked_at": hashes.looked_at}


def _facts(
    file: FileDescription, facts: FileFacts, found: Sequence[FileLocation]
) -> Iterator[tuple[str, str]]:
    """Yield titles and values; the title is empty for a further value of the same title."""
    version = file.reader.version
    yield "format", file.reader.format + ("" if version is None else f", data version {version}")
    counts = plural(len(file), "tensor"), plural(facts.all.parameters, "parameter")
    yield "holds", ", ".join((*counts, size(file.total)))
    if file.left_out:
        named = ", ".join(map(brief, file.left_out[:_MOST_OBJECTS]))
        more = len(file.left_out) - _MOST_OBJECTS
        yield "objects", named + (f" and {more:,} more" if more > 0 else "")
    if file.unreached:
        yield from _under("not loaded", file.unreached)
    yield from _under("dtypes", _dtypes(facts))
    encrypted = "XSalsa20-Poly1305: its data need a key" if file.reader.encrypted else "none"
    yield "encryption", encrypted
    yield "hashes", _hashes(file, facts.hashes)
    yield "alignment", _alignment(facts.alignment)
    metadata = [facts.damage] if facts.metadata is None else []
    metadata += [f"{brief(key)} = {brief(value)}" for key, value in (facts.metadata or {}).items()]
    yield from _under("metadata", metadata)
    if len(found) > 1:
        yield "read from", _together(found)
    else:
        yield from _under("read from", [line for location in found for line in location.lines()])


def _under(title: str, lines: list[str]) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(lines or ["none"]):
        yield "" if number else title, line


def _dtypes(facts: FileFacts) -> list[str]:
    cells = [
        (dtype, _share(of.nbytes, facts.all.nbytes), size(of.nbytes), plural(of.tensors, "tensor"))
        for dtype, of in facts.dtypes.items()
    ]
    return list(_columns(cells, "<>>>"))


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _hashes(file: FileDescription, hashes: HashCounts | None) -> str:
    if file.first is None or file.first.version is None:
        return "none: the format has no place for them"
    if hashes is None:
        return "unknown: the file can only be read once, and is not read to the end for this"
    if all(count == hashes.looked_at for count in hashes.counts.values()):
        names = " and ".join(hashes.counts) or "none"
    else:
        names = ", ".join(f"{name} of {count:,}" for name, count in hashes.counts.items())
    if hashes.sampled:
        return f"{names}, as the largest tensor says"
    return f"{names}, of {plural(hashes.looked_at, 'tensor')} with data"


def _alignment(alignment: int | None) -> str:
    return "no data" if alignment is None else f"data begin at multiples of {size(alignment)}"


def _together(found: Sequence[FileLocation]) -> str:
    lengths = [location.length for location in found if location.length is not None]
    of = f", {size(sum(lengths))}" if len(lengths) == len(found) else ""
    return f"{plural(len(found), 'file')}{of}"


def _show_files(report: Report, found: Sequence[FileLocation]) -> None:
    """Show the files, if there are several."""
    if len(found) > 1:
        cells = [location.cells() for location in found[:_MOST_FILES]]
        _show(report, [("files", "", "", ""), *cells], "<>><", len(found) - len(cells))


def _show_modules(report: Report, root: ModuleTotals) -> None:
    cells = [("modules", "tensors", "parameters", "bytes", "")]
    for name, of, count in module_rows(root):
        each = f"each of {count:,}" if count > 1 else ""
        numbers = f"{of.tensors:,}", f"{of.parameters:,}", size(of.nbytes)
        cells.append((brief(name, _NAME), *numbers, each))
    if len(cells) > 1:
        most = _MOST_MODULES + 1
        _show(report, cells[:most], "<>>><", len(cells[most:]))


def _show_largest(report: Report, facts: FileFacts, largest: Sequence[TensorFacts]) -> None:
    cells = [("largest tensors", "", "", "", "")]
    for tensor in largest:
        name, share = brief(text(tensor.name), _NAME), _share(tensor.nbytes, facts.all.nbytes)
        cells.append((name, tensor.dtype, str(tensor.shape), size(tensor.nbytes), share))
    if len(cells) > 1:
        _show(report, cells, "<<<>>")


def _show(report: Report, cells: Sequence[tuple[str, ...]], sides: str, more: int = 0) -> None:
    """Show a title and the rows below it, and the number of rows that are left out."""
    head, *lines = _columns(cells, sides)
    report.line()
    report.line(bold(head))
    for line in lines:
        report.line(line)
    if more:
        report.line(dim(f"... and {more:,} more"))


def _columns(cells: Sequence[tuple[str, ...]], sides: str) -> Iterator[str]:
    """Yield rows whose columns have one width each, aligned to the side of ``<`` or ``>``."""
    escaped = [[shown(cell) for cell in row] for row in cells]
    widths = [max(map(len, column)) for column in zip(*escaped, strict=True)]
    for row in escaped:
        parts = (
            f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)
        )
        yield "  ".join(parts).rstrip()
