"""Runs a server for as long as some process is connected to a socket.

As a program, ``guard.py DESCRIPTOR COMMAND…``, it gets the listening socket by its descriptor. Each
connection is told when it is accepted. One that is shut down for writing is closed: at once, or
where it was the last, when the server has ended. So the server ends, too, with processes that were
killed.
"""

import contextlib
import selectors
import signal
import socket
import subprocess
import sys


def main(listener, command):
    # Without a server there is nothing to wait for.
    signal.signal(signal.SIGCHLD, lambda *_: sys.exit(1))
    server = subprocess.Popen(command)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    connections = set()
    while listener.fileno() >= 0:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                with contextlib.suppress(OSError):
                    connection.sendall(b"1")
                selector.register(connection, selectors.EVENT_READ)
                connections.add(connection)
            elif connections == {key.fileobj}:
                # Connections that come from now on start another server.
                listener.close()
                break
            else:
                selector.unregister(key.fileobj)
                connections.remove(key.fileobj)
                key.fileobj.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    server.kill()
    server.wait()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
