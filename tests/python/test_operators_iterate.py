"""``torch.ops.tensorizer.iterate``: tensors one by one, eager and in TorchScript."""

import os
import threading
from pathlib import Path

import pytest
import tensorizer
import torch
from conftest import TENSORS, assert_same
from processes import run_python
from torch.fx.experimental.proxy_tensor import make_fx

ops = torch.ops.tensorizer


@pytest.fixture
def path(saved):
    return saved


def rest_of(iterator):
    """Return what an iterator has left, of which no tensor comes twice."""
    found = {}
    while part := ops.iterate_next(iterator):
        assert not found.keys() & part.keys()
        found |= part
    return found


@pytest.fixture
def many(tmp_path):
    tensors = {f"t{i:02}": torch.full((1000 + 9000 * i,), float(i)) for i in range(20)}
    tensorizer.save(tensors, tmp_path / "many.tensors")
    return str(tmp_path / "many.tensors"), tensors


@pytest.mark.parametrize("buffer_bytes", [1, 1 << 20, (1 << 63) - 1])
@pytest.mark.parametrize("order", ["file", "ready"])
def test_an_iterator_hands_out_every_tensor_once(many, order, buffer_bytes):
    path, tensors = many
    found = rest_of(ops.iterate(path, buffer_bytes=buffer_bytes, order=order, verify=True))
    assert sorted(found) == sorted(tensors)
    assert order == "ready" or list(found) == list(tensors)
    for name, tensor in found.items():
        assert_same(tensor, tensors[name])
        assert not tensor.requires_grad


def test_an_iterator_hands_out_what_was_asked_for(path):
    found = rest_of(ops.iterate(path, names=["half", "weight"], device="cpu", num_readers=1))
    assert list(found) == ["weight", "half"]
    for name, tensor in found.items():
        assert_same(tensor, TENSORS[name])
    assert rest_of(ops.iterate(path, names=[])) == {}
    assert all(tensor.is_meta for tensor in rest_of(ops.iterate(path, device="meta")).values())


def test_an_iterator_decrypts(path):
    key = torch.arange(32, dtype=torch.uint8)
    ops.save(path, TENSORS, key=key)
    found = rest_of(ops.iterate(path, key=key, verify=True))
    for name, tensor in TENSORS.items():
        assert_same(found[name], tensor)
    with pytest.raises(RuntimeError, match="Tensor decryption failed"):
        rest_of(ops.iterate(path, key=key + 1))
    with pytest.raises(RuntimeError, match="Tensor is encrypted"):
        ops.iterate(path)


def test_the_number_of_an_iterator_is_good_until_its_end(path):
    closed, ended = ops.iterate(path), ops.iterate(path)
    assert closed != ended
    rest_of(ended)
    for _ in range(2):
        ops.iterate_close(closed)
        ops.iterate_close(ended)
    for number in (closed, ended, 0, -1, 1 << 62):
        with pytest.raises(
            RuntimeError, match=f"no iterator {number}: it was closed, or has ended"
        ):
            ops.iterate_next(number)


def test_an_iterator_refuses_bad_use(path, tmp_path):
    cases = [
        ({"buffer_bytes": 0}, ValueError, "buffer_bytes is 0, expected at least 1"),
        ({"order": "name"}, ValueError, 'order is "name", expected "file" or "ready"'),
        ({"num_readers": 0}, ValueError, "num_readers is 0"),
        ({"names": ["none"]}, RuntimeError, "Tensor not found: `none`"),
        ({"names": ["bias", "bias"]}, RuntimeError, "`bias` is asked for twice"),
        ({"key": torch.zeros(3)}, ValueError, "a key is a uint8 tensor of 32 elements"),
    ]
    for options, error, text in cases:
        with pytest.raises(error, match=text):
            ops.iterate(path, **options)
    with pytest.raises(RuntimeError, match="missing`: No such file"):
        ops.iterate(str(tmp_path / "missing"))
    torch.save(TENSORS, tmp_path / "f.pt")
    with pytest.raises(RuntimeError, match=r"checkpoint of torch\.save"):
        ops.iterate(str(tmp_path / "f.pt"))


def test_damage_ends_an_iterator(many):
    path, _ = many
    data = bytearray(Path(path).read_bytes())
    data[-9] ^= 1
    Path(path).write_bytes(data)
    iterator = ops.iterate(path, verify=True)
    with pytest.raises(RuntimeError, match="t19"):
        rest_of(iterator)
    with pytest.raises(RuntimeError, match=f"no iterator {iterator}"):
        ops.iterate_next(iterator)


