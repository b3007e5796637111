"""The path to and from CUDA memory, on a stand-in that copies late: what a GPU would see."""

import concurrent.futures
import ctypes
import ctypes.util
import os
import struct

import pytest
import tensorizer
import torch
from conftest import run_python
from staged import make, on_cpu, same
from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer

KEY = bytes(range(32))


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setenv("TENSORIZER_FAKE_DEVICE", "7")
    yield
    tensorizer.release_pinned()
    tensorizer.set_pinned_limit(256 << 20)


@pytest.fixture(scope="module")
def tensors():
    torch.manual_seed(3)
    return make()


@pytest.fixture
def path(tmp_path, tensors):
    path = tmp_path / "f.tensors"
    tensorizer.save(tensors, path, allow_meta=True)
    return str(path)


@pytest.mark.parametrize("verify", [False, "crc32", True])
@pytest.mark.parametrize("options", [{}, {"clone": True}, {"num_readers": 1}, {"num_readers": 9}])
def test_tensors_arrive_and_the_report_says_how(path, tensors, verify, options):
    same(tensorizer.load(path, verify_hash=verify, **options), tensors)
    report = tensorizer.stats()
    data = [tensor.nbytes for tensor in tensors.values() if not tensor.is_meta]
    assert report["what"] == "load" and report["uri"] == path and report["device"] == "fake"
    assert report["bytes"] == sum(data) and report["tensors"] == len(tensors)
    assert report["reading"] == "page cache" and report["fallbacks"] == []
    assert 1 <= report["threads"] <= options.get("num_readers", 99)
    assert report["seconds"] > 0 and report["stages"]["read"] > 0
    assert (report["stages"]["hash"] > 0) == bool(verify)
    assert set(report["stages"]) == {
        "plan", "memory", "read", "decrypt", "hash", "copy", "write", "first touch",
    }  # fmt: skip
    assert 0 < report["pinned_bytes"] <= 256 << 20


def test_the_report_without_a_device(tmp_path):
    tensors = {"a": torch.arange(1000), "b": torch.ones(3)}
    on_cpu(tensorizer.save, tensors, tmp_path / "f")
    saved = tensorizer.stats()
    assert (saved["what"], saved["device"], saved["bytes"]) == ("save", "cpu", 8012)
    on_cpu(
        torch.ops.tensorizer.load, str(tmp_path / "f"), ["a"], out=[torch.zeros_like(tensors["a"])]
    )
    filled = tensorizer.stats()
    assert (filled["what"], filled["tensors"], filled["bytes"]) == ("load", 1, 8000)
    on_cpu(tensorizer.load, tmp_path / "f")
    assert tensorizer.stats()["bytes"] == 8012


def test_meta_tensors_of_types_that_have_no_kernels(tmp_path):
    dtypes = [torch.float8_e4m3fn, torch.bits8, torch.uint16, torch.float4_e2m1fn_x2]
    tensors = {str(d): torch.empty(3, 2, dtype=d, device="meta") for d in dtypes}
    tensorizer.save(tensors, tmp_path / "f", allow_meta=True)
    for name, tensor in tensorizer.load(tmp_path / "f").items():
        assert str(tensor.dtype) == name and tensor.shape == (3, 2)
        assert tensor.view(torch.uint8).count_nonzero() == 0
    out = [torch.full((3, 2), 7, dtype=torch.uint8).view(d) for d in dtypes[:2]]
    torch.ops.tensorizer.load(str(tmp_path / "f"), list(tensors)[:2], out=out)
    assert all(tensor.view(torch.uint8).count_nonzero() == 0 for tensor in out)


