"""A small share of each campaign of ``make trust``; the campaigns run for hours by hand."""

import json
import os
import subprocess
import sys

import pytest
from conftest import OLD_PYTHON, ROOT
from processes import run_python

TRUST = ROOT / "tests/trust"
sys.path.insert(0, str(TRUST))
import advisories  # noqa: E402
import parts  # noqa: E402
import run  # noqa: E402

#: Inputs of the share of each campaign: as many as show that it works.
SHARES = {"hostile files": 40, "hostile servers": 4, "old package": 20, "faults": 24, "kills": 24,
          "power": 60, "network": 32, "TLS": 24, "load": 72, "leaks": 9,
          "state dicts": 100, "forked children": 48, "short memory": 46}  # fmt: skip
ROWS = [row for row in run.campaigns([]) if row.get("needs") == ["python"]]


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_a_share(row, monkeypatch):
    monkeypatch.setenv("TENSORIZER_OLD_PYTHON", str(OLD_PYTHON))
    command = row["command"].replace("{python}", sys.executable)
    said = run.run(row | {"command": f"{command} --inputs {SHARES[row['name']]}"}, 60, 0)
    if "skipped" in said:
        if os.environ.get("CI"):
            pytest.fail(said["skipped"])
        pytest.skip(said["skipped"])
    assert not said["findings"]
    assert said["inputs"] >= SHARES[row["name"]]
    assert sum(said["kinds"].values()) == said["inputs"]


def fake(tmp_path, monkeypatch, *rows):
    path = tmp_path / "campaigns.json"
    listed = [{"name": name, "command": command, "needs": needs} for name, command, needs in rows]
    path.write_text(json.dumps(listed))
    monkeypatch.setattr(run, "LIST", path)


def says(**said):
    return f"{{python}} -c 'import sys; print(sys.argv[1])' '{json.dumps(said)}'".replace(
        json.dumps(said), json.dumps(said).replace("{", "{{").replace("}", "}}")
    )


def test_the_table(tmp_path, monkeypatch, capsys):
    fake(
        tmp_path,
        monkeypatch,
        (
            "good",
            says(inputs=1234, what="things", kinds={"a": 1000, "b": 234}, findings=[], seconds=2.5),
            [],
        ),
        ("bad", says(inputs=1, findings=["it is broken"], seconds=1), []),
        ("absent", "no-such-tool", ["no-such-tool"]),
        ("silent", "{python} -c 'raise SystemExit(3)'", []),
    )
    monkeypatch.setattr(sys, "argv", ["run.py", "--seconds", "4", "--record", str(tmp_path / "r")])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == 1
    text, said = (tmp_path / "r").read_text(), capsys.readouterr().out
    assert said.startswith(text)
    assert "| good | 1,234 things | a 1,000, b 234 | 0 | 2 |" in text
    assert "| absent | not run: no-such-tool not installed | | | |" in text
    assert "- bad: it is broken" in said
    assert "- silent: it ends with 3 and says nothing" in said


def test_a_page_keeps_the_rows_of_other_runs(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n" + "\n".join(run.HEAD) + "\n\nThe end.\n")
    for commit, inputs, only in (("first", 1, []), ("second", 2, ["a b"])):
        rows = [
            (name, says(inputs=inputs, of=9, findings=[], seconds=1), []) for name in ("a b", "c")
        ]
        fake(tmp_path, monkeypatch, *rows)
        monkeypatch.setattr(run, "commit", lambda commit=commit: commit)
        monkeypatch.setattr(sys, "argv", ["run.py", "--seconds", "1", "--record", str(page), *only])
        with pytest.raises(SystemExit) as ended:
            run.main()
        assert ended.value.code == 0
    before, *rows, gap, after = page.read_text().splitlines()[2:]
    assert [before, gap, after] == [run.HEAD[0], "", "The end."]
    assert [row.split(" | ")[:2] for row in rows[1:]] == [["| a b", "2, of 9"], ["| c", "1, of 9"]]
    assert [row.split(" | ")[5] for row in rows[1:]] == ["second", "first"]


def test_results_of_processes_are_added_up_and_work_is_divided():
    said = {"campaign": "x", "inputs": 3, "kinds": {"a": 1}, "findings": ["f"], "seconds": 2.0}
    other = {
        "campaign": "x",
        "inputs": 4,
        "kinds": {"a": 2, "b": 5},
        "findings": [],
        "seconds": 9.0,
    }
    assert parts.added(said, other) == {
        "campaign": "x", "inputs": 7, "kinds": {"a": 3, "b": 5}, "findings": ["f"], "seconds": 9.0,
    }  # fmt: skip
    names = [f"fault {number}" for number in range(100)]
    shares = [{name for name in names if parts.mine(name, part, 3)} for part in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(names)
    assert all(shares)


def test_a_process_that_dies_is_found():
    code = """
import json, os, parts
if parts.divide(2):
    os.kill(os.getpid(), 11)
print(json.dumps({"campaign": "x", "inputs": 1, "findings": []}))
"""
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(TRUST)},
                          capture_output=True, text=True, check=False)  # fmt: skip
    said = json.loads(done.stdout)
    assert (said["inputs"], said["findings"]) == (1, ["process 1 of 2 ends with -11"])
    assert done.returncode == 1


ADVISORY = """```toml
[advisory]
id = "RUSTSEC-2099-0001"
package = "PACKAGE"
date = "2099-01-01"

[versions]
patched = [">= 999.0.0"]
```

# It maps what it should not

How it does that.
"""


