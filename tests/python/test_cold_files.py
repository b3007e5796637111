"""Files that are not in the page cache: which bytes are read from the disk, and by which way."""

import os
import tempfile
from pathlib import Path

import pytest
import tensorizer
import torch
from processes import run_python
from ranks import cold

MIB = 1 << 20
AROUND = ("direct reads by io_uring", "direct reads")
#: Neither rows nor columns begin or end with a block of the disk.
SHAPES = {"first": (3, 100), "rows": (4000, 1421), "columns": (3000, 1000), "flat": (3_000_001,)}
#: Bytes that opening a file reads, at most: its index, and what the kernel reads ahead.
OPENING = 2 * MIB


@pytest.fixture(scope="module")
def tensors():
    torch.manual_seed(5)
    return {
        name: torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)
        for name, shape in SHAPES.items()
    }


@pytest.fixture(scope="module")
def folder():
    # Temporary folders may be in memory, where nothing is ever cold.
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent, prefix="cold-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module", params=["f.tensors", "f.safetensors"])
def path(request, folder, tensors):
    tensorizer.save(tensors, folder / request.param)
    return str(folder / request.param)


def same(found, expected):
    assert set(found) == set(expected)
    assert all(torch.equal(tensor.cpu(), expected[name]) for name, tensor in found.items())


def loaded(path, device="cpu", call=tensorizer.load, **options):
    """Load a cold file. Return the tensors, how it was read, and bytes that came from the disk."""
    read = []
    # The process reads code from the disk too: in its first load, and where memory is short.
    for _ in range(3):
        cold.forget(path)
        before = cold.bytes_from_disk()
        found = dict(call(path, device, **options))
        read.append(cold.bytes_from_disk() - before)
    return found, tensorizer.stats()["reading"], min(read)


ON_FUSE = """
import sys, tensorizer
tensorizer.load(sys.argv[1], "cpu")
print(tensorizer.stats()["reading"])
"""


def test_files_on_fuse_are_read_without_io_uring(path, with_faults):
    """With FUSE, kernels fill the rest of a short read with wrong bytes."""
    cold.forget(path)
    done = run_python(ON_FUSE, path, env=with_faults(FUSE=1))
    assert done.stdout == "direct reads\n", done.stderr


@pytest.mark.parametrize(
    "options", [{}, {"num_readers": 1}, {"verify_hash": "crc32"}, {"verify_hash": True}]
)
def test_loads_to_the_cpu_go_around_the_page_cache(path, tensors, options):
    if "verify_hash" in options and path.endswith(".safetensors"):
        options = {"clone": True}
    found, reading, read = loaded(path, **options)
    same(found, tensors)
    assert reading in AROUND
    assert read <= 1.02 * os.path.getsize(path) + OPENING
    report = tensorizer.stats()
    assert 0 < report["in_flight"] <= report["most_in_flight"] or reading == "direct reads"
    tensorizer.load(path, "cpu")
    assert tensorizer.stats()["reading"] == reading, "it did not come into the page cache"


def test_encrypted_tensors(folder, tensors):
    key = tensorizer.EncryptionParams(bytes(range(32)))
    tensorizer.save(tensors, folder / "e.tensors", encryption=key)
    key = tensorizer.DecryptionParams.from_key(bytes(range(32)))
    found, reading, _ = loaded(str(folder / "e.tensors"), encryption=key)
    same(found, tensors)
    assert reading in AROUND


def test_iterators(path, tensors):
    found, reading, read = loaded(path, call=tensorizer.iterate)
    same(found, tensors)
    assert reading in AROUND
    assert read <= 1.02 * os.path.getsize(path) + OPENING


def test_a_small_limit_of_memory_leaves_none_for_direct_reads(path, tensors):
    found, reading, _ = loaded(path, memory_limit=15 * MIB)
    same(found, tensors)
    assert reading == "page cache"


