"""``tensorizer ls``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from tensorizer._types import TensorType
from tensorizer.utils import convert_bytes

from .file import File, text
from .output import say, shown


def run(options: argparse.Namespace) -> int:
    """List the tensors of a file."""
    with File(options.file) as file:
        offsets = file.reader.offsets()
        rows: list[dict[str, Any]] = []
        for number in range(len(file)):
            name = file.reader.name(number)
            dtype, shape, _ = file.reader.describe(number)
            rows.append(
                {
                    "name": name if isinstance(name, str) else list(name),
                    "dtype": dtype,
                    "shape": shape,
                    "bytes": file.data_lens[number],
                    "offset": offsets[number][1],
                    "type": TensorType(file.kinds[number]).name.lower(),
                }
            )
        if options.json:
            # The one control character that JSON leaves as it is.
            print(json.dumps(rows, indent=1).replace("\x7f", "\\u007f"))
            return 0
        table = [
            (
                shown(text(row["name"])),
                row["dtype"],
                str(row["shape"]),
                f"{row['bytes']:,}",
                row["type"],
            )
            for row in rows
        ]
        head = ("name", "dtype", "shape", "bytes", "type")
        widths = [max(len(line[i]) for line in [head, *table]) for i in range(len(head))]
        for line in [head, *table]:
            cells = [
                cell.rjust(width) if i == 3 else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            say("  ".join(cells).rstrip())
        encrypted = ", encrypted" if file.reader.encrypted else ""
        print(
            f"{len(file)} tensors, {convert_bytes(file.total)}, "
            f"data version {file.reader.version}{encrypted}"
        )
    return 0
