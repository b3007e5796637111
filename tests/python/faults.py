"""The library of ``faults.c``, by which system calls of forked interpreters fail."""

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from filelock import FileLock

SOURCE = Path(__file__).with_name("faults.c")
#: It is compiled once for all runs, and anew when its source has changed.
FOLDER = Path(__file__).resolve().parents[2] / ".make/faults"


def library():
    """Return its path, or None where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    text = f"{compiler} {os.uname().machine}".encode() + SOURCE.read_bytes()
    path = FOLDER / f"{hashlib.sha256(text).hexdigest()[:16]}.so"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDER / "lock"):
        if not path.exists():
            for old in FOLDER.glob("*.so"):
                old.unlink()
            part = path.with_suffix(".part")
            command = [compiler, "-O1", "-shared", "-fPIC", SOURCE, "-o", part, "-ldl"]
            subprocess.run(command, check=True)
            part.rename(path)
    return path


def preloaded(environment):
    """Return an environment with the library in front of others, if there is one."""
    path = library()
    if path is None:
        return dict(environment)
    before = environment.get("LD_PRELOAD")
    return {**environment, "LD_PRELOAD": f"{before}:{path}" if before else str(path)}


def read():
    """Have the library of this process, if it has it, read its variables of the environment."""
    function = getattr(ctypes.CDLL(None), "read_faults", None)
    if function is not None:
        function()
