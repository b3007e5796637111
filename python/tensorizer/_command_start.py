"""Runs ``python -m tensorizer``, which is the command ``tensorizer``, before torch is imported.

The package is imported before its ``__main__`` runs, but the command imports it only when it needs
it. In other programs this module does nothing.
"""

import sys

# ``-m`` is there only while the interpreter looks up the module that it names.
_given = sys.orig_argv if (getattr(sys, "argv", None) or [""])[0] == "-m" else []
if "-m" in _given and _given[_given.index("-m") + 1 :][:1] == ["tensorizer"]:
    from tensorizer_cli.main import main

    del sys.modules[__package__]
    sys.exit(main())
