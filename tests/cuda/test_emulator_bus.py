"""The emulator's simulated bus, costs of calls, counters and memory pools.

Only lower bounds of times are tested: a loaded machine makes everything slower.
"""

import os

import pytest
from emulated import is_found, passes, run

#: Copies of `SIZE` bytes, each of which takes 0.1 seconds of a bus of 100 MB/s.
COPIES = """
import time
SIZE, SECONDS = 10_000_000, 0.1
up, down = torch.ones(SIZE, dtype=torch.uint8).pin_memory(), torch.zeros(SIZE).byte().pin_memory()
x, y = (torch.zeros(SIZE, dtype=torch.uint8, device="cuda") for _ in range(2))
first, second = torch.cuda.Stream(), torch.cuda.Stream()
torch.cuda.synchronize()
emulated.reset()
begun = time.monotonic()

def upload(stream, to=x, size=SIZE):
    with torch.cuda.stream(stream):
        to[:size].copy_(up[:size], non_blocking=True)

def download(stream):
    with torch.cuda.stream(stream):
        down.copy_(y, non_blocking=True)

def took(copies):
    elapsed = time.monotonic() - begun
    assert elapsed >= copies * SECONDS - 1e-6, elapsed

def call(name, *args):
    import ctypes
    assert getattr(ctypes.CDLL(None), name)(*args) == 0, name
"""
BUS = {"FAKE_CUDA_BUS_MBPS": "100"}


def test_copies_take_the_time_of_the_bus():
    passes(
        COPIES
        + """
upload(first)
first.synchronize()
took(copies=1)
assert x.cpu().eq(1).all()
took(copies=2)
""",
        **BUS,
    )


def test_streams_share_the_bus():
    passes(
        COPIES
        + """
upload(first)
upload(second, to=y)
torch.cuda.synchronize()
took(copies=2)
""",
        **BUS,
    )


def test_devices_share_the_bus_where_configured():
    passes(
        COPIES
        + """
other = torch.empty(SIZE, dtype=torch.uint8, device="cuda:1")
begun = time.monotonic()
upload(first)
with torch.cuda.device(1):
    upload(torch.cuda.Stream(), to=other)
torch.cuda.synchronize(0)
torch.cuda.synchronize(1)
took(copies=2)
""",
        FAKE_CUDA_BUS_SHARED="1",
        **BUS,
    )


def test_free_copies_take_the_time_of_the_bus():
    passes(
        COPIES
        + """
upload(first)
first.synchronize()
took(copies=1)
""",
        FAKE_CUDA_FREE_COPIES="1",
        **BUS,
    )


def test_a_copy_starts_after_the_event_that_its_stream_waits_for():
    """The bus is free for the second copy: it goes in the other direction."""
    passes(
        COPIES
        + """
upload(first)
second.wait_event(first.record_event())
download(second)
done = second.record_event()
done.synchronize()
took(copies=2)
""",
        **BUS,
    )


def test_driver_events_work_on_streams_of_torch():
    passes(
        COPIES
        + """
import ctypes
own, event, later = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
call("cuStreamCreate", ctypes.byref(own), 1)
for each in (event, later):
    call("cuEventCreate", ctypes.byref(each), 2)
theirs = ctypes.c_void_p(first.cuda_stream)
upload(first)
call("cuEventRecord", event, theirs)
call("cuStreamWaitEvent", own, event, 0)
call("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(down.data_ptr()), ctypes.c_void_p(x.data_ptr()),
     ctypes.c_size_t(SIZE), own)
call("cuEventRecord", later, own)
call("cuEventSynchronize", event)
took(copies=1)
call("cuEventSynchronize", later)
took(copies=2)
assert down.eq(1).all()
""",
        **BUS,
    )


@pytest.mark.parametrize(
    "work",
    ["emulated.pause(first, 0.1)", "emulated.launch(first, lambda: time.sleep(0.1))"],
)
def test_a_copy_starts_after_other_work_of_its_stream(work):
    passes(
        COPIES
        + f"""
{work}
upload(first)
first.synchronize()
took(copies=2)
""",
        **BUS,
    )


def test_each_copy_of_a_stream_has_the_latency():
    passes(
        COPIES
        + """
for _ in range(10):
    upload(first, size=1)
first.synchronize()
took(copies=5)
""",
        FAKE_CUDA_COPY_LATENCY_NS="50000000",
    )


def test_the_bus_counts_bytes_and_copies():
    passes(
        COPIES
        + """
upload(first)
download(second)
torch.cuda.synchronize()
assert emulated.stat("bus bytes") == 2 * SIZE
assert emulated.stat("bus busy us") == 200_000
assert 100_000 <= emulated.stat("bus span us")
first_us, last_us = emulated.stat("bus first us"), emulated.stat("bus last us")
assert begun * 1e6 - 1 <= first_us < last_us <= time.monotonic() * 1e6 + 1
assert emulated.stat("copies") == emulated.stat("pinned copies") == 2
emulated.reset()
assert emulated.stat("bus bytes") == emulated.stat("bus busy us") == emulated.stat("copies") == 0
""",
        **BUS,
    )


