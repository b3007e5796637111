"""Tensors one by one on the emulated CUDA: order of streams, memory that is used again, pools."""

import json

import emulated
import pytest

WRITE = """
import sys, tensorizer
tensors = {f"t{i:02}": torch.full((300_000 + 70_000 * (i % 5),), float(i)) for i in range(40)}
tensors |= {f"z{i:03}": torch.full((i,), float(i)) for i in range(200)}
tensorizer.save(tensors, sys.argv[1])
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("iterate") / "f.tensors"
    written = emulated.run(WRITE, path)
    assert written.returncode == 0, written.stderr
    return path


def passes(code, path, **env):
    done = emulated.run(code, path, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("order", "seed"), [("file", "1"), ("ready", "2")])
def test_memory_is_not_used_again_before_the_consumer_has_done_with_it(path, order, seed):
    """With small buffers torch reuses memory while kernels that read it have not run yet."""
    code = f"""
    import sys, tensorizer
    kept = []
    ahead = dict(buffer_bytes=4 << 20, order={order!r})
    for name, tensor in tensorizer.iterate(sys.argv[1], "cuda", **ahead):
        emulated.pause(torch.cuda.current_stream(), 0.0005)
        kept.append((int(name[1:]), tensor * 1))
        del tensor
    assert len(kept) == 240
    for number, tensor in kept:
        assert bool((tensor.cpu() == number).all()), number
    """
    passes(code, path, FAKE_CUDA_SEED=seed, FAKE_CUDA_DELAY_US="300")


def test_tensors_belong_to_the_stream_that_is_current_at_the_request(path):
    code = """
    import sys, tensorizer
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    iterator = tensorizer.iterate(sys.argv[1], "cuda", buffer_bytes=4 << 20)
    kept = []
    for turn in range(10**6):
        with torch.cuda.stream(streams[turn % 3]):
            try:
                name, tensor = next(iterator)
            except StopIteration:
                break
            emulated.pause(torch.cuda.current_stream(), 0.0005)
            kept.append((int(name[1:]), tensor * 1, streams[turn % 3]))
            del tensor
    assert len(kept) == 240
    for number, tensor, stream in kept:
        stream.synchronize()
        assert bool((tensor.cpu() == number).all()), number
    """
    passes(code, path, FAKE_CUDA_DELAY_US="300")


def test_memory_comes_from_the_pool_of_the_calling_thread(path):
    code = """
    import sys, tensorizer
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        tensors = dict(tensorizer.iterate(sys.argv[1], "cuda", buffer_bytes=8 << 20))
    of_pool = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == pool.id]
    ranges = [(s["address"], s["address"] + s["total_size"]) for s in of_pool]
    for name, tensor in tensors.items():
        at = tensor.data_ptr()
        assert tensor.nbytes == 0 or any(start <= at < end for start, end in ranges), name
    torch.cuda.synchronize()
    """
    passes(code, path)


def test_peak_memory_is_the_read_ahead_and_one_tensor(path):
    code = """
    import json, sys, tensorizer
    torch.cuda.memory.reset_peak_memory_stats()
    for name, tensor in tensorizer.iterate(sys.argv[1], "cuda", buffer_bytes=8_000_000):
        del tensor
    # Of what torch was asked for: its allocator gives blocks that are up to 1 MiB larger.
    print(json.dumps(torch.cuda.memory_stats()["requested_bytes.all.peak"]))
    """
    assert json.loads(passes(code, path)) <= 8_000_000 + 580_000 * 4 + 200 * 512


@pytest.mark.parametrize("taken", [0, 1, 100])
def test_closing_waits_for_copies_before_it_frees_their_memory(path, taken):
    code = f"""
    import sys, tensorizer
    for _ in range(3):
        iterator = tensorizer.iterate(sys.argv[1], "cuda", buffer_bytes=16 << 20)
        for _ in range({taken}):
            next(iterator)
        iterator.close()
        del iterator
        torch.cuda.empty_cache()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == 0
    """
    passes(code, path, FAKE_CUDA_DELAY_US="2000")


def test_a_paused_iterator_does_not_block_other_loads(path):
    code = """
    import sys, tensorizer
    paused = tensorizer.iterate(sys.argv[1], "cuda", buffer_bytes=4 << 20)
    next(paused)
    for _ in range(3):
        assert len(tensorizer.load(sys.argv[1], "cuda")) == 240
    assert sum(1 for _ in paused) == 239
    """
    passes(code, path, TENSORIZER_PINNED_MB="16")


@pytest.mark.parametrize("fault", ["copy=719@9", "cuEventRecord=700@20", "cudaMalloc=2@3-"])
def test_device_faults_are_errors_and_never_hang(path, fault):
    code = """
    import sys, tensorizer
    try:
        print(sum(1 for _ in tensorizer.iterate(sys.argv[1], "cuda", buffer_bytes=16 << 20)))
    except (tensorizer.DeviceError, tensorizer.DeviceMemoryError, RuntimeError) as error:
        print(type(error).__name__, error)
    sys.stdout.flush()
    import os
    os._exit(0)
    """
    assert passes(code, path, FAKE_CUDA_FAIL=fault, FAKE_CUDA_STRICT="0")


def test_operators_hand_out_tensors_of_a_device(path):
    code = """
    import sys
    import tensorizer

    unit = torch.jit.CompilationUnit('''
    def total(uri: str, device: Device) -> int:
        iterator = torch.ops.tensorizer.iterate(uri, device=device, buffer_bytes=4194304)
        count = 0
        while True:
            tensors = torch.ops.tensorizer.iterate_next(iterator)
            if len(tensors) == 0:
                break
            for tensor in tensors.values():
                assert tensor.is_cuda
                count += tensor.numel()
        return count
    ''')
    expected = sum(t.numel() for t in tensorizer.load(sys.argv[1], "cpu").values())
    assert unit.total(sys.argv[1], torch.device("cuda")) == expected
    """
    passes(code, path)


def test_tensors_without_data_become_zeros_when_they_are_handed_out(tmp_path):
    path = tmp_path / "f.tensors"
    code = """
    import sys, tensorizer
    meta = {f"m{i}": torch.empty(2 << 20, device="meta") for i in range(24)}
    tensorizer.save({"0": torch.zeros(1)} | meta, sys.argv[1], allow_meta=True)
    torch.cuda.memory.reset_peak_memory_stats()
    for name, tensor in tensorizer.iterate(sys.argv[1], "cuda", buffer_bytes=1 << 20):
        assert not tensor.cpu().any()
        del tensor
    assert torch.cuda.max_memory_allocated() <= 40 << 20
    """
    passes(code, path)
