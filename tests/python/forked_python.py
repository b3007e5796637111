"""A Python for programs that start others: what it runs is forked off a server of ``forking.py``.

That is for documents and examples that start ranks or spawn processes by ``sys.executable``, each
of which would import torch anew. Options of the interpreter are of no effect.
"""

import os
import signal
import stat
import sys
from pathlib import Path

#: The program; the folder of this file and the server's address are filled in.
PROGRAM = """#!{python} -SE
import sys
sys.path.insert(0, {folder!r})
import forked_python
forked_python.main({address!r})
"""
#: Code of the fork. It ends with the process that has asked for it, which holds a pipe open.
FORK = """import fcntl, multiprocessing.spawn, os, runpy, signal, sys
sys.executable, held, kind, what, *rest = sys.argv[1:]
multiprocessing.spawn.set_executable(sys.executable)
fcntl.fcntl(int(held), fcntl.F_SETOWN, os.getpid())
fcntl.fcntl(int(held), 10, signal.SIGKILL)  # F_SETSIG
fcntl.fcntl(int(held), fcntl.F_SETFL, os.O_ASYNC)
sys.argv = [what if kind == "file" else kind, *rest]
if kind == "-c":
    exec(compile(what, "<string>", "exec"))
elif kind == "-m":
    sys.path.insert(0, os.getcwd())
    runpy.run_module(what, run_name="__main__", alter_sys=True)
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(what)))
    runpy.run_path(os.path.abspath(what), run_name="__main__")
"""


def write(path, server):
    """Write a program that is such a Python, whose forks are of this server."""
    folder = str(Path(__file__).resolve().parent)
    text = PROGRAM.format(python=sys.executable, folder=folder, address=server.address)
    Path(path).write_text(text)
    Path(path).chmod(stat.S_IRWXU)


def main(address):
    """Act as that Python: have the server fork, pass signals on, and end as the fork does."""
    given = [int(name) for name in os.listdir("/proc/self/fd")]
    passed = [fd for fd in given if fd > 2 and os.path.exists(f"/proc/self/fd/{fd}")]
    import forking

    class Server(forking.Server):
        def __init__(self):
            self.address = address

    held, end = os.pipe()
    options = sys.argv[1:]
    while options and options[0].startswith("-") and options[0] not in {"-c", "-m"}:
        # These two have a value.
        del options[: 2 if options[0] in {"-W", "-X"} else 1]
    if options[0] not in {"-c", "-m"}:
        options.insert(0, "file")
    process = Server().start(FORK, sys.argv[0], held, *options, pass_fds=[held, *passed])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(process.pid, number))
    os.close(held)
    for fd in passed:
        os.close(fd)
    status = process.wait()
    os.close(end)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)
