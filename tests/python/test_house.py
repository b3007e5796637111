"""Rules for source files: the imports that are allowed, and the length of files and functions.

Read as text, so that nothing has to be built.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: The layers of the core, lowest first. A file imports from its own layer and from lower ones.
LAYERS = [
    {"error", "cancel", "environment", "fallible", "memory_limit", "numbers", "stats", "sys"}
    | {"traffic"},
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
MOST_FUNCTION_LINES = 60
#: Files that are longer, and why.
LONG_FILES: dict[str, str] = {}
#: Functions that are longer, and why.
LONG_FUNCTIONS: dict[str, str] = {}

#: The parts of a Rust path.
Names = tuple[str, ...]


def plain(text: str) -> str:
    """Blank out comments, strings and what is compiled for tests only; lines stay lines."""

    def blank(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", found[0])

    token = r'//[^\n]*|/\*.*?\*/|b?r(#+)".*?"\1|b?c?r?"(?:\\.|[^"\\])*"|b?\'(?:\\.[^\']*|[^\\\'])\''
    text = re.sub(token, blank, text, flags=re.DOTALL)
    for start in [found.start() for found in re.finditer(r"#\[cfg\((?:all\()?test\b", text)]:
        end = end_of_item(text, start)
        text = text[:start] + re.sub(r"[^\n]", " ", text[start:end]) + text[end:]
    return text


def end_of_item(text: str, start: int) -> int:
    """Return the end of an item: behind its ``;``, or behind its last brace."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] in "{([") - (text[at] in "})]")
        if depth == 0 and (text[at] == ";" or text[at] == "}"):
            return at + 1
    return len(text)


def paths_of(tree: str) -> Iterator[tuple[Names, str]]:
    """Yield each path that a ``use`` names, and the name that it gets."""
    tree = tree.strip()
    head, brace, rest = tree.partition("{")
    if brace:
        prefix = tuple(part for part in head.strip().split("::") if part)
        depth, part = 0, ""
        for sign in rest.rstrip().removesuffix("}") + ",":
            depth += (sign == "{") - (sign == "}")
            if sign == "," and depth == 0:
                for path, name in paths_of(part) if part.strip() else ():
                    yield (*prefix, *path), name
                part = ""
            else:
                part += sign
        return
    path, _, name = tree.partition(" as ")
    parts = tuple(path.strip().split("::"))
    if parts[-1] == "self":
        parts = parts[:-1]
        name = name or (parts[-1] if parts else "self")
    yield parts, name.strip() or parts[-1]


@dataclass
class Module:
    """A file of a crate."""

    file: Path
    path: Names
    text: str
    children: set[str] = field(default_factory=set)
    #: Names that it takes from elsewhere, and whether it gives them on.
    uses: list[tuple[Names, str, bool]] = field(default_factory=list)


class Crate:
    """The files of a crate, and what each imports."""

    def __init__(self, folder: str) -> None:
        self.root = ROOT / folder
        self.modules: dict[Names, Module] = {}
        for file in sorted(self.root.rglob("*.rs")):
            path = file.relative_to(self.root).with_suffix("").parts
            path = path[:-1] if path[-1] in {"mod", "lib"} else path
            if file.name not in {"build.rs", "tests.rs", "models.rs", "modelled.rs"}:
                self.modules[path] = Module(file, path, plain(file.read_text()))
        for path, module in self.modules.items():
            module.children = {p[-1] for p in self.modules if p and p[:-1] == path}
            for found in re.finditer(r"(?m)^\s*(pub(?:\([^)]*\))? )?use ([^;]*);", module.text):
                for names, name in paths_of(found[2]):
                    module.uses.append((names, name, found[1] is not None))

    def absolute(self, module: Module, path: Names) -> Names | None:
        """Return a path from the crate's root on; None for those of other crates."""
        at = module.path
        if path[0] == "crate":
            return path[1:]
        if path[0] in module.children:
            return (*at, *path)
        if path[0] not in {"super", "self"}:
            return None
        while path and path[0] in {"super", "self"}:
            at = at[:-1] if path[0] == "super" else at
            path = path[1:]
        return (*at, *path)

    def resolve(self, path: Names, seen: frozenset[Names] = frozenset()) -> Module:
        """Find the file that defines what a path names, through what others give on."""
        module = self.modules[()]
        for at, name in enumerate(path):
            if name in module.children:
                module = self.modules[(*module.path, name)]
                continue
            for target, known_as, _ in module.uses:
                whole = self.absolute(module, target)
                if known_as == name and whole is not None and whole not in seen:
                    return self.resolve((*whole, *path[at + 1 :]), seen | {whole})
            break
        return module

    def imports(self, module: Module) -> list[Module]:
        """Return the files of the crate that a file needs; what it only gives on is no need."""
        body = re.sub(r"(?m)^\s*(?:pub(?:\([^)]*\))? )?use [^;]*;", "", module.text)
        targets = [self.absolute(module, path) for path, _, given in module.uses if not given]
        # Names that are re-exported and used here too.
        targets += [
            self.absolute(module, path)
            for path, name, given in module.uses
            if given and re.search(rf"\b{re.escape(name)}\b", body)
        ]
        starts = "|".join(["crate", "super", "self", *sorted(module.children)])
        for found in re.finditer(rf"(?<![\w:.])(?:{starts})(?:::\w+)+", body):
            targets.append(self.absolute(module, tuple(found[0].split("::"))))
        needed = {self.resolve(target).path for target in targets if target is not None}
        return [self.modules[path] for path in sorted(needed - {module.path})]


