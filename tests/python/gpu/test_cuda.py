"""Loading into and saving from CUDA memory, on a device or on the emulated one of tests/cuda.

Values are compared on the CPU: the emulator has hardly any kernels. Skipped without a device,
unless REQUIRE_CUDA=1 says that there must be one.
"""

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import tensorizer
import torch
import vllm_stub
from processes import run_python
from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer
from tensorizer.torch_compat import tensorizer_loading, tensorizer_saving

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("REQUIRE_CUDA") != "1",
    reason="no CUDA device (REQUIRE_CUDA=1 demands one)",
)

CUDA = torch.device("cuda", 0)
PAUSE = 200_000_000  # cycles of the device: about 0.1 s
DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8,
    torch.int32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16,
]  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Memory of the device that a test took is free again."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    yield
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
    report = tensorizer.stats()
    assert report is None or report["pinned_bytes"] <= 256 << 20


def make(count=40, large=3_000_000):
    generator = torch.Generator().manual_seed(5)
    tensors = {
        f"small.{i}": torch.randn(17 * i % 501 + 1, 3, generator=generator) for i in range(count)
    }
    tensors["large"] = torch.randn(large, generator=generator)
    tensors["empty"] = torch.empty(0, 4)
    tensors["scalar"] = torch.tensor(3.5)
    for dtype in DTYPES:
        raw = torch.randint(0, 2, (6, 10), generator=generator)
        tensors[str(dtype)] = raw.to(dtype)
    return tensors


def same(loaded, expected, device=CUDA):
    assert set(loaded) == set(expected)
    for name, tensor in expected.items():
        found = loaded[name]
        assert found.device == device, name
        assert found.dtype == tensor.dtype and found.shape == tensor.shape, name
        as_bytes = found.detach().cpu().contiguous().flatten().view(torch.uint8)
        assert torch.equal(as_bytes, tensor.contiguous().flatten().view(torch.uint8)), name


@pytest.fixture(scope="module")
def tensors():
    return make()


@pytest.fixture(scope="module")
def path(tmp_path_factory, tensors):
    path = tmp_path_factory.mktemp("cuda") / "f.tensors"
    tensorizer.save(tensors, path)
    return str(path)


@pytest.mark.parametrize("options", [{}, {"clone": True}, {"num_readers": 1}, {"num_readers": 13}])
@pytest.mark.parametrize("verify", [False, "crc32", True])
def test_every_dtype_arrives(path, tensors, options, verify):
    same(tensorizer.load(path, "cuda", verify_hash=verify, **options), tensors)
    report = tensorizer.stats()
    assert report["device"] == "cuda:0" and report["fallbacks"] == []
    assert report["bytes"] == sum(t.nbytes for t in tensors.values())


def test_the_class_and_its_default_device(path, tensors):
    loaded = TensorDeserializer(path)
    same(dict(loaded.items()), tensors)
    assert isinstance(loaded["large"], torch.nn.Parameter)


def test_devices_are_those_of_torch(path, tensors):
    with torch.device("cuda:0"):
        same(tensorizer.load(path), tensors)
    last = torch.cuda.device_count() - 1
    with torch.cuda.device(last):
        same(tensorizer.load(path, "cuda"), tensors, torch.device("cuda", last))


