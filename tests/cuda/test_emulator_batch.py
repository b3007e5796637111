"""Batches of copies on the emulator: `cuMemcpyBatchAsync` in its two forms."""

import pytest
from emulated import is_found, passes

#: Calls by ctypes. `FORM` is 12 or 13, for the form of that CUDA.
BATCH = """
import ctypes, threading, time
driver = ctypes.CDLL(None)
BY_STREAM, DURING_CALL, ANY = 1, 2, 3
OK, INVALID, NOT_SUPPORTED, NO_COPY = 0, 1, 801, 2**64 - 1
FORM = 13
# torch has allocated 2 MiB for the small tensors here.
BEYOND = 3 << 20

class Attributes(ctypes.Structure):
    _fields_ = [("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint)]

failed = ctypes.c_size_t(77)
stream = torch.cuda.Stream()

def attributes(*orders, flags=0):
    return (Attributes * max(len(orders), 1))(*(Attributes(order, flags=flags) for order in orders))

def batch(copies, *, attrs=None, firsts=(0,), sets=None, on=None, count=None):
    "Copies: (to, from, bytes)."
    listed = [(ctypes.c_uint64 * max(len(copies), 1))(*each) for each in zip(*copies)] or [None] * 3
    attrs = attributes(BY_STREAM) if attrs is None else attrs
    firsts_list = (ctypes.c_size_t * len(firsts))(*firsts)
    head = (*listed, ctypes.c_size_t(len(copies) if count is None else count), attrs or None,
            firsts_list if firsts else None, ctypes.c_size_t(len(firsts) if sets is None else sets))
    on = ctypes.c_void_p(stream.cuda_stream if on is None else on)
    if FORM == 12:
        return driver.cuMemcpyBatchAsync(*head, ctypes.byref(failed), on)
    return driver.cuMemcpyBatchAsync_v2(*head, on)

def uploads(x, host, size=100):
    "Copies of the pieces of a tensor."
    return [(x.data_ptr() + at, host.data_ptr() + at, min(size, len(x) - at))
            for at in range(0, len(x), size)]

def hold():
    "Hold the stream back; returns the function that lets it go on."
    gate = threading.Event()
    emulated.launch(stream, gate.wait)
    return gate.set

host = torch.arange(1000).remainder(251).byte().pin_memory()
x = torch.zeros(1000, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
emulated.reset()
"""


@pytest.mark.parametrize("form", [12, 13])
def test_a_batch_copies_all_bytes(form):
    passes(
        BATCH
        + f"""
FORM = {form}
copies = [(to, source, size) for to, source, size in uploads(x, host)][::-1]
assert batch(copies) == OK
stream.synchronize()
assert torch.equal(x.cpu(), host)
assert FORM == 13 or failed.value == NO_COPY
assert emulated.calls("cuMemcpyBatchAsync") == 1
assert emulated.calls("cuMemcpyHtoDAsync") == 0
assert emulated.stat("batches") == 1 and emulated.stat("batched copies") == 10
"""
    )


def test_both_signatures_of_batches_are_found_by_version():
    passes(
        BATCH
        + """
def found(version):
    entry = ctypes.c_void_p()
    assert driver.cuGetProcAddress_v2(
        b"cuMemcpyBatchAsync", ctypes.byref(entry), version, ctypes.c_uint64(0), None) == 0
    return entry.value

def address(function):
    return ctypes.cast(function, ctypes.c_void_p).value

assert found(12080) == address(driver.cuMemcpyBatchAsync)
assert found(13000) == address(driver.cuMemcpyBatchAsync_v2)
"""
    )


