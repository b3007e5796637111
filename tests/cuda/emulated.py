"""Helpers for the emulated CUDA: settings, statistics, and programs that run on it."""

import ctypes
import os
import signal
import sys
import textwrap
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.append(str(FOLDER.parent / "python"))
import processes  # noqa: E402

_library = ctypes.CDLL(None)
#: True if this process runs on the emulated CUDA.
PRESENT = hasattr(_library, "fake_cuda_stat")
_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_functions = []  # that streams may still call


def _bind(name, result, *arguments):
    function = getattr(_library, name, None)
    if function is not None:
        function.restype, function.argtypes = result, arguments
    return function


_stat = _bind("fake_cuda_stat", ctypes.c_uint64, ctypes.c_char_p)
_calls = _bind("fake_cuda_calls", ctypes.c_uint64, ctypes.c_char_p)
_calls_text = _bind("fake_cuda_calls_text", ctypes.c_uint64, ctypes.c_char_p, ctypes.c_uint64)
_bytes = _bind("fake_cuda_bytes", ctypes.c_bool, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_char_p)
_fail = _bind("fake_cuda_fail", None, ctypes.c_char_p)
_pause = _bind("fake_cuda_pause", None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
_delay = _bind("fake_cuda_delay", None, ctypes.c_uint64)
_launch = _bind("cudaLaunchHostFunc", ctypes.c_int, ctypes.c_void_p, _Function, ctypes.c_void_p)
heal = _bind("fake_cuda_heal", None)
reset = _bind("fake_cuda_reset", None)
report_here = _bind("fake_cuda_report_here", None)


def stat(name):
    """Return a number that the emulator keeps, see its README."""
    return _stat(name.encode())


def calls(name):
    """Return how often a function was called since the last `fail` or `reset`."""
    return _calls(name.encode())


def calls_by_name():
    """Return the count of each function that was called since the last `fail` or `reset`."""
    text = ctypes.create_string_buffer(_calls_text(None, 0))
    _calls_text(text, len(text))
    lines = (line.split() for line in text.value.decode().splitlines())
    return {name: int(count) for name, count in lines}


def device_bytes(address, size):
    """Return bytes of device memory as they are now, without a stream."""
    found = ctypes.create_string_buffer(size)
    assert _bytes(address, size, found), "not in one allocation"
    return found.raw


def fail(rules):
    """Have calls fail; `FAKE_CUDA_FAIL` has the same rules."""
    _fail(rules.encode())


def delay(seconds):
    """Set the longest of the usual pauses before operations."""
    _delay(round(seconds * 1e6))


def pause(stream, seconds):
    """Put a pause on a stream."""
    _pause(stream.cuda_stream, stream.device_index, round(seconds * 1e6))


def launch(stream, function):
    """Put a function of the host on a stream."""
    _functions.append(_Function(lambda _: function()))
    assert _launch(stream.cuda_stream, _functions[-1], None) == 0


def run(code, *args, finalize=False, **env):
    """Run a program in a process of its own, without random pauses unless `env` has some.

    It is forked, unless `env` has variables that must be set before torch is imported. If
    `finalize`, or if the emulator is to report, it ends exactly as an interpreter does.
    """
    head = f"import sys\nsys.path.insert(0, {str(FOLDER)!r})\nimport emulated, torch\n"
    head += "emulated.report_here()\n"
    env = os.environ | {"FAKE_CUDA_DELAY_US": "0"} | env
    given = (head + textwrap.dedent(code), *map(str, args))
    ending = {
        "finalize": finalize or "FAKE_CUDA_REPORT" in env,
        "fresh": "PYTORCH_ALLOC_CONF" in env,
    }
    return processes.run_python(*given, timeout=100, env=env, **ending)


def passes(code, **env):
    """Run a program that must succeed and in which the emulator finds nothing wrong."""
    done = run(code, **env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "PROBLEM" not in done.stderr, done.stderr[-2000:]
    return done


def is_found(problem, code, **env):
    """Run a program that the emulator must abort with a problem."""
    done = run(code, **env)
    assert f"FAKE_CUDA PROBLEM: {problem}" in done.stderr, done.stderr[-2000:]
    assert done.returncode == -signal.SIGABRT