@pytest.fixture(scope="module", params=CRATES)
def crate(request: pytest.FixtureRequest) -> Crate:
    """Each crate of this repository."""
    return Crate(request.param)


def layer(module: Module) -> int:
    """Return the number of a file's layer in the core."""
    name = module.path[0] if module.path else "lib"
    return next(number for number, names in enumerate(LAYERS) if name in names)


def test_the_reader_of_imports(tmp_path):
    for name, text in {
        "lib.rs": "mod a;\nmod b;\npub use b::Deep;",
        "a.rs": "use crate::{b::{self as other, Deep}, c::C as D};\nfn f() { other::Deep }",
        "b/mod.rs": "mod deep;\npub use deep::Deep;\n#[cfg(test)]\nmod tests { use crate::c; }",
        "b/deep.rs": '// use crate::a;\npub struct Deep; fn f() { let _ = "crate::a"; super::g() }',
        "c.rs": "pub(crate) fn f() { crate::Deep }\npub struct C;",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    crate = Crate(str(tmp_path))
    found = {
        str(module.file.relative_to(tmp_path)): {
            str(needed.file.relative_to(tmp_path)) for needed in crate.imports(module)
        }
        for module in crate.modules.values()
    }
    assert found == {
        "lib.rs": set(),
        "a.rs": {"b/mod.rs", "b/deep.rs", "c.rs"},
        "b/mod.rs": set(),
        "b/deep.rs": {"b/mod.rs"},
        "c.rs": {"b/deep.rs"},
    }
    assert circles(found) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}}) == [["b", "c"], ["d"]]
    assert siblings(("io", "http"), ("io", "tls", "x")) == (("io", "http"), ("io", "tls"))
    assert siblings(("io", "http"), ("io", "http", "x")) is None


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


def test_no_import_of_a_higher_layer():
    core = Crate("src")
    wrong = [
        f"{module.file.relative_to(ROOT)} imports {needed.file.relative_to(ROOT)}"
        for module in core.modules.values()
        for needed in core.imports(module)
        if layer(needed) > layer(module)
    ]
    assert sorted(wrong) == []


def test_no_circle_of_rust_files(crate):
    imports = {
        str(module.file.relative_to(ROOT)): {
            str(needed.file.relative_to(ROOT)) for needed in crate.imports(module)
        }
        for module in crate.modules.values()
    }
    assert sum(map(len, imports.values())) > len(imports) / 2, "the imports were not understood"
    assert circles(imports) == []


def siblings(one: Names, other: Names) -> tuple[Names, Names] | None:
    """Return two paths up to where they part, as siblings in one folder; None within one module."""
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    if shared in {len(one), len(other)}:
        # A folder's own file, and files below it.
        return None
    return one[: shared + 1], other[: shared + 1]


def test_no_circle_of_rust_folders(crate):
    """Folders import each other in one direction only, on every level."""
    imports: dict[str, set[str]] = {}
    for module in crate.modules.values():
        for needed in crate.imports(module):
            pair = siblings(module.path, needed.path)
            if pair is not None:
                imports.setdefault("/".join(pair[0]), set()).add("/".join(pair[1]))
                imports.setdefault("/".join(pair[1]), set())
    assert len(imports) > 5, "the imports were not understood"
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


def functions(lines: list[str]) -> Iterator[tuple[str, int]]:
    """Yield the name and the number of lines of each function, as rustfmt lays them out."""
    for start, line in enumerate(lines):
        head = re.match(
            r"( *)(?:pub(?:\([^)]*\))? )?(?:(?:const|unsafe|extern \S+) )*fn (\w+)", line
        )
        if not head:
            continue
        for end in range(start, len(lines)):
            if lines[end].startswith(head[1] + "}") or (end == start and line.endswith("}")):
                yield head[2], end - start + 1
                break
            if lines[end].endswith(";") and not lines[end].startswith(head[1] + " "):
                break


def test_secrets_are_compared_in_constant_time():
    """Types of secrets have one comparison, and it is libsodium's."""
    folder = ROOT / "src/codec/crypt"
    door = (folder / "sodium.rs").read_text()
    same = door[door.index("pub fn same(") :]
    assert "ffi::sodium_memcmp(" in same[: end_of_item(same, 0)]
    compared = []
    for file in sorted(folder.glob("*.rs")):
        text = plain(file.read_text())
        for start in [found.start() for found in re.finditer(r"impl PartialEq for", text)]:
            body = text[start : end_of_item(text, start)]
            assert "sodium::same(" in body and "==" not in body, file.name
            compared += re.findall(r"for (\w+)", body)
        # Tags are compared inside libsodium, or by these types.
        assert not re.search(r"(?:tag|mac|digest|key|same)\w*(?:\([^()]*\))? *[!=]=", text), (
            file.name
        )
    assert sorted(compared) == ["HeaderTag", "Key"]
    for name in ("key.rs", "manifest.rs"):
        text = plain((folder / name).read_text())
        assert not re.search(r"derive\([^)]*(?:PartialEq|Ord|Hash)", text), name


def test_files_are_short():
    long = {name for name, lines in rust_files() if len(lines) > MOST_LINES}
    assert long == set(LONG_FILES), f"more than {MOST_LINES} lines"


def test_functions_are_short():
    long = {
        f"{name}: {function}"
        for name, lines in rust_files()
        for function, count in functions(lines)
        if count > MOST_FUNCTION_LINES
    }
    assert long == set(LONG_FUNCTIONS), f"more than {MOST_FUNCTION_LINES} lines"


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
