"""A process that the server of ``forking.py`` has forked: how others see it, and how it ends."""

import atexit
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time


class Process:
    """A fork of another process, with the interface of ``subprocess.Popen``."""

    def __init__(self, connection, args, text):
        self.connection, self.args, self.text = connection, args, text
        self.stdin = self.stdout = self.stderr = self.pid = self.returncode = None
        #: It has been stopped, by SIGSTOP.
        self.stopped = False
        self.said = b""

    def connect(self, stack, *asked):
        """Return what its first three descriptors shall be; a stack closes those that it has."""
        found = []
        for name, file in zip(("stdin", "stdout", "stderr"), asked, strict=True):
            if file == subprocess.PIPE:
                theirs, ours = os.pipe() if name == "stdin" else os.pipe()[::-1]
                stack.callback(os.close, theirs)
                mode = ("w" if name == "stdin" else "r") + ("" if self.text else "b")
                setattr(self, name, os.fdopen(ours, mode))
                found.append(theirs)
            elif file is None:
                found.append(len(found))
            elif file == subprocess.STDOUT:
                found.append(found[1])
            elif file == subprocess.DEVNULL:
                nothing = os.open(os.devnull, os.O_RDWR)
                stack.callback(os.close, nothing)
                found.append(nothing)
            else:
                found.append(file if isinstance(file, int) else file.fileno())
        return found

    def begun(self):
        self.pid = int(self.line(60).removeprefix("pid "))

    def line(self, timeout):
        """Return the next line of the server; None if there is none in time."""
        until = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self.said:
            # Not 0, which would not be a time-out.
            left = None if until is None else max(until - time.monotonic(), 1e-6)
            self.connection.settimeout(left)
            try:
                more = self.connection.recv(1 << 10)
            except TimeoutError:
                return None
            assert more, "the server that forks has ended"
            self.said += more
        found, _, self.said = self.said.partition(b"\n")
        return found.decode()

    def poll(self):
        return self.ended(0)

    def ended(self, timeout):
        """Return how it has ended; None if it has not in time."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if until is None else max(until - time.monotonic(), 0)
            line = self.line(left)
            if line is None:
                break
            what, number = line.split()
            if what == "stopped":
                self.stopped = True
            else:
                self.returncode = int(number)
                self.connection.close()
        return self.returncode

    def wait(self, timeout=None):
        if self.ended(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            # It may have ended already, and the server's message be on its way.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self, input=None, timeout=None):
        """Give it an input, read its outputs, and wait for its end."""
        found = [None, None]

        def read(number, file):
            found[number] = file.read()
            file.close()

        readers = [
            threading.Thread(target=read, args=(number, file), daemon=True)
            for number, file in enumerate((self.stdout, self.stderr))
            if file is not None and not file.closed
        ]
        for reader in readers:
            reader.start()
        if self.stdin is not None and not self.stdin.closed:
            try:
                self.stdin.write(input or ("" if self.text else b""))
                self.stdin.close()
            except BrokenPipeError:
                pass
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return tuple(found)

    def close(self):
        """End it, if it has not ended, and close its pipes."""
        self.kill()
        self.wait(60)
        for file in (self.stdin, self.stdout, self.stderr):
            if file is not None:
                file.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for file in (self.stdin, self.stdout, self.stderr):
            if file is not None:
                file.close()
        self.wait()


def end(code, names):
    """Run code, and end the process as its interpreter would, but for modules, which stay.

    To clear those of torch takes half a second of a processor.
    """
    status = 1
    try:
        exec(code, names)
        status = 0
    except SystemExit as error:
        status = status_of(error)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            status = -signal.SIGINT
        # The traceback begins in the code, and not in this function.
        error.__traceback__ = error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()
    atexit._run_exitfuncs()
    for name in names.keys() - {"__builtins__"}:
        del names[name]
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            status = status or 120
    if status < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


def status_of(error):
    """Return the status of a process that SystemExit ends."""
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1
