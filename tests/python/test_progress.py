"""Progress of loads and saves, and the statistics and log lines at their end."""

import io
import logging
import os
import pty
import re
import sys
from types import SimpleNamespace

import pytest
import tensorizer
import torch
from processes import run_python, start_python
from servers import Redis
from tensorizer import TensorDeserializer, stats
from tensorizer.file import progress

MB = 1 << 20


@pytest.fixture(scope="module")
def tensors():
    return {f"t{number}": torch.full((MB,), float(number)) for number in range(24)}


TOTAL = 24 * 4 * MB


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tensors):
    """The same tensors in every format."""
    path = tmp_path_factory.mktemp("progress")
    tensorizer.save(tensors, path / "f.tensors")
    tensorizer.save(tensors, path / "f.safetensors")
    torch.save(tensors, path / "f.pt")
    return path


@pytest.fixture(autouse=True)
def no_repeats(monkeypatch):
    """On a slow disk, the number before a second of silence would be reported again."""
    monkeypatch.setattr(progress, "_LONGEST_SILENCE", float("inf"))


class Told:
    """A progress callable that keeps its arguments."""

    def __init__(self):
        self.rows = []

    def __call__(self, done, total):
        self.rows.append((done, total))

    def check(self, total=TOTAL):
        """The numbers rise, and end with the total."""
        # If it takes over a second to open a file, that is reported before the total is known.
        rows = [row for row in self.rows if row != (0, 0)]
        done = [row[0] for row in rows]
        assert done == sorted(set(done))
        assert {row[1] for row in rows} == {total}
        assert done[-1] == total


@pytest.mark.parametrize("ending", ["tensors", "safetensors", "pt"])
def test_loads(folder, ending):
    path = folder / f"f.{ending}"
    told = Told()
    tensorizer.load(path, progress=told)
    told.check()
    told = Told()
    tensorizer.load(path, names=["t1", "t5"], progress=told)
    told.check(2 * 4 * MB)
    told = Told()
    tensorizer.load(path, names=["t1", "t5"], slices={"t5": (0, 0, 1000)}, progress=told)
    told.check(4 * MB + 4000)
    told = Told()
    tensorizer.load(path, out={"t3": torch.empty(MB)}, progress=told)
    told.check(4 * MB)
    told = Told()
    TensorDeserializer(path, "cpu", progress=told).close()
    told.check()
    told = Told()
    with TensorDeserializer(path, "cpu", lazy_load=True, progress=told) as file:
        assert told.rows == []
        file["t0"], file["t1"], file["t0"]
        assert told.rows == [(4 * MB, TOTAL), (8 * MB, TOTAL)]
    told = Told()
    assert len(list(tensorizer.iterate(path, buffer_bytes=20 * MB, progress=told))) == 24
    told.check()
    # In batches of the buffer at most.
    assert len(told.rows) >= 5


def test_a_load_from_a_server(folder, nginx):
    nginx.root.joinpath("progress.tensors").write_bytes((folder / "f.tensors").read_bytes())
    told = Told()
    tensorizer.load(f"{nginx.http}/progress.tensors", progress=told)
    told.check()


@pytest.mark.parametrize("ending", ["tensors", "safetensors", "shards"])
def test_saves(tmp_path, tensors, ending):
    told = Told()
    if ending == "shards":
        path = tmp_path / "f.safetensors"
        tensorizer.save(tensors, path, max_shard_size="50MB", progress=told)
        assert len(told.rows) > 1
    else:
        tensorizer.save(tensors, tmp_path / f"f.{ending}", progress=told)
    told.check()


def test_saves_in_the_background(tmp_path, tensors):
    told = Told()
    saved = tensorizer.save_async(tensors, tmp_path / "f.tensors", progress=told)
    saved.result()
    told.check()
    assert saved.total_bytes == TOTAL

    def fail(done, total):
        raise NoMoreError(done)

    with pytest.raises(NoMoreError):
        tensorizer.save_async(tensors, tmp_path / "g.tensors", progress=fail).result()
    assert os.listdir(tmp_path) == ["f.tensors"]


def test_a_serializer_reports_the_bytes_of_its_writes(tmp_path, tensors):
    told = Told()
    with tensorizer.TensorSerializer(tmp_path / "f.tensors", progress=told) as file:
        file.write_state_dict(tensors)
        told.check()
        file.write_tensor(0, "one", tensorizer.TensorType.BUFFER, torch.ones(3))
    assert told.rows[-1] == (TOTAL + 12, TOTAL + 12)


class NoMoreError(Exception):
    """Raised by a callable."""


def refuse(done, total):
    raise NoMoreError(done)


def test_an_exception_of_the_progress_callback_ends_the_call(tmp_path, tensors, folder):
    path = folder / "f.tensors"
    with pytest.raises(NoMoreError):
        tensorizer.load(path, progress=refuse)
    with pytest.raises(NoMoreError):
        list(tensorizer.iterate(path, progress=refuse))
    old = tmp_path / "f.tensors"
    tensorizer.save({"a": torch.ones(3)}, old)
    with pytest.raises(NoMoreError):
        tensorizer.save(tensors, old, progress=refuse)
    assert list(tensorizer.load(old)) == ["a"]
    assert os.listdir(tmp_path) == ["f.tensors"]


