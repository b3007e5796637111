"""What `iterate` is asked for: names, slices, shards, order, devices, operators."""

import gc
import os

import pytest
import tensorizer
import torch
from scripted import FaultServer

safetensors = pytest.importorskip("safetensors.torch")

DEVICES = ["host", "stand-in"]


@pytest.fixture(scope="module")
def tensors():
    torch.manual_seed(7)
    made = {f"m.{i:02}": torch.randn(16 + 5 * i, 24) for i in range(20)}
    made["long"] = torch.randn(300, 9000)
    made["empty"] = torch.empty(0, 3)
    made["scalar"] = torch.tensor(3.5)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tensors):
    folder = tmp_path_factory.mktemp("plan")
    tensorizer.save(tensors, folder / "f.tensors")
    safetensors.save_file(tensors, folder / "f.safetensors")
    torch.save(tensors, folder / "f.pt")
    tensorizer.save(tensors, folder / "shards.safetensors", max_shard_size=2_000_000)
    key = tensorizer.EncryptionParams.random()
    tensorizer.save(tensors, folder / "sealed.tensors", encryption=key)
    (folder / "key").write_bytes(key.key)
    return folder


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    if request.param == "stand-in":
        monkeypatch.setenv("TENSORIZER_FAKE_DEVICE", "5")
    yield "cpu"
    tensorizer.release_pinned()


def same(found, expected):
    found = dict(found)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


FILES = ["f.tensors", "f.safetensors", "f.pt", "shards.safetensors.index.json"]


@pytest.mark.parametrize("buffer_bytes", [1, 100_000, 1 << 30])
@pytest.mark.parametrize("file", FILES)
def test_both_orders_bring_every_tensor_once(folder, tensors, device, file, buffer_bytes):
    for order in ("file", "ready"):
        ahead = {"buffer_bytes": buffer_bytes, "order": order}
        found = list(tensorizer.iterate(folder / file, device, **ahead))
        assert len(found) == len(tensors)
        same(found, tensors)


@pytest.mark.parametrize("file", FILES)
def test_only_the_names_that_were_given_are_loaded(folder, tensors, device, file):
    names = ["scalar", "m.07", "m.03"]
    found = tensorizer.iterate(folder / file, device, names=names, verify_hash=False)
    same(found, {name: tensors[name] for name in names})
    with pytest.raises(KeyError, match="no such"):
        tensorizer.iterate(folder / file, device, names=["no such"])


SLICES = {
    "m.05": (slice(2, 9),),
    "m.06": (slice(None), slice(3, 8)),
    "m.08": (..., 4),
    "m.09": (slice(1, 20, 3), slice(0, 0)),
    "long": (slice(None), slice(0, 8000)),
    "empty": (slice(0, 0),),
}


@pytest.mark.parametrize("buffer_bytes", [1, 5_000_000, 1 << 30])
@pytest.mark.parametrize("file", FILES)
def test_slices_of_any_dimension_come_beside_whole_tensors(
    folder, tensors, device, file, buffer_bytes
):
    expected = {name: tensor[SLICES.get(name, ...)] for name, tensor in tensors.items()}
    # Other formats hold no hashes.
    for verify_hash in [False, True] if file == "f.tensors" else [False]:
        options = {"buffer_bytes": buffer_bytes, "verify_hash": verify_hash}
        same(tensorizer.iterate(folder / file, device, slices=SLICES, **options), expected)


@pytest.mark.parametrize("slices", [None, SLICES])
def test_encrypted_tensors_are_handed_out_decrypted(folder, tensors, device, slices):
    key = tensorizer.DecryptionParams.from_key((folder / "key").read_bytes())
    found = tensorizer.iterate(
        folder / "sealed.tensors", device, encryption=key, slices=slices, buffer_bytes=3_000_000
    )
    expected = {n: t[SLICES.get(n, ...)] if slices else t for n, t in tensors.items()}
    same(found, expected)
    with pytest.raises(tensorizer.CryptographyError):
        wrong = tensorizer.DecryptionParams.from_key(bytes(32))
        list(tensorizer.iterate(folder / "sealed.tensors", device, encryption=wrong))


@pytest.mark.parametrize("world", [2, 7])
@pytest.mark.parametrize("dim", [0, 1])
def test_every_rank_gets_its_shard(folder, tensors, device, dim, world):
    names = [name for name, tensor in tensors.items() if tensor.dim() == 2 and tensor.numel()]
    parts = [
        dict(
            tensorizer.iterate(
                folder / "f.safetensors",
                device,
                names=names,
                shard=tensorizer.Shard(dim, rank=rank, world=world),
                buffer_bytes=1_000_000,
            )
        )
        for rank in range(world)
    ]
    same(
        {n: torch.cat([part[n] for part in parts], dim) for n in names},
        {n: tensors[n] for n in names},
    )


@pytest.mark.parametrize("slices", [{}, SLICES])
def test_a_pipe_is_read_once(folder, tensors, device, slices):
    read, write = os.pipe()
    if os.fork() == 0:
        os.close(read)
        with open(write, "wb") as file:
            file.write((folder / "f.tensors").read_bytes())
        os._exit(0)
    os.close(write)
    expected = {name: tensor[slices.get(name, ...)] for name, tensor in tensors.items()}
    with open(read, "rb") as file:
        same(tensorizer.iterate(file, device, slices=slices, buffer_bytes=300_000), expected)
    os.wait()


