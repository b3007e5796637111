"""The status of the command ``tensorizer`` where its outputs are full, closed or not read."""

import json
import os
import signal
import subprocess
import sys
import warnings

import pytest
import tensorizer
import torch
from processes import COMMAND, run_python, start_python
from tensorizer_cli import describe
from tensorizer_cli.main import main

FULL = "standard output: No space left on device"
KEY = ["--key-file", "key"]
#: Commands with their status, and whether there is something for the standard output.
RUNS = {
    "ls": (["ls", "f"], 0, True),
    "info": (["info", "f"], 0, True),
    "load": (["load", "f"], 0, True),
    "verify": (["verify", "f"], 0, True),
    "verify, damaged": (["verify", "damaged"], 1, True),
    "verify, quiet": (["verify", "-q", "f"], 0, False),
    "diff": (["diff", "f", "f"], 0, True),
    "diff, different": (["diff", "f", "g"], 1, True),
    "cache": (["cache", "ls", "--folder", "."], 0, True),
    "cp": (["cp", "f", "new"], 0, False),
    "cp, verified": (["cp", "--verify", "f", "new"], 0, False),
    "cp, as JSON": (["cp", "--json", "f", "new"], 0, True),
    "encrypt": (["encrypt", *KEY, "f", "new"], 0, False),
    "decrypt": (["decrypt", *KEY, "sealed", "new"], 0, False),
    "rekey": (["rekey", *KEY, "--new-key-file", "key", "sealed", "new"], 0, False),
    "an error": (["ls", "missing"], 2, False),
    "an error, as JSON": (["cp", "--json", "missing", "new"], 2, False),
    "a wrong key": (["decrypt", *KEY, "f", "new"], 2, False),
    "wrong arguments": (["cp", "f"], 2, False),
    "help": (["--help"], 0, True),
    "help of a command": (["cp", "--help"], 0, True),
    "the version": (["--version"], 0, True),
}


@pytest.fixture
def folder(tmp_path):
    tensors = {"a": torch.ones(3), "b": torch.arange(4)}
    tensorizer.save(tensors, tmp_path / "f")
    tensorizer.save(tensors | {"a": torch.zeros(3)}, tmp_path / "g")
    (tmp_path / "key").write_bytes(bytes(32))
    params = tensorizer.EncryptionParams(bytes(32))
    tensorizer.save(tensors, tmp_path / "sealed", encryption=params)
    numbers = tensors["b"].numpy().tobytes()
    data = (tmp_path / "f").read_bytes()
    (tmp_path / "damaged").write_bytes(data.replace(numbers, numbers[::-1]))
    return tmp_path


def run(folder, arguments, out=subprocess.DEVNULL, err=subprocess.DEVNULL):
    """Return the status of the command with these outputs."""
    with start_python(COMMAND, *arguments, stdout=out, stderr=err, cwd=folder) as process:
        return process.wait(60)


@pytest.fixture
def full():
    with open("/dev/full", "wb") as file:
        yield file


@pytest.mark.parametrize("name", RUNS)
def test_a_full_stderr_changes_no_status(folder, full, name):
    arguments, status, _ = RUNS[name]
    assert run(folder, arguments, err=full) == status
    if status == 0 and "new" in arguments:
        assert tensorizer.info(folder / "new").nbytes == 44


@pytest.mark.parametrize("name", RUNS)
def test_a_full_stdout_is_an_error_where_something_is_to_be_written(folder, full, name):
    arguments, status, writes = RUNS[name]
    with open(folder / "err", "w+b") as err:
        assert run(folder, arguments, out=full, err=err) == (2 if writes else status)
        err.seek(0)
        said = err.read().decode()
    assert "Traceback" not in said
    assert said.count(FULL) == writes
    if writes and "--json" in arguments:
        assert json.loads(said) == {"error": {"type": "OSError", "message": FULL}}
    elif writes:
        assert said.endswith(f"tensorizer: error: {FULL}\n")
    assert run(folder, arguments, out=full, err=full) == (2 if writes else status)


def test_much_for_a_full_stdout(folder, full):
    """Output that does not fit a buffer fails before the command ends, with the same status."""
    tensorizer.save({f"{n}" * 100: torch.ones(1) for n in range(1000)}, folder / "many")
    assert run(folder, ["ls", "many"], out=full) == 2
    damaged = bytearray((folder / "many").read_bytes())
    damaged[-1] ^= 1
    (folder / "many").write_bytes(damaged)
    assert run(folder, ["verify", "many"], out=full, err=full) == 2


