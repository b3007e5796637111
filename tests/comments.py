"""Count comments that should be rewritten; their number may only fall.

    python tests/comments.py

A comment says what a thing is or why it is so. One that begins with a question word seldom does,
and a person in it is mostly a caller, a process or a server, which has a name. Comments are lines
that have nothing else, and the docstrings of Python; those of one kind that follow each other are
one block. Ends with 1 if there are more than `MOST`, or fewer: then that is to be lowered.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Blocks that begin with a question word, and lines with a person.
MOST = (14, 3)
MARKS = {".rs": "//[/!]?", ".cpp": "//[/!]?", ".h": "//[/!]?", ".py": "#:?", ".sh": "#"}
QUESTION = re.compile(r"(?i)(who|whether|what|how|where)\b")
PERSON = re.compile(r"(?i)\b(who|nobody|somebody|whoever|anybody)\b")


def docstrings(text):
    """Yield the docstrings of Python, each as its lines."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found = ast.get_docstring(node)
            if found:
                yield found.splitlines()


def blocks(text, ending):
    """Return the blocks of comments in a source, each as its lines without their marks."""
    found = list(docstrings(text)) if ending == ".py" else []
    comment, before = re.compile(rf"\s*({MARKS[ending]})(?:\s|$)(.*)"), None
    for line in text.splitlines():
        mark, words = match.groups() if (match := comment.match(line)) else (None, "")
        if mark is not None and mark == before:
            found[-1].append(words.strip())
        elif mark is not None:
            found.append([words.strip()])
        before = mark
    return found


def counted(sources):
    """Return the blocks with a question word and the lines with a person, of (text, ending)."""
    of_all = [block for text, ending in sources for block in blocks(text, ending)]
    questions = sum(bool(QUESTION.match(block[0])) for block in of_all)
    return questions, sum(bool(PERSON.search(line)) for block in of_all for line in block)


def main():
    """Count in all files that git knows."""
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = [ROOT / name for name in names.stdout.splitlines()]
    sources = [(path.read_text(), path.suffix) for path in paths if path.suffix in MARKS]
    found = counted(sources)
    if found != MOST:
        more = any(now > most for now, most in zip(found, MOST, strict=True))
        asks = "say what is, or why" if more else f"write MOST = {found} into tests/comments.py"
        sys.exit(
            f"{found[0]} comments begin with a question word (allowed: {MOST[0]}), "
            f"{found[1]} lines have a person (allowed: {MOST[1]}): {asks}"
        )


if __name__ == "__main__":
    main()
