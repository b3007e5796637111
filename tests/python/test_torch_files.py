"""Checkpoints of torch.save, read as torch.load reads them: from every place, to every one."""

import contextlib
import gc
import io
import json
import os
import weakref
from pathlib import Path

import pytest
import tensorizer
import torch
from servers import Nginx
from tensorizer import TensorDeserializer, TensorType
from tensorizer_cli.main import main
from torch_files import ODD, check, dtypes, leaves, make

ops = torch.ops.tensorizer


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("torch") / "checkpoint.pt"
    torch.save(make(), path)
    return path


@pytest.fixture(scope="module")
def expected(file):
    return torch.load(file, weights_only=True)


def test_every_dtype(tmp_path):
    # This comes with torch 2.15, and no format has a word for it.
    tensors = {name: tensor for name, tensor in dtypes() if name != "bcomplex32"}
    assert {"float32", "bfloat16", "uint16", "bits8", "float8_e4m3fn", "complex32"} <= set(tensors)
    assert set(ODD) & set(tensors)
    torch.save(tensors, tmp_path / "x.pt")
    check(tensorizer.load(tmp_path / "x.pt"), torch.load(tmp_path / "x.pt", weights_only=True))


@pytest.mark.device
@pytest.mark.parametrize("options", [{}, {"mmap": True}, {"num_readers": 3}, {"clone": True}])
def test_load(file, expected, options):
    check(tensorizer.load(file, **options), expected)


@pytest.mark.device
def test_views_share_their_storage(file, expected):
    for options in ({}, {"clone": True}):
        loaded = tensorizer.load(file, **options)
        check(loaded, expected)
        assert loaded["row"].untyped_storage()._cdata == loaded["weight"].untyped_storage()._cdata
        loaded["row"].fill_(7)
        assert (loaded["transposed"][:, 3] == 7).all()


def test_without_names_of_the_archive(tmp_path, expected):
    """A file in memory is called `archive` by torch, and a file may have been renamed."""
    buffer = io.BytesIO()
    torch.save(make(), buffer)
    check(tensorizer.load(io.BytesIO(buffer.getvalue())), expected)
    (tmp_path / "another.bin").write_bytes(buffer.getvalue())
    check(tensorizer.load(str(tmp_path / "another.bin")), expected)
    # A file object is read from where it is.
    shifted = io.BytesIO(b"before" + buffer.getvalue())
    shifted.seek(6)
    check(tensorizer.load(shifted), expected)
    with open(tmp_path / "another.bin", "rb") as opened:
        check(tensorizer.load(opened), expected)
    descriptor = os.open(tmp_path / "another.bin", os.O_RDONLY)
    check(tensorizer.load(descriptor), expected)
    os.close(descriptor)


def test_other_objects(tmp_path):
    path = tmp_path / "x.pt"
    for saved in (
        torch.randn(3),
        [torch.randn(2), torch.randn(3)],
        {},
        {"epoch": 5},
        7,
        torch.nn.Linear(3, 2).state_dict(),
        {"meta": torch.empty(3, 2, device="meta"), "real": torch.ones(2)},
        {"": torch.ones(1), "\x1e[1]": torch.zeros(2), "a.b": torch.ones(3)},
        # A container that two others share; torch saves it once.
        {"a": (both := {"x": torch.ones(3)}), "b": both},
    ):
        torch.save(saved, path)
        names = None
        if isinstance(saved, dict) and "meta" in saved:
            with pytest.raises(NotImplementedError, match="'meta' was saved on the meta device"):
                tensorizer.load(path)
            names = ["real"]
        loaded = tensorizer.load(path, names=names)
        if isinstance(saved, torch.Tensor):
            assert list(loaded) == [""]
            assert torch.equal(loaded[""], saved)
        elif isinstance(saved, dict) and "meta" in saved:
            assert torch.equal(loaded["real"], saved["real"])
        else:
            check(loaded, saved if isinstance(saved, (dict, list)) else {})


