"""Calls from signal handlers in the middle of native calls: errors, and no deadlocks."""

import pytest
from processes import run_python

#: A file object that raises an alarm in its first write, of which the handler calls `again`.
SAVE = """
import io, signal, sys, torch
from tensorizer import TensorSerializer

class Alarming(io.BytesIO):
    alarmed = False
    def write(self, data):
        if not self.alarmed and len(data) > 1000:
            self.alarmed = True
            signal.raise_signal(signal.SIGALRM)
        return super().write(data)

done = []
signal.signal(signal.SIGALRM, lambda *_: done.append(eval(sys.argv[1])))
serializer = TensorSerializer(Alarming())
writer = serializer._file.native
try:
    serializer.write_state_dict({"a": torch.ones(3_000_000)})
except RuntimeError as error:
    print("error:", error)
print(done)
"""

ITERATE = """
import io, signal, sys, torch, tensorizer

class Alarming(io.BytesIO):
    reads = None
    def read(self, size=-1):
        if self.reads is not None:
            self.reads += 1
        if self.reads == 2:
            signal.raise_signal(signal.SIGALRM)
        return super().read(size)

done = []
signal.signal(signal.SIGALRM, lambda *_: done.append(iterator.close()))
tensorizer.save({f"t{n}": torch.ones(400_000) for n in range(20)}, sys.argv[1])
file = Alarming(open(sys.argv[1], "rb").read())
iterator = tensorizer.iterate(file, "cpu", buffer_bytes=4_000_000)
file.reads = 0
try:
    print(len(list(iterator)))
except (ValueError, RuntimeError) as error:
    print(type(error).__name__, error)
print(done, file.reads)
"""


@pytest.mark.parametrize("call", ["serializer.close()", "writer.end", "writer.abandon()"])
def test_a_call_in_the_middle_of_a_write_is_an_error(call):
    done = run_python(SAVE, call)
    assert done.returncode == 0, done.stderr
    assert "error: this thread is in the middle of a write to " in done.stdout


def test_the_address_can_be_read_in_the_middle_of_a_write():
    done = run_python(SAVE, "writer.uri")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['<Alarming>']\n"


def test_closing_an_iterator_in_the_middle_of_its_call_is_an_error(tmp_path):
    done = run_python(ITERATE, tmp_path / "f")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("RuntimeError ") and "iterator" in done.stdout
