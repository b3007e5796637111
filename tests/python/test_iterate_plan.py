"""Arguments of `iterate`: names, slices, shards, order, devices, sources."""

import contextlib
import gc
import io
import os

import pytest
import tensorizer
import torch
from scripted import FaultServer
from test_cache import entries

pytestmark = pytest.mark.device

safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture(scope="module")
def tensors():
    torch.manual_seed(7)
    made = {f"m.{i:02}": torch.randn(16 + 5 * i, 24) for i in range(20)}
    made["long"] = torch.randn(300, 9000)
    made["empty"] = torch.empty(0, 3)
    made["scalar"] = torch.tensor(3.5)
    made["words"] = torch.arange(4000).to(torch.int16).view(4, 10, 100)
    return made


@pytest.fixture(scope="module")
def key():
    return tensorizer.EncryptionParams.random()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tensors, key):
    folder = tmp_path_factory.mktemp("plan")
    tensorizer.save(tensors, folder / "f.tensors")
    safetensors.save_file(tensors, folder / "f.safetensors")
    torch.save(tensors, folder / "f.pt")
    tensorizer.save(tensors, folder / "shards.safetensors", max_shard_size=2_000_000)
    tensorizer.save(tensors, folder / "sealed.tensors", encryption=key)
    return folder


@pytest.fixture
def sealed(folder, key):
    """The encrypted file, and what it is opened with."""
    return folder / "sealed.tensors", {"encryption": tensorizer.DecryptionParams.from_key(key.key)}


def same(found, expected):
    """Compare all tensors that come, each of which comes once."""
    found = list(found)
    assert len(found) == len(expected)
    assert {name for name, _ in found} == expected.keys()
    for name, tensor in found:
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


