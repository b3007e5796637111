"""The check of numbers that are arguments."""

from __future__ import annotations

from typing import Any


def check_number(
    name: str, value: Any, *, least: int = 1, wanted: str = "", needed: bool = False, hint: str = ""
) -> None:
    """Refuse an argument that is not a whole number of a range.

    Args:
        name: The public name of the argument.
        value: Its value.
        least: The least value. The largest has 63 bits.
        wanted: The range, in words; empty for "at least" the least value.
        needed: True if it cannot be None.
        hint: What to do, after a colon.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is out of range.

    """
    if value is None and not needed:
        return
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        kind = "an int" if needed else "an int or None"
        raise TypeError(f"{name} must be {kind}, not {value!r}{hint}")
    if not least <= value < 1 << 63:
        raise ValueError(f"{name} must be {wanted or f'at least {least}'}, not {value}")
