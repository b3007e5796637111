"""Daemon threads that load or save while the interpreter ends: we abort no process.

Threads that come back from torch's own calls then, before Python 3.14, abort it: ``torch.save``
in a daemon thread is enough. So may the operators, which torch calls, and file objects in Python,
which end inside of our calls.
"""

import signal

import pytest
import tensorizer
import torch
from processes import run_python

CODE = """
import sys, threading, time
import tensorizer, torch
path, way = sys.argv[1:]
tensors = {str(n): torch.ones(100_000) for n in range(10)}
begun = threading.Barrier(4)
# Names of the module are gone at the end.
def work(number, path, way, tensors, begun, tensorizer, torch):
    begun.wait()
    while True:
        if way == "load": tensorizer.load(path, verify_hash=True)
        elif way == "operator": torch.ops.tensorizer.load(path)
        elif way == "save": tensorizer.save(tensors, f"{path}.{number}")
given = path, way, tensors, begun, tensorizer, torch
for number in range(3):
    threading.Thread(target=work, args=(number, *given), daemon=True).start()
begun.wait()
time.sleep(0.1)
print("end", flush=True)
"""


@pytest.mark.parametrize("way", ["load", "operator", "save"])
def test_daemon_threads(tmp_path, way):
    tensorizer.save({str(n): torch.ones(100_000) for n in range(20)}, tmp_path / "f")
    done = run_python(CODE, tmp_path / "f", way, finalize=True)
    assert done.stdout == "end\n"
    # Messages of torch's threads, perhaps several; Rust would write of a foreign exception, or of
    # a panic.
    said = {"terminate called without an active exception", "terminate called recursively"}
    assert set(done.stderr.splitlines()) <= said
    assert done.returncode == (-signal.SIGABRT if done.stderr else 0)
