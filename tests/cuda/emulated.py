"""What tests do with the emulated CUDA: settings, statistics, and programs that run on it."""

import ctypes
import os
import subprocess
import sys
import textwrap
from pathlib import Path

_library = ctypes.CDLL(None)
#: Whether this process has it.
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
_fail = _bind("fake_cuda_fail", None, ctypes.c_char_p)
_pause = _bind("fake_cuda_pause", None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
_delay = _bind("fake_cuda_delay", None, ctypes.c_uint64)
_launch = _bind("cudaLaunchHostFunc", ctypes.c_int, ctypes.c_void_p, _Function, ctypes.c_void_p)
heal = _bind("fake_cuda_heal", None)


def stat(name):
    """Return a number that the emulator keeps, see its README."""
    return _stat(name.encode())


def calls(name):
    """Return how often a function was called since the last `fail`."""
    return _calls(name.encode())


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


def run(code, *args, **env):
    """Run a program in a process of its own, without random pauses unless `env` has some."""
    path = filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
    return subprocess.run(
        [sys.executable, "-c", "import emulated, torch\n" + textwrap.dedent(code), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path), "FAKE_CUDA_DELAY_US": "0"} | env,
    )
