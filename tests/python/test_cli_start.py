"""The command ``tensorizer`` parses its arguments and reports errors without torch."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import tensorizer
import torch
from conftest import ROOT
from processes import run_python
from tensorizer_cli.main import main

COMMANDS = ("ls", "info", "load", "verify", "cp", "diff", "encrypt", "decrypt", "rekey")
#: The script that pip installs.
SCRIPT = "import sys; from tensorizer_cli.main import main; sys.exit(main())"
WAYS = {"module": ["-m", "tensorizer"], "script": ["-c", SCRIPT]}


@pytest.fixture
def path(tmp_path):
    path = str(tmp_path / "f.tensors")
    tensorizer.save({"a": torch.ones(3), "b": torch.arange(4)}, path)
    return path


@pytest.fixture(params=WAYS)
def command(request):
    """Run the command in a process of its own."""

    def run(*arguments, before=()):
        return subprocess.run(
            [sys.executable, *before, *WAYS[request.param], *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def usage_error(capsys, *arguments):
    """Return what the command says of wrong arguments."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_the_command_itself(command, path, tmp_path):
    done = command("ls", path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "2 tensors, 44 bytes, data version 1"
    done = command("ls", tmp_path / "missing")
    assert done.returncode == 2
    assert done.stderr == f"tensorizer: error: {tmp_path}/missing: No such file or directory\n"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["--help"], 0), (["cp", "--help"], 0), (["--version"], 0), (["cp", "a"], 2), ([], 0)],
    ids=str,
)
def test_help_version_and_usage_errors_do_not_import_torch(command, arguments, status):
    done = command(*arguments, before=["-X", "importtime"])
    assert done.returncode == status
    assert done.stdout if status == 0 else "usage: tensorizer" in done.stderr
    imported = set(re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE))
    assert "argparse" in imported
    assert not imported & {"torch", "numpy", "tensorizer._C"}


@pytest.mark.parametrize("arguments", [["--help"], []], ids=str)
def test_help(arguments, command):
    done = command(*arguments)
    assert done.returncode == 0
    assert set(COMMANDS) | {"convert"} <= set(done.stdout.split())


def test_a_wrong_option_shows_the_usage_of_its_command(command):
    done = command("cp", "--reader", "4", "a", "b")
    assert done.returncode == 2
    assert "usage: tensorizer cp" in done.stderr
    assert "unknown: --reader (did you mean --num-readers?)" in done.stderr
    # It did nothing.
    assert command("load", "--report", "a").stderr.endswith("unknown: --report\n")


def test_a_wrong_command_is_named(command):
    for word, meant in (
        ("convert", "cp"),
        ("lost", None),
        ("verfy", "verify"),
        ("--versio", "--version"),
    ):
        done = command(word, "a", "b")
        assert done.returncode == 2 and "usage: tensorizer" in done.stderr
        ending = f" (did you mean {meant}?)" if meant else ""
        assert done.stderr.endswith(f"unknown: {word}{ending}\n")


def test_the_version(command):
    minor = ".".join(torch.__version__.split(".")[:2])
    assert command("--version").stdout == f"tensorizer {tensorizer.__version__} for torch {minor}\n"


def test_the_library_only_starts_the_command():
    package = ROOT / "python/tensorizer"
    users = [f for f in package.rglob("*.py") if "tensorizer_cli" in f.read_text()]
    assert {file.name for file in users} == {"__main__.py", "_command_start.py"}


