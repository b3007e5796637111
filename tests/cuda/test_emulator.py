"""The emulator detects mistakes of programs: plain torch, each in a process of its own."""

import signal

import pytest
from emulated import is_found, passes, run

#: Calls of the CUDA run time, for mistakes that torch itself does not make.
RUNTIME = """
import ctypes
runtime = ctypes.CDLL(None)
HOST_TO_DEVICE = 1

def call(name, *args):
    return getattr(runtime, name)(*args)

def address(tensor):
    return ctypes.c_void_p(tensor.data_ptr())

def allocate(size):
    found = ctypes.c_void_p()
    assert call("cudaMalloc", ctypes.byref(found), ctypes.c_size_t(size)) == 0
    return found

def copy(to, source, size, stream=None):
    return call("cudaMemcpyAsync", to, source, ctypes.c_size_t(size), HOST_TO_DEVICE, stream)
"""


RACE = """
first, second = torch.cuda.Stream(), torch.cuda.Stream()
x = torch.ones(1000, device="cuda")
torch.cuda.synchronize()
emulated.pause(first, 0.2)
with torch.cuda.stream(first):
    x.fill_(2)
with torch.cuda.stream(second):
    {wait}
    y = x * 3
torch.cuda.synchronize()
"""


def test_unordered_copies_to_one_range_are_a_race():
    is_found("race: mul on stream", RACE.format(wait="pass"))


def test_a_stream_that_waits_for_an_event_has_no_race():
    passes(RACE.format(wait="second.wait_stream(first)") + "assert y.cpu().eq(6).all()")


def test_a_stream_keeps_waiting_when_the_event_is_recorded_anew():
    """The call fixes for which work the stream waits, as CUDA says of cudaEventRecord."""
    anew = "event = first.record_event(); event.wait(); event.record(torch.cuda.Stream())"
    passes(RACE.format(wait=anew) + "assert y.cpu().eq(6).all()")


@pytest.mark.parametrize(
    "wait",
    [
        "torch.cuda.synchronize()",
        "first.synchronize()",
        "first.record_event().synchronize()",
        "event = first.record_event()\n    while not event.query(): pass",
    ],
)
def test_a_host_that_synchronizes_has_no_race(wait):
    passes(RACE.format(wait=wait) + "assert y.cpu().eq(6).all()")


def test_a_race_with_right_bytes_is_still_reported():
    is_found("race: mul on stream", RACE.format(wait="import time; time.sleep(0.5)"))


def test_without_strict_a_race_is_only_reported():
    done = run(RACE.format(wait="pass") + "assert y.cpu().eq(3).all()", FAKE_CUDA_STRICT="0")
    assert "FAKE_CUDA PROBLEM: race: mul on stream" in done.stderr
    assert done.returncode == 0, done.stderr[-2000:]


def test_memory_reused_by_torch_while_a_stream_uses_it_is_a_race():
    code = """
stream = torch.cuda.Stream()
x = torch.ones(1000, device="cuda")
torch.cuda.synchronize()
emulated.pause(stream, 0.2)
with torch.cuda.stream(stream):
    y = x * 3
{record}
del x
z = torch.zeros(1000, device="cuda")
torch.cuda.synchronize()
"""
    is_found("race: fill on stream", code.format(record=""))
    passes(code.format(record="x.record_stream(stream)") + "assert y.cpu().eq(3).all()")


def test_use_after_free_is_reported():
    code = """
memory, host = allocate(1000), torch.zeros(1000, dtype=torch.uint8)
assert call("cudaFree", memory) == 0
copy(memory, address(host), 1000)
"""
    is_found("cudaMemcpyAsync of 1000 bytes at device address", RUNTIME + code)


def test_use_after_free_by_a_graph_is_reported():
    code = """
pool = torch.cuda.graph_pool_handle()
x = torch.ones(1000, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, pool=pool):
    x.mul_(2)
graph.replay()
assert x.cpu().eq(2).all()
del x
torch.cuda.empty_cache()
graph.replay()
torch.cuda.synchronize()
"""
    is_found("mul uses device memory", code)


def test_a_double_free_is_reported():
    code = """
memory = allocate(1000)
call("cudaFree", memory)
call("cudaFree", memory)
"""
    is_found("free of", RUNTIME + code)