def test_memory_counters_have_current_and_peak_bytes():
    passes("""
MIB = 1 << 20
x = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
used = emulated.stat("device used")
assert used >= 40 * MIB
assert emulated.stat("device peak") == used
del x
torch.cuda.empty_cache()
assert emulated.stat("device used") <= used - 40 * MIB
assert emulated.stat("device peak") == used
emulated.reset()
assert emulated.stat("device peak") == emulated.stat("device used")

import ctypes
host = ctypes.c_void_p()
runtime = ctypes.CDLL(None)
before = emulated.stat("pinned now")
assert runtime.cudaHostAlloc(ctypes.byref(host), ctypes.c_size_t(5 * MIB), 0) == 0
assert emulated.stat("pinned now") == before + 5 * MIB
assert runtime.cudaFreeHost(host) == 0
assert emulated.stat("pinned now") == before
assert emulated.stat("pinned peak") == before + 5 * MIB
""")


def test_every_driver_call_is_counted():
    passes("""
event = torch.cuda.Event()
event.record()
torch.cuda.synchronize()
emulated.reset()
for _ in range(3):
    event.query()
named = emulated.calls_by_name()
assert named["cudaEventQuery"] == emulated.calls("cudaEventQuery") == 3
assert emulated.stat("total calls") == sum(named.values()) >= 3
""")


@pytest.mark.parametrize(
    ("setting", "value", "function"),
    [
        ("FAKE_CUDA_CALL_NS", "20000000", "for _ in range(5): call('cuStreamCreate', new(), 1)"),
        # Queries cost a tenth of other calls.
        ("FAKE_CUDA_CALL_NS", "50000000", "for _ in range(20): call('cuStreamQuery', None)"),
        ("FAKE_CUDA_MALLOC_US", "50000", "for _ in '12': call('cudaMalloc', new(), large)"),
        ("FAKE_CUDA_PIN_US_PER_MB", "12500", "call('cudaHostAlloc', new(), large, 0)"),
        ("FAKE_CUDA_PIN_US_PER_MB", "12500", "call('cuMemHostRegister_v2', memory, large, 0)"),
    ],
)
def test_calls_take_their_configured_time(setting, value, function):
    passes(
        f"""
import ctypes, mmap, time
mapping = mmap.mmap(-1, 8 << 20)
memory = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(mapping)))
large, runtime = ctypes.c_size_t(8 << 20), ctypes.CDLL(None)

def new():
    return ctypes.byref(ctypes.c_void_p())

def call(name, *args):
    assert getattr(runtime, name)(*args) == 0

torch.cuda.init()
torch.cuda.synchronize()
begun = time.monotonic()
{function}
elapsed = time.monotonic() - begun
assert elapsed >= 0.1 - 1e-6, elapsed
runtime.cuMemHostUnregister(memory)
""",
        **{setting: value},
    )


def test_pinning_makes_pages_present():
    code = """
import ctypes, mmap
size = 8 << 20
mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
runtime = ctypes.CDLL(None)
torch.cuda.init()

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE

before = resident()
# Not from the beginning of a page on.
pinned = runtime.cudaHostRegister(ctypes.c_void_p(memory + 100), ctypes.c_size_t(size - 100), 0)
assert pinned == 0
print(resident() - before)
runtime.cudaHostUnregister(ctypes.c_void_p(memory + 100))
"""
    grown = passes(code, FAKE_CUDA_PIN_POPULATE="1").stdout
    assert int(grown) >= 7 << 20


def test_device_bytes_can_be_compared():
    passes("""
x = torch.arange(200, dtype=torch.uint8).cuda()
torch.cuda.synchronize()
assert emulated.device_bytes(x.data_ptr() + 7, 5) == bytes(range(7, 12))
""")


#: Selects torch's allocator that uses the driver's pools; torch reads this once, when it starts.
POOLS = {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}


def test_memory_pools_allocate_and_free_in_stream_order():
    passes(
        """
x = torch.ones(1_000_000).cuda()
assert emulated.calls("cudaMallocAsync") >= 1
used = emulated.stat("device used")
assert used >= 4_000_000
y = x * 3
emulated.pause(torch.cuda.current_stream(), 0.1)
del x
assert y.cpu().eq(3).all()
torch.cuda.synchronize()
assert emulated.calls("cudaFreeAsync") == 1
assert emulated.stat("device used") <= used
assert torch.cuda.memory_allocated() >= 4_000_000
""",
        **POOLS,
    )


def test_a_free_without_waiting_for_another_stream_is_a_race():
    code = """
import ctypes
runtime, stream, x = ctypes.CDLL(None), torch.cuda.Stream(), ctypes.c_void_p()
assert runtime.cudaMallocAsync(ctypes.byref(x), ctypes.c_size_t(1000), None) == 0
torch.cuda.synchronize()
assert runtime.cudaMemsetAsync(x, 0, ctypes.c_size_t(1000), None) == 0
{wait}
assert runtime.cudaFreeAsync(x, ctypes.c_void_p(stream.cuda_stream)) == 0
torch.cuda.synchronize()
"""
    is_found("race: free on stream", code.format(wait=""))
    passes(code.format(wait="stream.wait_stream(torch.cuda.default_stream())"))


def test_the_report_has_the_bus_and_the_peaks():
    done = run("torch.ones(1000).pin_memory().cuda()", FAKE_CUDA_REPORT="1", **BUS)
    assert done.returncode == os.EX_OK, done.stderr
    assert "pinned: peak" in done.stderr
    assert "bus: 4000 bytes, busy for 0.000040 s" in done.stderr
