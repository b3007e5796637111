"""Servers of S3 that are forked off one process that has imported moto, which takes a second.

As a program, ``moto_forks.py PORT``, it forks a server for each connection to that port. The
request is a line of JSON: the port to listen at, and after how many requests signatures are
checked. A server ends with its connection.
"""

import json
import os
import signal
import socket
import sys
import threading


def serve(connection):
    """Be the server that a connection asks for."""
    asked = json.loads(connection.makefile().readline())
    # A string, as JSON has no infinity.
    settings.INITIAL_NO_AUTH_ACTION_COUNT = float(asked["unchecked"])

    def end():
        connection.recv(1)
        os._exit(0)

    threading.Thread(target=end, daemon=True).start()
    moto_server.main(["-H", "127.0.0.1", "-p", str(asked["port"])])


def main(listener):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            serve(connection)
            os._exit(0)
        connection.close()


if __name__ == "__main__":
    import moto.iam.responses
    import moto.s3.responses
    import moto.server as moto_server
    import moto.sts.responses  # noqa: F401
    from moto import settings

    main(socket.create_server(("127.0.0.1", int(sys.argv[1]))))