def test_deserializer(file, expected):
    with TensorDeserializer(file, "cpu", lazy_load=True) as lazy:
        assert list(lazy) == [
            key for key, value in expected.items() if next(leaves(value), None) is not None
        ]
        assert lazy.total_bytes_read == 0
        row = lazy["row"]
        assert isinstance(row, torch.nn.Parameter)
        assert lazy.total_bytes_read == 40 * 30 * 4
        # A tensor that shares its storage needs no more bytes.
        weight = lazy["weight"]
        assert lazy.total_bytes_read == 40 * 30 * 4
        assert weight[3].data_ptr() == row.data_ptr()
        tree = lazy.tree(["optimizer", "state"])
        assert torch.equal(tree[1]["exp_avg"], expected["optimizer"]["state"][1]["exp_avg"])
        assert {kind for _, kind, _, _ in lazy.read_tensors()} == {TensorType.STATE_DICT}
    found = TensorDeserializer(file, "cpu", filter_func=lambda name: name[0] == "model")
    assert list(found) == ["model"]
    assert list(found["model"]) == list(expected["model"])
    arrays = {
        name: array
        for _, _, name, array, _, _ in TensorDeserializer(
            file, "cpu", lazy_load=True, filter_func=lambda name: "conj" != name != "negative"
        ).read_numpy_arrays(allow_raw_data=True)
    }
    assert (arrays["transposed"] == expected["transposed"].numpy()).all()


def test_dtype(file, expected):
    for name, tensor in tensorizer.load(file, dtype=torch.float64).items():
        value = expected
        for step in name if isinstance(name, tuple) else (name,):
            value = value[step]
        is_cast = value.is_floating_point() and value.itemsize > 1
        wanted = value.to(torch.float64) if is_cast else value
        assert tensor.dtype == wanted.dtype
        assert torch.equal(tensor, wanted), name


def test_names(file, expected):
    names = ["transposed", ("optimizer", "state", 0, "exp_avg")]
    loaded = tensorizer.load(file, names=names)
    assert list(loaded) == names
    assert torch.equal(loaded[names[1]], expected["optimizer"]["state"][0]["exp_avg"])
    with pytest.raises(KeyError, match="epoch"):
        tensorizer.load(file, names=["epoch"])


def test_a_shared_storage_is_kept_only_while_a_tensor_uses_it(file):
    with TensorDeserializer(file, "cpu", lazy_load=True) as lazy:
        tensors, _ = lazy._file.read([lazy._file.find("row")], torch.device("cpu"))
        memory = weakref.ref(tensors[0].untyped_storage())
        read = lazy.total_bytes_read
        again, _ = lazy._file.read([lazy._file.find("weight")], torch.device("cpu"))
        assert lazy.total_bytes_read == read
        del tensors, again
        gc.collect()
        assert memory() is None


@pytest.mark.device
def test_a_storage_that_was_made_smaller(file, expected):
    with TensorDeserializer(file, "cpu", lazy_load=True, clone=True) as lazy:
        (row,), _ = lazy._file.read([lazy._file.find("row")], torch.device("cpu"))
        with contextlib.suppress(RuntimeError):
            # Since torch 2.15 it cannot be.
            row.untyped_storage().resize_(0)
        (weight,), _ = lazy._file.read([lazy._file.find("weight")], torch.device("cpu"))
        assert torch.equal(weight, expected["weight"])


def test_mapped_in_place(tmp_path):
    tensors = {"a": torch.randn(1000, 1000), "b": torch.randn(3)}
    tensors["c"] = tensors["a"].t()
    torch.save(tensors, tmp_path / "x.pt")
    loaded = tensorizer.load(tmp_path / "x.pt", mmap=True)
    check(loaded, tensors)
    maps = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("x.pt")
    ]
    ranges = [[int(part, 16) for part in line.split()[0].split("-")] for line in maps]
    assert any(start <= loaded["c"].data_ptr() < end for start, end in ranges)
    loaded["a"].fill_(1)
    assert (loaded["c"] == 1).all()
    assert torch.equal(torch.load(tmp_path / "x.pt")["a"], tensors["a"])


def test_in_place(tmp_path, expected, file):
    names = [name for name, value in expected.items() if isinstance(value, torch.Tensor)]
    out = {name: torch.full_like(expected[name], 3).contiguous() for name in names}
    loaded = tensorizer.load(file, names=names, out=out)
    for name in names:
        assert loaded[name] is out[name]
        assert torch.equal(out[name], expected[name]), name


