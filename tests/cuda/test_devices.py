"""One call that fills several devices at once, on the emulated CUDA."""

import threading

import emulated
import pytest
import tensorizer
import torch

HASHES = [False, True]


def made():
    """Tensors of a batch and more, small ones of which several share a block, and empty ones."""
    random = torch.Generator().manual_seed(3)
    sizes = {f"large.{n}": (300_000 + 50_000 * n,) for n in range(8)}
    sizes |= {f"small.{n:03}": (3, n) for n in range(200)}
    tensors = {name: torch.randn(size, generator=random) for name, size in sizes.items()}
    return tensors | {"bytes": torch.arange(256, dtype=torch.uint8), "step": torch.tensor(5)}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("devices") / "f.tensors"
    tensorizer.save(made(), path)
    return path


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory):
    path = tmp_path_factory.mktemp("devices") / "e.tensors"
    key = tensorizer.EncryptionParams(bytes(range(32)))
    tensorizer.save(made(), path, encryption=key)
    return path


def in_turn(name):
    return f"cuda:{len(name) % 2 if name.startswith('l') else int(name[-1] in '02468')}"


def front_and_back(name):
    return "cuda:0" if name < "large.4" else "cuda:1"


def also_on_the_cpu(name):
    return {"l": "cuda:1", "s": "cuda:0"}.get(name[0], "cpu")


PLANS = [in_turn, front_and_back, also_on_the_cpu]


def check(found, place, expected=None):
    """Compare tensors with what was saved, and see that each is where it belongs."""
    expected = made() if expected is None else expected
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert str(tensor.device) == place(name), name
        assert torch.equal(tensor.cpu(), expected[name]), name


def calls_of(function):
    """Return the result of a function, and the devices of the passes over a file that it made."""
    last = (tensorizer.stats() or {"call": 0})["call"]
    return function(), [call["device"] for call in tensorizer.stats(last)]


@pytest.mark.parametrize("place", PLANS)
@pytest.mark.parametrize("verify", HASHES)
def test_a_function_of_names_chooses_devices(path, place, verify):
    found, calls = calls_of(lambda: tensorizer.load(path, place, verify_hash=verify))
    check(found, place)
    (devices,) = calls
    assert sorted(devices.split(", ")) == sorted(set(map(place, made())))


@pytest.mark.parametrize("place", PLANS)
def test_tensors_on_several_devices_are_filled_in_one_pass(path, place):
    out = {name: torch.empty_like(tensor, device=place(name)) for name, tensor in made().items()}
    _, calls = calls_of(lambda: tensorizer.load(path, out=out))
    check(out, place)
    assert len(calls) == 1


@pytest.mark.parametrize("place", PLANS)
def test_tensors_like_others_on_several_devices_come_in_one_pass(path, place):
    like = {name: torch.empty_like(tensor, device=place(name)) for name, tensor in made().items()}
    found, calls = calls_of(lambda: tensorizer.load(path, like=like))
    check(found, place)
    assert len(calls) == 1


@pytest.mark.parametrize("place", PLANS)
@pytest.mark.parametrize("verify", HASHES)
def test_encrypted_tensors_go_to_several_devices(encrypted, place, verify):
    key = tensorizer.DecryptionParams.from_key(bytes(range(32)))
    found = tensorizer.load(encrypted, place, encryption=key, verify_hash=verify)
    check(found, place)


def test_slices_and_whole_tensors_go_to_several_devices(path):
    slices = {f"large.{n}": (slice(10, 200_000),) for n in range(4)}
    found = tensorizer.load(path, in_turn, slices=slices)
    expected = {n: t[10:200_000] if n in slices else t for n, t in made().items()}
    check(found, in_turn, expected)


def test_an_unseekable_stream_is_read_once_for_several_devices(path):
    class Stream:
        def __init__(self):
            self._file = path.open("rb")

        def read(self, size=-1):
            return self._file.read(size)

    for place in (in_turn, also_on_the_cpu):
        check(tensorizer.load(Stream(), place), place)
        out = {name: torch.empty_like(t, device=place(name)) for name, t in made().items()}
        tensorizer.load(Stream(), out=out)
        check(out, place)


@pytest.mark.parametrize("options", [{"dtype": torch.bfloat16}, {"clone": True}, {"mmap": True}])
def test_every_other_call_takes_several_devices(path, options):
    dtype = options.get("dtype")
    floating = {n: t.to(dtype) if dtype and t.is_floating_point() else t for n, t in made().items()}
    check(tensorizer.load(path, in_turn, **options), in_turn, floating)


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_other_formats_go_to_several_devices(tmp_path, kind):
    path = tmp_path / f"f.{kind}"
    if kind == "pt":
        torch.save(made(), path)
    else:
        tensorizer.save(made(), path)
    found = tensorizer.load(path, in_turn)
    check({name: found[name] for name in made()}, in_turn)


def test_memory_limits_hold_for_all_devices_together(path):
    with pytest.raises(ValueError, match="memory limit of 1048576 bytes is too small"):
        tensorizer.load(path, in_turn, memory_limit=1 << 20)
    check(tensorizer.load(path, in_turn, memory_limit=64 << 20), in_turn)
    # Slices that are verified come by way of host memory, some at a time.
    slices = {f"large.{n}": (slice(10, 200_000),) for n in range(8)}
    expected = {n: t[10:200_000] if n in slices else t for n, t in made().items()}
    options = {"slices": slices, "verify_hash": True, "memory_limit": 40 << 20}
    check(tensorizer.load(path, in_turn, **options), in_turn, expected)


def test_names_without_a_device_go_to_the_default(path):
    found = tensorizer.load(path, lambda name: "cuda:1" if name == "step" else None)
    assert {str(found["step"].device), str(found["bytes"].device)} == {"cuda:1", "cpu"}


def test_iterators_refuse_several_devices(path):
    with pytest.raises(TypeError, match="one device for all tensors"):
        tensorizer.iterate(path, in_turn)


@pytest.mark.parametrize("at", [1, 3])
def test_a_failed_device_ends_the_load_to_all(path, at):
    """The error is told, and no copy is under way to what is freed then."""
    code = f"""
    import tensorizer
    emulated.fail("copy=700@{at}")
    try:
        tensorizer.load(sys.argv[1], lambda name: f"cuda:{{len(name) % 2}}")
        raise SystemExit("no error")
    except (RuntimeError, OSError) as error:
        assert "cuda" in str(error).lower(), error
    """
    done = emulated.run(code, path)
    assert done.returncode == 0, done.stderr
    assert "PROBLEM" not in done.stderr, done.stderr


def test_loads_to_different_devices_run_at_the_same_time(path):
    failed = []

    def load(place):
        try:
            for _ in range(3):
                check(tensorizer.load(path, place), place)
        except BaseException as error:
            failed.append(error)

    places = [in_turn, front_and_back, lambda _: "cuda:0", lambda _: "cuda:1"]
    threads = [threading.Thread(target=load, args=(place,)) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