@pytest.mark.parametrize("wrong", [None, 1, "yes"])
def test_progress_that_is_neither_bool_nor_callable_is_refused(folder, tmp_path, wrong):
    for call in (
        lambda: tensorizer.load(folder / "f.tensors", progress=wrong),
        lambda: tensorizer.save({"a": torch.ones(1)}, tmp_path / "f.tensors", progress=wrong),
        lambda: tensorizer.iterate(folder / "f.tensors", progress=wrong),
        lambda: TensorDeserializer(folder / "f.tensors", progress=wrong),
    ):
        with pytest.raises(TypeError, match="progress must be a bool or callable"):
            call()
    assert not list(tmp_path.iterdir())


def test_the_callable_is_called_on_the_callers_thread(folder):
    import threading

    threads = set()
    tensorizer.load(folder / "f.tensors", progress=lambda *_: threads.add(threading.get_ident()))
    assert threads == {threading.get_ident()}


def test_a_bar_on_a_terminal_only(folder):
    program = "import sys, tensorizer; tensorizer.load(sys.argv[1], progress=True)"
    ours, theirs = pty.openpty()
    try:
        with start_python(program, folder / "f.tensors", stderr=theirs) as process:
            os.close(theirs)
        assert process.returncode == 0
        shown = os.read(ours, 1 << 16).decode()
    finally:
        os.close(ours)
    assert "[##############################] 100% 100.7 MB" in shown
    assert shown.endswith("\n") and shown.count("\n") == 1
    done = run_python(program, folder / "f.tensors")
    assert (done.returncode, done.stderr) == (0, "")


def test_statistics_of_every_call(folder, tmp_path):
    tensorizer.load(folder / "f.tensors", names=["t1"])
    last = stats()
    tensorizer.load(folder / "f.safetensors", names=["t1", "t2"])
    tensorizer.save({"a": torch.ones(5)}, tmp_path / "f.tensors")
    found = stats(since=last["call"])
    assert [one["call"] for one in found] == [last["call"] + 1, last["call"] + 2]
    assert [one["what"] for one in found] == ["load", "save"]
    assert [one["bytes"] for one in found] == [8 * MB, 20]
    assert found[1] == stats()
    assert found[0]["ended"] <= found[1]["ended"]
    assert stats(since=0)[-2:] == found
    assert stats(since=found[1]["call"]) == []
    for _ in range(300):
        tensorizer.load(tmp_path / "f.tensors")
    kept = stats(since=0)
    assert len(kept) == 256
    assert kept[-1]["call"] - kept[0]["call"] == 255


