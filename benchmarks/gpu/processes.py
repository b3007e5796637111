"""Processes with a limit in time, and why they ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Ended:
    """The end of a process: its exit code, seconds and output."""

    code: int
    seconds: float
    out: str
    error: str
    #: True if it was killed at its time limit.
    timed_out: bool

    def why(self) -> str:
        """Return how it ended, and its last words."""
        words = self.error.strip() or self.out.strip()
        # The place of a crash comes before a list of all modules.
        crash = words.find("Fatal Python error")
        words = words[-600:] if crash < 0 else words[crash : crash + 1500]
        if self.timed_out:
            return f"it did not end within {self.seconds:.0f} s; {words}"
        if self.code < 0:
            return f"it was ended by {signal.Signals(-self.code).name}; {words}"
        return f"it ended with {self.code}: {words}"


def _start_process_group() -> None:
    """Start a process group, and have the kernel kill this process when its parent ends."""
    os.setpgid(0, 0)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run(command: list[str], env: dict[str, str], limit: float, cwd: str | None = None) -> Ended:
    """Run a command, and kill it with all that it has started after so many seconds."""
    began = time.monotonic()
    timed_out = False
    # Files, not pipes: a process that the command leaves running would keep a pipe open.
    text = {"mode": "w+", "errors": "replace"}
    with tempfile.TemporaryFile(**text) as out, tempfile.TemporaryFile(**text) as error:
        # This program has one thread.
        process = subprocess.Popen(
            command,
            env=env,
            cwd=cwd,
            stdout=out,
            stderr=error,
            preexec_fn=_start_process_group,  # noqa: PLW1509
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        error.seek(0)
        took = time.monotonic() - began
        return Ended(process.returncode, took, out.read(), error.read(), timed_out)