def test_tensors_share_blocks_unless_they_are_cloned(path):
    shared = tensorizer.load(path)
    with_data = [tensor for tensor in shared.values() if tensor.numel()]
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in with_data}
    large = [tensor for tensor in with_data if tensor.nbytes >= 1 << 20]
    for tensor in large:
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    # Neighbours that are small share a block; the zeros of the meta tensor are apart.
    assert len(storages) < len(with_data)
    assert all(tensor.nbytes < 1 << 20 or tensor in large for tensor in storages.values())
    assert all(tensor.data_ptr() % 64 == 0 for tensor in with_data)
    for tensor in tensorizer.load(path, clone=True).values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_blocks_are_of_a_bounded_size(tmp_path):
    tensors = {str(i): torch.full((200_000,), i, dtype=torch.float32) for i in range(200)}
    tensorizer.save(tensors, tmp_path / "f")
    loaded = tensorizer.load(tmp_path / "f")
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in loaded.values()}
    assert len(sizes) == 3
    assert max(sizes.values()) <= 64 << 20
    same(loaded, tensors)


def test_one_by_one_and_in_any_order(path, tensors):
    file = TensorDeserializer(path, device="cpu", lazy_load=True)
    for name in reversed(tensors):
        same({name: file[name]}, {name: tensors[name]})


def test_casts(path, tensors):
    loaded = tensorizer.load(path, dtype=torch.float16)
    assert torch.equal(loaded["large"], tensors["large"].half())
    assert loaded["bytes"].dtype == torch.uint8


def test_encrypted_files(tmp_path, tensors):
    tensorizer.save(tensors, tmp_path / "f", encryption=EncryptionParams(KEY), allow_meta=True)
    params = DecryptionParams.from_key(KEY)
    same(on_cpu(tensorizer.load, tmp_path / "f", encryption=params, verify_hash=True), tensors)
    same(tensorizer.load(tmp_path / "f", encryption=params, verify_hash=True), tensors)
    assert tensorizer.stats()["stages"]["decrypt"] > 0
    with pytest.raises(tensorizer.CryptographyError, match="wrong key"):
        tensorizer.load(tmp_path / "f", encryption=DecryptionParams.from_key(bytes(32)))


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


def test_pieces_of_encryption_that_staging_memory_cannot_hold(tmp_path):
    if ctypes.util.find_library("sodium") is None:
        assert not os.environ.get("CI"), "libsodium is required in CI"
        pytest.skip("libsodium is not installed")
    path = tmp_path / "f.tensors"
    data = torch.arange(3_000_000, dtype=torch.int32)
    seal_as_one_piece(path, data)
    params = DecryptionParams.from_key(KEY)
    assert torch.equal(on_cpu(tensorizer.load, path, encryption=params)["a"], data)
    assert torch.equal(tensorizer.load(path, encryption=params)["a"], data)
    assert "encrypted in pieces of an unusual length" in tensorizer.stats()["fallbacks"][0]


@pytest.mark.parametrize("verify", [False, True])
def test_pipes_are_read_in_one_pass(path, tensors, verify):
    reading, writing = os.pipe()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:

        def feed():
            with os.fdopen(writing, "wb") as file, open(path, "rb") as source:
                file.write(source.read())

        fed = pool.submit(feed)
        with os.fdopen(reading, "rb") as file:
            loaded = TensorDeserializer(file, device="cpu", verify_hash=verify)
            same(dict(loaded.items()), tensors)
        fed.result()


# Memory


def test_staging_memory_is_bounded_shared_and_given_back(tmp_path):
    tensorizer.release_pinned()
    tensorizer.set_pinned_limit(16 << 20)
    big = torch.arange(4_000_000)
    tensorizer.save({"big": big}, tmp_path / "f")

    def load(_):
        return torch.equal(tensorizer.load(tmp_path / "f", verify_hash=True)["big"], big)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert all(pool.map(load, range(12)))
    assert tensorizer.stats()["pinned_bytes"] == 16 << 20
    assert tensorizer.release_pinned() == 16 << 20
    assert tensorizer.release_pinned() == 0


def test_the_limit_comes_from_the_environment(path):
    code = """
import sys, tensorizer
tensorizer.save({"a": tensorizer.load(sys.argv[1])["large"]}, sys.argv[1] + ".out")
print(tensorizer.stats()["pinned_bytes"])
"""
    found = run_python(code, path, env=os.environ | {"TENSORIZER_PINNED_MB": "20"})
    assert int(found.stdout) <= 20 << 20, found.stderr
    found = run_python(code, path, env=os.environ | {"TENSORIZER_PINNED_MB": "much"})
    assert "TENSORIZER_PINNED_MB must be a whole number" in found.stderr