def test_free_waits_for_the_device():
    code = """
memory, host = allocate(1000), torch.zeros(1000, dtype=torch.uint8).pin_memory()
emulated.pause(torch.cuda.current_stream(), 0.2)
assert copy(memory, address(host), 1000) == 0 and emulated.stat("pending") == 1
assert call("cudaFree", memory) == 0 and emulated.stat("pending") == 0
"""
    passes(RUNTIME + code)


def test_a_copy_beyond_an_allocation_is_reported():
    code = """
memory, host = allocate(1000), torch.zeros(2000, dtype=torch.uint8)
assert copy(memory, address(host), 1000) == 0
copy(memory, address(host), 1001)
"""
    is_found("cudaMemcpyAsync of 1001 bytes at device address", RUNTIME + code)


def test_a_copy_beyond_pinned_memory_is_reported():
    code = """
memory, host = allocate(8192), torch.zeros(8192, dtype=torch.uint8)
assert call("cudaHostRegister", address(host), ctypes.c_size_t(4096), 0) == 0
copy(memory, address(host), 4097)
"""
    is_found("cudaMemcpyAsync: host range", RUNTIME + code)


def test_a_write_to_a_pinned_source_during_its_copy_is_reported():
    code = """
host, x = torch.ones(1000).pin_memory(), torch.zeros(1000, device="cuda")
torch.cuda.synchronize()
emulated.pause(torch.cuda.current_stream(), 0.2)
x.copy_(host, non_blocking=True)
{wait}
host.fill_(2)
torch.cuda.synchronize()
"""
    is_found("cudaMemcpyAsync: 4000 bytes of host memory", code.format(wait=""))
    wait = "torch.cuda.current_stream().synchronize()"
    passes(code.format(wait=wait) + "assert x.cpu().eq(1).all()")


def test_a_read_of_the_destination_during_a_copy_is_reported():
    passes("""
host, x = torch.zeros(1000, dtype=torch.uint8).pin_memory(), torch.ones(1000).byte().cuda()
torch.cuda.synchronize()
emulated.pause(torch.cuda.current_stream(), 0.2)
host.copy_(x, non_blocking=True)
assert host.eq(0x5A).all(), "what was copied is there before the copy"
torch.cuda.synchronize()
assert host.eq(1).all()
""")


@pytest.mark.parametrize(
    ("name", "problem"),
    [("cudaHostUnregister", "host memory"), ("munmap", "munmap of pinned memory")],
)
def test_unpinning_during_a_copy_is_reported(name, problem):
    code = f"""
import mmap
mapping = mmap.mmap(-1, 8192)
host = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(mapping)))
memory = allocate(8192)
assert call("cudaHostRegister", host, ctypes.c_size_t(8192), 0) == 0
emulated.pause(torch.cuda.current_stream(), 0.2)
assert copy(memory, host, 8192) == 0
call("{name}", host, ctypes.c_size_t(8192))
"""
    is_found(problem, RUNTIME + code)


def test_host_access_to_device_memory_is_reported():
    done = run("""
import ctypes
x = torch.ones(1000, device="cuda")
torch.cuda.synchronize()
ctypes.string_at(x.data_ptr(), 4)
""")
    assert done.returncode == -signal.SIGSEGV


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ("call('cudaEventRecord', event, None)", "use of an event after it was destroyed"),
        ("call('cudaStreamSynchronize', stream)", "use of stream 0 after it was destroyed"),
        ("call('cudaStreamSynchronize', event)", "is no stream"),
    ],
)
def test_invalid_handles_are_reported(what, problem):
    code = f"""
stream, event = ctypes.c_void_p(), ctypes.c_void_p()
call("cudaStreamCreate", ctypes.byref(stream))
call("cudaEventCreate", ctypes.byref(event))
call("cudaStreamDestroy", stream)
call("cudaEventDestroy", event)
{what}
"""
    done = run(RUNTIME + code)
    assert "FAKE_CUDA PROBLEM: " in done.stderr and problem in done.stderr, done.stderr[-2000:]
    assert done.returncode == -signal.SIGABRT


