"""Savers and loads of one object at once: in the end both halves are of one save."""

import contextlib
import errno
import fcntl
import logging
import os
import signal
import subprocess
import threading
import warnings
from pathlib import Path

import pytest
import torch
from conftest import files
from pairs import load, save
from processes import run_python, start_python
from tensorizer.checkpoints import pairs

NAMES = ["state.pt", "state.pt.tensors"]
#: Seconds after which a test fails that hangs.
LONG = 60


def tensors(value):
    return {"weight": torch.full((1000,), float(value))}


def value_in(path):
    (number,) = set(load(path, {"device": "cpu"})["weight"].tolist())
    return number


@pytest.fixture
def path(tmp_path):
    """Return an object that has the value 1."""
    save(tensors(1), tmp_path / "state.pt")
    return tmp_path / "state.pt"


class Saver(threading.Thread):
    """Saves an object with a value, and stops before the pickle gets its name if it shall.

    Args:
        path: The object.
        value: The value that is saved.
        stops: True to wait for ``resume`` then.
        fails: True to fail then.

    """

    def __init__(self, path, value, *, stops=False, fails=False):
        super().__init__(daemon=True)
        self.path, self.value, self.stops, self.fails = path, value, stops, fails
        self.error = None
        #: `settled`: it has stopped, waits for another one, or has ended.
        self.settled, self.resume = threading.Event(), threading.Event()

    def run(self):
        try:
            save(tensors(self.value), self.path)
        except BaseException as error:
            self.error = error
        finally:
            self.settled.set()

    def begin(self):
        self.start()
        assert self.settled.wait(LONG)
        return self

    def end(self):
        self.resume.set()
        self.join(LONG)
        assert not self.is_alive()
        if self.fails:
            assert isinstance(self.error, OSError)
            assert "lost the disk" in str(self.error)
        else:
            assert self.error is None, self.error


@pytest.fixture(autouse=True)
def stops(monkeypatch):
    class Writer(pairs.AtomicWriter):
        def close(self):
            saver = threading.current_thread()
            if isinstance(saver, Saver) and not self.closed:
                if saver.stops:
                    saver.settled.set()
                    assert saver.resume.wait(LONG)
                if saver.fails:
                    self.abandon()
                    raise OSError("lost the disk")
            super().close()

    monkeypatch.setattr(pairs, "AtomicWriter", Writer)


class Waits(logging.Handler):
    """Calls a function in the thread that says that it waits."""

    def __init__(self, then):
        super().__init__()
        self.then = then

    def emit(self, record):
        if "another save" in record.getMessage():
            self.then()


@pytest.fixture(autouse=True)
def waits():
    @contextlib.contextmanager
    def handled(then):
        logger, handler = logging.getLogger("tensorizer.torch_compat"), Waits(then)
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)

    def settle():
        saver = threading.current_thread()
        if isinstance(saver, Saver):
            saver.settled.set()

    with handled(settle):
        yield handled


def no_locks(*_):
    raise OSError(errno.ENOLCK, "No locks available")


def no_links(*_):
    raise OSError(errno.EPERM, "Operation not permitted")


# Savers


@pytest.mark.parametrize("existed", [True, False])
def test_concurrent_saves_leave_the_last_pair(tmp_path, existed):
    path = tmp_path / "state.pt"
    if existed:
        save(tensors(1), path)
    first = Saver(path, 2, stops=True).begin()
    second = Saver(path, 3).begin()
    first.end()
    second.end()
    assert value_in(path) == 3
    assert sorted(os.listdir(tmp_path)) == NAMES


@pytest.mark.parametrize("locks", [True, False])
def test_a_failing_save_does_not_withdraw_the_pair_of_another_save(path, monkeypatch, locks):
    if not locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    first = Saver(path, 2, stops=True, fails=True).begin()
    second = Saver(path, 3, stops=True).begin()
    first.end()
    second.end()
    assert value_in(path) == 3
    if locks:
        assert sorted(os.listdir(path.parent)) == NAMES