def test_into_module(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(40, 8)
            self.norm = torch.nn.BatchNorm1d(8)
            self.head = torch.nn.Linear(8, 40, bias=False)
            self.head.weight = self.embedding.weight

    saved, module = Tied(), Tied()
    saved.norm.running_mean.fill_(7)
    torch.save(saved.state_dict(), tmp_path / "x.pt")
    before = module.norm.weight
    with TensorDeserializer(tmp_path / "x.pt", "cpu", lazy_load=True) as file:
        file.load_into_module(module)
    for name, tensor in saved.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name
    assert module.norm.weight is before
    assert module.head.weight is module.embedding.weight


def test_slices(file, expected):
    large = expected["large"]
    with TensorDeserializer(file, "cpu", lazy_load=True) as lazy:
        assert torch.equal(lazy.slice("large")[10:20], large[10:20])
        assert lazy.total_bytes_read <= 10 * 1000 * 4
        assert torch.equal(lazy.slice("large")[5:600:7, 3], large[5:600:7, 3])
        assert torch.equal(lazy.slice("row")[2:9], expected["row"][2:9])
        assert torch.equal(lazy.slice("transposed")[2:9, 1], expected["transposed"][2:9, 1])
        assert torch.equal(lazy.slice("conj")[1:], expected["conj"][1:])
    part = tensorizer.load(file, slices={"transposed": (0, 1, 5), "weight": (1, 2, 4)})
    assert torch.equal(part["transposed"], expected["transposed"][1:5])
    assert torch.equal(part["weight"], expected["weight"][:, 2:4])
    assert part["transposed"].untyped_storage().nbytes() == 4 * 40 * 4


def test_iterate(file, expected):
    wanted = dict(leaves(expected))
    for buffer_bytes in (1, 5000, 1 << 30):
        count = 0
        for name, tensor in tensorizer.iterate(file, "cpu", buffer_bytes=buffer_bytes):
            assert torch.equal(tensor, wanted[name if isinstance(name, tuple) else (name,)]), name
            count += 1
        assert count == len(wanted)


def test_info(file, expected):
    found = tensorizer.info(file)
    assert (found.format, found.version, found.encrypted) == ("torch", None, False)
    assert found.tensors["expanded"].shape == (3, 500)
    assert found.tensors["model", "1.num_batches_tracked"].dtype == "int64"


def test_no_hashes(file, capsys):
    for call in (
        lambda: tensorizer.load(file, verify_hash=True),
        lambda: tensorizer.load(file, names=["transposed"], verify_hash="crc32"),
        lambda: TensorDeserializer(file, "cpu", lazy_load=True, verify_hash=True)["row"],
        lambda: TensorDeserializer(file, "cpu", lazy_load=True).verify_module(
            torch.nn.Linear(1, 1)
        ),
        lambda: tensorizer.load(file, slices={"transposed": (0, 1, 5)}, verify_hash=True),
    ):
        with pytest.raises(tensorizer.HashMismatchError, match="torch files hold no hashes"):
            call()
    assert main(["verify", str(file)]) == 2
    assert "torch files hold no hashes" in capsys.readouterr().err


def test_commands(tmp_path, file, expected, capsys):
    assert main(["ls", str(file)]) == 0
    out = capsys.readouterr().out
    assert "optimizer" in out
    assert "torch" in out.splitlines()[-1]
    target = tmp_path / "x.tensors"
    assert main(["cp", "-q", str(file), str(target)]) == 0
    copied = tensorizer.load(target, verify_hash=True)
    for path, tensor in leaves(expected):
        name = path[0] if len(path) == 1 else path
        assert torch.equal(copied[name], tensor), name
    assert main(["diff", "-q", str(file), str(target)]) == 0
    assert main(["diff", "-q", str(target), str(file)]) == 0
    assert main(["ls", str(tmp_path / "no.pt")]) == 2


def test_a_key_for_a_torch_file_is_refused(file):
    with pytest.raises(tensorizer.CryptographyError):
        tensorizer.load(file, encryption=tensorizer.DecryptionParams.from_key(bytes(32)))


def test_operators_refuse_torch_files(file):
    for call in (lambda: ops.load(str(file)), lambda: ops.names(str(file))):
        with pytest.raises(
            (RuntimeError, NotImplementedError), match=r"only the Python package reads: .*load"
        ):
            call()


@pytest.fixture(scope="module")
def nginx(tmp_path_factory):
    server = Nginx(tmp_path_factory.mktemp("nginx"))
    yield server
    server.stop()


def test_http(nginx, file, expected):
    (nginx.root / "x.pt").write_bytes(file.read_bytes())
    check(tensorizer.load(f"{nginx.http}/x.pt"), expected)
    with TensorDeserializer(f"{nginx.http}/x.pt", "cpu", lazy_load=True) as lazy:
        assert torch.equal(lazy["large"], expected["large"])
    with pytest.raises(NotImplementedError, match="directory is at its end"):
        tensorizer.load(f"{nginx.http}/whole/x.pt")


def test_pipes_are_refused(file):
    read, write = os.pipe()
    os.write(write, file.read_bytes()[:2000])
    os.close(write)
    with pytest.raises(
        NotImplementedError, match="directory is at its end, but this source can only"
    ):
        tensorizer.load(read)
    os.close(read)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    write_shards(folder)
    return folder


def write_shards(folder):
    shared = torch.randn(4, 5)
    shards = {
        "pytorch_model-00001-of-00002.bin": {"a": shared, "b": shared.t(), "c": torch.ones(3)},
        "pytorch_model-00002-of-00002.bin": {"d": torch.randn(500, 600), "e": torch.tensor(1)},
    }
    for name, tensors in shards.items():
        torch.save(tensors, folder / name)
    index = {
        "metadata": {"total_size": 5},
        "weight_map": {name: file for file, tensors in shards.items() for name in tensors},
    }
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return index


def everything(folder):
    found = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(".bin"):
            found |= torch.load(folder / name, weights_only=True)
    return found


def test_shards(sharded, nginx):
    expected = everything(sharded)
    check(tensorizer.load(sharded), expected)
    check(tensorizer.load(sharded / "pytorch_model.bin.index.json", mmap=True), expected)
    for path in sharded.iterdir():
        (nginx.root / path.name).write_bytes(path.read_bytes())
    check(tensorizer.load(f"{nginx.http}/pytorch_model.bin.index.json"), expected)
    assert dict(tensorizer.info(sharded).metadata) == {"total_size": "5"}
    files = {name: os.path.basename(t.file) for name, t in tensorizer.info(sharded).tensors.items()}
    assert files["d"] == "pytorch_model-00002-of-00002.bin"


def test_shards_that_do_not_fit(tmp_path):
    index = write_shards(tmp_path)
    first, second = sorted(set(index["weight_map"].values()))
    where = tmp_path / "pytorch_model.bin.index.json"

    def refused(error, match, **weight_map):
        where.write_text(json.dumps({"weight_map": index["weight_map"] | weight_map}))
        with pytest.raises(error, match=match):
            tensorizer.load(tmp_path)

    refused(tensorizer.FormatError, rf"'f' in .*{second}, which does not hold it", f=second)
    refused(tensorizer.FormatError, rf"'a' in .*{second}, which does not hold it", a=second)
    # If two files hold a tensor, the one that the index names counts.
    torch.save(torch.load(tmp_path / second) | {"c": torch.zeros(3)}, tmp_path / second)
    where.write_text(json.dumps(index))
    assert torch.equal(tensorizer.load(tmp_path)["c"], torch.ones(3))
    del index["weight_map"]["c"]
    refused(tensorizer.FormatError, "name")
    # A name of a record is no name of a tensor.
    index["weight_map"]["c"] = first
    refused(tensorizer.FormatError, "'1/data.pkl'", **{"1/data.pkl": first})
    tensorizer.save({"d": torch.ones(1)}, tmp_path / second, format="tensors")
    refused(tensorizer.FormatError, "expected a shard")


def test_whole_tensors_beside_slices_share_their_storage(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    torch.save({"a": base, "b": base, "t": base.t(), "c": torch.ones(4, 2)}, tmp_path / "f.pt")
    loaded = tensorizer.load(tmp_path / "f.pt", "cpu", slices={"c": (0, 1, 3)})
    assert loaded["c"].shape == (2, 2)
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr() == loaded["t"].data_ptr()
    assert torch.equal(loaded["t"], base.t())
