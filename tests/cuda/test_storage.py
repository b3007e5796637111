"""Files that the device reads by itself, by way of the emulated cuFile."""

import ctypes

import pytest
import tensorizer
import torch
from emulated import run
from tensorizer import _C

TENSORS = {"large": torch.arange(3_000_000), "small": torch.arange(5.0), "empty": torch.empty(0)}
_library = ctypes.CDLL(None)


def reads():
    """Return how many times a device has read a file by itself."""
    count = _library.fake_cufile_reads
    count.restype = ctypes.c_uint64
    return count()


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORIZER_GDS", "1")
    _C.forget_environment()
    tensorizer.save(TENSORS, tmp_path / "f.tensors")
    yield tmp_path / "f.tensors"
    monkeypatch.undo()
    _C.forget_environment()


def load(path):
    """Load and compare; return whether the device has read the file, and the fallbacks."""
    before = reads()
    loaded = tensorizer.load(path, "cuda")
    for name, tensor in TENSORS.items():
        assert torch.equal(loaded[name].cpu(), tensor), name
    report = tensorizer.stats()
    assert (report["reading"] == "GPUDirect Storage") == (not report["fallbacks"])
    return reads() > before, report["fallbacks"]


def test_gpudirect_storage_reads_the_file(path):
    assert load(path) == (True, [])
    assert _library.fake_cufile_handles() == 0


def test_short_reads_are_continued(path, monkeypatch):
    monkeypatch.setenv("FAKE_CUFILE_SHORT", "1000003")
    assert load(path) == (True, [])


def test_memory_is_not_written_while_it_is_used(path, emulator):
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    for _ in range(2):
        scratch = torch.empty(30_000_000, dtype=torch.uint8, device="cuda")
        emulator.pause(torch.cuda.current_stream(), 0.2)
        scratch.fill_(7)
        del scratch  # its memory goes to the next who asks
        assert load(path) == (True, [])


def test_memory_of_the_caller_is_not_written_while_it_is_used(path, emulator):
    given = {name: torch.empty_like(tensor, device="cuda") for name, tensor in TENSORS.items()}
    for _ in range(2):
        before = reads()
        emulator.pause(torch.cuda.current_stream(), 0.2)
        given["large"].fill_(7)
        tensorizer.load(path, out=given)
        assert reads() > before
        for name, tensor in TENSORS.items():
            assert torch.equal(given[name].cpu(), tensor), name


def test_cufile_is_not_used_if_it_reads_wrong_bytes(path, monkeypatch):
    monkeypatch.setenv("FAKE_CUFILE_WRONG", "1")
    _, fallbacks = load(path)
    assert len(fallbacks) == 1 and "other bytes" in fallbacks[0]


@pytest.mark.parametrize("failure", ["FAIL", "EIO"])
def test_failed_direct_reads_fall_back_to_host_memory(path, monkeypatch, failure):
    # The first read of a load is a test that the device reads the right bytes.
    monkeypatch.setenv(f"FAKE_CUFILE_{failure}_FROM", str(reads() + 2))
    right, fallbacks = load(path)
    assert right
    assert len(fallbacks) == 1 and "during the load" in fallbacks[0]
    monkeypatch.setenv(f"FAKE_CUFILE_{failure}_FROM", str(reads() + 1))
    _, fallbacks = load(path)
    assert len(fallbacks) == 1 and "other bytes" in fallbacks[0]


def test_without_its_driver_files_are_read_through_host_memory(path):
    done = run(
        """
import sys, tensorizer
loaded = tensorizer.load(sys.argv[1], "cuda")
assert loaded["small"].cpu().eq(torch.arange(5.0)).all()
assert "not available" in tensorizer.stats()["fallbacks"][0]
""",
        path,
        FAKE_CUFILE_OPEN_FAILS="1",
    )
    assert done.returncode == 0, done.stderr[-2000:]