def test_a_batch_copies_in_all_directions():
    passes(
        BATCH
        + """
down = torch.zeros(1000, dtype=torch.uint8).pin_memory()
y, z = torch.full_like(x, 7), torch.full_like(x, 9)
torch.cuda.synchronize()
go_on = hold()
assert batch([(x.data_ptr(), host.data_ptr(), 1000), (down.data_ptr(), y.data_ptr(), 1000),
              (z.data_ptr(), y.data_ptr(), 500)]) == OK
assert down.eq(0x5A).all(), "what was copied is there before the copy"
go_on()
stream.synchronize()
assert torch.equal(x.cpu(), host) and down.eq(7).all()
assert z[:500].cpu().eq(7).all() and z[500:].cpu().eq(9).all()
"""
    )


def test_a_batch_runs_in_stream_order():
    passes(
        BATCH
        + """
go_on = hold()
with torch.cuda.stream(stream):
    x.fill_(3)
    assert batch(uploads(x, host)[:5]) == OK
    done = stream.record_event()
    y = x.clone()
assert not done.query()
go_on()
stream.synchronize()
assert torch.equal(y[:500].cpu(), host[:500])
assert y[500:].cpu().eq(3).all()
"""
    )


def test_each_copy_of_a_batch_takes_the_time_of_the_bus():
    passes(
        BATCH
        + """
large = torch.ones(10_000_000, dtype=torch.uint8).pin_memory()
to = torch.zeros(10_000_000, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
emulated.reset()
begun = time.monotonic()
assert batch(uploads(to, large, size=1_000_000)) == OK
stream.synchronize()
assert time.monotonic() - begun >= 0.1 - 1e-6
assert emulated.stat("bus busy us") == 100_000
""",
        FAKE_CUDA_BUS_MBPS="100",
    )


@pytest.mark.parametrize(
    "refused",
    [
        "batch([])",
        "batch(all, count=0)",
        "batch([], count=3)",
        "batch(all, attrs=())",
        "batch(all, firsts=())",
        "batch(all, sets=0)",
        "batch(all[:1], attrs=attributes(1, 1), firsts=(0, 1))",
        "batch(all, firsts=(1,))",
        "batch(all, attrs=attributes(1, 1), firsts=(0, 0))",
        "batch(all, attrs=attributes(1, 1, 1), firsts=(0, 5, 4))",
        "batch(all, attrs=attributes(1, 1), firsts=(0, 10))",
        "batch(all, attrs=attributes(0))",
        "batch(all, attrs=attributes(4))",
        "batch(all, attrs=attributes(1, 0), firsts=(0, 9))",
        "batch(all, attrs=attributes(1, flags=2))",
        "batch(all, on=0)",
        "batch(all, on=1)",
    ],
)
def test_invalid_arguments_of_batches_are_refused(refused):
    passes(
        BATCH
        + f"""
all = uploads(x, host)
FORM = 12
assert {refused} == INVALID
assert failed.value == NO_COPY
FORM = 13
assert {refused} == INVALID
torch.cuda.synchronize()
assert x.cpu().eq(0).all()
assert emulated.stat("batches") == 0 and emulated.calls("cuMemcpyBatchAsync") == 2
"""
    )


@pytest.mark.parametrize("wrong", ["(to, source, 0)", "(0, source, 5)", "(to, 0, 5)"])
def test_the_index_of_the_refused_copy_is_returned(wrong):
    passes(
        BATCH
        + f"""
all, FORM = uploads(x, host), 12
to, source, _ = all[4]
all[4] = {wrong}
assert batch(all) == INVALID and failed.value == 4
torch.cuda.synchronize()
assert x.cpu().eq(0).all()
"""
    )


def test_the_per_thread_stream_is_permitted():
    passes(BATCH + "assert batch(uploads(x, host), on=2) == OK\ntorch.cuda.synchronize()")


def test_a_driver_without_batches_returns_not_supported():
    passes(
        BATCH
        + """
for FORM in (12, 13):
    assert batch(uploads(x, host)) == NOT_SUPPORTED
assert emulated.calls("cuMemcpyBatchAsync") == 2
torch.cuda.synchronize()
assert x.cpu().eq(0).all()
""",
        FAKE_CUDA_NO_BATCH="1",
    )


