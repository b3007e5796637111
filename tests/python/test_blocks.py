"""Memory that loaded tensors share, and that comes back as they go."""

import pytest
import tensorizer
import torch
from processes import run_python
from tensorizer import TensorDeserializer

MIB = 1 << 20
WATCH = """
import sys
import tensorizer

def resident():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) >> 10 for line in file if line.startswith("Rss:"))

tensors = tensorizer.load(sys.argv[1], "cpu", verify_hash=True)
assert all((tensor == int(name[1:])).all() for name, tensor in tensors.items())
names = list(tensors)
# All large tensors and those before them, and some of the small ones.
watched = {at for large, name in enumerate(names) if name[0] == "l" for at in (large - 1, large)}
for at, name in enumerate(names):
    del tensors[name]
    if at in watched or at % 8 == 0:
        print(name, resident())
"""


def test_memory_comes_back_as_tensors_go(tmp_path):
    # Small neighbours of 80 MiB, and large ones among them and behind.
    tensors = {f"s{i}": torch.full((MIB // 16,), i, dtype=torch.float64) for i in range(160)}
    tensors = (
        dict(list(tensors.items())[:100]) | {"l7": torch.full((30 * MIB,), 7).byte()} | tensors
    )
    tensors |= {f"l{i}": torch.full((30 * MIB,), i).byte() for i in range(2)}
    tensorizer.save(tensors, tmp_path / "f")
    watch = run_python(WATCH, tmp_path / "f")
    assert watch.returncode == 0, watch.stderr
    lines = [line.split() for line in watch.stdout.splitlines()]
    left = {name: int(size) for name, size in lines}
    first, last = left["s0"], left["l1"]
    assert first - last > 160
    # A large tensor gives its memory back at once, though others of the file live.
    names = list(tensors)
    before = dict(zip(names[1:], names[:-1], strict=True))
    for name in ("l7", "l0", "l1"):
        # Meanwhile the kernel may collapse memory beside it into huge pages of 2 MiB.
        assert left[before[name]] - left[name] >= 30 - 4, name
    # Small ones are held by neighbours only: never more than a block of 64 MiB too much.
    alive = sum(tensor.nbytes for tensor in tensors.values()) / MIB
    for name in names:
        alive -= tensors[name].nbytes / MIB
        assert left.get(name, 0) - last <= alive + 64 + 4, name


@pytest.mark.parametrize("mmap", [False, True])
def test_saving_one_tensor_does_not_save_its_block(tmp_path, mmap):
    tensors = {str(i): torch.full((1000,), i, dtype=torch.float32) for i in range(2000)}
    tensorizer.save(tensors, tmp_path / "f")
    with TensorDeserializer(tmp_path / "f", device="cpu", mmap=mmap) as file:
        loaded = file["777"].data
    assert loaded.untyped_storage().nbytes() == loaded.nbytes
    torch.save(loaded, tmp_path / "one.pt")
    assert (tmp_path / "one.pt").stat().st_size < 3 * loaded.nbytes
    assert torch.equal(torch.load(tmp_path / "one.pt"), tensors["777"])


def test_a_tensor_of_a_block_can_be_changed_alone(tmp_path):
    tensors = {str(i): torch.full((100,), i, dtype=torch.int16) for i in range(50)}
    tensorizer.save(tensors, tmp_path / "f")
    loaded = tensorizer.load(tmp_path / "f", "cpu")
    for number in (0, 20, 49):
        loaded[str(number)].fill_(-1)
        loaded[str(number)].untyped_storage().fill_(0xFF)
    for name, tensor in loaded.items():
        assert torch.equal(
            tensor, tensors[name] if name not in ("0", "20", "49") else tensor * 0 - 1
        )
