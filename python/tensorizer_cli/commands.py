"""What runs each command."""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Callable

from tensorizer import CryptographyError, HashMismatchError

from . import cache, copy, diff, info, load, ls, verify

#: Each returns the status of the process.
COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "ls": ls.run,
    "info": info.run,
    "cache": cache.run,
    "load": load.run,
    "verify": verify.run,
    "diff": diff.run,
    "cp": copy.cp,
    "encrypt": copy.encrypt,
    "decrypt": copy.decrypt,
    "rekey": copy.rekey,
}
#: What files, servers and machines are the reason of; anything else is a mistake in the program.
ERRORS = (
    OSError,
    ValueError,
    RuntimeError,
    MemoryError,
    ImportError,
    CryptographyError,
    HashMismatchError,
    pickle.UnpicklingError,
)
