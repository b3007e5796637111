"""Files and servers that the workers of one run share: made once, by the first that needs them."""

import atexit
import contextlib
import fcntl
import hashlib
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

#: The folder of the run; a fixture for all tests sets it.
folder = None
#: The program that ends a server with the run.
GUARD = Path(__file__).with_name("guard.py")
#: The guards that this process has started. They end after it if other workers use their servers;
#: Python would warn of a running process whose object is collected.
_GUARDS = []


def _folder():
    """Return the folder; a program that is no test is a run of its own."""
    global folder
    if folder is None:
        folder, owner = Path(tempfile.mkdtemp()), os.getpid()
        # Forks of the program leave it alone.
        atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder))
    return folder


@contextlib.contextmanager
def lock(name):
    """Let one worker of the run at a time go on."""
    with open(_folder() / f"{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def made(name, make):
    """Return a folder of the run that ``make`` fills once."""
    place, part = _folder() / name, _folder() / f"{name}.part"
    with lock(name):
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
    address = b"\0" + hashlib.sha256(bytes(_folder() / name)).hexdigest().encode()
    known = _folder() / f"{name}.pickle"
    with lock(name):
        use = _connect(address)
        if use is not None:
            found = pickle.loads(known.read_bytes())
        else:
            use, found = _start(address, start)
            known.write_bytes(pickle.dumps(found))
    try:
        yield found
    finally:
        # The answer comes at once, or when the server has ended.
        use.shutdown(socket.SHUT_WR)
        use.recv(1)
        use.close()


def _connect(address):
    """Return a connection to the guard of a server, if there is one."""
    use = socket.socket(socket.AF_UNIX)
    with contextlib.suppress(ConnectionError):
        use.connect(address)
        if use.recv(1):
            return use
    use.close()
    return None


def _start(address, start):
    use = socket.socket(socket.AF_UNIX)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        use.connect(address)

        def popen(command, **options):
            # In a session of its own, Ctrl-C does not end it before the tests.
            guard = [sys.executable, "-SE", GUARD, str(listener.fileno())]
            process = subprocess.Popen(
                [*guard, *command], pass_fds=[listener.fileno()], start_new_session=True, **options
            )
            _GUARDS.append(process)
            return process

        try:
            found = start(popen)
            assert use.recv(1), "the server has ended"
        except BaseException:
            use.close()
            raise
    return use, found
