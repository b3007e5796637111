"""Loads of new weights into a module that has older ones: only what has changed is read."""

import pytest
import tensorizer
import torch
from processes import run_python
from tensorizer import TensorDeserializer, TensorSerializer


def build(seed=1):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(4)]
    return torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(64))


def write(module, path, **options):
    with TensorSerializer(path, **options) as serializer:
        serializer.write_module(module)
    return path


def load(module, path, **options):
    """Load what has changed; return the bytes that were read, and what was reported."""
    before = (tensorizer.stats() or {"call": 0})["call"]
    options = {"only_changed": True, **options}
    with TensorDeserializer(path, "cpu", lazy_load=True) as file:
        count = file.load_into_module(module, **options)
        read = file.total_bytes_read
    calls = tensorizer.stats(before)
    assert count or not read
    return read, [why for call in calls for why in call["fallbacks"]]


def assert_same(found, expected):
    expected = expected.state_dict()
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.fixture
def files(tmp_path):
    """Return a module, its file, and a file whose second weight and one buffer are other ones."""
    source = build()
    first = write(source, tmp_path / "first")
    with torch.no_grad():
        source[1].weight.mul_(2)
        source[4].running_mean.add_(1)
    return source, first, write(source, tmp_path / "second")


CHANGED = 64 * 64 * 4 + 64 * 4
ALL = 4 * 64 * 64 * 4 + 4 * 64 * 4 + 8


@pytest.mark.parametrize("first_with", [True, False])
def test_only_changed_tensors_are_read(files, first_with):
    source, first, second = files
    module = build(2)
    read, said = load(module, first, only_changed=first_with)
    assert (read, len(said)) == (ALL, first_with)
    addresses = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    objects = [*module.parameters()]
    assert load(module, second) == (CHANGED, [])
    assert_same(module, source)
    # From one version to the next, and back.
    assert load(module, second) == (0, [])
    assert load(module, first) == (CHANGED, [])
    assert load(module, second) == (CHANGED, [])
    assert_same(module, source)
    assert {n: t.data_ptr() for n, t in module.state_dict().items()} == addresses
    assert all(a is b for a, b in zip(module.parameters(), objects, strict=True))
    # Everything, unless it is asked for.
    assert load(module, second, only_changed=False) == (ALL, [])


def test_bytes_that_a_server_sends(nginx):
    source, module, big = build(), build(2), torch.nn.Linear(1024, 4096)
    source.add_module("5", big)
    module.add_module("5", torch.nn.Linear(1024, 4096))
    write(source, nginx.root / "first")
    with torch.no_grad():
        source[1].weight.mul_(2)
    write(source, nginx.root / "second")
    load(module, f"{nginx.http}/first")
    assert nginx.sent("first") > big.weight.nbytes
    assert load(module, f"{nginx.http}/second") == (64 * 64 * 4, [])
    # The first MiB is fetched when the file is opened.
    assert nginx.sent("second") < 3 << 20
    assert_same(module, source)


def test_tensors_that_the_module_changed_are_read(files):
    source, first, second = files
    module = build(2)
    load(module, first)
    with torch.no_grad():
        module[0].weight.add_(1)
    module[2].weight = torch.nn.Parameter(torch.zeros(64, 64))
    module[3].weight.data = torch.zeros(64, 64)
    module[4].bias.grad = torch.zeros(64)
    assert load(module, second) == (4 * 64 * 64 * 4 + 2 * 64 * 4, [])
    assert_same(module, source)
    module.double()
    with pytest.warns(UserWarning, match="dtypes"):
        read, _ = load(module, second)
    # The count of batches is no floating-point number, but has moved.
    assert read >= ALL - 8
    assert_same(module, source)


def test_a_failed_load_is_not_remembered(files, tmp_path):
    source, first, second = files
    module = build(2)
    load(module, first)
    data = second.read_bytes()
    wanted = source[1].weight.detach().numpy().tobytes()
    assert data.count(wanted) == 1
    damaged = tmp_path / "damaged"
    damaged.write_bytes(data.replace(wanted, bytes(len(wanted))))
    with pytest.raises(tensorizer.HashMismatchError):
        load(module, damaged, verify_hash=True)
    read, _ = load(module, second)
    assert read == ALL
    assert_same(module, source)


def test_tied_tensors_are_read_together(tmp_path):
    source, module = build(), build(2)
    module[1].weight = module[0].weight
    with torch.no_grad():
        source[1].weight.copy_(source[0].weight)
    load(module, write(source, tmp_path / "first"))
    assert module[1].weight is module[0].weight
    with torch.no_grad():
        source[1].weight.add_(1)
    read, _ = load(module, write(source, tmp_path / "second"))
    assert read == 2 * 64 * 64 * 4
    assert_same(module, source)


def test_parts_of_sharded_tensors(tmp_path):
    code = """
import sys, torch, tensorizer
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
mesh = init_device_mesh("cpu", (1,))
source, module = (torch.nn.Sequential(*(torch.nn.Linear(8, 8, False) for _ in "ab")) for _ in "ab")
for layer in module:
    layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
for number in range(3):
    with tensorizer.TensorSerializer(sys.argv[1]) as serializer:
        serializer.write_module(source)
    with tensorizer.TensorDeserializer(sys.argv[1], "cpu", lazy_load=True) as file:
        file.load_into_module(module, only_changed=True)
        print(file.total_bytes_read)
    for here, there in zip(module, source):
        assert torch.equal(here.weight.full_tensor(), there.weight)
    with torch.no_grad():
        (source, module, source)[number][number % 2].weight.mul_(2)
dist.destroy_process_group()
"""
    done = run_python(code, tmp_path / "f")
    assert done.stdout.split() == ["512", "256", "256"] and not done.returncode, done.stderr


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("kind", ["crc32", "safetensors"])
def test_without_hashes_everything_is_read(tmp_path, kind, which):
    source, module = build(), build(2)
    paths = [write(source, tmp_path / "0"), write(source, tmp_path / "1")]
    if kind == "crc32":
        write(source, paths[which], hashes="crc32")
    else:
        paths[which] = tmp_path / "model.safetensors"
        tensorizer.save(source.state_dict(), paths[which])
    load(module, paths[0])
    read, (said,) = load(module, paths[1])
    assert read == ALL and said.startswith("all tensors were read, as ")
    assert_same(module, source)


def test_with_a_filter_and_encrypted(tmp_path):
    source, module = build(), build(2)

    def save_and_load(name, wants=None):
        key = tensorizer.EncryptionParams.random()
        path = write(source, tmp_path / name, encryption=key)
        params = tensorizer.DecryptionParams.from_key(key.key)
        with TensorDeserializer(path, "cpu", lazy_load=True, encryption=params) as file:
            file.load_into_module(module, wants, only_changed=True)
            return file.total_bytes_read

    assert save_and_load("first") == ALL
    with torch.no_grad():
        source[1].weight.mul_(2)
        source[4].running_mean.add_(1)
    assert save_and_load("second", lambda name: name.endswith("weight")) == 64 * 64 * 4
    assert save_and_load("third", lambda name: name.startswith("4.")) == 64 * 4
    assert save_and_load("fourth") == 0
    assert_same(module, source)
