"""Indices of many or of deep names take memory and time in proportion to their bytes."""

import cProfile
import struct

import pytest
import tensorizer
import torch
from processes import run_python
from tensorizer import TensorDeserializer, TensorSerializer

#: Opens a small file, then a file in some way; prints by how many bytes the peak of memory grew.
GROWTH = """
import sys, tensorizer
from tensorizer import TensorDeserializer
small, path, lazy = sys.argv[1], sys.argv[2], sys.argv[3] == "lazy"
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))
with TensorDeserializer(small, "cpu", lazy_load=True) as file: file["a"]
TensorDeserializer(small, "cpu")
before = peak()
file = TensorDeserializer(path, "cpu", lazy_load=lazy)
print(peak() - before)
"""


def write(path, names):
    """Write scalars of type uint8, in as few bytes as they can be. Return the index's size."""
    shared = struct.pack("<BB3sB", 2, 3, b"|u1", 0)
    index_len = sum(2 + len(name) + len(shared) + 24 for name in names)
    at = 73 + index_len
    index, body = bytearray(), bytearray()
    for name in names:
        record = struct.pack("<H", len(name)) + name + shared
        header = struct.pack("<QHB", 8 + 2 + 1 + 2 + len(name) + 5 + 2 + 1 + 8, 0, 2)
        header += record[: 2 + len(name)] + shared[1:] + b"\x01\0\0" + struct.pack("<Q", 1)
        index += record + struct.pack("<QQQ", at, at + len(header), 1)
        body += header + b"\x05"
        at += len(header) + 1
    prologue = b"|TZR|" + struct.pack("<I32xQ8xQ", 1, len(names), len(names))
    path.write_bytes(prologue + struct.pack("<Q", index_len) + index + body + bytes(8))
    return index_len


def growth(small, path, way):
    done = run_python(GROWTH, small, path, way)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small"
    tensorizer.save({"a": torch.arange(10)}, path)
    return path


def deep_names(count, levels=256):
    """Names that part at their first step, so that none of their levels are shared."""
    return [b"\x1e[%d%s]" % (number, b",0" * (levels - 1)) for number in range(count)]


def test_deep_names_take_memory_in_proportion(small, tmp_path):
    index_len = write(tmp_path / "f", deep_names(2_000))
    assert index_len > 1 << 20
    assert growth(small, tmp_path / "f", "lazy") <= 8 * index_len


def test_many_entries_take_memory_in_proportion(small, tmp_path):
    # Nearly as many as a dict of 8192 places takes: where one has just grown, half is empty.
    count = 5000
    index_len = write(tmp_path / "f", [b"%x" % number for number in range(count)])
    assert index_len < 40 * count
    assert growth(small, tmp_path / "f", "lazy") <= 8 * index_len
    assert growth(small, tmp_path / "f", "eager") <= count + 8 * index_len + 1024 * count


def calls(work):
    """Count the calls of functions that some work takes, of Python's and of native ones."""
    profile = cProfile.Profile()
    profile.runcall(work)
    return sum(entry.callcount for entry in profile.getstats())


WAYS = {
    "tree": lambda file: file.tree(),
    "subtree": lambda file: file.tree(["top", 0]),
    "filtered": lambda file: file.tree(filter_func=lambda name: name[1] == 0),
    "item": lambda file: file["top"],
    "keys": list,
}


@pytest.mark.parametrize("way", WAYS)
def test_trees_take_time_in_proportion(way, tmp_path):
    def taken(levels, count):
        names = [b'\x1e["top",%d%s]' % (n, b",0" * (levels - 2)) for n in range(count)]
        write(tmp_path / "f", names)
        with TensorDeserializer(tmp_path / "f", "cpu", lazy_load=True) as file:
            file.tree()
            return calls(lambda: WAYS[way](file))

    base = taken(50, 20)
    assert taken(100, 20) < 3 * base
    assert taken(50, 40) < 3 * base


def test_saving_deep_structures_takes_time_in_proportion(tmp_path):
    def structure(levels):
        value = torch.zeros(1)
        for _ in range(levels):
            value = [value, torch.zeros(1)]
        return value

    def taken(levels):
        with TensorSerializer(tmp_path / "f") as file:
            return calls(lambda: file.write_state_dict(structure(levels)))

    assert taken(100) < 3 * taken(50)
    with TensorDeserializer(tmp_path / "f", "cpu", lazy_load=True) as file:
        assert len(file.tree()) == 2
    with pytest.raises(ValueError, match="nested too deeply"):
        with TensorSerializer(tmp_path / "f") as file:
            file.write_state_dict(structure(5000))


def test_the_deepest_names_come_back(tmp_path):
    value = torch.arange(3)
    for _ in range(255):
        value = {"k": value}
    tensorizer.save({"top": value}, tmp_path / "f")
    code = """
import sys, tensorizer
from tensorizer import TensorDeserializer
with TensorDeserializer(sys.argv[1], "cpu", lazy_load=True) as file:
    sys.setrecursionlimit(60)
    trees = [file.tree()["top"], file["top"], file.tree(["top"])]
    sys.setrecursionlimit(1000)
for tree in trees:
    for _ in range(255):
        assert list(tree) == ["k"]
        tree = tree["k"]
    print(tree.tolist())
"""
    done = run_python(code, tmp_path / "f")
    assert done.stdout.split("\n")[:3] == ["[0, 1, 2]"] * 3, done.stderr


def test_trees_keep_the_order_of_the_file(tmp_path):
    names = [("b", 10, "x"), ("b", 9, "y"), ("d", "p"), ("b", 10, "w"), ("d", "o", 0), "a", "c"]
    saved = {name: torch.tensor(at) for at, name in enumerate(names)}
    tensorizer.save(saved, tmp_path / "f")
    with TensorDeserializer(tmp_path / "f", "cpu", lazy_load=True) as file:
        assert list(file.keys()) == ["b", "d", "a", "c"]
        assert len(file) == 4
        assert "b" in file and ("b", 10, "x") not in file
        tree = file.tree()
        assert list(tree) == ["b", "d", "a", "c"]
        assert [list(item) for item in tree["b"]] == [["y"], ["x", "w"]]
        assert list(tree["d"]) == ["p", "o"]
        assert list(file["b"]) == [10, 9]
        assert file["b"][10]["w"].item() == 3
        filtered = file.tree(filter_func=lambda name: name not in (names[0], ("d", "p"), "a"))
        assert list(filtered) == ["b", "d", "c"]
        assert [list(item) for item in filtered["b"]] == [["y"], ["w"]]
        assert file.tree(["b", 9, "y"]).item() == 1
        assert file.tree(["b", 9, "y", "z"]) is None
        assert file.tree(["b", 9, "z"], default=7) == 7
        assert file.tree(["d", "o"]) == [file["d"]["o"][0]]
        with pytest.raises(KeyError, match="not found"):
            file["b", 10]
        with pytest.raises(TypeError):
            file["b"][10] = 1
    seen = []
    chosen = TensorDeserializer(
        tmp_path / "f", "cpu", filter_func=lambda name: seen.append(name) or name[0] == "b"
    )
    assert seen == names
    assert list(chosen) == ["b"]
    assert chosen.total_tensor_bytes == 3 * 8
    with pytest.raises(KeyError):
        chosen["a"]