# Cold files


def forget(path):
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_cold_files_are_read_around_the_page_cache(tmp_path, tensors, monkeypatch):
    # Temporary folders may be in memory, where nothing is ever cold.
    path = os.path.join(os.path.dirname(__file__), f"cold-{os.getpid()}.tensors")
    try:
        tensorizer.save(tensors, path, allow_meta=True)
        forget(path)
        same(tensorizer.load(path), tensors)
        reading = tensorizer.stats()["reading"]
        assert reading in ("direct reads by io_uring", "direct reads")
        forget(path)
        same(tensorizer.load(path, verify_hash=True), tensors)
        same(tensorizer.load(path), tensors)
        assert tensorizer.stats()["reading"] == reading, "it did not come into the page cache"
        monkeypatch.setenv("TENSORIZER_DIRECT_IO", "0")
        same(tensorizer.load(path), tensors)
        assert tensorizer.stats()["reading"] == "page cache"
    finally:
        os.remove(path)


def test_files_that_the_device_reads_by_itself(path, tensors, monkeypatch):
    monkeypatch.setenv("TENSORIZER_GDS", "1")
    same(tensorizer.load(path), tensors)
    assert tensorizer.stats()["reading"] == "GPUDirect Storage"
    same(tensorizer.load(path, verify_hash=True), tensors)
    assert "neither verifies nor decrypts" in tensorizer.stats()["fallbacks"][0]
    with open(path, "r+b") as file:
        file.truncate(os.path.getsize(path) - 9)
    with pytest.raises(ValueError, match="truncated"):
        tensorizer.load(path)


# Modules


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(300, 200), torch.nn.BatchNorm1d(200), torch.nn.Linear(200, 10)
    )


@pytest.fixture
def module_path(tmp_path):
    with TensorSerializer(str(tmp_path / "m")) as serializer:
        serializer.write_module(model())
    return str(tmp_path / "m")


def blank():
    found = model()
    for tensor in found.state_dict().values():
        tensor.fill_(9)
    return found


def test_modules_are_filled_in_place(module_path):
    filled = blank()
    before = dict(filled.named_parameters()) | dict(filled.named_buffers())
    addresses = {name: tensor.data_ptr() for name, tensor in before.items()}
    versions = {name: tensor._version for name, tensor in before.items()}
    file = TensorDeserializer(module_path, device="cpu", lazy_load=True)
    assert file.load_into_module(filled) == len(before)
    for name, tensor in model().state_dict().items():
        found = filled.state_dict(keep_vars=True)[name]
        assert found is before[name] and found.data_ptr() == addresses[name], name
        assert found._version > versions[name], "autograd must know"
        assert torch.equal(found, tensor), name


def test_module_tensors_that_cannot_be_filled_in_place_are_replaced(module_path):
    filled = blank()
    filled[0].weight = torch.nn.Parameter(filled[0].weight.half())
    filled[2].bias = torch.nn.Parameter(torch.zeros(10).double())
    filled[1].weight = torch.nn.Parameter(torch.zeros(400)[::2])
    tied = filled[0].bias
    filled[1].bias = tied
    file = TensorDeserializer(module_path, device="cpu", lazy_load=True)
    file.load_into_module(filled)
    for name, tensor in model().state_dict().items():
        assert torch.equal(filled.state_dict()[name], tensor), name
    assert filled[0].bias is not filled[1].bias, "their bytes differ in the file"


def test_tied_parameters_stay_tied(tmp_path):
    first = torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.Linear(50, 50))
    first[1].weight = first[0].weight
    with TensorSerializer(str(tmp_path / "m")) as serializer:
        serializer.write_module(first)
    second = torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.Linear(50, 50))
    second[1].weight = second[0].weight
    TensorDeserializer(str(tmp_path / "m"), device="cpu", lazy_load=True).load_into_module(second)
    assert second[1].weight is second[0].weight
    assert torch.equal(second[0].weight, first[0].weight)