def test_lazy_tensors_go_to_the_device_that_is_current_when_they_are_loaded(path):
    devices = [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
    for named in (None, "cuda"):
        with TensorDeserializer(path, named, lazy_load=True) as file:
            names = list(file)
            for name, device in zip(names, devices, strict=False):
                with torch.cuda.device(device):
                    assert file[name].device == device
            # torch's default device decides if it has a number; otherwise the current device does.
            with torch.device(devices[0]), torch.cuda.device(devices[-1]):
                assert file[names[-1]].device == devices[0]
            with torch.device("cpu"), torch.cuda.device(devices[-1]):
                assert file[names[-2]].device == devices[-1]
            with torch.device("cuda"), torch.cuda.device(devices[-1]):
                assert file[names[-3]].device == devices[-1]
        assert "for cuda>" in repr(file)
    with TensorDeserializer(path, devices[0], lazy_load=True) as file:
        with torch.cuda.device(devices[-1]), torch.device(devices[-1]):
            assert file[names[0]].device == devices[0]


def test_small_tensors_share_blocks_unless_they_are_cloned(path):
    shared = tensorizer.load(path, "cuda")
    small = [tensor for tensor in shared.values() if 0 < tensor.nbytes < 1 << 20]
    storages = {tensor.untyped_storage().data_ptr() for tensor in small}
    assert len(storages) < len(small)
    # Large tensors share memory with none: it is free as soon as the tensor is.
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    del shared["large"]
    assert torch.cuda.memory_allocated() <= before - 12_000_000
    apart = tensorizer.load(path, "cuda", clone=True)
    assert apart["small.3"].untyped_storage().nbytes() == apart["small.3"].nbytes
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    del apart["large"]
    assert torch.cuda.memory_allocated() <= before - 12_000_000


def test_many_tensors(tmp_path):
    generator = torch.Generator().manual_seed(1)
    flat = torch.randn(5000 * 640, generator=generator)
    tensors = {f"t.{i}": flat[i * 640 : (i + 1) * 640] for i in range(5000)}
    tensorizer.save(tensors, tmp_path / "f")
    loaded = tensorizer.load(tmp_path / "f", "cuda")
    assert torch.equal(torch.cat([tensor.cpu() for tensor in loaded.values()]), flat)


def test_more_than_the_staging_memory(tmp_path):
    big = torch.arange(8_000_000, dtype=torch.int64)
    tensorizer.save({"big": big}, tmp_path / "f")
    tensorizer.set_pinned_limit(16 << 20)
    pinned = 7 * (2052 << 10)  # whole buffers
    try:
        loaded = tensorizer.load(tmp_path / "f", "cuda")["big"]
        assert torch.equal(loaded.cpu(), big)
        tensorizer.release_pinned()
        tensorizer.load(tmp_path / "f", "cuda")
        assert tensorizer.stats()["pinned_bytes"] == pinned
        torch.cuda.synchronize()
        assert tensorizer.release_pinned() == pinned
    finally:
        tensorizer.set_pinned_limit(256 << 20)


def test_casts_on_the_device(path, tensors):
    loaded = tensorizer.load(path, "cuda", dtype=torch.float16)
    assert loaded["large"].dtype == torch.float16
    assert torch.equal(loaded["large"].cpu(), tensors["large"].half())
    assert loaded["torch.int32"].dtype == torch.int32


def test_encrypted(tmp_path, tensors):
    key = bytes(range(32))
    tensorizer.save(tensors, tmp_path / "f", encryption=EncryptionParams(key))
    params = DecryptionParams.from_key(key)
    same(tensorizer.load(tmp_path / "f", "cuda", encryption=params, verify_hash=True), tensors)
    wrong = DecryptionParams.from_key(bytes(32))
    with pytest.raises(tensorizer.CryptographyError):
        tensorizer.load(tmp_path / "f", "cuda", encryption=wrong)


def test_damage_is_found(path, tmp_path):
    damaged = bytearray(Path(path).read_bytes())
    damaged[-100_000] ^= 1
    (tmp_path / "f").write_bytes(damaged)
    with pytest.raises(Exception, match="failed CRC32 verification"):
        tensorizer.load(tmp_path / "f", "cuda", verify_hash=True)
    (tmp_path / "f").write_bytes(damaged[:-1_000_000])
    with pytest.raises(ValueError, match="truncated|beyond"):
        tensorizer.load(tmp_path / "f", "cuda")


# Order among streams


def test_loaded_tensors_can_be_used_at_once_on_the_current_stream(path, tensors):
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for _ in range(5):
                doubled = tensorizer.load(path, "cuda")["large"] * 2
        stream.synchronize()
        assert torch.equal(doubled.cpu(), tensors["large"] * 2)


def test_memory_that_is_still_being_written_is_not_overtaken(path, tensors):
    total = sum(tensor.nbytes for tensor in tensors.values())
    for _ in range(3):
        scratch = torch.empty(total + (1 << 20), dtype=torch.uint8, device="cuda")
        torch.cuda._sleep(PAUSE)
        scratch.fill_(7)
        del scratch  # its memory goes to the next who asks, while the fill is still to come
        same(tensorizer.load(path, "cuda"), tensors)


def test_tensors_that_are_filled_in_place_are_read_before(path, tensors):
    weight = torch.zeros_like(tensors["large"], device="cuda")
    torch.cuda._sleep(PAUSE)
    before = weight.clone()
    torch.ops.tensorizer.load(path, ["large"], out=[weight])
    after = weight.clone()
    assert before.cpu().count_nonzero() == 0
    assert torch.equal(after.cpu(), tensors["large"])


def test_tensors_may_be_freed_while_they_arrive(path, tensors):
    for _ in range(20):
        tensorizer.load(path, "cuda")
    same(tensorizer.load(path, "cuda"), tensors)


def test_threads_load_at_once(path, tensors):
    def work(_):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(5):
                loaded = tensorizer.load(path, "cuda", verify_hash=True)
        stream.synchronize()
        same(loaded, tensors)
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_a_graph_that_is_captured_refuses_and_others_are_not_disturbed(path, tensors):
    static = torch.ones(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises((RuntimeError, ValueError), match="captur"):
        with torch.cuda.graph(graph):
            tensorizer.load(path, "cuda")
    torch.cuda.synchronize()
    # Another thread captures while this one loads.
    begun, loaded = threading.Event(), threading.Event()
    graph = torch.cuda.CUDAGraph()
    failed = []

    def capture():
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                static.mul_(3)
                begun.set()
                assert loaded.wait(60)
        except BaseException as error:
            failed.append(error)
            begun.set()

    thread = threading.Thread(target=capture)
    thread.start()
    assert begun.wait(60)
    side = torch.cuda.Stream()
    try:
        with torch.cuda.stream(side):
            found = tensorizer.load(path, "cuda")
    finally:
        loaded.set()
        thread.join()
    assert failed == []
    side.synchronize()
    same(found, tensors)
    graph.replay()
    torch.cuda.synchronize()
    assert static[0].item() == 3


# Modules, operators, pickles


def test_modules_are_filled_in_place(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.BatchNorm1d(200))
    with TensorSerializer(str(tmp_path / "f")) as serializer:
        serializer.write_module(model)
    twin = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.BatchNorm1d(200)).cuda()
    before = {name: t.data_ptr() for name, t in twin.state_dict().items()}
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    TensorDeserializer(str(tmp_path / "f"), device="cuda", lazy_load=True).load_into_module(twin)
    assert torch.cuda.memory_allocated() == allocated
    assert {name: t.data_ptr() for name, t in twin.state_dict().items()} == before
    for name, tensor in model.state_dict().items():
        assert torch.equal(twin.state_dict()[name].cpu(), tensor), name


def test_operators(path, tensors, tmp_path):
    same(torch.ops.tensorizer.load(path, device="cuda"), tensors)
    large, scalar = torch.ops.tensorizer.load(path, ["large", "scalar"], device="cuda:0")
    assert torch.equal(large.cpu(), tensors["large"]) and scalar.item() == 3.5
    mixed = [torch.empty_like(tensors["large"], device="cuda"), torch.empty(())]
    torch.ops.tensorizer.load(path, ["large", "scalar"], out=mixed)
    assert torch.equal(mixed[0].cpu(), tensors["large"]) and mixed[1].item() == 3.5
    strided = torch.empty(2, tensors["small.5"].shape[0], device="cuda").t()
    wide = {"x": torch.randn(strided.shape)}
    tensorizer.save(wide, tmp_path / "f")
    torch.ops.tensorizer.load(str(tmp_path / "f"), ["x"], out=[strided])
    assert torch.equal(strided.cpu(), wide["x"])

    @torch.jit.script
    def scripted(path: str):
        return torch.ops.tensorizer.load(path, device=torch.device("cuda"))["large"] * 2

    assert torch.equal(scripted(path).cpu(), tensors["large"] * 2)


def test_compiled(path, tensors):
    def weights(x):
        (large,) = torch.ops.tensorizer.load(path, ["large"], device="cuda")
        return large * 2 + x

    ones = torch.ones_like(tensors["large"], device="cuda")
    compiled = torch.compile(weights, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ones).cpu(), tensors["large"] * 2 + 1)


