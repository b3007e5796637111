"""Calls of the driver are limited: with the reads they are the host's share of a load."""

import json
import os

import emulated
import pytest

#: Loads a file until a load pins no memory, and prints that load's calls. The loads before it pin
#: more or less: it depends on how far reading gets ahead of copying.
LOAD = """
import json, sys, tensorizer
path = sys.argv[1]
for _ in range(10):
    emulated.fail("")
    tensors = tensorizer.load(path, "cuda")
    torch.cuda.synchronize()
    counted = {name: emulated.calls(name) for name in (
        "cuCtxPushCurrent", "cuThreadExchangeStreamCaptureMode", "cuMemcpyHtoDAsync",
        "cuMemcpyBatchAsync", "cuEventCreate", "cuEventRecord", "cuEventQuery", "cuStreamCreate",
        "cuMemHostRegister",
    )}
    counted["all"] = sum(n for name, n in emulated.calls_by_name().items() if name != "copy")
    counted["threads"] = tensorizer.stats()["threads"]
    del tensors
    if not counted["cuMemHostRegister"]:
        break
print(json.dumps(counted))
"""
WRITE = """
import sys, tensorizer
count, size = int(sys.argv[2]), int(sys.argv[3])
tensors = {f"t.{i}": torch.ones(size, dtype=torch.uint8) for i in range(count)}
tensorizer.save(tensors, sys.argv[1])
"""


def counted(path, count, size, **settings):
    written = emulated.run(WRITE, path, count, size)
    assert written.returncode == 0, written.stderr
    free = {"FAKE_CUDA_FREE_COPIES": "1", "FAKE_CUDA_POISON": "0", **settings}
    loaded = emulated.run(LOAD, path, **free)
    assert loaded.returncode == 0, loaded.stderr
    return json.loads(loaded.stdout)


def check(calls, buffers, copies):
    # Calls that do not depend on the size: two streams wait for the consumer before and after.
    fixed = 16
    assert calls["cuStreamCreate"] == 0
    assert calls["cuMemHostRegister"] == 0
    # Events order the streams, and tell when a block's memory is free again.
    assert calls["cuEventCreate"] <= 12
    assert calls["cuEventRecord"] <= buffers + fixed
    # Called to look for buffers that are free again, and to begin copies.
    assert calls["cuCtxPushCurrent"] <= calls["threads"] + fixed
    assert calls["cuThreadExchangeStreamCaptureMode"] == 2 * calls["cuCtxPushCurrent"]
    # Buffers come back in the order of their streams; one that is not free yet is asked for again.
    assert calls["cuEventQuery"] <= 4 * buffers + fixed
    assert calls["cuMemcpyHtoDAsync"] + calls["cuMemcpyBatchAsync"] <= copies


def test_large_tensors_cost_few_driver_calls(tmp_path):
    """128 MiB: 64 staging buffers, and a tenth more because batches leave room for headers."""
    calls = counted(tmp_path / "f", 8, 16 << 20)
    check(calls, buffers=74, copies=74 + 8)


def test_waiting_for_a_slow_bus_costs_few_calls(tmp_path):
    """At 2 GB/s buffers come back every ms; 10,000 calls for 2.18 GB are 4.6 for each MB."""
    bus = {"FAKE_CUDA_BUS_MBPS": "2000", "FAKE_CUDA_DELAY_US": "0"}
    calls = counted(tmp_path / "f", 8, 16 << 20, **bus)
    assert calls["all"] < 4.6 * 134, calls


def test_small_tensors_cost_few_driver_calls(tmp_path):
    """64 MiB in 4,096 tensors: images of the file, one copy for each staging buffer."""
    calls = counted(tmp_path / "f", 4096, 16 << 10)
    check(calls, buffers=42, copies=42 + 4)


LOADS = """
import json, sys, tensorizer
for _ in range(40):
    tensors = tensorizer.load(sys.argv[1], "cuda")
    torch.cuda.synchronize()
    del tensors
print(json.dumps([emulated.calls("cuEventCreate"), emulated.calls("cuEventRecord")]))
"""


def test_loads_reuse_the_events_of_earlier_ones(tmp_path):
    """Forty loads create fewer events than four record: as many as are in use at once."""
    written = emulated.run(WRITE, tmp_path / "f", 1024, 4096)
    assert written.returncode == 0, written.stderr
    loaded = emulated.run(LOADS, tmp_path / "f", FAKE_CUDA_POISON="0")
    assert loaded.returncode == 0, loaded.stderr
    created, recorded = json.loads(loaded.stdout)
    assert 0 < created <= recorded / 10, (created, recorded)