def test_little_is_read_through_the_page_cache(path, tensors):
    found, reading, _ = loaded(path, names=["first"])
    same(found, {"first": tensors["first"]})
    assert reading == "page cache"


# Slices


def cut(dim, names):
    return {name: (dim, SHAPES[name][dim] // 4, SHAPES[name][dim] // 2) for name in names}


@pytest.mark.parametrize("dim", [0, 1])
def test_slices_to_the_cpu(path, tensors, dim):
    wanted = ["rows", "columns"]
    found, reading, read = loaded(path, names=wanted, slices=cut(dim, wanted))
    for name, (_, start, stop) in cut(dim, wanted).items():
        assert torch.equal(found[name], tensors[name].narrow(dim, start, stop - start))
    assert read <= 1.02 * sum(tensors[name].nbytes for name in wanted) + OPENING
    assert reading in AROUND


# Several processes of one machine


@pytest.mark.parametrize(
    ("settings", "direct"),
    [
        ({"LOCAL_WORLD_SIZE": "1"}, True),
        ({"LOCAL_WORLD_SIZE": "2"}, False),
        ({"LOCAL_WORLD_SIZE": "2", "TENSORIZER_DIRECT_IO": "2"}, True),
        ({"TENSORIZER_DIRECT_IO": "0"}, False),
        ({"LOCAL_WORLD_SIZE": "?"}, True),
    ],
)
def test_processes_of_one_machine_share_the_page_cache(
    path, tensors, monkeypatch, settings, direct
):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    found, reading, _ = loaded(path)
    same(found, tensors)
    assert (reading in AROUND) == direct


def test_processes_of_one_machine_share_the_readers(path, monkeypatch):
    monkeypatch.setenv("TENSORIZER_DIRECT_IO", "0")
    readers = []
    for processes in ("1", "1000"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        loaded(path)
        readers.append(tensorizer.stats()["most_threads"])
    assert readers[1] == 2 < readers[0]


@pytest.mark.parametrize("by", ["group", "environment"])
def test_the_disk_is_read_once_for_all_of_them(ranks, path, by):
    environment = {"LOCAL_WORLD_SIZE": "3"} if by == "environment" else {}
    cold.forget(path)
    read = ranks.run("cold.together", 3, path, by == "group", env=environment)
    size = os.path.getsize(path)
    assert 0.9 * size <= sum(read) <= 1.1 * size


# Mappings, and single tensors


def test_a_mapping_may_be_larger_than_memory(folder):
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    total = sum(int(fields[name].split()[0]) << 10 for name in ("MemTotal", "SwapTotal"))
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
        pytest.skip("this system reserves memory for all that may be written to")
    length = total + (16 << 30)
    path = folder / "sparse.safetensors"
    header = b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (length, length)
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + length)
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    found = tensorizer.load(path, "cpu", mmap=True)["a"]
    assert found.shape == (length,)
    assert found[0] == 0 and found[length // 2] == 0 and found[-1] == ord("x")
    found[7] = 3  # a copy of this page only
    assert found[7] == 3
    assert tensorizer.load(path, "cpu", mmap=True)["a"][7] == 0


SINGLE = """
import sys
import tensorizer

def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))

with tensorizer.TensorDeserializer(sys.argv[1], device="cpu", lazy_load=True) as file:
    names = list(file.keys())
    kept = [file[names[0]]]
    before = resident()
    kept += [file[name] for name in names[1:]]
    print((resident() - before) / sum(tensor.nbytes for tensor in kept[1:]))
"""


def test_tensors_of_little_more_than_a_mebibyte_take_no_more_memory_than_they_have(tmp_path):
    tensor = torch.ones(1_258_291, dtype=torch.int8)
    tensorizer.save({f"t{number}": tensor.clone() for number in range(50)}, tmp_path / "f.tensors")
    found = run_python(SINGLE, tmp_path / "f.tensors")
    assert float(found.stdout) <= 1.05, found.stderr
