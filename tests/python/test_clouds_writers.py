"""Processes that write to Google Cloud Storage and Azure: their memory, and how they end."""

import signal
import subprocess

import pytest
import tensorizer
import torch
from processes import run_python, start_python
from test_addresses import Store


@pytest.fixture
def key(request):
    return request.node.name.translate(str.maketrans("[]", "--"))


@pytest.fixture
def address(bucket, key):
    return f"{bucket.scheme}://bucket/{key}"


PEAK = """
import sys, tensorizer, torch
def peak():
    return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmHWM')) << 10
tensors = {str(i): torch.ones(20_000_000) for i in range(2)}
before = peak()
tensorizer.save(tensors, sys.argv[1])
print(peak() - before)
"""


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_peak_memory(no_settings_of_the_machine, monkeypatch, scheme):
    monkeypatch.setenv("TENSORIZER_UPLOAD_MB", "48")
    with Store() as store:
        store.use(monkeypatch)
        done = run_python(PEAK, f"{scheme}://bucket/f")
        assert len(store.paths) > 20
    assert done.returncode == 0, done.stderr
    # 48 for parts; what is copied and hashed takes the rest.
    assert int(done.stdout) >> 20 < 112


CODE = """
import os, sys, tensorizer, time, torch
def end(s):
    # The upload is not the child's to end, or to give up.
    try: s.close()
    except tensorizer.ClosedError: return 0
    return 1
try:
    s = tensorizer.TensorSerializer(sys.argv[1])
    s.write_state_dict({'a': torch.arange(4_000_000)})
    print('written', flush=True)
    if sys.argv[2] == 'fork':
        pid = os.fork()
        if pid == 0: os._exit(end(s))
        assert os.waitpid(pid, 0)[1] == 0
    else:
        time.sleep(60)
    s.close()
except KeyboardInterrupt:
    s = None
    print('interrupted', flush=True)
"""


@pytest.mark.parametrize("how", ["kill", "ctrl-c", "fork"])
def test_an_interrupted_writer_keeps_the_old_object(bucket, key, address, how):
    bucket.put(key, b"old")
    with start_python(CODE, address, how, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"written\n"
        if how == "fork":
            assert process.wait(60) == 0
            assert torch.equal(tensorizer.load(address)["a"], torch.arange(4_000_000))
            return
        process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGINT)
        assert process.stdout.read() == (b"" if how == "kill" else b"interrupted\n")
    assert bucket.read(key) == b"old"
    # An interrupted upload leaves nothing; a killed one is left for the bucket's lifecycle rules.
    if how == "kill" and bucket.scheme == "gs":
        bucket.drop(key)
    assert bucket.left(key) == []
