"""Files and servers that the workers of one run share: made once, by the first that needs them."""

import atexit
import contextlib
import fcntl
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from filelock import FileLock

#: The folder of the run; a fixture for all tests sets it.
folder = None
#: The program that ends a server with the run.
GUARD = Path(__file__).with_name("guard.py")


def _folder():
    """Return the folder; a program that is no test is a run of its own."""
    global folder
    if folder is None:
        folder, owner = Path(tempfile.mkdtemp()), os.getpid()
        # Forks of the program leave it alone.
        atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))
    return folder


def made(name, make):
    """Return a folder of the run that ``make`` fills once."""
    place, part = _folder() / name, _folder() / f"{name}.part"
    with FileLock(f"{place}.lock"):
        if not place.exists():
            # A worker that was killed may have left it.
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            make(part)
            part.rename(place)
    return place


@contextlib.contextmanager
def server(name, start):
    """Yield the server of this name; it ends when no worker of the run uses it any more.

    ``start`` gets the first words of a command, starts the server by that command, and returns an
    object whose attributes are all that is to be known of the server.
    """
    known, users = (_folder() / f"{name}.{ending}" for ending in ("pickle", "users"))
    guards = []

    def popen(command, **options):
        # In a session of its own, Ctrl-C does not end it before the tests.
        guarded = [sys.executable, "-SE", GUARD, users, known, *command]
        guards.append(subprocess.Popen(guarded, start_new_session=True, **options))
        return guards[-1]

    with users.open("w") as use:
        with FileLock(f"{known}.lock"):
            # The guard has the other kind of lock while it ends a server.
            fcntl.flock(use, fcntl.LOCK_SH)
            if not known.exists():
                found = start(popen)
                known.write_bytes(pickle.dumps(found))
                for guard in guards:
                    # It may end after this process, which is not to wait for it, or to be warned.
                    guard.returncode = 0
            found = pickle.loads(known.read_bytes())
        yield found
