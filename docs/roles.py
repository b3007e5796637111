"""Docstrings name other things as ``:class:`load```: here these become links, and ``::`` a colon."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`([\w.]+)`")
#: Where names without a path are looked for, after the object's own class and module.
PUBLIC = ("tensorizer", "tensorizer.torch_compat", "tensorizer.safetensors", "tensorizer.stream_io")


class Roles(griffe.Extension):
    """Rewrites docstrings before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe with everything that it has read."""
        if obj.docstring is None:
            return
        text = ROLE.sub(lambda found: f"`{found[1]}`", obj.docstring.value)
        obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)
