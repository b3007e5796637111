"""Tensors that are used in place in a mapping of their file, or own their memory."""

import signal
from pathlib import Path

import pytest
import tensorizer
import torch
from conftest import GOLDEN, assert_same
from processes import run_python
from reading import TENSORS, check
from tensorizer import TensorDeserializer, TensorSerializer

pytestmark = pytest.mark.device


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "f.tensors"
    tensorizer.save(TENSORS, path)
    return path


@pytest.mark.host
def test_a_mapped_file_is_used_in_place_and_stays_as_it_is(path):
    before = path.read_bytes()
    with TensorDeserializer(path, "cpu", mmap=True, verify_hash=True) as file:
        check(file)
        mapped = [
            line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line
        ]
        assert mapped
        with torch.no_grad():
            file["b.weight"].fill_(7)
    assert path.read_bytes() == before, "changes are private"
    assert file["b.weight"].unique().tolist() == [7]
    path.unlink()
    assert_same(file["a"].detach(), TENSORS["a"])


@pytest.mark.parametrize("mmap", [True, False])
def test_a_file_that_is_replaced_or_deleted_while_it_is_open(tmp_path, mmap):
    # Readers open the file once more each; it must be the same file.
    path, large = tmp_path / "f.tensors", torch.randn(2000, 2000)
    for number in range(2):
        tensorizer.save({"large": large}, path)
        with TensorDeserializer(path, "cpu", lazy_load=True, mmap=mmap, num_readers=4) as file:
            if number == 0:
                tensorizer.save({"large": torch.zeros(2000, 2000)}, path)
            else:
                path.unlink()
            assert_same(file["large"].detach(), large)


@pytest.mark.host
def test_files_are_mapped_only_on_request(path):
    def mapped(**options):
        file = TensorDeserializer(path, "cpu", **options)
        check(file)
        maps = Path("/proc/self/maps").read_text()
        return str(path) in maps

    assert not mapped()
    assert not mapped(lazy_load=True)
    assert mapped(mmap=True, verify_hash=True)
    assert mapped(mmap=True, lazy_load=True)
    assert not mapped(mmap=False)
    assert not mapped(mmap=None)
    # Small loads are not worth a mapping each.
    small = TensorDeserializer(path, "cpu", lambda name: name != "b.weight", mmap=True)
    assert small["a"].sum() == TENSORS["a"].sum()
    assert str(path) not in Path("/proc/self/maps").read_text()


def is_mapped(tensor, path):
    """True if a tensor's bytes lie in a mapping of the file."""
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [line[0].split("-") for line in maps if line[-1] == str(path)]
    return any(int(start, 16) <= tensor.data_ptr() < int(end, 16) for start, end in ranges)


@pytest.fixture(params=["f.tensors", "f.safetensors"])
def rows(request, tmp_path):
    tensors = {f"t{n}": torch.randn(64, 16 * (n + 1)) for n in range(60)}
    tensorizer.save({**tensors, "empty": torch.empty(0, 3)}, tmp_path / request.param)
    return tmp_path / request.param, tensors


@pytest.mark.host
def test_an_iterator_uses_tensors_in_place(rows):
    path, tensors = rows
    before = path.read_bytes()
    found = {}
    for name, tensor in tensorizer.iterate(path, "cpu", mmap=True, buffer_bytes=1):
        assert is_mapped(tensor, path) == (name != "empty")
        found[name] = tensor
    assert found.pop("empty").shape == (0, 3)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_same(found[name], tensor)
    found["t0"].fill_(7)
    assert path.read_bytes() == before, "changes are private"
    del found, tensor
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert not any(is_mapped(tensor, path) for _, tensor in tensorizer.iterate(path, "cpu"))
    if path.suffix == ".tensors":
        verified = tensorizer.iterate(path, "cpu", mmap=True, verify_hash=True)
        assert not any(is_mapped(tensor, path) for _, tensor in verified)


@pytest.mark.host
def test_slices_that_are_one_range_are_used_in_place(rows):
    path, tensors = rows
    names = [f"t{n}" for n in range(20, 60)]

    def load(dimension, end, **options):
        slices = dict.fromkeys(names, (dimension, 0, end))
        return tensorizer.load(path, "cpu", names=names, slices=slices, **options)

    found = load(0, 33, mmap=True)
    for name, tensor in found.items():
        assert is_mapped(tensor, path)
        assert torch.equal(tensor, tensors[name][:33])
    assert not tensorizer.stats()["fallbacks"]
    columns = load(1, 300, mmap=True)
    assert not any(is_mapped(tensor, path) for tensor in columns.values())
    (why,) = tensorizer.stats()["fallbacks"]
    assert "slices are read although mapping was asked for" in why
    whole = {name: tensors[name][:, :300] for name in names}
    assert all(torch.equal(columns[name], whole[name]) for name in names)
    assert not any(is_mapped(tensor, path) for tensor in load(0, 33).values())


