"""``tensorizer cache``."""

from __future__ import annotations

import argparse
import time

from . import native
from .file_description import size
from .output import Report, plural


def run(options: argparse.Namespace) -> int:
    """List the cached files of servers, or remove them."""
    report = Report(options)
    removes = options.action == "clear"
    core = native.module()
    found = (core.clear_cache if removes else core.cache_entries)(options.folder)
    if not removes:
        for uri, length, here, used in found:
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(used))
            report.finding(f"{when}  {here / length:4.0%} of {size(length):<9}  {uri}")
    together = size(sum(here for _, _, here, _ in found))
    report.summary(f"{'removed ' * removes}{plural(len(found), 'file')}, {together}")
    names = ("uri", "bytes", "cached", "used")
    rows = [dict(zip(names, row, strict=True)) for row in found]
    report.result(**{"removed" if removes else "files": rows})
    return 0