def test_closing_an_iterator_leaves_nothing(many):
    before = len(os.listdir("/proc/self/fd"))
    for taken in range(4):
        iterator = ops.iterate(many[0], buffer_bytes=1, device="cpu")
        for _ in range(taken):
            ops.iterate_next(iterator)
        ops.iterate_close(iterator)
        assert len(os.listdir("/proc/self/fd")) == before


def test_threads_share_an_iterator(many):
    path, tensors = many
    iterator, found = ops.iterate(path, buffer_bytes=300_000), []

    def take():
        try:
            while part := ops.iterate_next(iterator):
                found.extend(part)
        except RuntimeError as error:
            assert f"no iterator {iterator}" in str(error)  # another thread has got the end

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(tensors)


LEFT_OPEN = """
import os, sys, tensorizer, torch
ops, path = torch.ops.tensorizer, sys.argv[1]
def rest_of(iterator):
    return iter(lambda: len(ops.iterate_next(iterator)), 0)
iterator = ops.iterate(path, buffer_bytes=1, device="cpu")
ops.iterate_next(iterator)
child = os.fork()
if child == 0:
    try:
        ops.iterate_next(iterator)
    except RuntimeError as error:
        print(error, flush=True)
    ops.iterate_close(iterator)
    print(sum(rest_of(ops.iterate(path))), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(1 + sum(rest_of(iterator)))
ops.iterate_next(ops.iterate(path, buffer_bytes=1))
"""


def test_an_iterator_belongs_to_its_process_and_ends_with_it(many):
    done = run_python(LEFT_OPEN, many[0], finalize=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "this iterator was made before a fork(), by the parent process: make one in this process",
        "20",
        "20",
    ]


def test_tracing_is_refused_and_leaves_no_load_behind(many):
    path, _ = many

    def begins(x: torch.Tensor):
        torch.ops.tensorizer.iterate(path, buffer_bytes=1)
        return x + 1

    before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    for trace in (torch.compile(begins, backend="eager"), make_fx(begins, tracing_mode="fake")):
        with pytest.raises(Exception, match="iterate cannot be part of a graph"):
            trace(torch.ones(1))
    assert len(os.listdir("/proc/self/fd")) <= before[0]
    names = [Path(f"/proc/self/task/{task}/comm") for task in os.listdir("/proc/self/task")]
    assert not any(name.exists() and name.read_text() == "tensorizer\n" for name in names)


def test_code_that_torch_does_not_compile_iterates(many):
    path, tensors = many

    @torch.compiler.disable
    def total(path: str) -> torch.Tensor:
        iterator, sums = torch.ops.tensorizer.iterate(path), []
        while part := torch.ops.tensorizer.iterate_next(iterator):
            sums += [tensor.sum() for tensor in part.values()]
        return torch.stack(sums).sum()

    @torch.compile(backend="eager")
    def compiled(path: str, x: torch.Tensor):
        return x + total(path)

    expected = 1 + sum(tensor.sum() for tensor in tensors.values())
    for _ in range(2):
        assert compiled(path, torch.ones(1)) == expected


@torch.jit.script
def sums_one_by_one(uri: str, order: str):
    iterator = torch.ops.tensorizer.iterate(uri, buffer_bytes=200000, order=order)
    sums: dict[str, float] = {}
    tensors = torch.ops.tensorizer.iterate_next(iterator)
    while len(tensors) > 0:
        for name, tensor in tensors.items():
            assert name not in sums
            sums[name] = float(tensor.sum())
        tensors = torch.ops.tensorizer.iterate_next(iterator)
    return sums


@torch.jit.script
def first_of_all(uri: str):
    iterator = torch.ops.tensorizer.iterate(uri, buffer_bytes=1)
    first = torch.ops.tensorizer.iterate_next(iterator)
    second = torch.ops.tensorizer.iterate_next(iterator)
    torch.ops.tensorizer.iterate_close(iterator)
    return first.keys() + second.keys()


@pytest.mark.parametrize("order", ["file", "ready"])
def test_scripted_functions_iterate(many, order):
    path, tensors = many
    for _ in range(3):  # calls that look alike are neither merged nor deleted
        sums = sums_one_by_one(path, order)
        assert sums == {name: float(tensor.sum()) for name, tensor in tensors.items()}
        assert first_of_all(path) == ["t00", "t01"]