def test_arguments_are_refused_before_the_first_byte(folder):
    with pytest.raises(ValueError, match='order must be "file" or "ready"'):
        tensorizer.iterate(folder / "f.tensors", "cpu", order="name")
    with pytest.raises(ValueError, match='order="ready" with group='):
        tensorizer.iterate(folder / "f.tensors", "cpu", order="ready", group=object())
    with pytest.raises(KeyError, match="a slice of"):
        tensorizer.iterate(folder / "f.tensors", "cpu", slices={"none": (0,)})


def test_tensors_without_data_come_as_zeros(tmp_path, device):
    given = {"a": torch.ones(3), "meta": torch.empty(1000, 70, device="meta"), "z": torch.ones(2)}
    tensorizer.save(given, tmp_path / "f.tensors")
    found = dict(tensorizer.iterate(tmp_path / "f.tensors", device, buffer_bytes=64))
    assert list(found) == ["a", "meta", "z"]
    assert found["meta"].shape == (1000, 70) and not found["meta"].any()


def test_tensors_share_no_memory(folder, tensors, device):
    found = dict(tensorizer.iterate(folder / "f.safetensors", device))
    for tensor in found.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        tensor.fill_(1)
    same(tensorizer.iterate(folder / "f.safetensors", device), tensors)


def test_a_damaged_tensor_is_an_error_after_those_before_it(tmp_path, tensors, device):
    path = tmp_path / "f.tensors"
    tensorizer.save({f"{i}": torch.full((400_000,), float(i)) for i in range(12)}, path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    found = []
    with pytest.raises(tensorizer.HashMismatchError):
        for name, tensor in tensorizer.iterate(
            path, device, verify_hash=True, buffer_bytes=4 << 20
        ):
            assert tensor[0] == tensor[-1] == float(name)
            found.append(name)
    assert 4 <= len(found) < 8 and found == [f"{i}" for i in range(len(found))]


def test_a_damaged_copy_in_the_cache_is_fetched_again_and_no_tensor_comes_twice(tmp_path):
    tensors = {f"{i}": torch.full((300_000,), float(i)) for i in range(10)}
    tensorizer.save(tensors, tmp_path / "f.tensors")
    cache = tmp_path / "cache"
    with FaultServer((tmp_path / "f.tensors").read_bytes()) as server:
        same(tensorizer.iterate(server.url, "cpu", cache_dir=cache), tensors)
        largest = max((f for f in cache.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
        data = bytearray(largest.read_bytes())
        data[len(data) * 2 // 3] ^= 1
        largest.write_bytes(data)
        found = list(tensorizer.iterate(server.url, "cpu", cache_dir=cache, verify_hash=True))
    assert len(found) == len(tensors)
    same(found, tensors)


def test_progress_ends_with_all_bytes_and_may_raise(folder, device):
    told = []
    list(tensorizer.iterate(folder / "f.tensors", device, progress=lambda *at: told.append(at)))
    assert told[-1][0] == told[-1][1] and told == sorted(told)

    def refuse(done, total):
        raise OSError("enough")

    with pytest.raises(OSError, match="enough"):
        list(tensorizer.iterate(folder / "f.tensors", device, progress=refuse))


def test_two_iterators_and_a_load_of_one_file_do_not_disturb_each_other(folder, tensors, device):
    one = tensorizer.iterate(folder / "f.tensors", device, buffer_bytes=200_000)
    other = tensorizer.iterate(folder / "f.tensors", device, buffer_bytes=200_000, order="ready")
    first, second = [next(one)], [next(other)]
    same(tensorizer.load(folder / "f.tensors", device), tensors)
    same(first + list(one), tensors)
    same(second + list(other), tensors)


def test_an_iterator_that_is_dropped_leaves_nothing(folder):
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    for _ in range(5):
        next(tensorizer.iterate(folder / "f.tensors", "cpu", buffer_bytes=100_000))
        gc.collect()
    after = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    assert after[0] <= before[0] and after[1] <= before[1]


@torch.jit.script
def total_of(uri: str, order: str) -> int:
    iterator = torch.ops.tensorizer.iterate(uri, buffer_bytes=200000, order=order)
    count = 0
    while True:
        tensors = torch.ops.tensorizer.iterate_next(iterator)
        if len(tensors) == 0:
            break
        for tensor in tensors.values():
            count += tensor.numel()
    return count


@pytest.mark.parametrize("order", ["file", "ready"])
def test_operators_hand_out_tensors_in_torchscript(folder, tensors, order):
    expected = sum(tensor.numel() for tensor in tensors.values())
    assert total_of(str(folder / "f.tensors"), order) == expected


def test_operators_in_eager_mode(folder, tensors):
    ops, path = torch.ops.tensorizer, str(folder / "sealed.tensors")
    key = torch.frombuffer(bytearray((folder / "key").read_bytes()), dtype=torch.uint8)
    iterator = ops.iterate(path, names=["m.04", "scalar"], key=key, device="cpu", verify=True)
    found = {}
    while part := ops.iterate_next(iterator):
        found |= part
    same(found, {name: tensors[name] for name in ["m.04", "scalar"]})
    with pytest.raises(RuntimeError, match=f"no iterator {iterator}"):
        ops.iterate_next(iterator)
    iterator = ops.iterate(str(folder / "f.tensors"))
    ops.iterate_close(iterator)
    ops.iterate_close(iterator)
    with pytest.raises(RuntimeError, match="no iterator"):
        ops.iterate_next(iterator)
    with pytest.raises(ValueError, match="buffer_bytes is 0"):
        ops.iterate(path, buffer_bytes=0)
    with pytest.raises(ValueError, match="order is"):
        ops.iterate(path, order="name")
