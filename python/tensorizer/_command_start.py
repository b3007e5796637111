"""Parses the arguments of ``python -m tensorizer`` before torch is imported, which takes long.

The package is imported before its ``__main__`` runs. In other programs this module does nothing.
"""

import sys


def _is_command() -> bool:
    if (getattr(sys, "argv", None) or [""])[0] != "-m":
        return False
    # True only while the interpreter looks up the module that ``-m`` names.
    given = sys.orig_argv
    return "-m" in given and given[given.index("-m") + 1 :][:1] == ["tensorizer"]


if _is_command():
    from tensorizer_cli import start

    start.begin()