@pytest.mark.host
@pytest.mark.parametrize("ending", ["tensors", "safetensors"])
def test_overlapping_slices_are_all_read(tmp_path, ending):
    path, whole = tmp_path / f"f.{ending}", torch.randn(400_000, 2)
    tensorizer.save({"w": whole, "other": torch.randn(300_000)}, path)
    for first, second in [((0, 0, 400_000), (0, 1, 400_000)), ((0, 0, 300_000), (1, 0, 1))]:
        for one in (first, second):
            found = tensorizer.load(path, "cpu", names=["w"], slices={"w": one}, mmap=True)["w"]
            assert torch.equal(found, whole.narrow(one[0], one[1], one[2] - one[1]))


def test_a_mapped_file_of_the_old_writer_is_read(unpack):
    file = {"file": "v1_linear.tensors.gz"}
    assert (GOLDEN / file["file"]).exists()
    path = unpack(file)
    left, right = (TensorDeserializer(path, "cpu", mmap=m) for m in (False, True))
    for name in left:
        assert_same(left[name].detach(), right[name].detach())
        assert right[name].data_ptr() % 64 == 0


@pytest.mark.host
def test_tensors_own_their_memory(path):
    """They outlive the deserializer and each other, and can be changed."""
    tensor = TensorDeserializer(path, "cpu")["b.weight"].detach()
    tensor += 1
    assert torch.equal(tensor, TENSORS["b.weight"] + 1)
    assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert tensor.data_ptr() % 64 == 0


SAVED_OVER = """
import sys, tensorizer, torch
path = sys.argv[1]
module, other = torch.nn.Linear(700, 500), torch.nn.Linear(700, 500)
with tensorizer.TensorSerializer(path) as serializer:
    serializer.write_module(module)
tensorizer.TensorDeserializer(path, "cpu").load_into_module(other)
loaded = tensorizer.load(path)
expected = {name: tensor.clone() for name, tensor in loaded.items()}
with open(path, "wb+") as file:
    serializer = tensorizer.TensorSerializer(file)
    serializer.write_module(other)
    serializer.close()
torch.save(loaded, open(path + ".pt", "wb"))
assert torch.equal(tensorizer.load(path, verify_hash=True)[".weight"], module.weight)
with open(path, "wb") as file:
    torch.save(loaded, file)
open(path, "wb").close()
assert all(torch.equal(loaded[name], expected[name]) for name in expected)
assert torch.equal(other.weight, module.weight)
"""


@pytest.mark.host
def test_loaded_tensors_can_be_saved_over_their_own_file(tmp_path):
    """Opened for writing, and so truncated, as callers of the old package do."""
    done = run_python(SAVED_OVER, tmp_path / "f")
    assert done.returncode == 0, (done.returncode, done.stderr)


@pytest.mark.host
@pytest.mark.parametrize("mmap", [True, False])
def test_a_file_that_is_cut_shorter(mmap, tmp_path):
    """As documented: a mapped tensor raises SIGBUS, and one with memory of its own stays."""
    tensorizer.save({"a": torch.ones(1 << 20)}, tmp_path / "f")
    code = (
        "import os, sys, tensorizer\n"
        "a = tensorizer.load(sys.argv[1], 'cpu', mmap=sys.argv[2] == 'True')['a']\n"
        "os.truncate(sys.argv[1], 4096)\nassert a.sum() == 1 << 20"
    )
    done = run_python(code, tmp_path / "f", mmap)
    assert done.returncode == (-signal.SIGBUS if mmap else 0), done.stderr


@pytest.mark.host
@pytest.mark.parametrize("how", ["file", "descriptor"])
def test_a_file_that_is_mapped_is_not_written(how, path):
    before = path.read_bytes()
    loaded = tensorizer.load(path, mmap=True)
    with open(path, "rb+") as file:
        with pytest.raises(ValueError, match="they would change"):
            TensorSerializer(file if how == "file" else file.fileno())
    assert path.read_bytes() == before
    check(loaded)
    # A save to the path replaces the file, and leaves the mapping alone.
    tensorizer.save({"a": torch.ones(3)}, path)
    check(loaded)
    del loaded
    with open(path, "rb+") as file, TensorSerializer(file.fileno()) as serializer:
        serializer.write_state_dict({"b": torch.ones(2)})
    assert list(tensorizer.load(path)) == ["b"]
