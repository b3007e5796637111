"""Loads to a device: blocks, staging memory and its limits, errors, and forks."""

import concurrent.futures
import ctypes
import ctypes.util
import json
import os
import struct

import emulated
import pytest
import tensorizer
import torch
from conftest import golden_bytes, golden_files
from servers import Nginx
from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer
from tensorizer_cli.main import main

KEY = bytes(range(32))
MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_staging_memory_is_left():
    yield
    torch.cuda.synchronize()
    tensorizer.release_pinned()
    tensorizer.set_pinned_limit(256 * MIB)


@pytest.fixture
def path(tmp_path):
    tensors = {f"small.{i}": torch.full((17 * i % 501 + 1, 3), float(i)) for i in range(60)}
    tensors |= {"large": torch.arange(3_000_000.0), "scalar": torch.tensor(3.5)}
    tensorizer.save(tensors, tmp_path / "f.tensors")
    return str(tmp_path / "f.tensors")


def passes(code, *args, **options):
    done = emulated.run("import json, os, sys, tensorizer\n" + code, *args, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if done.stdout else None


def test_the_report_says_how(path, capsys):
    tensorizer.load(path, "cuda", num_readers=9, verify_hash=True)
    report = tensorizer.stats()
    assert (report["what"], report["uri"], report["device"]) == ("load", path, "cuda:0")
    assert report["reading"] == "page cache" and report["fallbacks"] == []
    assert 1 <= report["threads"] <= 9 and report["seconds"] > 0
    assert report["stages"]["read"] > 0 and report["stages"]["hash"] > 0
    assert 0 < report["pinned_bytes"] <= 256 * MIB
    assert main(["load", "--json", "--device", "cuda", path]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"] == "cuda:0" and found["shares"]["copy"] > 0


def test_meta_tensors_of_types_that_have_no_kernels(tmp_path):
    dtypes = [torch.float8_e4m3fn, torch.bits8, torch.uint16, torch.float4_e2m1fn_x2]
    tensors = {str(d): torch.empty(3, 2, dtype=d, device="meta") for d in dtypes}
    tensorizer.save(tensors, tmp_path / "f", allow_meta=True)
    for name, tensor in tensorizer.load(tmp_path / "f", "cuda").items():
        assert str(tensor.dtype) == name and tensor.shape == (3, 2)
        assert not tensor.cpu().view(torch.uint8).any()
    out = [torch.full((3, 2), 7, dtype=torch.uint8).view(d).cuda() for d in dtypes[:2]]
    torch.ops.tensorizer.load(str(tmp_path / "f"), list(tensors)[:2], out=out)
    assert not any(tensor.cpu().view(torch.uint8).any() for tensor in out)


def test_blocks_are_of_a_bounded_size(tmp_path):
    tensors = {str(i): torch.full((200_000,), i, dtype=torch.float32) for i in range(200)}
    tensorizer.save(tensors, tmp_path / "f")
    loaded = tensorizer.load(tmp_path / "f", "cuda")
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in loaded.values()}
    assert len(sizes) == 3 and max(sizes.values()) <= 64 * MIB
    assert all(tensor.data_ptr() % 64 == 0 for tensor in loaded.values())


def test_tensors_in_graphs_do_not_share_memory(path):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def both():
        return tuple(torch.ops.tensorizer.load(path, ["small.3", "scalar"], device="cuda"))

    small, scalar = both()
    assert scalar.item() == 3.5
    assert small.untyped_storage().data_ptr() != scalar.untyped_storage().data_ptr()


# Encryption and damage


def seal_as_one_piece(path, data):
    """Write a file whose only tensor has one tag, which no writer does for so many bytes."""
    tensorizer.save({"a": data[:1009]}, path, encryption=EncryptionParams(KEY))
    with TensorDeserializer(
        path, device="cpu", lazy_load=True, encryption=DecryptionParams.from_key(KEY)
    ) as file:
        ((_, start),) = file._file.reader.offsets()
    head = path.read_bytes()[:start]
    head = head.replace(struct.pack("<I", 1009), struct.pack("<I", len(data)))
    head = head.replace(struct.pack("<Q", 4 * 1009), struct.pack("<Q", data.nbytes))
    at = head.index(struct.pack("<Q", 2 << 20)) + 8  # behind the length of pieces: nonce, count
    sodium = ctypes.CDLL(ctypes.util.find_library("sodium"))
    sealed, mac = ctypes.create_string_buffer(data.nbytes), ctypes.create_string_buffer(16)
    size = ctypes.c_ulonglong(data.nbytes)
    plain = data.numpy().tobytes()
    assert sodium.crypto_secretbox_detached(sealed, mac, plain, size, head[at : at + 24], KEY) == 0
    head = head[: at + 32] + mac.raw + head[at + 48 :]
    path.write_bytes(head + sealed.raw + bytes(8))


def test_a_piece_of_encryption_that_staging_memory_cannot_hold(tmp_path):
    if ctypes.util.find_library("sodium") is None:
        assert not os.environ.get("CI"), "libsodium is required in CI"
        pytest.skip("libsodium is not installed")
    path = tmp_path / "f.tensors"
    data = torch.arange(3_000_000, dtype=torch.int32)
    seal_as_one_piece(path, data)
    params = DecryptionParams.from_key(KEY)
    for device in ("cpu", "cuda"):
        loaded = tensorizer.load(path, device, encryption=params)
        assert torch.equal(loaded["a"].cpu(), data)


def outcome(path, device):
    """Return the type of the error of a load."""
    try:
        tensorizer.load(path, device, verify_hash=True)
    except Exception as error:
        return type(error)
    return None


def test_damaged_files_are_the_same_errors(tmp_path):
    path, seen = tmp_path / "f", 0
    for file in golden_files("corrupt"):
        path.write_bytes(golden_bytes(file))
        on_device = outcome(path, "cuda")
        assert on_device == outcome(path, "cpu"), file["file"]
        seen += on_device is not None
    assert seen > 50


def test_files_that_are_too_short_for_direct_reads_of_the_device(path):
    code = """
path = sys.argv[1]
tensorizer.load(path, "cuda", verify_hash=True)
assert "neither verifies nor decrypts" in tensorizer.stats()["fallbacks"][0]
os.truncate(path, os.path.getsize(path) - 9)
try:
    tensorizer.load(path, "cuda")
except ValueError as error:
    assert "truncated" in str(error), error
else:
    sys.exit("no error")
"""
    passes(code, path, TENSORIZER_GDS="1")


# Memory


def test_staging_memory_is_bounded_shared_and_given_back(tmp_path):
    tensorizer.release_pinned()
    tensorizer.set_pinned_limit(16 * MIB)
    pinned = 7 * (2052 << 10)  # whole buffers
    big = torch.arange(4_000_000)
    tensorizer.save({"big": big}, tmp_path / "f")

    def load(_):
        loaded = tensorizer.load(tmp_path / "f", "cuda", verify_hash=True)
        return torch.equal(loaded["big"].cpu(), big)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert all(pool.map(load, range(12)))
    assert tensorizer.stats()["pinned_bytes"] == pinned
    torch.cuda.synchronize()
    assert tensorizer.release_pinned() == pinned
    assert tensorizer.release_pinned() == 0


def test_the_limit_comes_from_the_environment(path):
    code = """
tensorizer.save({"a": tensorizer.load(sys.argv[1], "cuda")["large"]}, sys.argv[1] + ".out")
print(tensorizer.stats()["pinned_bytes"])
"""
    assert passes(code, path, TENSORIZER_PINNED_MB="20") <= 20 * MIB
    refused = emulated.run("import sys, tensorizer\n" + code, path, TENSORIZER_PINNED_MB="much")
    assert "TENSORIZER_PINNED_MB must be a whole number" in refused.stderr


@pytest.fixture(scope="module")
def nginx(tmp_path_factory):
    server = Nginx(tmp_path_factory.mktemp("nginx"))
    whole = {f"t{n}": torch.full((4 * MIB,), n, dtype=torch.uint8) for n in range(20)}
    tensorizer.save(whole, server.root / "whole")
    yield server
    server.stop()


def test_memory_limits_hold_for_staging_memory(nginx):
    code = """
limit = int(sys.argv[2]) << 20 or None
load = tensorizer.load(sys.argv[1], "cuda", verify_hash=True, num_readers=16, memory_limit=limit)
assert len(load) == 20
assert all(bool((tensor.cpu() == int(name[1:])).all()) for name, tensor in load.items())
torch.cuda.synchronize()
print(tensorizer.release_pinned())
"""
    path = nginx.root / "whole"
    assert 0 < passes(code, path, 64) <= 64 * MIB
    assert 0 < passes(code, f"{nginx.http}/whole", 16) <= 16 * MIB
    assert passes(code, path, 0) > 16 * MIB, "the limit makes no difference"
    with pytest.raises(ValueError, match="4 staging buffers of 2101248"):
        tensorizer.load(path, "cuda", memory_limit=MIB)


def test_iterate_reports_the_minimum_memory_limit(nginx):
    code = """
import re
def call(limit):
    found = tensorizer.iterate(sys.argv[1], "cuda", memory_limit=limit)
    assert sum(1 for _ in found) == 20
call(24 << 20)
try:
    call(4 << 20)
except ValueError as error:
    call(int(re.search(r"at least (\\d+) are needed", str(error))[1]))
else:
    sys.exit("no error")
"""
    passes(code, nginx.root / "whole")
    passes(code, f"{nginx.http}/whole")


def test_sliced_and_whole_tensors_are_verified_together(tmp_path):
    """Some batches are hashed on their way, and some are copied from what was hashed before."""
    code = """
whole = tensorizer.load(sys.argv[1], "cpu")
slices = {f"t{i}": (1, 5, 900) for i in range(0, 24, 3)}
for attempt in range(12):
    got = tensorizer.load(
        sys.argv[1], "cuda", slices=slices, verify_hash="crc32" if attempt % 2 else True,
        num_readers=2 + attempt % 5, memory_limit=(32 << 20) if attempt % 3 else None,
    )
    for name, tensor in got.items():
        right = whole[name][:, 5:900] if name in slices else whole[name]
        assert torch.equal(tensor.cpu(), right), (attempt, name)
    del got
"""
    tensors = {f"t{i}": torch.randint(0, 255, (1000, 1500), dtype=torch.uint8) for i in range(24)}
    tensorizer.save(tensors, tmp_path / "f")
    passes(code, tmp_path / "f")


def test_a_device_without_room(tmp_path):
    tensorizer.save({"a": torch.zeros(100_000_000)}, tmp_path / "f")
    with pytest.raises(tensorizer.DeviceMemoryError, match=str(tmp_path / "f")) as raised:
        emulated.fail("cudaMalloc=2@1-")
        tensorizer.load(tmp_path / "f", "cuda")
    assert isinstance(raised.value, (torch.OutOfMemoryError, MemoryError))


def test_memory_that_cannot_be_pinned_is_used_unpinned(path):
    code = """
large = tensorizer.load(sys.argv[1], "cuda")["large"]
assert torch.equal(large.cpu(), torch.arange(3_000_000.0))
assert emulated.stat("pageable copies") > 0
print(json.dumps(tensorizer.stats()["fallbacks"]))
"""
    (fallback,) = passes(code, path, FAKE_CUDA_FAIL="cuMemHostRegister=2@1-")
    assert "refused to pin" in fallback


FORKED = """
tensorizer.load(sys.argv[1], "cuda")
pinned = tensorizer.stats()["pinned_bytes"]
torch.cuda.synchronize()
child = os.fork()
if child == 0:
    status = 1
    try:
        assert tensorizer.release_pinned() == 0, "nothing is the child's to give back"
        try:
            tensorizer.load(sys.argv[1], "cuda")
        except RuntimeError as error:
            assert "fork" in str(error), error
            status = 0
        tensorizer.load(sys.argv[1], "cpu")
    finally:
        sys.stderr.flush()
        os._exit(status)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert tensorizer.release_pinned() == pinned > 0
tensorizer.load(sys.argv[1], "cuda")
torch.cuda.synchronize()
"""


def test_a_forked_child_leaves_the_staging_memory_alone(path):
    passes(FORKED, path, finalize=True)


def test_the_plugin_sends_loads_and_saves_through_the_device(tmp_path):
    code = """
import through_device
tensors = {"a": torch.arange(9.0), "b": torch.ones(3)}
tensorizer.save(tensors, sys.argv[1])
assert tensorizer.stats()["device"] == "cuda:0"
found = tensorizer.load(sys.argv[1], "cpu")
assert tensorizer.stats()["device"] == "cuda:0"
assert all(tensor.is_cpu and torch.equal(tensor, tensors[name]) for name, tensor in found.items())
out = {"a": torch.zeros(9)}
tensorizer.load(sys.argv[1], out=out)
assert tensorizer.stats()["device"] == "cuda:0" and torch.equal(out["a"], tensors["a"])
"""
    passes(code, tmp_path / "f.tensors")