def test_a_thread_that_ends_with_a_context_pushed_is_reported():
    code = """
import os, threading, time
context = ctypes.c_void_p()
assert call("cuInit", 0) == 0
assert call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0) == 0
def work():
    assert call("cuCtxPushCurrent_v2", context) == 0
thread = threading.Thread(target=work)
thread.start()
# Not by join(), which returns before the thread's own end.
while os.path.exists(f"/proc/self/task/{thread.native_id}"):
    time.sleep(0.001)
"""
    is_found("a thread ended with 1 contexts pushed and not popped", RUNTIME + code)


def test_synchronizing_a_stream_during_a_graph_capture_fails():
    passes("""
x, other = torch.ones(1000, device="cuda"), torch.cuda.Stream()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        x.mul_(2)
        other.synchronize()
except RuntimeError as error:
    assert "captur" in str(error), error
else:
    raise AssertionError("a capture went on after a synchronisation")
""")


def test_a_captured_graph_is_replayed():
    passes("""
x = torch.ones(1000, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    x.mul_(3)
torch.cuda.synchronize()
assert x.cpu().eq(1).all()
graph.replay()
graph.replay()
assert x.cpu().eq(9).all()
""")


def test_a_child_after_a_fork_has_no_device():
    passes("""
import os
x = torch.ones(1000, device="cuda")
child = os.fork()
if child == 0:
    import ctypes
    os._exit(ctypes.CDLL(None).cudaDeviceSynchronize())
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3  # cudaErrorInitializationError
""")


def test_configured_calls_fail_with_their_error():
    passes("""
emulated.fail("cudaMalloc=2@2")
small = torch.ones(10, device="cuda")
large = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
# torch has asked again, after it has freed what it can.
assert emulated.calls("cudaMalloc") == 3
""")
    done = run('torch.ones(10, device="cuda")', FAKE_CUDA_FAIL="cudaMalloc=2")
    assert "torch.OutOfMemoryError" in done.stderr


@pytest.mark.parametrize("code", [700, 719])
def test_a_copy_that_fails_takes_the_device_with_it_and_aborts_no_process(code):
    program = f"""
weights, spare = torch.ones(500_000).cuda(), torch.ones(3, device="cuda:1")
torch.cuda.synchronize()
emulated.fail("copy={code}@1")
for _ in range(2):
    try:
        torch.ones(3).to("cuda:0")
        torch.cuda.synchronize(0)
    except RuntimeError:
        pass
    else:
        raise AssertionError("the device is not lost")
assert (spare * 2).cpu().eq(2).all()
"""
    passes(program, finalize=True)


def test_memory_is_limited():
    done = run('torch.empty(65 << 20, dtype=torch.uint8, device="cuda")', FAKE_CUDA_MEM_MB="64")
    assert "torch.OutOfMemoryError" in done.stderr


def test_kernels_compute_what_torch_computes():
    passes("""
x = torch.randn(1000, 7)
on = x.cuda()
assert torch.equal((on * 3).cpu(), x * 3)
assert torch.equal((on + on).cpu(), x + x)
assert torch.equal((on + 2).cpu(), x + 2)
for dtype in (torch.float16, torch.bfloat16, torch.float64):
    assert torch.equal(on.to(dtype).cpu(), x.to(dtype))
    assert torch.equal(on.to(dtype).float().cpu(), x.to(dtype).float())
small = x.to(torch.float8_e4m3fn)
assert torch.equal(small.cuda().float().cpu(), small.float())
for dtype in (torch.float32, torch.uint8, torch.bfloat16, torch.float64):
    wide = torch.randn(6, 5, 4).mul(50).to(dtype)
    assert torch.equal(wide.cuda().permute(2, 0, 1).contiguous().cpu(), wide.permute(2, 0, 1))
    assert torch.equal(wide.cuda()[:, ::2].contiguous().cpu(), wide[:, ::2])
""")


def test_a_kernel_that_is_not_emulated_is_refused():
    done = run('torch.ones(10, device="cuda").cos()', FAKE_CUDA_LOG="1")
    assert "operation not supported (not emulated)" in done.stderr
    assert "FAKE_CUDA note: no kernel" in done.stderr and "cos" in done.stderr


def test_the_report_counts_problems_and_copies():
    done = passes(
        """
x = torch.ones(1000).cuda()
torch.cuda.synchronize()
""",
        FAKE_CUDA_REPORT="1",
    )
    assert "FAKE_CUDA report: problems 0" in done.stderr
    assert "pageable copies: 1" in done.stderr
