"""Rules for source files: the imports that are allowed, and the length of files.

Read as text, so that nothing has to be built. clippy has the length of functions.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: The layers of the core, lowest first. A file imports from its own layer and from lower ones.
LAYERS = [
    {"error", "cancel", "environment", "fallible", "memory_limit", "numbers", "stats", "sys"}
    | {"traffic", "cpu_count"},
    {"format"},
    {"codec"},
    {"mem"},
    {"io"},
    {"engine"},
    {"api", "fuzzing"},
    {"lib"},
]
PACKAGE = ROOT / "python/tensorizer"
#: The folders of the Python package, lowest first, and the modules beside them.
FOLDERS = [
    {
        "_build",
        "_calls",
        "_command_start",
        "_errors",
        "_installation_check",
        "_locks",
        "_native",
        "_numbers",
        "_patching",
        "_types",
    },
    {"group", "tensors", "modules", "streams"},
    {"file"},
    {"checkpoints", "distributed", "safetensors", "transformers"},
    {"torch_hooks"},
    {
        "serialization",
        "stream_io",
        "torch_compat",
        "lightning",
        "utils",
        "_NumpyTensor",
        "tensors_pb2",
    },
    {"protobuf"},
    {"__main__"},
]
CRATES = ["src", "csrc", "python/src"]
MOST_LINES = 450
TESTS_AT_THE_END = re.compile(r"(?m)^#\[cfg\((?:all\()?test.*\n(?:#.*\n)*mod \w+ \{")


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of files each of which reaches each other one."""
    reached: dict[str, set[str]] = {}
    for start in imports:
        found, left = set(), [start]
        while left:
            new = imports.get(left.pop(), set()) - found
            found |= new
            left += new
        reached[start] = found
    groups = {
        frozenset(other for other in reached[one] if one in reached[other])
        for one in imports
        if one in reached[one]
    }
    return sorted(sorted(group) for group in groups)


def layer(module: str) -> int:
    """Return the number of the layer that a file or folder of the core belongs to."""
    return next(number for number, names in enumerate(LAYERS) if module in names)


def test_no_import_of_a_higher_layer():
    """Tests at the end of a file may import from anywhere."""
    wrong, found = [], 0
    for file in sorted((ROOT / "src").rglob("*.rs")):
        first, *others = file.relative_to(ROOT / "src").with_suffix("").parts
        if {"tests", "models", "modelled"} & set(others):
            continue
        text, *_ = re.split(TESTS_AT_THE_END, file.read_text())
        for line in text.splitlines():
            for needed in re.findall(r"\bcrate::([a-z]\w*)", line.partition("//")[0]):
                found += 1
                if layer(needed) > layer(first):
                    wrong.append(f"{file.relative_to(ROOT)} imports {needed}")
    assert found > 500, "the imports were not understood"
    assert wrong == []


def test_no_circle_of_rust_folders():
    """Siblings of one folder import each other in one direction only."""
    imports: dict[str, set[str]] = {}
    for file in (ROOT / "src").rglob("*.rs"):
        first, *others = file.relative_to(ROOT / "src").with_suffix("").parts
        if not others or {"tests", "models", "modelled", "mod"} & set(others):
            continue
        text, *_ = re.split(TESTS_AT_THE_END, file.read_text())
        text = re.sub(r"//.*", "", text)
        for needed in re.findall(rf"\bcrate::{first}::([a-z]\w*)::", text):
            imports.setdefault(f"{first}/{others[0]}", set()).add(f"{first}/{needed}")
    for own, needed in imports.items():
        needed.discard(own)
    assert sum(map(len, imports.values())) > 30, "the imports were not understood"
    assert circles(imports) == []