@contextlib.contextmanager
def pipe_of(path):
    """Lend the reading end of a pipe that another process writes a file to."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.close(read)
        with contextlib.suppress(BrokenPipeError), open(write, "wb") as file:
            file.write(path.read_bytes())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        yield file
    os.wait()


FILES = ["f.tensors", "f.safetensors", "f.pt", "shards.safetensors.index.json"]

# Which tensors, and in what order


@pytest.mark.parametrize("buffer_bytes", [1, 100_000, 1 << 62])
@pytest.mark.parametrize("file", FILES)
def test_both_orders_bring_every_tensor_once(folder, tensors, file, buffer_bytes):
    for order in ("file", "ready"):
        options = {"buffer_bytes": buffer_bytes, "order": order, "num_readers": 3}
        same(tensorizer.iterate(folder / file, "cpu", **options), tensors)


@pytest.mark.parametrize("file", FILES)
def test_only_the_names_that_were_given_are_loaded(folder, tensors, file):
    names = ["scalar", "m.07", "m.03", "m.07"]
    found = list(tensorizer.iterate(folder / file, "cpu", names=names))
    same(found, {name: tensors[name] for name in names})
    of_file = [name for name in tensorizer.info(folder / file).tensors if name in names]
    assert [name for name, _ in found] == of_file
    odd = tensorizer.iterate(
        folder / file, "cpu", names=names, filter_func=lambda name: name != "m.07"
    )
    same(odd, {name: tensors[name] for name in ("scalar", "m.03")})
    assert list(tensorizer.iterate(folder / file, "cpu", names=[])) == []
    assert list(tensorizer.iterate(folder / file, "cpu", filter_func=lambda name: False)) == []


def test_names_that_are_missing_are_an_error_before_data_are_read(folder):
    with FaultServer((folder / "f.tensors").read_bytes()) as server:
        assert list(tensorizer.iterate(server.url, "cpu", names=[])) == []
        opened = len(server.requests)
        with pytest.raises(KeyError, match="no such"):
            tensorizer.iterate(server.url, "cpu", names=["m.07", "no such"])
        assert len(server.requests) == 2 * opened


def test_tensors_of_nested_structures_are_named_by_tuples(tmp_path):
    tensorizer.save({"a": {"b": torch.ones(3)}, "c": torch.zeros(2)}, tmp_path / "f")
    found = tensorizer.iterate(tmp_path / "f", "cpu", names=[("a", "b")])
    same(found, {("a", "b"): torch.ones(3)})
    found = tensorizer.iterate(tmp_path / "f", "cpu", names=['\x1e["a","b"]'])
    same(found, {'\x1e["a","b"]': torch.ones(3)})


def test_files_without_tensors_end_at_once(tmp_path):
    tensorizer.save({}, tmp_path / "f.safetensors")
    assert list(tensorizer.iterate(tmp_path / "f.safetensors", "cpu")) == []


def test_arguments_are_refused_before_the_first_byte(folder):
    refused = [
        (ValueError, 'order must be "file" or "ready"', {"order": "name"}),
        (ValueError, 'order="ready" with group=', {"order": "ready", "group": object()}),
        (ValueError, "buffer_bytes must be positive, not -1", {"buffer_bytes": -1}),
        (ValueError, "num_readers must be at least 1", {"num_readers": 0}),
        (KeyError, "a slice of", {"slices": {"none": (0,)}}),
        (KeyError, "a slice of", {"slices": {"m.01": (0,)}, "names": ["m.02"]}),
        (IndexError, "the slice of 'm.01': too many indices", {"slices": {"m.01": (..., 0, 0, 0)}}),
        (IndexError, "the slice of 'm.01': index 24 is out of", {"slices": {"m.01": (..., 24)}}),
        (ValueError, "slice steps must be at least 1", {"slices": {"m.01": slice(None, None, -1)}}),
        (TypeError, "expected integers, slices and", {"slices": {"m.01": torch.ones(1)}}),
        (IndexError, "dimension 0 of tensor 'scalar'", {"shard": tensorizer.Shard(0, 0, 2)}),
    ]
    for error, text, options in refused:
        with open(folder / "f.tensors", "rb") as file:
            with pytest.raises(error, match=text):
                tensorizer.iterate(file, "cpu", **options)


# Parts of tensors

SLICES = {
    "m.05": (slice(2, 9),),
    "m.06": (slice(None), slice(3, 8)),
    "m.08": (..., 4),
    "m.09": (slice(1, 20, 3), slice(0, 0)),
    "m.10": -1,
    "m.11": (slice(3, 60, 7), slice(1, None, 2)),
    "long": (slice(None), slice(0, 8000)),
    "empty": (slice(0, 0),),
    "words": (slice(None), slice(2, 4), 7),
}


def sliced(tensors):
    return {name: tensor[SLICES.get(name, ...)] for name, tensor in tensors.items()}


@pytest.mark.parametrize("buffer_bytes", [1, 5_000_000, 1 << 30])
@pytest.mark.parametrize("file", FILES)
def test_slices_of_any_dimension_come_beside_whole_tensors(folder, tensors, file, buffer_bytes):
    # Other formats hold no hashes.
    for verify_hash in [False, True, "crc32"] if file == "f.tensors" else [False]:
        for order in ("file", "ready"):
            options = {"verify_hash": verify_hash, "order": order, "buffer_bytes": buffer_bytes}
            found = tensorizer.iterate(folder / file, "cpu", slices=SLICES, **options)
            same(found, sliced(tensors))


@pytest.mark.parametrize("verify_hash", [False, True])
@pytest.mark.parametrize("name", SLICES)
def test_slices_alone_are_read_and_decrypted(tensors, sealed, name, verify_hash):
    path, opened = sealed
    part = {"names": [name], "slices": {name: SLICES[name]}, "verify_hash": verify_hash}
    expected = {name: tensors[name][SLICES[name]]}
    same(tensorizer.iterate(path.with_name("f.tensors"), "cpu", **part), expected)
    same(tensorizer.iterate(path, "cpu", **part, **opened), expected)


def test_only_the_bytes_of_a_slice_are_fetched(tmp_path):
    tensors = {f"{i}": torch.full((4000, 1000), float(i)) for i in range(4)}
    tensorizer.save(tensors, tmp_path / "f.tensors")
    slices = {name: slice(100, 200) for name in tensors}
    expected = {name: tensor[100:200] for name, tensor in tensors.items()}
    with FaultServer((tmp_path / "f.tensors").read_bytes()) as server:
        same(tensorizer.iterate(server.url, "cpu", slices=slices), expected)
        # The head, and 400 kB of each.
        assert server.sent < 2_000_000 + 4 * 500_000


@pytest.mark.parametrize("world", [1, 2, 7, 400])
@pytest.mark.parametrize("dim", [0, 1])
def test_every_rank_gets_its_shard(tensors, sealed, dim, world):
    path, opened = sealed
    names = [name for name, tensor in tensors.items() if tensor.dim() == 2 and tensor.numel()]
    for rank in range(world) if world < 10 else (0, 23, 24, 399):
        shard = tensorizer.Shard(dim, rank=rank, world=world)
        expected = {}
        for name in names:
            parts = tensors[name].chunk(world, dim)
            nothing = tensors[name].narrow(dim, 0, 0)
            expected[name] = parts[rank] if rank < len(parts) else nothing
        options = {"names": names, "shard": shard, "buffer_bytes": 1_000_000}
        same(tensorizer.iterate(path.with_name("f.safetensors"), "cpu", **options), expected)
        same(tensorizer.iterate(path, "cpu", **options, **opened), expected)


def test_a_shard_leaves_tensors_whole_for_which_it_names_no_dimension(folder, tensors):
    shard = tensorizer.Shard(lambda name: 1 if name == "long" else None, rank=1, world=3)
    expected = tensors | {"long": tensors["long"].chunk(3, 1)[1]}
    same(tensorizer.iterate(folder / "f.tensors", "cpu", shard=shard), expected)


def test_only_floating_point_tensors_are_cast(folder, tensors):
    for slices, given in (({}, tensors), (SLICES, sliced(tensors))):
        found = tensorizer.iterate(
            folder / "f.tensors", "cpu", dtype="bfloat16", slices=slices, buffer_bytes=500_000
        )
        same(found, {n: t.bfloat16() if t.is_floating_point() else t for n, t in given.items()})


# Sources


@pytest.mark.parametrize("slices", [{}, SLICES], ids=["whole", "sliced"])
def test_encrypted_tensors_are_handed_out_decrypted(tensors, sealed, slices):
    path, opened = sealed
    expected = sliced(tensors) if slices else tensors
    for buffer_bytes in (1, 3_000_000, 1 << 30):
        options = {"slices": slices, "buffer_bytes": buffer_bytes, **opened}
        same(tensorizer.iterate(path, "cpu", **options), expected)
    with pytest.raises(tensorizer.CryptographyError, match="decryption was not requested"):
        tensorizer.iterate(path, "cpu")
    wrong = tensorizer.DecryptionParams.from_key(bytes(32))
    with pytest.raises(tensorizer.CryptographyError):
        next(tensorizer.iterate(path, "cpu", encryption=wrong))


@pytest.mark.parametrize("verify_hash", [False, True])
@pytest.mark.parametrize("slices", [{}, SLICES], ids=["whole", "sliced"])
def test_a_pipe_is_read_once(tensors, sealed, slices, verify_hash):
    path, opened = sealed
    expected = sliced(tensors) if slices else tensors
    options = {"slices": slices, "verify_hash": verify_hash, "buffer_bytes": 300_000}
    with pipe_of(path.with_name("f.tensors")) as pipe:
        same(tensorizer.iterate(pipe, "cpu", **options), expected)
    with pipe_of(path) as pipe:
        same(tensorizer.iterate(pipe, "cpu", **options, **opened), expected)
    with pipe_of(path.with_name("f.tensors")) as pipe:
        assert next(tensorizer.iterate(pipe, "cpu", **options))[0] == "m.00"


def test_views_of_a_checkpoint_come_as_tensors_of_their_own(tmp_path):
    base = torch.arange(60_000.0).view(200, 300)
    tensors = {"a": base, "tail": base[7:], "t": base.t(), "odd": base[:, ::2], "conj": base[0, 0]}
    torch.save(tensors, tmp_path / "f.pt")
    slices = {"t": (slice(5, 50), slice(1, 2)), "tail": (slice(None), 3), "odd": slice(0, 0)}
    for given in ({}, slices):
        expected = {name: tensor[given.get(name, ...)] for name, tensor in tensors.items()}
        for order in ("file", "ready"):
            names = []
            for name, tensor in tensorizer.iterate(
                tmp_path / "f.pt", "cpu", slices=given, order=order
            ):
                assert torch.equal(tensor, expected[name])
                names.append(name)
                tensor.fill_(-1)
            assert sorted(names) == sorted(tensors)


def test_tensors_without_data_come_as_zeros(tmp_path):
    given = {"a": torch.ones(3), "meta": torch.empty(1000, 70, device="meta"), "z": torch.ones(2)}
    tensorizer.save(given, tmp_path / "f.tensors", allow_meta=True)
    for slices in ({}, {"meta": (slice(2, 4), 5)}):
        found = dict(tensorizer.iterate(tmp_path / "f.tensors", "cpu", slices=slices))
        assert list(found) == ["a", "meta", "z"]
        assert found["meta"].shape == ((2,) if slices else (1000, 70))
        assert not found["meta"].any() and found["z"].all()


@pytest.mark.parametrize("file", FILES)
def test_a_tensor_that_is_changed_changes_no_other(folder, tensors, file):
    found = list(tensorizer.iterate(folder / file, "cpu"))
    for number, (_, tensor) in enumerate(found):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        tensor.fill_(number)
    assert all((tensor == number).all() for number, (_, tensor) in enumerate(found))
    same(tensorizer.iterate(folder / file, "cpu"), tensors)


# Errors and servers


@pytest.mark.parametrize("verify_hash", [True, "crc32"])
def test_a_damaged_tensor_is_an_error_after_those_before_it(tmp_path, verify_hash):
    path = tmp_path / "f.tensors"
    tensorizer.save({f"{i}": torch.full((400_000,), float(i)) for i in range(12)}, path)
    data = bytearray(path.read_bytes())
    at = data.index(torch.full((9,), 7.0).numpy().tobytes()) + 800_000
    data[at] ^= 1
    path.write_bytes(data)
    for order in ("file", "ready"):
        found = []
        iterator = tensorizer.iterate(
            path, "cpu", verify_hash=verify_hash, buffer_bytes=4 << 20, order=order
        )
        with pytest.raises(tensorizer.HashMismatchError, match="'7'"):
            for name, tensor in iterator:
                assert (tensor == float(name)).all()
                found.append(name)
        assert "7" not in found and len(found) < 12
        assert order == "ready" or found == [f"{i}" for i in range(len(found))]
        assert list(iterator) == []


def test_a_damaged_copy_in_the_cache_is_fetched_again_and_no_tensor_comes_twice(tmp_path):
    tensors = {f"{i}": torch.full((300_000,), float(i)) for i in range(10)}
    tensorizer.save(tensors, tmp_path / "f.tensors")
    for order in ("file", "ready"):
        cache = tmp_path / order
        with FaultServer((tmp_path / "f.tensors").read_bytes()) as server:
            options = {"cache_dir": cache, "order": order, "buffer_bytes": 3_000_000}
            same(tensorizer.iterate(server.url, "cpu", **options), tensors)
            (copy,) = entries(cache)
            data = bytearray(copy.read_bytes())
            data[len(data) * 2 // 3] ^= 1
            copy.write_bytes(data)
            sent = server.sent
            found = tensorizer.iterate(server.url, "cpu", verify_hash=True, **options)
            same(found, tensors)
            assert server.sent > sent


FAULTS = {
    "busy": lambda number, *_: ("status", 503) if number % 9 == 4 else None,
    "lost": lambda number, *_: ("reset", 1000) if number % 9 == 4 else None,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_that_pass_are_not_seen(folder, tensors, fault):
    with FaultServer((folder / "f.tensors").read_bytes(), FAULTS[fault]) as server:
        same(tensorizer.iterate(server.url, "cpu", buffer_bytes=8_000_000), tensors)


@pytest.mark.parametrize(
    ("fault", "error"), [(("status", 403), PermissionError), (("etag", '"two"'), OSError)]
)
def test_a_server_that_refuses_later_is_an_error(folder, tensors, fault, error):
    script = lambda number, *_: fault if number > 5 else None  # noqa: E731
    with FaultServer((folder / "f.tensors").read_bytes(), script) as server:
        iterator = tensorizer.iterate(server.url, "cpu", buffer_bytes=500_000)
        names = []
        with pytest.raises(error, match="the server answered 403|the file changed"):
            for name, tensor in iterator:
                assert torch.equal(tensor, tensors[name])
                names.append(name)
        assert names == list(tensors)[: len(names)]
        assert list(iterator) == []


class OddError(Exception):
    """Raised by a file object."""


class Failing(io.BytesIO):
    """Fails beyond a position."""

    end = 1 << 40

    def read(self, size=-1):
        if self.tell() + size > self.end:
            raise OddError("no more")
        return super().read(size)


def test_an_exception_of_a_file_object_is_raised_by_the_iterator(tmp_path):
    tensorizer.save({f"{i}": torch.full((300_000,), float(i)) for i in range(9)}, tmp_path / "f")
    file = Failing((tmp_path / "f").read_bytes())
    iterator = tensorizer.iterate(file, "cpu", buffer_bytes=1 << 20)
    file.end = 4_000_000
    with pytest.raises(OddError, match="no more"):
        list(iterator)
    assert file.closed


@pytest.mark.parametrize("slices", [{}, SLICES], ids=["whole", "sliced"])
@pytest.mark.parametrize("file", FILES)
def test_progress_rises_to_all_bytes(folder, file, slices):
    told = []
    options = {"slices": slices, "progress": lambda *at: told.append(at)}
    list(tensorizer.iterate(folder / file, "cpu", **options))
    assert told[-1][0] == told[-1][1] > 0 and told == sorted(told)
    assert len({total for _, total in told}) == 1


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_exception_of_the_progress_callback_ends_the_iterator(folder, error):
    def refuse(done, total):
        raise error("enough")

    iterator = tensorizer.iterate(folder / "f.tensors", "cpu", progress=refuse)
    with pytest.raises(error, match="enough"):
        list(iterator)
    assert list(iterator) == []


# Several at once, and the end


def test_two_iterators_and_a_load_of_one_file_do_not_disturb_each_other(folder, tensors):
    one = tensorizer.iterate(folder / "f.tensors", "cpu", buffer_bytes=200_000)
    other = tensorizer.iterate(folder / "f.tensors", "cpu", buffer_bytes=200_000, order="ready")
    first, second = [next(one)], [next(other)]
    assert list(tensorizer.load(folder / "f.tensors", "cpu")) == list(tensors)
    same(first + list(one), tensors)
    same(second + list(other), tensors)


@pytest.mark.parametrize("slices", [{}, SLICES], ids=["whole", "sliced"])
@pytest.mark.parametrize("file", FILES)
def test_nothing_is_open_after_the_end(folder, file, slices):
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for taken in (1, 100):
        options = {"slices": slices, "buffer_bytes": 100_000}
        iterator = tensorizer.iterate(folder / file, "cpu", **options)
        for _ in range(taken):
            next(iterator, None)
        iterator.close()
        assert len(os.listdir("/proc/self/fd")) == before
