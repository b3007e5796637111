"""Interpreters of tests, forked off multiprocessing's server, which has imported torch already.

Importing torch takes two seconds of a processor, and hundreds of tests want a process of their own.
Code that is about the import, or in an environment that is read before it, needs a fresh one.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import types
from multiprocessing import forkserver, reduction

import faults
import psutil

FOLDER = os.path.dirname(os.path.abspath(__file__))
#: Prefixes of variables that are read while an interpreter starts or torch is imported.
READ_EARLY = ("CUDA", "GLOO_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "PYTHON")
#: What the server has imported; the last of them freezes it.
IMPORTED = [
    *("tensorizer", "torch._dynamo", "torch.distributed.run", "torch.distributed.fsdp"),
    *("torch.distributed.checkpoint.state_dict", "torch.distributed.tensor.parallel"),
    *("ranks.being", "ranks.cold", "ranks.common", "ranks.dcp_failures", "ranks.dcp_jobs"),
    *("ranks.dcp_meshes", "ranks.devices", "ranks.dtensors", "ranks.engines", "ranks.groups"),
    *("ranks.held", "ranks.lost", "ranks.modules", "ranks.one_by_one", "ranks.saving"),
    "ranks.wants",
    *("processes", "frozen"),
]


#: The command of the package, for ``run_python`` and ``start_python``.
COMMAND = "import sys\nfrom tensorizer_cli.main import main\nsys.exit(main())\n"
#: A program as if Python had been started with it; its path is the first argument.
SCRIPT = """
import os, runpy, sys
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@functools.cache
def _server():
    """Start the server; return the environment that it was started with."""
    path = os.pathsep.join(filter(None, (FOLDER, os.environ.get("PYTHONPATH"))))
    before = dict(os.environ)
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    os.environ |= faults.preloaded(dict(os.environ)) | {"PYTHONPATH": path}
    try:
        forkserver.set_forkserver_preload(IMPORTED)
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return before


def takes(environment):
    """Tell whether a fork of the server can have this environment."""
    own = _server()
    names = {name for name in environment.keys() | own.keys() if name.startswith(READ_EARLY)}
    return all(environment.get(name) == own.get(name) for name in names)


class _Descriptor:
    """A descriptor that is sent to a fork, where it is a number."""

    def __init__(self, number):
        self.number = number

    def __reduce__(self):
        return _received, (reduction.DupFd(self.number),)


def _received(sent):
    return sent.detach()


class Forked(subprocess.Popen):
    """A forked interpreter that runs code.

    Args:
        args: The code, and the arguments of the process.
        finalize: True to end exactly as an interpreter does, which clears the modules of torch.
        **options: Those of ``subprocess.Popen`` for pipes, ``cwd``, ``env`` and ``pass_fds``.

    """

    def __init__(self, args, finalize=False, **options):
        self.finalize = finalize
        super().__init__([*map(str, args)], **options)

    def _execute_child(self, args, *options):
        """Fork where the base class would start a program."""
        pass_fds, cwd, env = options[3:6]
        theirs_in, ours_in, ours_out, theirs_out, ours_err, theirs_err = options[9:15]
        code, *arguments = args
        given = {0: theirs_in, 1: theirs_out, 2: theirs_err, **{fd: fd for fd in pass_fds}}
        given = {at: _Descriptor(at if fd == -1 else fd) for at, fd in given.items()}
        folder, env = os.fspath(cwd or os.getcwd()), dict(env or os.environ)
        asked = {"code": code, "arguments": arguments, "folder": folder, "environment": env}
        asked |= {"descriptors": given, "finalize": self.finalize}
        _server()
        context = multiprocessing.get_context("forkserver")
        self.fork = context.Process(target=_become, kwargs=asked, daemon=True)
        self.fork.start()
        self.pid, self._child_created = self.fork.pid, True
        self._close_pipe_fds(theirs_in, ours_in, ours_out, theirs_out, ours_err, theirs_err)

    @property
    def stopped(self):
        """Whether a signal has stopped it, until another lets it go on."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        return False

    def close(self):
        """End it, if it has not ended, and close its pipes."""
        self.kill()
        with self:
            pass

    def _internal_poll(self, *_, **__):
        if self.returncode is None:
            self.returncode = self.fork.exitcode
        return self.returncode

    def _wait(self, timeout):
        if self.returncode is None:
            self.fork.join(timeout)
        if self._internal_poll() is None and timeout is not None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode


def _become(*, code, arguments, folder, environment, descriptors, finalize):
    """Be an interpreter that was started to run code."""
    multiprocessing.current_process().daemon = False
    multiprocessing.set_start_method(None, force=True)
    # First move them out of the way of the numbers that they will have.
    apart = {at: fcntl.fcntl(fd, fcntl.F_DUPFD, 500) for at, fd in descriptors.items()}
    for fd in descriptors.values():
        os.close(fd)
    for at, fd in apart.items():
        os.dup2(fd, at)
        os.close(fd)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # multiprocessing has closed it
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    faults.read()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tests = os.path.dirname(FOLDER)
    sys.path[:] = ["", *(path for path in sys.path if not path.startswith(tests))]
    sys.argv = ["-c", *arguments]
    sys.modules["tensorizer._C"].forget_environment()
    # That of the server is frozen: the garbage collector would never look through it.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    _run_to_the_end(code, vars(main), finalize)


def _run_to_the_end(code, names, finalize):
    """Run code, and end the process as its interpreter would.

    Unless ``finalize``, modules are not cleared, and the operators of torch are not removed, which
    takes 50 ms.
    """
    status = 1
    try:
        exec(compile(code, "<string>", "exec"), names)
        status = 0
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            status = (error.code or 0) & 0xFF
        else:
            print(error.code, file=sys.stderr)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            status = -signal.SIGINT
        # The traceback begins in the code, and not in this function.
        error.__traceback__ = error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()
    if not finalize:
        for finalizer in sys.modules["frozen"].OPERATORS_OF_TORCH:
            finalizer.atexit = False
    atexit._run_exitfuncs()
    for name in names.keys() - {"__builtins__"}:
        del names[name]
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            status = status or 120
    if finalize and status >= 0:
        ctypes.pythonapi.Py_Exit(status)
    if status < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


def start_python(code, *args, **options):
    """Start code in a forked interpreter; ``Forked`` has the options."""
    assert takes(options.get("env") or os.environ), "it needs a fresh interpreter"
    return Forked([code, *args], **options)


def run_python(code, *args, fresh=False, timeout=120, **options):
    """Run code to its end in an interpreter of its own, as ``subprocess.run`` does; return that.

    It is a fresh one if ``fresh``, or if variables differ that are read early.
    """
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    given = options.pop("input", None)
    if given is not None:
        options["stdin"] = subprocess.PIPE
    if fresh or not takes(options.get("env") or os.environ):
        options.pop("finalize", None)
        process = subprocess.Popen([sys.executable, "-c", code, *map(str, args)], **options)
    else:
        process = Forked([code, *args], **options)
    with process:
        try:
            output, errors = process.communicate(given, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(code, process.returncode, output, errors)
