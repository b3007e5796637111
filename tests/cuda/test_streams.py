"""The order of copies among streams, and that a call leaves nothing behind.

A problem that the emulator finds ends the process, with its text on the standard error.
"""

import resource
import threading
from pathlib import Path

import pytest
import tensorizer
import torch


@pytest.fixture(scope="module")
def tensors():
    generator = torch.Generator().manual_seed(5)
    return {f"w{i}": torch.randn(700_000, generator=generator) for i in range(16)}


@pytest.fixture
def path(tmp_path, tensors):
    tensorizer.save(tensors, tmp_path / "f.tensors")
    return tmp_path / "f.tensors"


@pytest.fixture(autouse=True)
def no_copies_before_and_after():
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()
    tensorizer.release_pinned()


def same(loaded, tensors):
    return all(torch.equal(loaded[name].cpu(), tensor) for name, tensor in tensors.items())


def test_a_load_that_fails_has_ended_its_copies(path, emulator):
    damaged = bytearray(path.read_bytes())
    damaged[-1000] ^= 1
    path.write_bytes(damaged)
    emulator.pause(torch.cuda.current_stream(), 0.3)
    with pytest.raises(Exception, match="failed CRC32 verification"):
        tensorizer.load(path, "cuda", verify_hash="crc32", num_readers=1)
    assert emulator.calls("cuMemcpyHtoDAsync") > 0
    assert emulator.stat("pending") == 0


def test_a_save_that_fails_has_ended_its_copies(tmp_path, tensors, emulator):
    on_device = {"all": torch.cat(list(tensors.values())).cuda()}
    torch.cuda.synchronize()
    emulator.delay(0.2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The first piece does not fit, while the second is on its way.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        for _ in range(4):
            with pytest.raises(OSError, match="File too large"):
                tensorizer.save(on_device, tmp_path / "f")
            assert emulator.stat("pending") == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_both_streams_of_a_load_are_waited_for(path, tensors):
    for _ in range(3):
        loaded = tensorizer.load(path, "cuda", num_readers=2)
        doubled = {name: loaded[name] * 2 for name in tensors}
        assert same(doubled, {name: tensor * 2 for name, tensor in tensors.items()})


def test_pinned_memory_is_not_filled_again_while_it_is_copied(path, tensors, emulator):
    tensorizer.set_pinned_limit(16 << 20)
    try:
        emulator.delay(0.02)
        for _ in range(2):
            loaded = tensorizer.load(path, "cuda")
            assert same(loaded, tensors)
    finally:
        tensorizer.set_pinned_limit(256 << 20)


def test_a_load_does_not_disturb_a_capture_of_another_thread(path, tensors):
    """Capture in torch's usual mode, in which an unsafe call of any thread spoils the graph."""
    # torch's allocator makes such calls: load into memory that is there.
    found = {name: torch.empty_like(tensor, device="cuda") for name, tensor in tensors.items()}
    static = torch.ones(1000, device="cuda")
    graph, errors = torch.cuda.CUDAGraph(), []
    begun, loaded = threading.Event(), threading.Event()

    def capture():
        try:
            with torch.cuda.graph(graph):
                static.mul_(3)
                begun.set()
                assert loaded.wait(60)
        except BaseException as error:
            errors.append(error)
            begun.set()

    side = torch.cuda.Stream()
    thread = threading.Thread(target=capture)
    thread.start()
    assert begun.wait(60)
    try:
        with torch.cuda.stream(side):
            torch.ops.tensorizer.load(str(path), list(found), out=list(found.values()))
    finally:
        loaded.set()
        thread.join()
    assert errors == []
    torch.cuda.synchronize()
    assert same(found, tensors)
    graph.replay()
    assert static.cpu().eq(3).all()


def test_a_call_leaves_nothing_behind(path, tensors, tmp_path, emulator):
    def everything():
        same(tensorizer.load(path, "cuda"), tensors)
        tensorizer.save(loaded, tmp_path / "g")
        torch.cuda.synchronize()
        tensorizer.release_pinned()
        return [emulator.stat(what) for what in ("streams", "pinned ranges", "pending")]

    loaded = tensorizer.load(path, "cuda")
    before = everything()
    for _ in range(4):
        assert everything() == before
    assert before[1] == 0
    # Events are kept for the next copies: as many as were on their way at once, 256 at most.
    assert emulator.stat("events") <= 256


def test_unused_events_are_destroyed(path, tensors, emulator):
    for _ in range(30):
        # The events of memory that is still in use have not passed when the load lets them go.
        emulator.pause(torch.cuda.current_stream(), 0.02)
        loaded = tensorizer.load(path, "cuda")
    assert same(loaded, tensors)
    assert emulator.stat("events") <= 256


def test_copies_have_pinned_sources(path, tensors, tmp_path, emulator):
    loaded = tensorizer.load(path, "cuda")
    tensorizer.save(loaded, tmp_path / "g")
    pinned, pageable = emulator.stat("pinned copies"), emulator.stat("pageable copies")
    tensorizer.load(path, "cuda")
    tensorizer.save(loaded, tmp_path / "g")
    assert tensorizer.stats()["fallbacks"] == []
    assert emulator.stat("pinned copies") > pinned
    assert emulator.stat("pageable copies") == pageable
    assert Path(tmp_path / "g").read_bytes() == path.read_bytes()
