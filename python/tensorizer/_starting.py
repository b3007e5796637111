"""``python -m tensorizer``: the arguments are parsed before torch is imported, which takes long.

The package is imported before its ``__main__`` can run. In other programs nothing happens here.
"""

import sys


def _is_command() -> bool:
    if (getattr(sys, "argv", None) or [""])[0] != "-m":
        return False
    # The interpreter is looking for the module that it was told to run.
    given = sys.orig_argv
    return "-m" in given and given[given.index("-m") + 1 :][:1] == ["tensorizer"]


if _is_command():
    from tensorizer_cli import start

    start.begin()