SMALL = """
import json, sys, tensorizer
path, how = sys.argv[1], sys.argv[2]
given = {name: t.cuda() for name, t in tensorizer.load(path, "cpu").items()}
for _ in range(2):
    emulated.reset()
    if how == "iterate":
        count = sum(1 for _ in tensorizer.iterate(path, "cuda"))
    elif how == "clone":
        count = len(tensorizer.load(path, "cuda", clone=True))
    else:
        count = len(tensorizer.load(path, out=given))
    torch.cuda.synchronize()
    calls = emulated.calls_by_name()
print(json.dumps([count, sum(n for name, n in calls.items() if name.startswith("cu")
                             and not name.startswith("cuda"))]))
"""


@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize("how", ["iterate", "clone", "out"])
def test_small_tensors_in_memory_of_their_own_share_calls_of_the_driver(tmp_path, how, batches):
    """A quarter of a call each; as many as one each, and a few, where a driver has no batches."""
    written = emulated.run(WRITE, tmp_path / "f", 2000, 1024)
    assert written.returncode == 0, written.stderr
    settings = {"FAKE_CUDA_POISON": "0"} | ({} if batches else {"FAKE_CUDA_NO_BATCH": "1"})
    loaded = emulated.run(SMALL, tmp_path / "f", how, **settings)
    assert loaded.returncode == 0, loaded.stderr
    count, calls = json.loads(loaded.stdout)
    assert count == 2000
    assert calls < (500 if batches else 3000), calls


def test_files_in_the_page_cache_get_few_readers(tmp_path):
    """A quarter of the cores, four at most, is for copies; waiting for them starts no readers."""
    calls = counted(tmp_path / "f", 16, 8 << 20)
    assert calls["threads"] <= max(2, os.cpu_count() - min(os.cpu_count() // 4, 4))


def test_large_tensors_are_verified_in_little_memory(tmp_path):
    """Data that wait for their hash never take all of the memory that the next bytes need."""
    written = emulated.run(
        "import sys, tensorizer\n"
        "tensorizer.save({f't{i}': torch.full((size,), i, dtype=torch.uint8) for i, size in "
        "enumerate([8_000_000, 17_000_001, 5, 18_000_000, 20_000_000, 300_000, 18_000_000])},"
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
    for readers in ("2", "8"):
        little = {"TENSORIZER_PINNED_MB": "16", "TENSORIZER_NUM_READERS": readers}
        loaded = emulated.run(code, tmp_path / "f", **little)
        assert loaded.returncode == 0, loaded.stderr


RESERVED = """
import json, sys, tensorizer
emulated.fail(sys.argv[2])
tensors = tensorizer.load(sys.argv[1], "cuda")
torch.cuda.synchronize()
stats, mallocs = torch.cuda.memory_stats(), emulated.calls("cudaMalloc")
ends = [end for tensor in tensors.values() for end in (tensor[:4096], tensor[-4096:])]
right = all(bool((end.cpu() == 1).all()) for end in ends)
print(json.dumps({
    "right": right,
    "mallocs": mallocs,
    "peak": stats["allocated_bytes.all.peak"],
    "now": stats["allocated_bytes.all.current"],
    "reserved": stats["reserved_bytes.all.peak"],
}))
"""


def reserved(path, fault="", **settings):
    fast = {"FAKE_CUDA_POISON": "0", "FAKE_CUDA_CHECK_SOURCE": "0"}
    loaded = emulated.run(RESERVED, path, fault, **fast, **settings)
    assert loaded.returncode == 0, loaded.stderr
    found = json.loads(loaded.stdout)
    assert found["right"]
    assert found["peak"] == found["now"], "more than the tensors was allocated at a time"
    return found


def test_memory_of_many_tensors_is_asked_for_at_once(tmp_path):
    """32 tensors of 12 MiB; without large blocks that may be split, each is asked for by itself."""
    path = tmp_path / "f"
    written = emulated.run(WRITE, path, 32, 12 << 20)
    assert written.returncode == 0, written.stderr
    one_by_one = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:21"}
    apart = reserved(path, FAKE_CUDA_MEM_MB="4000", **one_by_one)
    assert apart["mallocs"] >= 32
    together = reserved(path, FAKE_CUDA_MEM_MB="4000")
    assert together["mallocs"] <= 4
    assert (together["peak"], together["reserved"]) == (apart["peak"], apart["reserved"])
    # A quarter of what is free at most, which is not enough for the first blocks of 400 MiB.
    assert 1 < reserved(path, FAKE_CUDA_MEM_MB="1200")["mallocs"] < 32
    assert reserved(path, FAKE_CUDA_MEM_MB="400")["mallocs"] >= 32
    # A driver that refuses it gives no error.
    refused = reserved(path, "cudaMalloc=2@1-2", FAKE_CUDA_MEM_MB="4000")
    assert refused["peak"] == apart["peak"]