def test_a_line_in_the_log(folder, tmp_path, caplog, nginx):
    with caplog.at_level(logging.INFO, "tensorizer"):
        tensorizer.load(folder / "f.tensors")
        tensorizer.save({"a": torch.ones(5)}, tmp_path / "f.tensors")
    load, save = (record.getMessage() for record in caplog.records)
    assert load.startswith("loaded 24 tensors, 100663296 bytes in ")
    assert "GB/s) to " in load and str(folder / "f.tensors") in load
    assert save.startswith("saved 1 tensors, 20 bytes in ")
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tensorizer"):
        tensorizer.load(folder / "f.tensors")
    assert not caplog.records
    nginx.root.joinpath("log.tensors").write_bytes((tmp_path / "f.tensors").read_bytes())
    with caplog.at_level(logging.INFO, "tensorizer"):
        tensorizer.load(
            f"{nginx.http}/log.tensors?X-Amz-Signature=abcdef-hu5hw0rd&token=ghijkl-hu5hw0rd"
        )
    (line,) = (record.getMessage() for record in caplog.records)
    assert "log.tensors" in line
    assert "abcdef" not in line and "ghijkl" not in line


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_bar_has_the_total_and_the_time_left_within_one_line(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    now = iter([0.0, 10.0, 200.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    bar = progress.TerminalBar()
    bar.show(1 << 30, 20 << 30)
    bar.show(20 << 30, 20 << 30)
    first, last = capsys.readouterr().err.rstrip("\n").split("\r")[1:]
    assert len(first) == len(last) == columns - 1
    if columns >= 80:
        assert "1.1 GB of 21.5 GB, 107.4 MB/s" in first
        assert "100% 21.5 GB of 21.5 GB" in last and "left" not in last
    assert ("3:10 min left" in first) == (columns > 80)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_command_shows_a_bar(monkeypatch):
    from tensorizer_cli.progress import Progress

    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    options = SimpleNamespace(command="cp", quiet=False, json=False)

    def fail(options):
        with Progress(options) as bar:
            bar.total = 1000 * MB
            bar.part()(100 * MB)
            raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        fail(options)
    # The message after it begins a line.
    assert shown.getvalue().endswith("\n")
    assert "104.9 MB of 1.0 GB" in shown.getvalue()
    before = shown.getvalue()
    for name in ("quiet", "json"):
        with Progress(SimpleNamespace(**{**vars(options), name: True})) as bar:
            assert bar.part() is None
    assert shown.getvalue() == before


@pytest.mark.parametrize("has_tqdm", [True, False])
def test_a_notebook_shows_a_bar(has_tqdm, monkeypatch):
    """That of tqdm, if it is installed: its standard error is no terminal."""
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    if not has_tqdm:
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    shell = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    # IPython in a shell whose standard error is a file.
    assert progress.ProgressReporter(True).part() is None
    shell.kernel = object()
    with progress.ProgressReporter(True) as reporter:
        # Nothing is known of the file yet.
        reporter.flush()
        assert not has_tqdm or not shown.getvalue()
        reporter.total = 1000 * MB
        reporter.part()(100 * MB)
    assert ("100%|" if has_tqdm else "100% 1.0 GB of 1.0 GB") in shown.getvalue()
    assert ("1.05G/1.05G" in shown.getvalue()) == has_tqdm


class Bar:
    """The parts of tqdm's that are used."""

    def __init__(self, total, **options):
        self.n, self.total, self.closed, self.start_t = 0, total, 0, 7

    def reset(self, total):
        # A widget's limit is changed here alone.
        self.n, self.total, self.start_t = 0, total, 8

    def update(self, more):
        self.n += more

    def refresh(self):
        pass

    def close(self):
        self.closed += 1


@pytest.mark.parametrize("seconds", [0, 60])
@pytest.mark.parametrize("kind", ["terminal", "notebook"])
def test_a_bar_of_a_total_that_grows_ends_when_it_is_closed(kind, seconds, monkeypatch):
    shown, made = Terminal(), []
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(progress, "_REDRAW_SECONDS", seconds)

    def tqdm(**options):
        made.append(Bar(**options))
        return made[0]

    is_terminal = kind == "terminal"
    bar = progress.TerminalBar(grows=True) if is_terminal else progress.TqdmBar(tqdm, grows=True)
    bar.show(100, 100)
    bar.show(100, 200)
    ended = (lambda: shown.getvalue().count("\n")) if is_terminal else (lambda: made[0].closed)
    assert ended() == 0
    bar.show(200, 200)
    bar.close()
    bar.close()
    assert ended() == 1
    if is_terminal:
        assert "100% 200.0 bytes of 200.0 bytes" in shown.getvalue().rpartition("\r")[2]
        assert shown.getvalue().count("\r") == (2 if seconds else 3)
    else:
        assert (made[0].n, made[0].total, made[0].start_t) == (200, 200, 7)


def test_the_bar_of_a_load_that_fails_is_closed(monkeypatch):
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    with pytest.raises(NoMoreError), progress.ProgressReporter(True, 1000 * MB) as reporter:
        reporter.part()(100 * MB)
        raise NoMoreError
    assert shown.getvalue().endswith("\n")


@pytest.mark.parametrize("way", ["iterate", "lazy"])
def test_the_bar_of_a_load_that_is_left_early_is_closed(way, monkeypatch, folder):
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    path = folder / "f.tensors"
    if way == "iterate":
        next(tensorizer.iterate(path, buffer_bytes=20 * MB, progress=True))
    else:
        with TensorDeserializer(path, "cpu", lazy_load=True, progress=True) as file:
            file["t1"]
    assert shown.getvalue().count("\n") == 1 and shown.getvalue().endswith("\n")


@pytest.mark.parametrize("command", ["load", "verify", "cp", "cp to safetensors", "cp to redis"])
def test_the_bar_of_a_command_moves(command, monkeypatch, nginx, tmp_path, request):
    from tensorizer_cli.main import main

    # The server sends 4 MB/s on each connection, which leaves time to draw.
    parts = {f"t{number}": torch.full((MB // 4,), float(number)) for number in range(16)}
    tensorizer.save(parts, nginx.root / "moves.tensors")
    monkeypatch.setattr(progress, "_REDRAW_SECONDS", 0)
    target = [str(tmp_path / f"copy.{command.rpartition(' ')[2]}")] if "cp" in command else []
    if command.endswith("redis"):
        server = Redis(tmp_path)
        request.addfinalizer(server.stop)
        target = [f"{server.address}/moves"]
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    assert main([command.split()[0], f"{nginx.http}/slow/moves.tensors", *target]) == 0
    shares = [int(share) for share in re.findall(r"(\d+)% ", shown.getvalue())]
    assert shares == sorted(shares) and shares[-1] == 100
    assert any(share < 100 for share in shares)


def test_a_write_that_is_refused_does_not_count(tmp_path):
    told = Told()
    with tensorizer.TensorSerializer(tmp_path / "f.tensors", progress=told) as file:
        file.write_tensor(0, "a", tensorizer.TensorType.BUFFER, torch.ones(3))
        with pytest.raises(ValueError, match="a"):
            file.write_tensor(0, "a", tensorizer.TensorType.BUFFER, torch.ones(5))
        file.write_tensor(0, "b", tensorizer.TensorType.BUFFER, torch.ones(3))
    assert told.rows[-1] == (24, 24)