def test_a_torch_that_does_not_fit(command, tmp_path, path, monkeypatch):
    """The package says which wheel fits; there is no traceback before it can be used."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['torch'] = None\n")
    package = os.path.dirname(os.path.dirname(tensorizer.__file__))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{package}")
    done = command("ls", path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("tensorizer: error: import of torch")
    error = json.loads(command("ls", "--json", path).stderr)["error"]
    assert error["type"] == "ModuleNotFoundError"


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("option", ["--num-readers", "--alignment"])
def test_invalid_numbers_of_options_are_usage_errors(name, option, path, tmp_path, capsys):
    files = [path] if name in ("ls", "info", "verify") else [path, tmp_path / "target"]
    for number in ("-5", "0", "", "x", "1.5", "1e3", "1_0", "٣", "9" * 30, "-" + "9" * 30, "nan"):
        err = usage_error(capsys, name, *files, option, number)
        assert "usage: tensorizer" in err
        assert "Traceback" not in err
    assert os.listdir(tmp_path) == ["f.tensors"]


def test_the_largest_alignment(path, tmp_path, capsys):
    target = tmp_path / "target"
    assert main(["cp", "--alignment", str(2 << 20), path, str(target)]) == 0
    assert target.stat().st_size > 4 << 20
    for number in (4 << 20, 3, 65):
        err = usage_error(capsys, "cp", path, target, "--alignment", number)
        assert f"expected a power of two from 1 to 2097152, found '{number}'" in err


# For programs


def test_errors_as_json(tmp_path, path, capsys):
    missing = tmp_path / "missing\x7f\x1b"
    files = {name: [missing] for name in COMMANDS[:4]}
    (tmp_path / "key").write_bytes(bytes(32))
    key = ["--key-file", tmp_path / "key"]
    keys = {"encrypt": key, "decrypt": key, "rekey": [*key, "--new-key-file", tmp_path / "key"]}
    for name in COMMANDS:
        options = ["--json", *keys.get(name, []), *files.get(name, [missing, tmp_path / "target"])]
        assert main([name, *map(str, options)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        message = f"{missing}: No such file or directory"
        assert json.loads(err) == {"error": {"type": "FileNotFoundError", "message": message}}
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f]", err)
    error = json.loads(usage_error(capsys, "cp", "--json", path))["error"]
    assert error["type"] == "UsageError"
    assert "TARGET" in error["message"]
    text = tmp_path / "text"
    text.write_text("no tensors")
    assert main(["verify", "--json", str(text)]) == 2
    assert json.loads(capsys.readouterr().err)["error"]["type"] == "FormatError"


def test_results_as_json(tmp_path, path, capsys):
    other, target = str(tmp_path / "g.tensors"), str(tmp_path / "target")
    tensors = {"a": torch.tensor([1.0, 1.0, 2.0]), "b": torch.arange(3)}
    tensorizer.save(tensors | {"c": {"d": [torch.ones(1)]}}, other)

    def run(*arguments):
        status = main(list(arguments))
        out, err = capsys.readouterr()
        assert err == ""
        return status, json.loads(out)

    status, found = run("ls", "--json", other)
    assert status == 0
    assert list(found) == [
        *("file", "format", "files", "metadata", "version", "encrypted", "bytes", "tensors")
    ]
    assert (found["file"], found["encrypted"], found["bytes"]) == (other, False, 40)
    assert found["tensors"][2] == {
        "name": ["c", "d", 0],
        "dtype": "float32",
        "shape": [1],
        "bytes": 4,
        "offset": found["tensors"][2]["offset"],
        "type": "state_dict",
    }
    assert found["tensors"][0]["offset"] % 64 == 0
    assert run("diff", "--json", path, other) == (
        1,
        {
            "file": path,
            "other": other,
            "same": False,
            "differences": [
                {"name": "a", "difference": "data", "bytes": 2, "of": 12},
                {
                    "name": "b",
                    "difference": "type",
                    "file": {"dtype": "int64", "shape": [4]},
                    "other": {"dtype": "int64", "shape": [3]},
                },
                {"name": ["c", "d", 0], "difference": "only_in_other"},
            ],
        },
    )
    nothing = {"file": path, "other": path, "same": True, "differences": []}
    assert run("diff", "--json", path, path) == (0, nothing)
    sound = {"file": path, "tensors": 2, "bytes": 44, "without_data": [], "damaged": []}
    assert run("verify", "--json", path) == (0, sound)
    (tmp_path / "key").write_bytes(bytes(32))
    key = ("--key-file", str(tmp_path / "key"))
    new = ("--new-key-file", key[1])
    for name, options in {"cp": (), "encrypt": key, "rekey": (*key, *new), "decrypt": key}.items():
        source = path if name in ("cp", "encrypt") else target
        status, found = run(name, "--json", *options, source, target)
        assert status == 0
        assert found.pop("seconds") > 0
        assert found.pop("bytes_per_second") > 0
        expected = {"file": source, "target": target, "tensors": 2, "bytes": 44}
        assert found == expected | {"without_data": []}
    with open(path, "r+b") as file:
        file.seek(file.read().index(torch.arange(4).numpy().tobytes()))
        file.write(b"\xff")
    status, found = run("verify", "--json", path)
    assert status == 1
    (damage,) = found["damaged"]
    assert damage["name"] == "b"
    assert "'b' failed" in damage["message"]


WITHOUT_TORCH = """
import contextlib, io, json, sys
from tensorizer_cli.main import main
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            status = main(arguments)
    imported = sorted({"torch", "tensorizer"} & {*sys.modules})
    print(json.dumps([status, imported, out.getvalue(), err.getvalue()]))
"""


def test_ls_info_and_missing_files_do_not_import_torch(tmp_path, nginx):
    """The last of these commands, for a file of ``torch.save``, does."""
    tensors = {"a": torch.ones(3, 4), ("b", 0): torch.zeros(2, dtype=torch.bfloat16)}
    tensorizer.save(tensors, tmp_path / "f.tensors", metadata={"step": "7"})
    tensorizer.save({"a": torch.ones(3)}, tmp_path / "f.safetensors")
    torch.save({"a": torch.ones(3, 4)}, tmp_path / "f.pt")
    shutil.copy(tmp_path / "f.tensors", nginx.root / "torchless.tensors")
    files = [*map(str, tmp_path.glob("*s")), f"{nginx.http}/torchless.tensors"]
    assert len(files) == 3
    none = str(tmp_path / "none")
    commands = [[command, "--json", file] for command in ("ls", "info") for file in files]
    commands += [["verify", none], ["load", none], ["cp", none, "x.tensors"]]
    commands += [["ls", str(tmp_path / "f.pt")]]
    done = run_python(WITHOUT_TORCH, json.dumps(commands), fresh=True)
    assert done.returncode == 0, done.stderr
    *quick, slow = map(json.loads, done.stdout.splitlines())
    assert [found[:2] for found in quick] == [[0, []]] * 6 + [[2, []]] * 3
    assert all(json.loads(out)["tensors"] for _, _, out, _ in quick[:6])
    assert all("none: No such file or directory" in err for _, _, _, err in quick[6:])
    assert slow[:2] == [0, ["tensorizer", "torch"]]
    assert "a     float32  [3, 4]" in slow[2]
