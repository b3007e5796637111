"""Runs ``python -m tensorizer``, which is the command ``tensorizer``, before torch is imported.

The package is imported before its ``__main__`` runs, but the command imports it only when it needs
it. In other programs this module does nothing.
"""

import sys


def _is_command() -> bool:
    if (getattr(sys, "argv", None) or [""])[0] != "-m":
        return False
    # True only while the interpreter looks up the module that ``-m`` names.
    given = sys.orig_argv
    return "-m" in given and given[given.index("-m") + 1 :][:1] == ["tensorizer"]


if _is_command():
    from tensorizer_cli.main import main

    del sys.modules[__package__]
    sys.exit(main())