def python_imports(file: Path) -> Iterator[str]:
    """Yield what a module of the package imports when it is imported itself, from the root on."""
    package = file.relative_to(PACKAGE).parent.parts
    left: list[ast.stmt] = list(ast.parse(file.read_text()).body)
    while left:
        node = left.pop()
        if isinstance(node, ast.ImportFrom) and node.level:
            above = package[: len(package) + 1 - node.level]
            named = tuple(node.module.split(".")) if node.module else ()
            yield "/".join((*above, *named))
            yield from ("/".join((*above, *named, alias.name)) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            left += node.body + node.orelse
        elif isinstance(node, (ast.Try, ast.With)):
            left += node.body


@pytest.fixture(scope="module")
def package() -> dict[str, set[str]]:
    """The modules of the Python package by path, each with those that it imports."""
    files = {
        str(file.relative_to(PACKAGE).with_suffix("")): file
        for file in PACKAGE.rglob("*.py")
        if file.name != "__init__.py"
    }
    imports = {name: set(python_imports(file)) & set(files) for name, file in files.items()}
    assert sum(map(len, imports.values())) > len(imports), "the imports were not understood"
    return imports


def test_no_circle_of_python_files(package):
    assert circles(package) == []


def test_no_import_of_a_higher_folder(package):
    def height(name: str) -> int:
        first = name.partition("/")[0]
        return next(number for number, names in enumerate(FOLDERS) if first in names)

    wrong = [
        f"{name} imports {needed}"
        for name, imports in package.items()
        for needed in imports
        if height(needed) > height(name)
    ]
    assert sorted(wrong) == []


def test_no_circle_in_the_command():
    files = {file.stem: file for file in (ROOT / "python/tensorizer_cli").glob("*.py")}
    named = re.compile(r"(?m)^(?:    )?from \.(\w*) import (.*)$")
    imports = {
        name: {
            part
            for found in named.findall(file.read_text())
            for part in re.findall(r"\w+", found[0] or found[1])
        }
        & set(files)
        for name, file in files.items()
    }
    assert sum(map(len, imports.values())) > len(imports), "the imports were not understood"
    assert circles(imports) == []


def test_public_modules_only_give_on():
    names = ["serialization", "stream_io", "torch_compat", "utils", "protobuf", "tensors_pb2"]
    for name in [*names, "_NumpyTensor"]:
        body = ast.parse((PACKAGE / f"{name}.py").read_text()).body
        assert not [node for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]


def rust_files() -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the lines of each file."""
    for folder in CRATES:
        for file in sorted((ROOT / folder).rglob("*.rs")):
            yield str(file.relative_to(ROOT)), file.read_text().splitlines()


def test_files_are_short():
    long = {name for name, lines in rust_files() if len(lines) > MOST_LINES}
    assert long == set(), f"more than {MOST_LINES} lines"


def test_secrets_are_compared_in_constant_time():
    """Types of secrets have one comparison, and it is libsodium's."""
    folder = ROOT / "src/codec/crypt"
    assert "ffi::sodium_memcmp(" in (folder / "sodium.rs").read_text()
    compared = []
    for file in sorted(folder.glob("*.rs")):
        text = re.sub(r"//.*", "", file.read_text())
        for head, name, body in re.findall(r"(?ms)^(impl PartialEq for) (\w+)(.*?)^}", text):
            assert "sodium::same(" in body and "==" not in body, (file.name, head)
            compared.append(name)
        # Tags are compared inside libsodium, or by these types.
        wrong = re.search(r"(?:tag|mac|digest|key|same)\w*(?:\([^()]*\))? *[!=]=", text)
        assert not wrong, (file.name, wrong)
    assert sorted(compared) == ["HeaderTag", "Key"]
    for name in ("key.rs", "manifest.rs"):
        text = (folder / name).read_text()
        assert not re.search(r"derive\([^)]*(?:PartialEq|Ord|Hash)", text), name


def test_few_types_share_a_name():
    """A name may have two types, such as one of the core and its class for Python."""
    definition = re.compile(r"(?:pub(?:\([a-z: ]+\))? )?(?:struct|enum|trait|type|union) (\w+)")
    found: dict[str, list[str]] = {}
    for name, lines in rust_files():
        for line in lines:
            # Indented ones are associated types, or types of one function.
            if match := definition.match(line):
                found.setdefault(match[1], []).append(name)
    assert len(found) > 400
    assert {name: files for name, files in found.items() if len(files) > 2} == {}
