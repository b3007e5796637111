"""``on_thread`` tells its work of a signal, instead of interrupting it."""

import _thread
import gc
import os
import signal
import threading
import time
import weakref

import pytest
from tensorizer.group.connections import on_thread

HOW = {
    "a signal": lambda: os.kill(os.getpid(), signal.SIGINT),
    "a call": _thread.interrupt_main,
}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_work_is_told_of_an_interruption_and_ends(how):
    done = []

    def work(leaving):
        time.sleep(0.2)
        how()
        done.append(leaving.wait(20))
        time.sleep(0.3)
        done.append("all of it")

    result, interruption = on_thread(work, 30)
    assert result is None and isinstance(interruption, KeyboardInterrupt)
    assert done == [True, "all of it"]


def test_a_second_interruption_is_raised_at_once():
    end = threading.Event()

    def work(leaving):
        for _ in range(2):
            time.sleep(0.2)
            HOW["a signal"]()
            leaving.wait(20)
        end.wait(60)

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        on_thread(work, 60)
    assert time.monotonic() - begun < 10
    end.set()


def test_work_that_does_not_end_is_not_waited_for():
    end = threading.Event()
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        on_thread(lambda _: end.wait(60), 0.1)
    assert time.monotonic() - begun < 10
    end.set()


def test_a_failure_is_raised_and_keeps_no_objects_alive():
    class Large:
        pass

    large = Large()
    gone = weakref.ref(large)

    def work(leaving, large=large):
        raise OSError(5, "Input/output error")

    gc.disable()
    try:
        with pytest.raises(OSError, match="Input/output error"):
            on_thread(work, 30)
        del large, work
        assert gone() is None
    finally:
        gc.enable()


def test_work_runs_on_the_caller_if_no_thread_can_start(monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert on_thread(lambda _: threading.current_thread(), 30)[0] is threading.main_thread()
