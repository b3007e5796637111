"""All files and definitions that CONTRIBUTING.md names are there."""

import re

from conftest import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
PATH = re.compile(r"`((?:src|csrc|python|tests)/[\w./]+|[A-Z]+\.md|\.ci/run)`")


def test_files_that_are_named_are_there():
    paths = PATH.findall(TEXT)
    assert len(paths) > 50
    missing = sorted({path for path in paths if not (ROOT / path).exists()})
    assert missing == []


def test_each_station_of_a_byte_is_in_its_file():
    stations = re.findall(r"`(\w+)` in (`[\w./]+/[\w./]+`(?:, `[\w./]+`)*)", TEXT)
    assert len(stations) > 25
    #: A function or type in Rust or Python, in C++, or a list of a test.
    words = r"\b(?:fn|def|struct|enum|trait|class) "
    definition = rf"(?m)(?:{words}|^[\w:<>]+ |^){{name}}(?:\(|<| =| \{{{{|:)"
    missing = [
        f"{name} in {path}"
        for name, paths in stations
        for path in PATH.findall(paths)
        if not re.search(definition.format(name=name), (ROOT / path).read_text())
    ]
    assert missing == []


def test_the_names_of_the_core_are_in_it():
    names = set(re.findall(r"`(?:impl )?(?:\w+::)?([A-Z]\w+|[a-z_]+)(?:::\w+)?`", TEXT))
    words = {
        word
        for folder in ("src", "csrc", "python/src", "python/tensorizer", "tests/python")
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in {".rs", ".cpp", ".py"} and path.name != "test_contributing.py"
        for word in re.findall(r"\w+", path.read_text())
    }
    assert len(names) > 40
    assert sorted(names - words) == []


def test_commands_that_are_named_are_there():
    targets = set(re.findall(r"(?m)^([a-z][\w-]*):", (ROOT / "Makefile").read_text()))
    named = set(re.findall(r"`make ([\w-]+)", TEXT))
    assert len(named) > 15
    assert named - targets == set()
    documented = named | {"test", "clean", "docs-serve", "docs"}
    assert targets - documented == set(), "a command that CONTRIBUTING does not name"


def test_files_that_tests_share_are_there():
    """Those without ``test_`` before their names."""
    layout = TEXT.partition("## Tests")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+\.py)`", layout))
    assert len(named) > 10
    folders = [ROOT / "tests" / name for name in ("python", "trust")]
    there = {path.name for folder in folders for path in folder.glob("*.py")}
    assert sorted(named - there) == []
