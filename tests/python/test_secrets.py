"""No test shows a secret: all have the mark of ``secret_words.py``, and are searched for."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import secret_words
from conftest import ROOT

TESTS = Path(__file__).parent
#: Names whose values are secrets.
NAMES = re.compile(r"(?i)secret|password|(?<!max_)token|passphrase|account_?key|bearer|sas\b")
IN_ADDRESSES = re.compile(r"://[^/\s\"'{}]*:(?!\*\*\*@)[^/@\s\"'{}]+@")
#: Names and texts that look like secrets and are none.
OTHERS = {
    "token_type", "unk_token", "special_tokens_map_file",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN", "HF_TOKEN_PATH",
    "tokenizer.json", "tokenizer_config.json",
    # The passphrase of an example, which is public.
    "correct horse battery staple",
}  # fmt: skip


def named(node: ast.AST) -> list[tuple[object, ast.AST]]:
    """Return the values of a call or a dictionary with their names."""
    if isinstance(node, ast.Dict):
        keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
        return list(zip(keys, node.values, strict=True))
    if not isinstance(node, ast.Call):
        return []
    found: list[tuple[object, ast.AST]] = [(one.arg, one.value) for one in node.keywords]
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if method == "setenv" and isinstance(node.args[0], ast.Constant):
        found.append((node.args[0].value, node.args[1]))
    if method == "from_string" and node.args:
        found.append(("passphrase", node.args[0]))
    return found


def unmarked(path: Path) -> list[str]:
    """Return the secrets of a file of tests that have no mark."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        texts = [(name, value.value) for name, value in named(node)
                 if isinstance(value, ast.Constant) and NAMES.search(str(name))]  # fmt: skip
        if isinstance(node, ast.Constant) and IN_ADDRESSES.search(str(node.value)):
            texts.append(("an address", node.value))
        for name, text in texts:
            secret = isinstance(text, (str, bytes)) and text and not secret_words.shown_in(text)
            if secret and not {name, text} & OTHERS:
                found.append(f"{path.name}:{node.lineno}: {name}: {text!r}")
    return found


def test_secrets_have_the_mark(tmp_path):
    """Secrets are recognized by the names that they are passed with."""
    files = sorted([*TESTS.rglob("*.py")])
    assert len(files) > 100
    assert [line for path in files for line in unmarked(path)] == []
    bad = tmp_path / "bad.py"
    bad.write_text("f(password='x', AWS_SECRET_ACCESS_KEY='')\nd = {'token': 'y'}\n"
                   "m.setenv('HF_TOKEN', 'z')\nurl = 'http://me:x' '@host'\n")  # fmt: skip
    assert len(unmarked(bad)) == 4


#: Tests that show a secret, each somewhere else or in another form.
SHOWING = """
import base64, logging, os, subprocess, sys, warnings
import pytest
from secret_words import SECRET, GOLDEN_KEY, key

def test_printed():
    print("it is", SECRET)

def test_written_to_a_descriptor():
    os.write(2, SECRET.encode())

def test_logged():
    logging.getLogger("tensorizer").warning("with %s", SECRET)

def test_of_an_expected_error():
    with pytest.raises(ValueError):
        raise ValueError(SECRET)

def test_of_what_an_error_comes_from():
    with pytest.raises(ValueError):
        try:
            raise KeyError(SECRET)
        except KeyError:
            raise ValueError("that")

def test_of_a_program():
    subprocess.run([sys.executable, "-c", "print(input())"], input=SECRET, capture_output=True,
                   text=True)

def test_of_a_program_that_writes_to_the_same_descriptor():
    subprocess.run([sys.executable, "-c", "print(input())"], input=SECRET.encode())

def test_in_base64():
    print("Authorization: Basic", base64.b64encode(f"a:{SECRET}".encode()).decode())

def test_in_hex():
    print(key().hex())

def test_as_numbers():
    print(list(key()))

def test_of_golden_files():
    print(repr(GOLDEN_KEY))

def test_warned_of():
    warnings.warn(SECRET)

@pytest.fixture
def after():
    yield
    print(SECRET)

def test_that_ends(after):
    pass
"""
SILENT = """
import pytest
from secret_words import SECRET

def test_silent():
    assert SECRET
    print("nothing")

@pytest.mark.shows_secrets("a test of these")
def test_that_may():
    print(SECRET)
"""
HOOKS = (TESTS / "conftest.py").read_text().split("from secret_search import (")[1].split(")\n")[0]


def run(tmp_path: Path, code: str) -> subprocess.CompletedProcess:
    (tmp_path / "conftest.py").write_text(f"from secret_search import ({HOOKS})\n")
    (tmp_path / "test_it.py").write_text(code)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-p", "no:xdist",
         "--rootdir", tmp_path, tmp_path],
        env={"PYTHONPATH": f"{TESTS}:{ROOT / 'python'}", "PATH": "/usr/bin:/bin"},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.shows_secrets("of tests that show them")
def test_a_test_that_shows_a_secret_fails(tmp_path):
    done = run(tmp_path, SHOWING)
    names = set(re.findall(r"def (test_\w+)", SHOWING))
    failed = set(re.findall(r"(?:FAILED|ERROR) test_it\.py::(\w+)", done.stdout))
    assert names - failed == {"test_warned_of"}, done.stdout + done.stderr
    assert "a warning of test_it.py::test_warned_of" in done.stdout
    assert "an error, KeyError: …'secret-hu5hw0rd'" in done.stdout


@pytest.mark.shows_secrets("of a test that may")
def test_a_test_that_shows_no_secret_passes(tmp_path):
    done = run(tmp_path, SILENT)
    assert done.returncode == 0, done.stdout + done.stderr
    # pytest prints a warning when all tests have ended.
    warns = "import warnings\nimport secret_words\n"
    warns += "def test_it():\n    warnings.warn(secret_words.SECRET)\n"
    assert run(tmp_path, warns).returncode == 1
