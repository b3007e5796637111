"""Interpreters that are forked for tests begin and end as those that are started do."""

import signal
import subprocess

import pytest
from processes import run_python, start_python

#: Leaves an object, a thread, and something to do at the end; each says so.
LEAVES = """
import atexit, sys, threading, time
class Object:
    def __del__(self): print("object", flush=True)
kept = Object()
atexit.register(print, "exit", flush=True)
def work():
    # Not before the end, however long the machine takes until then.
    threading.main_thread().join()
    time.sleep(0.1)
    print("thread", flush=True)
threading.Thread(target=work).start()
print(__name__, sys.argv[1:], flush=True)
"""
ENDS = {
    "at the end": "",
    "with a number": "sys.exit(3)",
    "with a text": "sys.exit('text')",
    "with an error": "raise ValueError('text')",
    "interrupted": "raise KeyboardInterrupt",
    "killed": "import os; os.kill(os.getpid(), 9)",
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_forked_interpreter_ends_like_a_fresh_one(end):
    expected = run_python(LEAVES + end, "a b", 1, fresh=True)
    for finalize in (False, True):
        done = run_python(LEAVES + end, "a b", 1, finalize=finalize)
        assert (done.returncode, done.stdout) == (expected.returncode, expected.stdout)
        assert done.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]


def test_a_forked_interpreter_has_pipes():
    code = "import sys\nfor line in sys.stdin: print(line.upper(), end='', flush=True)"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with start_python(code, **pipes) as process:
        process.stdin.write("one\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ONE\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        assert process.communicate("two\n", 60) == ("TWO\n", None)
        assert process.returncode == 0
    with pytest.raises(subprocess.TimeoutExpired):
        run_python("import time\ntime.sleep(60)", timeout=0.1)


def test_faults_are_counted_from_the_fork_on(with_faults, tmp_path):
    """The third call that removes a file kills each process, whatever others have removed."""
    code = """
import os, sys
for number in range(int(sys.argv[2])):
    path = f"{sys.argv[1]}/{number}"
    open(path, "w").close()
    os.unlink(path)
"""
    for count, status in ((2, 0), (3, -signal.SIGKILL), (2, 0)):
        done = run_python(code, tmp_path, count, env=with_faults(KILL_AT=2))
        assert done.returncode == status, done.stderr