def test_a_failed_concurrent_save_keeps_the_other_pair(path):
    first = Saver(path, 2, stops=True).begin()
    second = Saver(path, 3, fails=True).begin()
    first.end()
    second.end()
    assert value_in(path) == 2
    assert sorted(os.listdir(path.parent)) == NAMES


def test_leftovers_of_a_beginning_save_are_not_removed(path, monkeypatch):
    first, second = Saver(path, 2), Saver(path, 3, fails=True)
    link, remove_leftovers = Path.hardlink_to, pairs.remove_leftovers

    def slow_link(self, target):
        link(self, target)
        if threading.current_thread() is second:
            second.settled.set()
            first.join(LONG)

    def slow_clean_up(*args):
        if threading.current_thread() is first:
            second.begin()
        remove_leftovers(*args)

    monkeypatch.setattr(Path, "hardlink_to", slow_link)
    monkeypatch.setattr(pairs, "remove_leftovers", slow_clean_up)
    first.start()
    first.end()
    second.end()
    assert value_in(path) == 2
    assert sorted(os.listdir(path.parent)) == NAMES


def test_an_object_without_storages_waits_too(path):
    first = Saver(path, 2, stops=True).begin()
    second = Saver(path, 3)
    second.run = lambda: (save({"plain": 1}, path), second.settled.set())
    second.begin()
    assert second.is_alive()
    first.end()
    second.end()
    assert load(path) == {"plain": 1}
    assert sorted(os.listdir(path.parent)) == NAMES


PROCESS = """
import sys, torch
from tensorizer.checkpoints import pairs
from tensorizer.torch_compat import tensorizer_saving

class Writer(pairs.AtomicWriter):
    def close(self):
        print("stopped", flush=True)
        sys.stdin.readline()
        super().close()

pairs.AtomicWriter = Writer
with tensorizer_saving():
    torch.save({"weight": torch.full((1000,), 2.0)}, sys.argv[1])
"""


@pytest.mark.parametrize("killed", [True, False])
def test_a_saver_in_another_process(path, killed):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with start_python(PROCESS, path, **pipes) as process:
        try:
            assert process.stdout.readline() == b"stopped\n"
            saver = Saver(path, 3).begin()
            assert saver.is_alive()
            if killed:
                process.kill()
            else:
                process.communicate(b"\n", timeout=LONG)
                assert process.returncode == 0
            saver.end()
        finally:
            process.kill()
    assert value_in(path) == 3
    assert sorted(os.listdir(path.parent)) == NAMES


FORKS = """
import os, signal, sys, torch
from tensorizer.checkpoints import pairs
from tensorizer.torch_compat import tensorizer_saving

path = sys.argv[1]
first, started = os.pipe()

class Writer(pairs.AtomicWriter):
    def close(self):
        if os.fork() == 0:
            os.write(started, str(os.getpid()).encode())
            signal.alarm(100)
            signal.pause()
        os.kill(os.getpid(), signal.SIGKILL)

if os.fork() == 0:
    pairs.AtomicWriter = Writer
    with tensorizer_saving():
        torch.save({"weight": torch.full((1000,), 2.0)}, path)
os.wait()
grandchild = int(os.read(first, 20))
with tensorizer_saving():
    torch.save({"weight": torch.full((1000,), 3.0)}, path)
os.kill(grandchild, signal.SIGKILL)
"""


def test_a_process_that_was_forked_off_holds_nothing(path):
    done = run_python(FORKS, path, timeout=LONG)
    assert done.returncode == 0, done.stderr
    assert value_in(path) == 3
    assert sorted(os.listdir(path.parent)) == NAMES


def test_waiting_can_be_interrupted(path, waits):
    first = Saver(path, 2, stops=True).begin()

    over = threading.Event()

    def interrupts():
        os.kill(os.getpid(), signal.SIGINT)
        # Python loses one that comes while it ends an object.
        if not over.wait(5):
            os.kill(os.getpid(), signal.SIGINT)

    try:
        with waits(threading.Thread(target=interrupts).start), pytest.raises(KeyboardInterrupt):
            save(tensors(3), path)
    finally:
        over.set()
    first.end()
    assert value_in(path) == 2
    assert sorted(os.listdir(path.parent)) == NAMES