def test_a_capture_forbids_batches():
    passes(
        BATCH
        + """
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph, stream=stream):
        assert batch(uploads(x, host)) == 900
except RuntimeError as error:
    assert "captur" in str(error), error
else:
    raise AssertionError("a capture went on after a batch")
"""
    )


def test_a_configured_batch_call_fails():
    passes(
        BATCH
        + """
emulated.fail("cuMemcpyBatchAsync=2@2")
assert batch(uploads(x, host)) == OK and batch(uploads(x, host)) == 2
torch.cuda.synchronize()
"""
    )


SOURCES = """
pageable = torch.arange(1000).remainder(241).byte()
expected, source = pageable.clone(), pageable if {pageable} else pageable.pin_memory()
go_on = hold()
{before}
assert batch(uploads(x, source), attrs=attributes({order})) == OK
"""


@pytest.mark.parametrize("pageable", [False, True])
def test_a_source_read_during_the_call_may_change_after_it(pageable):
    passes(
        BATCH
        + SOURCES.format(pageable=pageable, order="DURING_CALL", before="")
        + """
assert emulated.stat("pending") == 1
source.fill_(0)
go_on()
stream.synchronize()
assert torch.equal(x.cpu(), expected)
"""
    )


def test_a_pageable_source_in_the_order_of_the_stream_is_waited_for():
    passes(
        BATCH
        + SOURCES.format(
            pageable=True, order="BY_STREAM", before="threading.Timer(0.2, go_on).start()"
        )
        + """
assert emulated.stat("pending") == 0 and emulated.stat("pageable copies") == 10
source.fill_(0)
assert torch.equal(x.cpu(), expected)
"""
    )


@pytest.mark.parametrize(
    ("pageable", "order"), [(False, "BY_STREAM"), (False, "ANY"), (True, "ANY")]
)
def test_a_source_changed_during_a_batch_is_reported(pageable, order):
    code = BATCH + SOURCES.format(pageable=pageable, order=order, before="")
    change, wait = "\nsource.fill_(0)", "\ngo_on()\nstream.synchronize()"
    is_found("batch of copies: 100 bytes of host memory", code + change + wait)
    passes(code + wait + change + "\nassert torch.equal(x.cpu(), expected)")


def test_a_batch_without_waiting_for_another_stream_is_a_race():
    code = """
with torch.cuda.stream(torch.cuda.Stream()) as _:
    x.fill_(3)
    other = torch.cuda.current_stream()
{wait}
assert batch(uploads(x, host)[5:]) == OK
torch.cuda.synchronize()
"""
    is_found("race: batch of copies on stream", BATCH + code.format(wait=""))
    passes(BATCH + code.format(wait="stream.wait_stream(other)"))


@pytest.mark.parametrize(
    ("copies", "problem"),
    [
        ("[(x.data_ptr(), host.data_ptr(), 100), (x.data_ptr() + 99, host.data_ptr(), 1)]",
         "batch of copies: device memory"),
        ("[(x.data_ptr(), host.data_ptr(), 100), (host.data_ptr() + 50, x.data_ptr() + 500, 9)]",
         "batch of copies: host memory"),
        ("[(x.data_ptr(), host.data_ptr(), 100), (x.data_ptr() + BEYOND, host.data_ptr(), 11)]",
         "batch of copies of 11 bytes at device address"),
    ],
)  # fmt: skip
def test_overlapping_and_overlong_copies_of_a_batch_are_reported(copies, problem):
    is_found(problem, BATCH + f"batch({copies})")


def test_a_device_lost_during_a_batch_is_an_error():
    passes(
        BATCH
        + """
emulated.fail("copy=719@1")
assert batch(uploads(x, host)) == OK
assert driver.cudaStreamSynchronize(ctypes.c_void_p(stream.cuda_stream)) == 719
assert batch(uploads(x, host)) == 719
"""
    )
