"""Writes the page of links by which pip finds wheels, index.html in a folder: index.py FOLDER."""

import hashlib
import sys
import urllib.parse
from pathlib import Path

folder = Path(sys.argv[1])
wheels = sorted(folder.glob("*.whl"))
if not wheels:
    sys.exit(f"no wheels in {folder}")
lines = ["<!DOCTYPE html>", "<title>Wheels of tensorizer</title>"]
for wheel in wheels:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    address = f"{urllib.parse.quote(wheel.name)}#sha256={digest}"
    lines.append(f'<a href="{address}">{wheel.name}</a><br>')
(folder / "index.html").write_text("\n".join(lines) + "\n")
