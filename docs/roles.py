"""Docstrings name other things by roles: here these become links, and ``::`` a colon."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`([\w.]+)`")


def meant(name: str, obj: griffe.Object) -> str:
    """Return the path of what an object's docstring calls by this name."""
    if name.startswith("tensorizer."):
        return name
    owner = obj if obj.is_class else obj.parent
    for scope in (owner, obj.module):
        if scope is not None and name in scope.members:
            return f"{scope.path}.{name}"
    return f"tensorizer.{name}"


class Roles(griffe.Extension):
    """Rewrites docstrings before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of whatever griffe has read."""
        if obj.docstring is None:
            return

        def link(found: re.Match[str]) -> str:
            # What is not on the page stays as it is.
            path = meant(found[1], obj)
            return f'<autoref identifier="{path}" optional><code>{found[1]}</code></autoref>'

        text = ROLE.sub(link, obj.docstring.value)
        # Relative to docs/reference/python, where the pages with docstrings are.
        text = re.sub(r"``docs/([\w-]+)/([\w-]+)\.md``", r"[\2](../../\1/\2.md)", text)
        obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)
