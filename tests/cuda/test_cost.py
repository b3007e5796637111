"""How often the driver is called: its calls are the host's share of a load beside the reads."""

import json
import os

import emulated

#: Loads a file twice and prints the calls of the second time.
LOAD = """
import json, sys, tensorizer
path = sys.argv[1]
for _ in range(2):
    emulated.fail("")
    tensors = tensorizer.load(path, "cuda")
    torch.cuda.synchronize()
    counted = {name: emulated.calls(name) for name in (
        "cuCtxPushCurrent", "cuThreadExchangeStreamCaptureMode", "cuMemcpyHtoDAsync",
        "cuEventCreate", "cuEventRecord", "cuEventQuery", "cuStreamCreate", "cuMemHostRegister",
    )}
    counted["threads"] = tensorizer.stats()["threads"]
    del tensors
print(json.dumps(counted))
"""
WRITE = """
import sys, tensorizer
count, size = int(sys.argv[2]), int(sys.argv[3])
tensors = {f"t.{i}": torch.ones(size, dtype=torch.uint8) for i in range(count)}
tensorizer.save(tensors, sys.argv[1])
"""


def counted(path, count, size):
    written = emulated.run(WRITE, path, count, size)
    assert written.returncode == 0, written.stderr
    free = {"FAKE_CUDA_FREE_COPIES": "1", "FAKE_CUDA_POISON": "0"}
    loaded = emulated.run(LOAD, path, **free)
    assert loaded.returncode == 0, loaded.stderr
    return json.loads(loaded.stdout)


def check(calls, buffers, copies):
    # Waiting for the consumer before and after, for two streams.
    fixed = 16
    assert calls["cuStreamCreate"] == calls["cuMemHostRegister"] == 0
    assert calls["cuEventCreate"] <= 8
    assert calls["cuEventRecord"] <= buffers + fixed
    # To look for buffers that are free again, and to begin copies.
    assert calls["cuCtxPushCurrent"] <= 2 * buffers + fixed
    assert calls["cuThreadExchangeStreamCaptureMode"] == 2 * calls["cuCtxPushCurrent"]
    # Buffers come back in the order of their streams: what has not passed is asked again.
    assert calls["cuEventQuery"] <= 4 * buffers + fixed
    assert calls["cuMemcpyHtoDAsync"] <= copies


def test_large_tensors(tmp_path):
    """256 MiB: 64 staging buffers, and a tenth more because batches leave room for headers."""
    calls = counted(tmp_path / "f", 16, 16 << 20)
    check(calls, buffers=74, copies=74 + 16)


def test_small_tensors(tmp_path):
    """64 MiB in 4,096 tensors: images of the file, one copy for each staging buffer."""
    calls = counted(tmp_path / "f", 4096, 16 << 10)
    check(calls, buffers=21, copies=21 + 4)


def test_readers_of_what_is_in_memory(tmp_path):
    """As many as cores: copies that are waited for are no reason for more."""
    calls = counted(tmp_path / "f", 64, 8 << 20)
    assert calls["threads"] <= max(2, os.cpu_count())


def test_large_tensors_are_verified_in_little_memory(tmp_path):
    """What waits for its hash never takes all of the memory that the next bytes need."""
    written = emulated.run(
        "import sys, tensorizer\n"
        "tensorizer.save({f't{i}': torch.full((size,), i, dtype=torch.uint8) for i, size in "
        "enumerate([30_000_000, 68_000_001, 5, 69_000_000, 80_000_000, 300_000, 70_000_000])},"
        " sys.argv[1])",
        tmp_path / "f",
    )
    assert written.returncode == 0, written.stderr
    code = """
    import sys, tensorizer
    tensors = tensorizer.load(sys.argv[1], "cuda", verify_hash=True)
    for number, tensor in enumerate(tensors.values()):
        assert bool((tensor.cpu() == number).all()), number
    """
    for readers in ("2", "4", "8"):
        little = {"TENSORIZER_PINNED_MB": "16", "TENSORIZER_READERS": readers}
        loaded = emulated.run(code, tmp_path / "f", **little)
        assert loaded.returncode == 0, loaded.stderr
