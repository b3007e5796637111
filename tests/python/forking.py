"""Interpreters that have imported torch already: forked off one that has done nothing else.

Importing torch takes two seconds of a processor, and hundreds of tests want a process of their own.
Run as a program this is the server: it forks once for each connection, and the child goes on as
`python -c` would, to the end of the interpreter. Code that is about the import itself, or with an
environment that is read before it, needs a fresh interpreter.
"""

import array
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile

#: Variables that may be others than those of the server: read when they are needed.
READ_LATE = (
    *("TENSORIZER_", "AWS_", "HF_", "AZURE_", "GOOGLE_", "REDIS_", "HOME", "TMPDIR", "PYTEST_"),
    *("TORCHINDUCTOR_", "XDG_", "SSL_CERT_", "http_proxy", "https_proxy", "no_proxy"),
)
#: And of those one that is not.
READ_EARLY = {"TENSORIZER_FAKE_DEVICE"}


class Server:
    """An interpreter with some modules, and forks of it."""

    def __init__(self, python=sys.executable, modules=("torch", "tensorizer")):
        self.folder = tempfile.TemporaryDirectory()
        self.address = os.path.join(self.folder.name, "socket")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.address)
        listener.listen(64)
        # A path to a tree of this package is not for another Python.
        hidden = {"PYTEST_CURRENT_TEST"} | ({"PYTHONPATH"} if python != sys.executable else set())
        self.environment = {k: v for k, v in os.environ.items() if k not in hidden}
        command = [python, __file__, str(listener.fileno()), *modules]
        # It ends when this process does.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], env=self.environment
        )
        listener.close()

    def takes(self, environment):
        """Tell whether a fork can have this environment."""
        names = environment.keys() | self.environment.keys()
        changed = {n for n in names if environment.get(n) != self.environment.get(n)}
        return all(n.startswith(READ_LATE) and n not in READ_EARLY for n in changed)

    def run(self, code, *args, timeout=120, input=None, env=None, cwd=None):
        """Run code to its end, as subprocess.run does it; the output is bytes."""
        asked = {"code": code, "args": list(map(str, args)), "cwd": os.fspath(cwd or os.getcwd()),
                 "env": dict(os.environ if env is None else env)}  # fmt: skip
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
            files[0].write(input or b"")
            files[0].seek(0)
            with socket.socket(socket.AF_UNIX) as connection, tempfile.TemporaryFile() as request:
                request.write(json.dumps(asked).encode())
                request.seek(0)
                connection.connect(self.address)
                fds = array.array("i", [file.fileno() for file in [request, *files]])
                connection.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
                pid, status = self.waited(connection, timeout)
            if status is None:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(code, timeout)
            for file in files:
                file.seek(0)
            return subprocess.CompletedProcess(code, status, files[1].read(), files[2].read())

    def waited(self, connection, timeout):
        """Return a fork's number and how it ended; None if it has not in time."""
        answers = connection.makefile("r")
        connection.settimeout(60)
        pid = int(answers.readline())
        connection.settimeout(timeout)
        try:
            return pid, int(answers.readline())
        except TimeoutError:
            return pid, None

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.folder.cleanup()


def serve(listener):
    """Fork for each connection; return what to run, in the forks alone."""
    import select

    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if 0 in ready:
            os._exit(0)
        connection, _ = listener.accept()
        # Nobody waits for those who wait.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            break
        connection.close()
    ability = socket.CMSG_LEN(4 * array.array("i").itemsize)
    _, ((_, _, packed),), _, _ = connection.recvmsg(1, ability)
    fds = array.array("i", packed)
    pid = os.fork()
    if pid:
        connection.sendall(f"{pid}\n".encode())
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        # Who has asked may have given up.
        with contextlib.suppress(OSError):
            connection.sendall(f"{status}\n".encode())
        os._exit(0)
    connection.close()
    with open(fds[0]) as request:
        asked = json.load(request)
    for number, fd in enumerate(fds[1:]):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.argv = ["-c", *asked["args"]]
    sys.path[0] = ""
    native = sys.modules.get("tensorizer._C")
    if native is not None:
        native.forget_environment()
    return asked["code"]


if __name__ == "__main__":
    for name in sys.argv[2:]:
        __import__(name)
    exec(compile(serve(socket.socket(fileno=int(sys.argv[1]))), "<string>", "exec"))