@pytest.mark.long
@pytest.mark.parametrize("package", ["memmap2", "never-heard-of"])
def test_an_advisory_is_found(package, tmp_path):
    """In a database that stands in for RustSec's."""
    if not advisories.cargo_deny():
        assert not os.environ.get("CI"), "cargo-deny is required in CI"
        pytest.skip("there is no cargo-deny: make lint installs it")
    advisory = tmp_path / "crates" / package / "RUSTSEC-2099-0001.md"
    advisory.parent.mkdir(parents=True)
    advisory.write_text(ADVISORY.replace("PACKAGE", package))
    git = ["git", "-C", tmp_path, "-c", "user.name=x", "-c", "user.email=x@example.com"]
    for command in (["init", "-qb", "main"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True)
    real = "https://github.com/RustSec/advisory-db"
    instead = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.file://{tmp_path}.insteadOf",
               "GIT_CONFIG_VALUE_0": real}  # fmt: skip
    done = subprocess.run([sys.executable, TRUST / "advisories.py"], env=os.environ | instead,
                          capture_output=True, text=True, check=False)  # fmt: skip
    said = json.loads(done.stdout)
    found = ["memmap2: RUSTSEC-2099-0001 It maps what it should not"]
    assert said["findings"] == (found if package == "memmap2" else [])
    assert said["inputs"] > 100


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        # A call that undoes the save when both halves of a pair have their names.
        ("save, pair", "unlink 0"),
        # The sync of the pickle.
        ("save, pair", "fsync 0"),
        # The call for a second descriptor: the file that is half made is dropped without a warning.
        ("save, stream", "fcntl 0"),
    ],
)
def test_past_defects_at_failing_system_calls_stay_fixed(kind, call):
    code = f"import runpy, sys\nsys.path.insert(0, {str(TRUST)!r})\n"
    code += "runpy.run_module('call_faults', run_name='__main__')\n"
    done = run_python(code, "--jobs", "1", "--only", kind, "--call", call)
    said = json.loads(done.stdout.splitlines()[-1])
    if "skipped" in said:
        pytest.skip(said["skipped"])
    assert not said["findings"]
    assert said["inputs"] >= 6


#: A save that puts nothing on the disk before it has its name, one that writes over what is there,
#: a load of wrong data, one that believes every server, one that is wrong under vmap, one that ends
#: the process for want of memory, and a file that a child closes for its parent: each must be found
#: by its campaign.
BROKEN = {
    "states": """
import states, torch
load = states.LOADS["vmap"]
states.LOADS = {"vmap": lambda path: {name: tensor * 0 for name, tensor in load(path).items()}}
""",
    "short_memory": """
import os, scenes, short_memory
def load(folder):
    try:
        # More than an arena of the allocator has, of which other threads have some.
        bytearray(65 << 20)
        return scenes.by_path(folder)
    except MemoryError:
        os.abort()
short_memory.SAVES[:] = []
short_memory.LOADS[:] = [scenes.Load("eager", scenes.once(scenes.save_path), load)]
""",
    "children": """
import children, scenes
def make(folder, url, chance):
    file = open(folder / "f.tensors", "rb")
    def read():
        return scenes.value_of(scenes.tensorizer.load(file, "cpu"))
    # Both have one position.
    return children.Made({"read": lambda: file.seek(100) and None}, read)
children.KINDS = {"file": make}
""",
    "power": """
import os, scenes, power
def save(folder, value):
    scenes.save_path(folder.parent, value)
    data = (folder.parent / "f.tensors").read_bytes()
    with open(folder / "new", "wb") as file:
        file.write(data)
    os.rename(folder / "new", folder / "f.tensors")
scenes.SAVES[:] = [scenes.Save("over a file", save, scenes.by_path)]
""",
    "kills": """
import scenes, kills
def save(folder, value):
    with open(folder / "f", "wb", buffering=0) as file:
        for _ in range(3):
            file.write(b"%d" % value)
def load(folder):
    return {"111": 1.0, "222": 2.0, "999999": 99}[(folder / "f").read_text()]
scenes.SAVES[:] = [scenes.Save("over a file", save, load)]
""",
    "tls": """
import tls
CAInfo = tls.CAInfo
tls.CAInfo = lambda **given: CAInfo(allow_untrusted=True)
""",
    "call_faults": """
import scenes, call_faults
def load(folder):
    try:
        return scenes.by_path(folder)
    except OSError:
        return 7.0
scenes.SAVES[:] = []
scenes.LOADS[:] = [scenes.Load("eager", scenes.once(scenes.save_path), load)]
""",
}


@pytest.mark.long
@pytest.mark.parametrize("campaign", BROKEN)
def test_each_campaign_finds_a_planted_defect(campaign):
    code = f"import sys\nsys.path.insert(0, {str(TRUST)!r})\n"
    code += BROKEN[campaign] + f"\n{campaign}.main()"
    only = {"power": ["--only", "over", "--inputs", "20"],
            "kills": ["--only", "over", "--inputs", "20"],
            # Among these there are some certificates of others.
            "tls": ["--inputs", "64"],
            "states": ["--inputs", "60"],
            "short_memory": ["--only", "eager", "--inputs", "40"],
            "children": ["--inputs", "20"],
            "call_faults": ["--only", "eager", "--call", "preadv 1 EIO"]}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code, *only[campaign]],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    said = json.loads(done.stdout.splitlines()[-1])
    if "skipped" in said:
        pytest.skip(said["skipped"])
    assert said["findings"], done.stdout
    assert done.returncode == 1
