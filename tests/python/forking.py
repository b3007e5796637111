"""Interpreters that have imported torch already: forked off one that has done nothing else.

Importing torch takes two seconds of a processor, and hundreds of tests want a process of their own.
``serve`` is what the server runs: it forks once for each connection, and the child goes on as
`python -c` would. Code that is about the import itself, or with an environment that is read before
it, needs a fresh interpreter.
"""

import array
import contextlib
import fcntl
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types

import faults
from forked import Process, end

#: Variables that may be others than those of the server: read when they are needed.
READ_LATE = (
    *("TENSORIZER_", "AWS_", "HF_", "AZURE_", "GOOGLE_", "REDIS_", "HOME", "TMPDIR", "PYTEST_"),
    *("TORCHINDUCTOR_", "XDG_", "SSL_CERT_", "http_proxy", "https_proxy", "no_proxy", "FAULT_"),
    *("CLOUDSDK_", "GCE_", "IDENTITY_", "STORAGE_EMULATOR_", "_TORCHINDUCTOR_"),
    *("FAKE_CUDA_", "FAKE_CUFILE_", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "HTTP_PROXY"),
    *("HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "all_proxy"),
)
#: The server's program. Forks have a ``__main__`` of their own.
PROGRAM = """import sys
sys.path.insert(0, sys.argv[1])
import forking
exec(forking.serve(), vars(sys.modules["__main__"]))
"""
FOLDER = os.path.dirname(os.path.abspath(__file__))


class Server:
    """An interpreter with some modules, and forks of it.

    Args:
        python: The program.
        modules: The modules that it imports; the folder of this file is on its path then.
        parent: A server of which it is a fork, and so has the modules too.

    """

    def __init__(self, python=sys.executable, modules=("torch",), parent=None):
        self.folder = tempfile.TemporaryDirectory()
        self.address = os.path.join(self.folder.name, "socket")
        own = python == sys.executable
        # A path to a tree of this package is not for another Python.
        hidden = {"PYTEST_CURRENT_TEST"} | (set() if own else {"PYTHONPATH"})
        self.environment = {k: v for k, v in os.environ.items() if k not in hidden}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(64)
            arguments = [FOLDER, str(listener.fileno()), *modules]
            # It ends when its input does, and so with this process.
            options = {"stdin": subprocess.PIPE, "pass_fds": [listener.fileno()]}
            if parent is not None:
                self.environment = parent.environment
                options |= {"env": self.environment, "finalize": True}
                self.process = parent.start(PROGRAM, *arguments, **options)
            else:
                env = faults.preloaded(self.environment) if own else self.environment
                command = [python, "-c", PROGRAM, *arguments]
                self.process = subprocess.Popen(command, env=env, **options)

    def takes(self, environment):
        """Tell whether a fork can have this environment."""
        names = environment.keys() | self.environment.keys()
        changed = {n for n in names if environment.get(n) != self.environment.get(n)}
        return all(n.startswith(READ_LATE) for n in changed)

    def start(self, code, *args, stdin=None, stdout=None, stderr=None, text=False, env=None,
              cwd=None, pass_fds=(), finalize=False):  # fmt: skip
        """Start a process that runs code; the arguments are those of ``subprocess.Popen``.

        Args:
            code: The code to run.
            *args: Arguments of the process.
            stdin: A file, a number, PIPE, or None for that of this process.
            stdout: The same.
            stderr: The same.
            text: True if pipes are of text.
            env: The environment, if not that of this process.
            cwd: The folder that it runs in.
            pass_fds: Descriptors that it gets besides.
            finalize: True to end exactly as an interpreter does, which takes twenty times as
                long as ``forked.end``.

        """
        asked = {"code": code, "args": list(map(str, args)), "finalize": finalize,
                 "cwd": os.fspath(cwd or os.getcwd()),
                 "env": dict(os.environ if env is None else env),
                 "fds": [0, 1, 2, *pass_fds]}  # fmt: skip
        connection = socket.socket(socket.AF_UNIX)
        with contextlib.ExitStack() as stack:
            request = stack.enter_context(tempfile.TemporaryFile())
            request.write(json.dumps(asked).encode())
            request.seek(0)
            process = Process(connection, code, text)
            fds = process.connect(stack, stdin, stdout, stderr)
            connection.connect(self.address)
            sent = array.array("i", [request.fileno(), *fds, *pass_fds])
            connection.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)])
            process.begun()
        return process

    def run(self, code, *args, timeout=120, input=None, stdin=None, **options):
        """Run code to its end, as subprocess.run does it; the output is bytes."""
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
            files[0].write(input or b"")
            files[0].seek(0)
            given = files[0] if stdin is None else stdin
            process = self.start(
                code, *args, stdin=given, stdout=files[1], stderr=files[2], **options
            )
            try:
                process.wait(timeout)
            finally:
                process.close()
            for file in files:
                file.seek(0)
            return subprocess.CompletedProcess(
                code, process.returncode, files[1].read(), files[2].read()
            )

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.folder.cleanup()


# The server


def serve():
    """Fork for each connection; return, in the forks alone, code that is to run to the very end."""
    _, _, listening, *modules = sys.argv
    for name in modules:
        __import__(name)
    sys.path.remove(FOLDER)
    # Forks share pages that they do not write to: the garbage collector would write to all.
    gc.collect()
    gc.freeze()
    listener = socket.socket(fileno=int(listening))
    ended, wake = os.pipe()
    for end_of_pipe in (ended, wake):
        os.set_blocking(end_of_pipe, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    forks = {}
    while True:
        ready, _, _ = select.select([listener, 0, ended], [], [])
        if 0 in ready:
            os._exit(0)
        if ended in ready:
            os.read(ended, 1 << 12)
            report(forks)
        if listener not in ready:
            continue
        connection, _ = listener.accept()
        fds = received(connection)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for one in (listener, connection, *forks.values()):
                one.close()
            os.close(ended)
            os.close(wake)
            return become(fds)
        for fd in fds:
            os.close(fd)
        forks[pid] = connection
        tell(connection, f"pid {pid}")


def received(connection):
    """Return the descriptors that came with a request."""
    size = array.array("i").itemsize
    _, ((_, _, packed),), _, _ = connection.recvmsg(1, socket.CMSG_LEN(250 * size))
    fds = array.array("i")
    fds.frombytes(packed[: len(packed) - len(packed) % size])
    return list(fds)


def tell(connection, line):
    # The process that has asked may have given up.
    with contextlib.suppress(OSError):
        connection.sendall(f"{line}\n".encode())


def report(forks):
    """Report forks that have ended or were stopped."""
    while forks:
        pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        if pid == 0:
            return
        if os.WIFSTOPPED(status):
            tell(forks[pid], "stopped 1")
            continue
        connection = forks.pop(pid)
        tell(connection, f"ended {os.waitstatus_to_exitcode(status)}")
        connection.close()


def become(fds):
    """Be the process that was asked for: run its code, or return it."""
    with open(fds[0]) as request:
        asked = json.load(request)
    # First move them out of the way of the numbers that they will have.
    apart = [fcntl.fcntl(fd, fcntl.F_DUPFD, 500) for fd in fds[1:]]
    for fd in fds[1:]:
        os.close(fd)
    for fd, number in zip(apart, asked["fds"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    faults.read()
    sys.argv = ["-c", *asked["args"]]
    native = sys.modules.get("tensorizer._C")
    if native is not None:
        native.forget_environment()
    # The server's own __main__ is frozen: the garbage collector would never look through it.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    code = compile(asked["code"], "<string>", "exec")
    if asked["finalize"]:
        return code
    return end(code, vars(main))
