"""Draw mutants with a seed, and write them to `rust.json` and `python.json` beside this file.

Those of Rust are drawn twice over, because some do not compile or are outside of functions;
`run.py` drops these, and those beyond the wanted number. The lists there are of commit 104088bc.
"""

import json
import random
import re
import sys
from pathlib import Path

from sites import Site, python_sites, rust_sites

ROOT = Path(__file__).resolve().parents[2]
SEED = 54
#: Folders of each group, and the number of its mutants.
GROUPS = {
    "engine": (["src/engine", "src/api"], 20),
    "io": (["src/io"], 20),
    "python": (["python/tensorizer"], 60),
}
TESTS = re.compile(r"/(tests|models)(\.rs|/)")
TEST_MODULE = re.compile(
    r"#\[cfg\((?:test|all\(test)[^\n]*\n(?:#\[[^\n]*\n)*(?:pub(?:\(\w+\))? )?mod (\w+);"
)
#: Lines of context on each side, by which a mutant is found in another tree.
CONTEXT = 2


def sources(folder: Path) -> list[Path]:
    """Return the files of a folder that have mutants."""
    files = sorted([*folder.rglob("*.rs"), *folder.rglob("*.py")])
    tests = {
        path.parent / f"{name}.rs"
        for path in files
        if path.suffix == ".rs"
        for name in TEST_MODULE.findall(path.read_text())
    }
    return [path for path in files if path not in tests and not TESTS.search(str(path))]


def described(path: Path, site: Site) -> dict[str, object]:
    """Return the record of a mutant."""
    text = path.read_text()
    line = text.count("\n", 0, site.start)
    lines = text.splitlines()
    first = max(line - CONTEXT, 0)
    return {
        "file": str(path.relative_to(ROOT)),
        "line": line + 1,
        "column": site.start - text.rfind("\n", 0, site.start) - 1,
        "kind": site.kind,
        "before": site.before,
        "after": site.after,
        "context": lines[first : line + CONTEXT + 1],
        "of": line - first,
    }


def main() -> None:
    """Write the lists, without results."""
    chance = random.Random(SEED)
    drawn: list[dict[str, object]] = []
    for group, (folders, count) in GROUPS.items():
        found = [
            (path, site)
            for folder in folders
            for path in sources(ROOT / folder)
            for site in (python_sites if path.suffix == ".py" else rust_sites)(path.read_text())
        ]
        print(f"{group}: {len(found)} sites", file=sys.stderr)
        many = count if group == "python" else 2 * count
        for path, site in chance.sample(found, many):
            drawn.append({"number": len(drawn) + 1, "group": group, **described(path, site)})
    for name in ("rust", "python"):
        some = [mutant for mutant in drawn if (mutant["group"] == "python") == (name == "python")]
        (Path(__file__).parent / f"{name}.json").write_text(json.dumps(some, indent=1) + "\n")


if __name__ == "__main__":
    main()