@pytest.mark.parametrize("name", ["diff, different", "ls", "help", "an error", "cp"])
def test_pipes_without_a_reader_change_no_status(folder, name):
    arguments, status, _ = RUNS[name]
    for stream in ("out", "err"):
        end, pipe = os.pipe()
        os.close(end)
        assert run(folder, arguments, **{stream: pipe}) == status
        os.close(pipe)


@pytest.mark.parametrize("redirected", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["cp", "--help"], ["cp", "f"]], ids=str
)
def test_closed_outputs_are_not_written_to(folder, arguments, redirected):
    line = f'exec "$@" {redirected}'
    command = ["bash", "-c", line, "-", sys.executable, "-m", "tensorizer", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    status = 2 if arguments == ["cp", "f"] else 0
    assert done.returncode == status
    closed = [">&-" in redirected.split(), "2>&-" in redirected]
    shown = status == 0 and not closed[0], status == 2 and not closed[1]
    assert (bool(done.stdout), bool(done.stderr)) == shown


def test_a_copy_with_all_streams_closed(folder):
    """No file gets the number of one, nor what is told on it."""
    code = """
import sys
from tensorizer_cli.main import main
sys.exit(main(["cp", "f", "new"]) or main(["cp", "f", "new.safetensors"]))
"""
    command = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "-", sys.executable, "-c", code]
    assert subprocess.run(command, cwd=folder, check=False).returncode == 0
    for target in ("new", "new.safetensors"):
        assert tensorizer.load(folder / target)["b"].tolist() == [0, 1, 2, 3]


def test_messages_go_only_to_stderr(folder):
    # As in an interpreter that is started without it.
    code = """
import os, sys
from tensorizer_cli.main import main
os.close(2)
sys.stderr = None
status = main(["cp", "f", "new"])
sys.stdout.flush()
os._exit(status)
"""
    done = run_python(code, cwd=folder)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("redirected", ["2>/dev/full", "2>&-"])
def test_ctrl_c_at_start_exits_with_130_even_if_stderr_is_unwritable(tmp_path, redirected):
    (tmp_path / "torch").mkdir()
    # A signal just before a system call that sleeps does not end it.
    code = "import time\nopen('ready', 'w').close()\nfor _ in range(1000): time.sleep(0.06)\n"
    (tmp_path / "torch/__init__.py").write_text(code)
    package = os.path.dirname(os.path.dirname(tensorizer.__file__))
    command = ["bash", "-c", f'exec "$@" {redirected}', "-", sys.executable, "-m", "tensorizer"]
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{package}"}
    with subprocess.Popen([*command, "ls", "f"], env=env, cwd=tmp_path) as process:
        while not (tmp_path / "ready").exists():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


def test_mistakes_in_the_program_are_errors(folder, monkeypatch, capsys):
    monkeypatch.setattr(describe, "ls", lambda options: {}["gone"])
    assert main(["ls", str(folder / "f")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("tensorizer: error: 'gone'\n")
    assert main(["ls", "--json", str(folder / "f")]) == 2
    found = json.loads(capsys.readouterr().err)
    assert found == {"error": {"type": "KeyError", "message": "'gone'"}}


@pytest.mark.filterwarnings("default")
def test_warnings_are_told_without_lines_of_code(tmp_path, capsys):
    torch.save({"a": torch.ones(3), (1, "\x1b"): torch.ones(2)}, tmp_path / "f.pt")
    assert main(["ls", str(tmp_path / "f.pt")]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-2].startswith("1 tensor, ")
    assert out.splitlines()[-1].startswith("not loaded: 1 tensor that cannot be named")
    start = f"tensorizer: warning: {tmp_path}/f.pt is loaded without 1 tensor that cannot be named"
    assert err.startswith(start)
    assert err.count("\n") == 1
    warnings.resetwarnings()
    copy = ["cp", "--json", "--skip-objects", str(tmp_path / "f.pt"), str(tmp_path / "f.tensors")]
    assert main(copy) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["tensors"] == 1
    assert json.loads(err)["warning"]["type"] == "UserWarning"


def test_a_terminal_that_is_gone_ends_no_load(folder):
    code = (
        "import sys, tensorizer\n"
        "sys.stderr = open('/dev/full', 'w')\nsys.stderr.isatty = lambda: True\n"
        "print(len(tensorizer.load('f', 'cpu', progress=True)))\n"
    )
    assert run_python(code, cwd=folder).stdout == "2\n"


def test_names_that_the_encoding_of_the_output_lacks(tmp_path):
    tensorizer.save({"ü": torch.ones(2)}, tmp_path / "f")
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "tensorizer", "ls", tmp_path / "f"],
        env=env,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"\\xfc" in done.stdout
