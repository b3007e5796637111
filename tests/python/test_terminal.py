"""Output of the command ``tensorizer`` on a terminal, and its answer to Ctrl-C."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import tensorizer
import torch
from processes import COMMAND, run_python, start_python
from tensorizer_cli.main import main

#: A name of each kind that a terminal would act on, and how it is shown.
EVIL = {
    "\x1b[2Jred": r"\x1b[2Jred",
    "two\nlines\r\t": r"two\nlines\r\t",
    "nul\x00bell\x07back\x08": r"nul\x00bell\x07back\x08",
    "del\x7f": r"del\x7f",
    "c1\x80\x85\x9b2J": r"c1\x80\x85\x9b2J",
    "marks\u200e\u200f\u061c\ufeff": r"marks\u200e\u200f\u061c\ufeff",
    "turns\u202a\u202b\u202c\u202d\u202e": r"turns\u202a\u202b\u202c\u202d\u202e",
    "isolates\u2066\u2067\u2068\u2069": r"isolates\u2066\u2067\u2068\u2069",
    "lines\u2028\u2029": r"lines\u2028\u2029",
    "plain ä 名": "plain ä 名",
}
ACTS = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


@pytest.fixture
def evil(tmp_path):
    path = tmp_path / "f\x1b[31m\n\u202e.tensors"
    tensorizer.save({name: torch.arange(3) for name in EVIL}, path)
    return path


def command(capsys, *arguments):
    """Return the status of the command, and the lines of both of its outputs."""
    status = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    for text in (out, err):
        assert not ACTS.search(text), text
    return status, out.splitlines(), err.splitlines()


def test_names_of_tensors(evil, capsys):
    status, out, _ = command(capsys, "ls", evil)
    assert status == 0
    assert len(out) == len(EVIL) + 2
    for line, shown in zip(out[1:], EVIL.values(), strict=False):
        assert re.fullmatch(re.escape(shown) + r" +int64 +\[3\] +24 +state_dict", line)
    # Columns stay below each other.
    assert len({line.index("int64") for line in out[1:-1]}) == 1


def test_json_keeps_the_names(evil, capsys):
    assert main(["ls", "--json", str(evil)]) == 0
    out = capsys.readouterr().out
    assert not ACTS.search(out)
    assert [row["name"] for row in json.loads(out)["tensors"]] == list(EVIL)


def test_differences(evil, tmp_path, capsys):
    other = tmp_path / "g\x9b\u2066"
    tensorizer.save({name: torch.zeros(3) for name in list(EVIL)[1:]}, other)
    status, out, _ = command(capsys, "diff", evil, other)
    assert status == 1
    where = f"{tmp_path}/f" + r"\x1b[31m\n\u202e.tensors"
    assert f"only in {where}: {EVIL[next(iter(EVIL))]}" in out
    assert r"del\x7f: int64 [3] and float32 [3]" in out


def test_tensors_that_are_damaged(evil, capsys):
    data = bytearray(evil.read_bytes())
    at = data.rindex(torch.arange(3).numpy().tobytes())
    data[at] ^= 1
    first = data.index(torch.arange(3).numpy().tobytes())
    data[first] ^= 1
    evil.write_bytes(data)
    status, out, _ = command(capsys, "verify", evil)
    assert status == 1
    assert len(out) == 3
    assert r"\x1b[2Jred" in out[0]


def test_a_dtype(tmp_path, capsys):
    path = tmp_path / "f"
    tensorizer.save({"a": torch.ones(3, dtype=torch.float32)}, path)
    data = path.read_bytes()
    assert b"<f4" in data
    path.write_bytes(data.replace(b"<f4", b"\x1b[m"))
    status, out, err = command(capsys, "ls", path)
    assert (status, out) == (2, [])
    assert re.fullmatch(r"tensorizer: error: unknown dtype .*1b.*\[m.*", *err)


def test_names_of_files(tmp_path, capsys):
    missing = str(tmp_path / "gone\x1b]0;title\x07\n\u202e")
    status, out, err = command(capsys, "ls", missing)
    assert (status, out) == (2, [])
    (line,) = err
    assert r"gone\x1b]0;title\x07\n\u202e" in line
    # Bytes of a name that are no text.
    status, out, err = command(capsys, "ls", os.fsdecode(os.fsencode(tmp_path) + b"/gone\xff"))
    assert (status, out, len(err)) == (2, [], 1)


def test_arguments(capsys):
    with pytest.raises(SystemExit):
        main(["ls", "a", "b\x1b[2J\u202e"])
    err = capsys.readouterr().err
    assert not ACTS.search(err)
    assert r"b\x1b[2J\u202e" in err


# Ctrl-C

PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    path = tmp_path_factory.mktemp("large") / "f.tensors"
    tensorizer.save({str(i): torch.full((1 << 20,), float(i)) for i in range(20)}, path)
    return path


@pytest.fixture
def ready():
    """Wait until a process is ready; it is killed if it is there at the end of the test."""
    started = []

    def wait(process):
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield wait
    for process in started:
        process.kill()
        process.communicate()


def interrupt(process):
    process.send_signal(signal.SIGINT)
    sent = time.monotonic()
    out, err = process.communicate(timeout=60)
    # The promise is one second; the rest is for a busy machine.
    assert time.monotonic() - sent < 5
    return process.returncode, out, err


INTERRUPTED = (130, "", "tensorizer: interrupted\n")
AS_JSON = (130, "", '{"error": {"type": "KeyboardInterrupt", "message": "interrupted"}}\n')


@pytest.mark.parametrize("name", ["verify", "cp", "diff", "encrypt"])
def test_ctrl_c_while_a_pipe_is_read(name, ready, large, tmp_path):
    """The tensors come slowly."""
    fifo, target = tmp_path / "fifo", tmp_path / "target"
    os.mkfifo(fifo)
    (tmp_path / "key").write_bytes(bytes(32))
    arguments = [name, fifo] + {
        "verify": [],
        "cp": [target],
        "diff": [large],
        "encrypt": [target, "--key-file", tmp_path / "key"],
    }[name]
    code = f"print('ready', flush=True)\n{COMMAND}"
    process = ready(start_python(code, *arguments, **PIPES))
    begun = threading.Event()

    def feed():
        with contextlib.suppress(BrokenPipeError), open(fifo, "wb", buffering=0) as pipe:
            data = large.read_bytes()
            for at in range(0, len(data), 1 << 15):
                pipe.write(data[at : at + (1 << 15)])
                if at > 1 << 21:
                    begun.set()
                time.sleep(0.01)

    feeder = threading.Thread(target=feed, daemon=True)
    feeder.start()
    assert begun.wait(60)
    assert interrupt(process) == INTERRUPTED
    feeder.join()
    assert sorted(os.listdir(tmp_path)) == ["fifo", "key"]


def test_ctrl_c_beside_an_error(monkeypatch, capsys, tmp_path):
    """An interrupted call may end with an error of its own before Python has handled the signal."""
    from tensorizer_cli import describe, output

    def fail(*_):
        raise OSError("interrupted")

    def error_line(*_):
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(describe, "_open", fail)
    monkeypatch.setattr(output, "error_line", error_line)
    try:
        assert main(["ls", str(tmp_path)]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "tensorizer: interrupted\n"


#: A torch whose import takes long.
SLOW = "print('ready', flush=True)\nimport time\ntime.sleep(60)\n"


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize("way", ["module", "script"])
def test_ctrl_c_while_the_command_starts(way, options, ready, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(SLOW)
    script = tmp_path / "tensorizer"
    script.write_text("import sys\nfrom tensorizer_cli.main import main\nsys.exit(main())\n")
    package = os.path.dirname(os.path.dirname(tensorizer.__file__))
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{package}"}
    arguments = ["-m", "tensorizer"] if way == "module" else [script]
    if way == "script":
        # A script that pip installs has no modules beside it: take its folder off the path.
        script.write_text("import sys\nsys.path.pop(0)\n" + script.read_text())
    command = [sys.executable, *arguments, "ls", *options, "file"]
    process = ready(subprocess.Popen(command, env=env, **PIPES))
    assert interrupt(process) == (AS_JSON if options else INTERRUPTED)


@pytest.mark.parametrize("name", ["-c", "tensorizer", "/bin/tensorizer"])
def test_other_programs_keep_their_ctrl_c(name):
    """And their arguments."""
    code = (
        "import importlib, signal, sys, tensorizer\n"
        f"sys.argv = [{name!r}, '--unknown']\n"
        "importlib.reload(sys.modules['tensorizer._command_start'])\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
        "signal.raise_signal(signal.SIGINT)\n"
    )
    done = run_python(code)
    assert "KeyboardInterrupt" in done.stderr
    assert "tensorizer: interrupted" not in done.stderr


@pytest.mark.parametrize(
    ("redirected", "status"),
    [
        ("ls {file} >&-", 0),
        ("ls {missing} 2>&-", 2),
        ("ls {missing} 2>&1 >/dev/null | true; exit ${{PIPESTATUS[0]}}", 2),
    ],
)
def test_outputs_that_are_closed(tmp_path, redirected, status):
    tensorizer.save({"a": torch.ones(3)}, tmp_path / "f")
    names = {"file": tmp_path / "f", "missing": tmp_path / "missing"}
    line = f"{sys.executable} -m tensorizer {redirected.format(**names)}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr


def test_signatures_of_addresses_are_not_shown(tmp_path):
    from tensorizer_cli.output import without_password

    for secret in (
        "http://h/f?X-Amz-Signature=SECRET&a=b",
        "cannot read 'https://me:SECRET-hu5hw0rd@h/f?token=SECRET-hu5hw0rd': 404",
        "redis://h/p?password=SECRET-hu5hw0rd",
        "redis://h/p?db=3&password=SECRET-hu5hw0rd",
    ):
        assert "SECRET" not in without_password(secret)
    assert without_password("redis://h/p?db=3") == "redis://h/p?db=3"
    assert without_password("is /tmp/f?x=1 there?") == "is /tmp/f?x=1 there?"