def test_a_handler_of_a_signal_that_saves(path, monkeypatch):
    """The handler runs in the thread that its save would wait for."""

    class Interrupted(pairs.AtomicWriter):
        def close(self):
            if not self.closed:
                signal.raise_signal(signal.SIGUSR1)
            super().close()

    monkeypatch.setattr(pairs, "AtomicWriter", Interrupted)
    before = files(path.parent)
    outer = signal.signal(signal.SIGUSR1, lambda *_: save(tensors(3), path))
    try:
        with pytest.raises(RuntimeError, match="a signal handler must not save"):
            save(tensors(2), path)
    finally:
        signal.signal(signal.SIGUSR1, outer)
    assert files(path.parent) == before


def test_locks_that_do_not_work(path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", no_locks)
    save(tensors(2), path)
    assert value_in(path) == 2
    assert sorted(os.listdir(path.parent)) == NAMES


# Saves that end early


def test_a_hidden_file_that_is_gone_does_not_hide_the_error(path, monkeypatch):
    class Broken(pairs.AtomicWriter):
        def close(self):
            if not self.closed:
                (hidden,) = path.parent.glob(".*.before")
                hidden.unlink()
                self.abandon()
                raise OSError("lost the disk")

    monkeypatch.setattr(pairs, "AtomicWriter", Broken)
    with pytest.raises(OSError, match="lost the disk"):
        save(tensors(2), path)


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("early", [True, False])
def test_an_interrupt_while_the_old_half_is_kept(path, monkeypatch, links, early):
    name = "hardlink_to" if links else "rename"
    real = getattr(Path, name)

    def interrupted(*args):
        if not early:
            real(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "hardlink_to", no_links)
    monkeypatch.setattr(Path, name, interrupted)
    before = files(path.parent)
    with pytest.raises(KeyboardInterrupt):
        save(tensors(2), path)
    assert files(path.parent) == before


@pytest.mark.parametrize("step", ["write", "close"])
def test_the_same_object_again(path, monkeypatch, step):
    """The file of storages has the same identity before and after."""

    class Broken(pairs.AtomicWriter):
        def close(self):
            if step == "close" and not self.closed:
                self.abandon()
                raise OSError("lost the disk")
            super().close()

        def write(self, data):
            if step == "write":
                raise OSError("lost the disk")
            return super().write(data)

    monkeypatch.setattr(pairs, "AtomicWriter", Broken)
    before = files(path.parent)
    with pytest.raises(OSError, match="lost the disk"):
        save(tensors(1), path)
    assert files(path.parent) == before


# A reader


def test_a_load_during_a_save(path):
    saver = Saver(path, 2, stops=True).begin()
    with pytest.warns(RuntimeWarning, match="killed or is in progress"):
        assert value_in(path) == 1
    saver.end()
    assert value_in(path) == 2


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("links", [True, False])
def test_a_save_that_ends_during_a_load(path, monkeypatch, fails, links):
    """The save removes the hidden file when the load has found it and not yet opened it."""
    if not links:
        monkeypatch.setattr(Path, "hardlink_to", no_links)
    saver = Saver(path, 2, stops=True, fails=fails).begin()
    retained_storage_file = pairs.retained_storage_file

    def found(*args):
        kept = retained_storage_file(*args)
        saver.end()
        return kept

    monkeypatch.setattr(pairs, "retained_storage_file", found)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert value_in(path) == (1 if fails else 2)


def test_a_load_without_a_matching_pair_raises(path):
    save(tensors(5), path.parent / "other.pt")
    os.replace(path.parent / "other.pt.tensors", f"{path}.tensors")
    with pytest.raises(pairs.PairMismatchError):
        load(path)
    os.unlink(f"{path}.tensors")
    with pytest.raises(FileNotFoundError, match="which is missing"):
        load(path)
