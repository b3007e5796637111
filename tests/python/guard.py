"""Runs a server for as long as some process uses it.

As a program, ``guard.py USERS KNOWN COMMAND…``: each process that uses the server has a shared lock
of the file USERS, and the system takes it from one that was killed. KNOWN tells new users of the
server; it goes with it.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys


def main(users, known, command):
    # Without a server there is nothing to wait for.
    signal.signal(signal.SIGCHLD, lambda *_: sys.exit(1))
    server = subprocess.Popen(command)
    with open(users) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        finally:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # First, so that nobody finds a server that ends.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(known)
            server.kill()
            server.wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
