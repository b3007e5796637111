"""Compiled files that the tests keep between runs: made once, by the first test that needs them."""

import hashlib
import os
import shutil
import time
from pathlib import Path

import torch
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".make/compiled"
DAY = 86400


def build_once(name, sources, make):
    """Return a folder that ``make`` fills once for this torch and these sources.

    What was made of others goes a day after its last use: other tests may be running now.
    """
    folder = FOLDER / f"{name}-{torch.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / _hash(sources)
    with FileLock(folder / "lock"):
        if not place.exists():
            part = folder / "part"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            make(part)
            part.rename(place)
            for old in folder.iterdir():
                if old.is_dir() and old.stat().st_mtime < time.time() - DAY:
                    shutil.rmtree(old)
        os.utime(place)
    return place


def _hash(sources):
    """Return a hash of files, and of those below folders, by name and content."""
    found = hashlib.sha256()
    for source in sources:
        below = sorted(path for path in source.rglob("*") if path.is_file())
        for path in below or [source]:
            if path.suffix != ".pyc":
                found.update(f"{path}\0".encode())
                found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]