# Operators


def test_operators(path, tensors, tmp_path):
    same(torch.ops.tensorizer.load(path), tensors)
    large, scalar = torch.ops.tensorizer.load(path, ["large", "scalar"], verify=True)
    assert torch.equal(large, tensors["large"]) and scalar.item() == 3.5
    out = [torch.zeros(3_000_000), torch.ones(5, 3, dtype=torch.int16)]
    torch.ops.tensorizer.load(path, ["large", "meta"], out=out)
    assert torch.equal(out[0], large) and out[1].count_nonzero() == 0

    @torch.jit.script
    def scripted(path: str):
        return torch.ops.tensorizer.load(path)["large"] * 2

    assert torch.equal(scripted(path), large * 2)
    flat = torch.zeros(4_000_000)
    with pytest.raises(RuntimeError, match="overlap"):
        torch.ops.tensorizer.load(path, ["large", "scalar"], out=[flat[:3_000_000], flat[5]])


def test_tensors_in_graphs_do_not_share_memory(path, tensors):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def both():
        large, scalar = torch.ops.tensorizer.load(path, ["large", "scalar"])
        return large, scalar

    large, scalar = both()
    assert torch.equal(large, tensors["large"]) and scalar.item() == 3.5
    assert large.untyped_storage().data_ptr() != scalar.untyped_storage().data_ptr()


# Saves


@pytest.mark.parametrize("options", [{}, {"alignment": 1}])
def test_saves_are_the_same_bytes(tmp_path, tensors, options):
    options["allow_meta"] = True
    tensorizer.save(tensors, tmp_path / "f", **options)
    report = tensorizer.stats()
    assert report["what"] == "save" and report["device"] == "fake" and report["fallbacks"] == []
    data = [tensor.nbytes for tensor in tensors.values() if not tensor.is_meta]
    assert report["bytes"] == sum(data) and report["stages"]["write"] > 0
    on_cpu(tensorizer.save, tensors, tmp_path / "g", **options)
    assert (tmp_path / "f").read_bytes() == (tmp_path / "g").read_bytes()


def test_saves_of_many_small_and_of_odd_tensors(tmp_path):
    tensors = {str(i): torch.full((i % 7, 5), float(i)) for i in range(3000)}
    tensors["turned"] = torch.arange(12.0).view(3, 4).t()
    tensors["conjugate"] = torch.randn(4, dtype=torch.complex64).conj()
    tensorizer.save(tensors, tmp_path / "f", encryption=EncryptionParams(KEY))
    params = DecryptionParams.from_key(KEY)
    same(on_cpu(tensorizer.load, tmp_path / "f", encryption=params, verify_hash=True), tensors)


def test_a_full_disk_leaves_the_old_file(tmp_path, tensors):
    if os.access("/dev/full", os.W_OK):
        with pytest.raises(OSError, match="No space left"):
            with TensorSerializer(os.open("/dev/full", os.O_RDWR)) as serializer:
                serializer.write_state_dict(tensors)
    # Nothing of the staging memory was lost with it.
    tensorizer.save(tensors, tmp_path / "f", allow_meta=True)
    same(tensorizer.load(tmp_path / "f"), tensors)


def test_verify_module(module_path):
    file = TensorDeserializer(module_path, device="cpu", lazy_load=True)
    assert file.verify_module(model())[0]
    assert not file.verify_module(blank())[0]


def test_save_async_has_a_snapshot(tmp_path):
    weight = torch.full((2_000_000,), 5.0)
    saving = tensorizer.save_async({"weight": weight}, tmp_path / "f")
    weight.fill_(6)
    saving.result()
    assert saving.saved_bytes == saving.total_bytes == weight.nbytes
    assert tensorizer.load(tmp_path / "f")["weight"].eq(5).all()
