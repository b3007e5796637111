"""The count of comments that `make lint` bounds."""

import runpy
from pathlib import Path

counted = runpy.run_path(str(Path(__file__).parents[1] / "comments.py"))["counted"]

PYTHON = '''"""Whether it is one."""

#: What it is
#: for somebody.
NAME = "# who"  # where


def call():
    """Return it.

    Nobody calls this.
    """
'''
RUST = """//! The whole, and whosoever.
/// How it is
// made.
fn call() {} // who
"""


def test_question_words_begin_blocks_and_people_are_in_lines():
    assert counted([(PYTHON, ".py")]) == (2, 2)
    assert counted([(RUST, ".rs")]) == (1, 0)
    assert counted([(PYTHON, ".py"), (RUST, ".rs")]) == (3, 2)
