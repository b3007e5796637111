"""Find a mutant in a tree that may have changed since it was drawn, and put it in."""

import re
from pathlib import Path
from typing import Any, NamedTuple

from sites import closing, rust_code

Mutant = dict[str, Any]
#: In a build that has all mutants, the variable of the environment that chooses one.
VARIABLE = "MUTANT"
SWITCH = f"""
#[doc(hidden)]
pub mod mutant {{
    static CHOSEN: std::sync::LazyLock<u32> = std::sync::LazyLock::new(|| {{
        std::env::var("{VARIABLE}").ok().and_then(|text| text.parse().ok()).unwrap_or(0)
    }});
    pub fn is(number: u32) -> bool {{
        *CHOSEN == number
    }}
}}
"""
RUST_FUNCTION = re.compile(r"(const )?(?:unsafe )?\bfn \w+")


class Place(NamedTuple):
    """A file, and where in its text a mutant begins."""

    path: Path
    start: int


def indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def found_in(text: str, mutant: Mutant) -> int | None:
    """Return where a mutant begins in a text: by its line and the lines around it, or None.

    Of the lines around it as many as possible have to be the same, but indentation may differ.
    """
    lines = text.splitlines(keepends=True)
    bare = [line.strip() for line in lines]
    context, of = [line.strip() for line in mutant["context"]], mutant["of"]
    for around in (len(context), 1, 0):
        wanted = context[max(of - around, 0) : of + around + 1]
        at = [first for first in range(len(bare)) if bare[first : first + len(wanted)] == wanted]
        if at and (len(at) == 1 or len(wanted) == len(context)):
            # Of several such lines, those nearest to the old place.
            nearest = min(at, key=lambda first: abs(first + of + 1 - mutant["line"]))
            line = nearest + of - max(of - around, 0)
            more = indentation(lines[line]) - indentation(mutant["context"][of])
            start = sum(map(len, lines[:line])) + mutant["column"] + more
            return start if text.startswith(mutant["before"], start) else None
    return None


def locate(tree: Path, mutant: Mutant) -> Place | None:
    """Return where a mutant is in a tree: in its file, or in another that its lines moved to."""
    own = tree / mutant["file"]
    top = tree / ("python/tensorizer" if own.suffix == ".py" else "src")
    others = [path for path in sorted(top.rglob(f"*{own.suffix}")) if path != own]
    for path in [own, *others]:
        if path.exists() and (start := found_in(path.read_text(), mutant)) is not None:
            return Place(path, start)
    return None


def mutated(text: str, start: int, mutant: Mutant) -> str:
    """Return a text with a mutant in it."""
    return text[:start] + str(mutant["after"]) + text[start + len(mutant["before"]) :]


def function_around(code: str, start: int) -> tuple[int, int] | None:
    """Return the body of the innermost function around a place, None if it has to be constant."""
    innermost: tuple[int, int] | None = None
    without_arrays = re.sub(r"\[[^\]\n]*\]", lambda found: " " * len(found[0]), code)
    for found in RUST_FUNCTION.finditer(code, 0, start + 1):
        opening = re.compile(r"[{;]").search(without_arrays, found.end())
        if opening and opening[0] == "{":
            body = (opening.start(), closing(code, opening.start()))
            if body[0] <= start < body[1]:
                innermost = None if found[1] else body
    return innermost


def switched(text: str, places: list[tuple[int, Mutant]]) -> tuple[str, dict[int, tuple[int, int]]]:
    """Return a Rust file in which `MUTANT=number` chooses a mutant, and the lines of each.

    Each function has its body once more for each of its mutants. A mutant outside of functions,
    or in one within another that has some too, is left out.
    """
    code = rust_code(text)
    bodies: dict[tuple[int, int], list[tuple[int, Mutant]]] = {}
    for at, mutant in places:
        if around := function_around(code, at):
            bodies.setdefault(around, []).append((at, mutant))
    lines: dict[int, tuple[int, int]] = {}
    last = 0
    result = ""
    for (opening, end), inside in sorted(bodies.items()):
        if opening < last:
            continue
        result += text[last:opening] + "{ "
        for start, mutant in inside:
            body = mutated(text[opening:end], start - opening, mutant)
            first = result.count("\n") + 1
            result += f"if crate::mutant::is({mutant['number']}) {body} else "
            lines[mutant["number"]] = (first, result.count("\n") + 1)
        result += text[opening:end] + " }"
        last = end
    return result + text[last:], lines
