"""Pipes: signals that are handled meanwhile, and files that a pipe cannot give."""

import os
import threading
import time

import pytest
import tensorizer
import torch
from conftest import run_python
from tensorizer import DecryptionParams, EncryptionParams

SIGNALS = """
import signal, sys, tensorizer
count = 0
def handle(*_):
    global count
    count += 1
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
way, number = sys.argv[1], int(sys.argv[2])
source = {"number": number, "path": f"/proc/self/fd/{number}"}.get(way) or open(number, "rb", 0)
loaded = tensorizer.TensorDeserializer(source, "cpu", verify_hash=True)
signal.setitimer(signal.ITIMER_REAL, 0)
print(count > 5, loaded["a"].sum().item())
"""


def trickle(data, into):
    with open(into, "wb", buffering=0) as pipe:
        for at in range(0, len(data), 200_000):
            pipe.write(data[at : at + 200_000])
            time.sleep(0.05)


@pytest.mark.parametrize("way", ["number", "path", "file"])
def test_signals_that_are_handled(tmp_path, way):
    tensorizer.save({"a": torch.ones(500_000)}, tmp_path / "f")
    out, into = os.pipe()
    writer = threading.Thread(target=trickle, args=((tmp_path / "f").read_bytes(), into))
    writer.start()
    done = run_python(SIGNALS, way, out, pass_fds=[out])
    writer.join()
    os.close(out)
    assert done.stdout == "True 500000.0\n", done.stderr


def test_a_sealed_file_says_why_it_needs_more_than_a_pipe(tmp_path):
    params = EncryptionParams.random(manifest=True)
    tensorizer.save({"a": torch.ones(5)}, tmp_path / "f", encryption=params)
    out, into = os.pipe()
    writer = threading.Thread(target=feed, args=((tmp_path / "f").read_bytes(), into))
    writer.start()
    try:
        with pytest.raises(NotImplementedError, match="has a manifest, which is checked before"):
            tensorizer.load(out, encryption=DecryptionParams.from_key(params.key))
    finally:
        os.close(out)
        writer.join()


def feed(data, into):
    try:
        with open(into, "wb", buffering=0) as pipe:
            pipe.write(data)
    except BrokenPipeError:
        pass