def test_saves_are_the_same_bytes(path, tensors, tmp_path):
    on_device = {name: tensor.cuda() for name, tensor in tensors.items()}
    tensorizer.save(on_device, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == Path(path).read_bytes()
    assert tensorizer.stats()["what"] == "save" and tensorizer.stats()["fallbacks"] == []
    torch.ops.tensorizer.save(str(tmp_path / "g"), on_device)
    assert (tmp_path / "g").read_bytes() == Path(path).read_bytes()
    turned = {"x": torch.arange(12.0).cuda().view(3, 4).t()}
    tensorizer.save(turned, tmp_path / "h")
    assert torch.equal(tensorizer.load(tmp_path / "h", "cpu")["x"], turned["x"].cpu())


def test_a_save_waits_for_what_is_being_computed(tmp_path):
    weight = torch.zeros(2_000_000, device="cuda")
    torch.cuda._sleep(PAUSE)
    weight.fill_(5)
    tensorizer.save({"weight": weight}, tmp_path / "f")
    assert tensorizer.load(tmp_path / "f", "cpu")["weight"].eq(5).all()


def test_save_async_has_a_snapshot(tmp_path):
    weight = torch.full((5_000_000,), 5.0, device="cuda")
    saving = tensorizer.save_async({"weight": weight}, tmp_path / "f")
    weight.fill_(6)
    saving.result()
    assert saving.saved_bytes == weight.nbytes
    assert tensorizer.load(tmp_path / "f", "cpu")["weight"].eq(5).all()


def test_pickles(tmp_path, tensors):
    state = {"on": torch.randn(500_000).cuda(), "off": torch.randn(3), "step": 7}
    with tensorizer_saving():
        torch.save(state, tmp_path / "s.pt")
    with tensorizer_loading():
        loaded = torch.load(tmp_path / "s.pt")
    assert loaded["on"].device == CUDA and loaded["off"].device.type == "cpu"
    assert torch.equal(loaded["on"].cpu(), state["on"].cpu())
    assert torch.equal(loaded["off"], state["off"])
    with tensorizer_loading():
        moved = torch.load(tmp_path / "s.pt", map_location="cuda")
    assert moved["off"].device == CUDA and moved["on"].untyped_storage().nbytes() == 2_000_000
    with tensorizer_loading():
        moved = torch.load(tmp_path / "s.pt", map_location={"cuda:0": "cpu"})
    assert torch.equal(moved["on"], state["on"].cpu())
    gc.collect()  # CUDA defect 7: pickling leaves tensors in cycles of references


def fetched(tensor):
    """Return a tensor on the CPU with its strides; the device only copies bytes."""
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    geometry = (tensor.storage_offset(), tensor.shape, tensor.stride())
    found = torch.empty(0, dtype=tensor.dtype).set_(raw.cpu().untyped_storage(), *geometry)
    return torch._conj(found) if tensor.is_conj() else found


@pytest.mark.parametrize("options", [{}, {"clone": True}, {"mmap": True}], ids=str)
def test_checkpoints_of_torch_share_storages(tmp_path, options):
    weight = torch.randn(40, 30)
    saved = {
        "weight": weight,
        "transposed": weight.t(),
        "row": weight[3],
        "small": torch.arange(5),
        "odd": torch.randn(9).half()[1:],
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "large": torch.randn(900, 800).t(),
        "empty": torch.empty(0, 3),
        "expanded": torch.ones(3, 1).expand(3, 7),
    }
    torch.save(saved, tmp_path / "x.pt")
    loaded = tensorizer.load(tmp_path / "x.pt", CUDA, **options)
    for name, tensor in saved.items():
        assert (loaded[name].device, loaded[name].stride()) == (CUDA, tensor.stride())
        assert torch.equal(fetched(loaded[name]), tensor), name
    storages = {loaded[name].untyped_storage()._cdata for name in ("weight", "transposed", "row")}
    assert len(storages) == 1
    assert loaded["transposed"].data_ptr() == loaded["weight"].data_ptr()


# Other programs and failures


def test_weights_go_to_where_vllm_has_its_model(tmp_path, monkeypatch):
    vllm_stub.install(monkeypatch, vllm_stub.write(tmp_path))
    import tensorizer_vllm
    from vllm.model_executor import model_loader

    tensorizer_vllm.register()
    weights = {name: torch.rand_like(t) for name, t in vllm_stub.Model().state_dict().items()}
    tensorizer.save(weights, tmp_path / "model.tensors")
    config = SimpleNamespace(load_format=tensorizer_vllm.LOAD_FORMAT, model_loader_extra_config={})
    made = SimpleNamespace(
        **{"model": str(tmp_path), "revision": None, "experts": None},
        build=lambda: vllm_stub.Model(CUDA),
    )
    model = model_loader.get_model_loader(config).load_model(None, made)
    assert model.devices == {CUDA}
    assert all(torch.equal(t.cpu(), weights[name]) for name, t in model.state_dict().items())


def test_a_device_without_room(path, tensors):
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(4e6 / total)
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            tensorizer.load(path, "cuda")
        assert isinstance(caught.value, MemoryError)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    same(tensorizer.load(path, "cuda"), tensors)


def test_a_device_that_is_not_there(path):
    with pytest.raises((RuntimeError, ValueError)):
        tensorizer.load(path, f"cuda:{torch.cuda.device_count()}")


def test_a_forked_child_still_loads_to_the_cpu(path):
    code = """
import os, sys, tensorizer, torch
path = sys.argv[1]
tensorizer.load(path, "cuda")
child = os.fork()
if child == 0:
    os._exit(0 if len(tensorizer.load(path, "cpu", mmap=False)) > 10 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run_python(code, path).returncode == 0
