"""Slices of tensors: their bytes, and only theirs, from every format, source and device."""

import contextlib
import io
import random

import numpy as np
import pytest
import tensorizer
import torch
from processes import run_python
from servers import Nginx
from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer
from tensorizer.file.open_file import OpenFile

safetensors = pytest.importorskip("safetensors.torch")

KEY = bytes(range(32))


def make():
    torch.manual_seed(11)
    return {
        "rows": torch.randn(3000, 501),
        "wide": torch.randn(60, 70_001).to(torch.bfloat16),
        "thin": torch.arange(2_000_001, dtype=torch.int16).reshape(-1, 3),
        "cube": torch.randint(0, 99, (20, 30, 401), dtype=torch.int64),
        "scalar": torch.tensor(7.5),
        "empty": torch.zeros(0, 4),
        "small": torch.arange(30, dtype=torch.uint8).reshape(5, 6),
    }


TENSORS = make()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slices")
    with_meta = {**TENSORS, "meta": torch.empty(5, 3, device="meta")}
    tensorizer.save(with_meta, folder / "plain.tensors", allow_meta=True)
    encryption = EncryptionParams(KEY, manifest=True)
    tensorizer.save(with_meta, folder / "sealed.tensors", encryption=encryption, allow_meta=True)
    safetensors.save_file(TENSORS, folder / "f.safetensors")
    return folder


OPEN = {
    "plain": ("plain.tensors", {}),
    "verified": ("plain.tensors", {"verify_hash": True}),
    "encrypted": ("sealed.tensors", {"encryption": DecryptionParams.from_key(KEY)}),
    "encrypted, verified": (
        "sealed.tensors",
        {"encryption": DecryptionParams.from_key(KEY), "verify_hash": True},
    ),
    "safetensors": ("f.safetensors", {}),
}


def random_index(shape, rng):
    """Return an index as torch takes it, not of integers alone."""
    steps = []
    for dim in shape:
        a, b = sorted((rng.randint(-min(1, dim), dim), rng.randint(-min(1, dim), dim)))
        whole = rng.random() < 0.4
        steps.append(slice(None) if whole else slice(max(a, 0), b, rng.choice([1, 1, 1, 3])))
        if dim and rng.random() < 0.15:
            steps[-1] = rng.randrange(-dim, dim)
    if len(steps) > 1 and rng.random() < 0.3:
        del steps[rng.randrange(len(steps)) :]
    return (*steps, ...)


@pytest.mark.parametrize("how", OPEN)
@pytest.mark.device
def test_slices_are_those_of_the_whole(files, how):
    name, options = OPEN[how]
    rng = random.Random(how)
    for _ in range(6):
        chosen = rng.sample(sorted(TENSORS), 3)
        slices = {n: random_index(TENSORS[n].shape, rng) for n in chosen}
        loaded = tensorizer.load(files / name, names=list(TENSORS), slices=slices, **options)
        for key, tensor in TENSORS.items():
            expected = tensor[slices[key]] if key in slices else tensor
            assert loaded[key].dtype == expected.dtype
            assert loaded[key].shape == expected.shape, (key, slices[key])
            assert torch.equal(loaded[key], expected), (key, slices.get(key))


@pytest.mark.parametrize("how", OPEN)
@pytest.mark.device
def test_slices_are_loaded_in_place(files, how):
    name, options = OPEN[how]
    out = {
        "rows": torch.zeros(7, 501),
        "wide": torch.zeros(60, 40_000, dtype=torch.bfloat16),
        "cube": torch.zeros(30, 2, dtype=torch.int64),
        "small": torch.zeros(5, 6, dtype=torch.uint8),
    }
    before = {key: tensor.data_ptr() for key, tensor in out.items()}
    slices = {
        "rows": (0, 100, 107),
        "wide": (1, 30_001, None),
        "cube": (3, slice(None), slice(5, 7)),
    }
    loaded = tensorizer.load(files / name, slices=slices, out=out, **options)
    assert {key: tensor.data_ptr() for key, tensor in loaded.items()} == before
    assert torch.equal(out["rows"], TENSORS["rows"][100:107])
    assert torch.equal(out["wide"], TENSORS["wide"][:, 30_001:])
    assert torch.equal(out["cube"], TENSORS["cube"][3, :, 5:7])
    assert torch.equal(out["small"], TENSORS["small"])


#: Several slices of a tensor, which overlap: unordered, and one of them twice.
SEVERAL = [
    ("wide", (0, 60), (1, 40_000)),
    ("rows", (5, 900), (7, 9)),
    ("rows", (5, 900), (7, 9)),
    ("small", (1, 5), (0, 6)),
    ("wide", (3, 4), (0, 70_001)),
    ("rows", (0, 3000), (0, 501)),
    ("wide", (0, 60), (69_999, 70_001)),
    ("small", (0, 5), (2, 2)),
    ("rows", (100, 2000), (0, 501)),
]


@pytest.mark.parametrize("how", OPEN)
@pytest.mark.device
def test_several_slices_of_one_tensor(files, how):
    name, options = OPEN[how]
    with OpenFile(files / name, **options) as file:
        part = file.sliced([(file.find(name), ranges) for name, *ranges in SEVERAL])
        for numbers in (range(len(SEVERAL)), [8, 1, 0, 5]):
            loaded, _ = part.read(list(numbers), torch.device("cpu"))
            for number, tensor in zip(numbers, loaded, strict=True):
                key, (top, bottom), (left, right) = SEVERAL[number]
                assert torch.equal(tensor, TENSORS[key][top:bottom, left:right]), SEVERAL[number]


def test_a_tensor_of_an_open_file_is_sliced(files):
    with TensorDeserializer(files / "f.safetensors", "cpu", lazy_load=True) as file:
        part = file.slice("cube")
        assert (part.shape, part.dtype) == (torch.Size([20, 30, 401]), torch.int64)
        assert repr(part) == "<TensorSlice of 'cube': torch.int64 [20, 30, 401]>"
        cube = TENSORS["cube"]
        assert torch.equal(part[3:5, ..., 7], cube[3:5, ..., 7])
        assert torch.equal(part[-1], cube[-1])
        assert torch.equal(part[...], cube)
        assert torch.equal(part[::7, 1:30:2, 400:], cube[::7, 1:30:2, 400:])
        # As in torch, and unlike in slices=, ends of brackets may be outside.
        assert torch.equal(part[18:99, -50:2], cube[18:99, -50:2])
        assert torch.equal(file.slice("scalar")[...], TENSORS["scalar"])
        assert torch.equal(file.slice("scalar")[()], TENSORS["scalar"])
        for index, error in [
            ((0, 0, 0, 0), IndexError),
            (20, IndexError),
            (-21, IndexError),
            ((..., ...), IndexError),
            (slice(None, None, -1), ValueError),
            ("a", TypeError),
            (True, TypeError),
            (torch.tensor([1]), TypeError),
            (None, TypeError),
        ]:
            with pytest.raises(error):
                part[index]
        with pytest.raises(KeyError, match="'nothing'"):
            file.slice("nothing")
    with pytest.raises(tensorizer.ClosedError):
        part[0]


def test_meta_tensors_are_zeros(files):
    loaded = tensorizer.load(files / "plain.tensors", "cpu", slices={"meta": (0, 1, 3)})
    assert torch.equal(loaded["meta"], torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("slices", "error", "text"),
    [
        ({"none": (0, 0, 1)}, KeyError, "not among the tensors"),
        ({"rows": (2, 0, 1)}, IndexError, "'rows': dimension 2 of a tensor of 2"),
        ({"rows": (0, 1, 2, 3)}, IndexError, "'rows': too many indices"),
        ({"rows": ("a", 0, 1)}, TypeError, "'rows'"),
        ({"scalar": (0, 0, 1)}, IndexError, "'scalar'"),
        ({"rows": (0, 2990, 3001)}, IndexError, "'rows': 3001 is outside of a dimension of 3000"),
        ({"rows": (1, -502, None)}, IndexError, "'rows': -502 is outside of a dimension of 501"),
        ({"small": slice(0, 9)}, IndexError, "'small': 9 is outside of a dimension of 5: expected"),
        ({"small": slice(6, None)}, IndexError, "'small': 6 is outside .* ends from -5 to 5"),
        ({"small": (..., slice(None, 7, 2))}, IndexError, "7 is outside of a dimension of 6"),
        ({"small": (0, 0, 1 << 70)}, IndexError, "is outside of a dimension of 5"),
        ({"small": np.s_[: np.int64(9)]}, IndexError, "9 is outside of a dimension of 5"),
    ],
)
def test_invalid_slices_are_refused(files, slices, error, text):
    for name in ("f.safetensors", "plain.tensors"):
        with pytest.raises(error, match=text):
            tensorizer.load(files / name, "cpu", slices=slices)
        with pytest.raises(error, match=text):
            list(tensorizer.iterate(files / name, "cpu", slices=slices))


def test_the_ends_of_a_dimension_are_within_it(files):
    small = TENSORS["small"]
    for index in [slice(-5, 5), slice(5, None), slice(None, -5), slice(3, 1), np.s_[:, 6:6]]:
        loaded = tensorizer.load(
            files / "f.safetensors", "cpu", names=["small"], slices={"small": index}
        )
        assert torch.equal(loaded["small"], small[index])


def test_unfit_out_tensors_of_slices_are_refused_and_not_written(files):
    path = files / "f.safetensors"
    for given, slices in [
        (torch.zeros(8, 501), (0, 100, 107)),
        (torch.zeros(7, 501, dtype=torch.float64), (0, 100, 107)),
        (torch.zeros(501, 7).t(), (0, 100, 107)),
        (torch.zeros(501), (0, 0, 1)),
        (torch.zeros(4, 501), slice(0, 8, 2)),
    ]:
        with pytest.raises(ValueError, match="rows"):
            tensorizer.load(path, slices={"rows": slices}, out={"rows": given})
        assert not given.any()
    with pytest.raises(KeyError, match="no tensor to load 'cube' into"):
        tensorizer.load(path, names=["cube"], out={"rows": torch.zeros(3000, 501)})


def test_out_tensors_of_strided_tensors_are_checked(tmp_path):
    w = torch.arange(12.0).reshape(3, 4)
    torch.save({"t": w.t(), "w": w}, tmp_path / "f.pt")
    for wrong in [
        torch.full((4, 3), -1, dtype=torch.int8),
        torch.zeros(2, 4, 3),
        torch.zeros(3, 4).t(),
        torch.zeros(4, 3, device="meta"),
    ]:
        with pytest.raises(ValueError, match="tensor `t`"):
            tensorizer.load(tmp_path / "f.pt", out={"t": wrong})
    with pytest.raises(TypeError, match="found int"):
        tensorizer.load(tmp_path / "f.pt", out={"t": 3})
    both = torch.zeros(4, 3)
    with pytest.raises(ValueError, match="overlap"):
        tensorizer.load(tmp_path / "f.pt", out={"t": both, "w": both.view(3, 4)})
    assert not both.any()
    tensorizer.load(tmp_path / "f.pt", out={"t": both})
    assert torch.equal(both, w.t())


def test_names_as_they_are_stored(tmp_path):
    tensorizer.save({"a": {"b": torch.arange(9)}}, tmp_path / "f.tensors")
    stored = '\x1e["a","b"]'
    loaded = tensorizer.load(tmp_path / "f.tensors", "cpu", slices={stored: (0, 2, 4)})
    assert torch.equal(loaded["a", "b"], torch.tensor([2, 3]))
    with pytest.raises(ValueError, match="belong to the same tensor"):
        out = {("a", "b"): torch.zeros(9, dtype=torch.int64), stored: torch.zeros(9)}
        tensorizer.load(tmp_path / "f.tensors", out=out)
    # A plain name that looks like one is found first.
    odd = {'\x1e["x"]': torch.ones(1), "x": torch.zeros(1)}
    safetensors.save_file(odd, tmp_path / "f.safetensors")
    for name, tensor in odd.items():
        loaded = tensorizer.load(tmp_path / "f.safetensors", "cpu", names=[name])
        assert torch.equal(loaded[name], tensor)


def test_short_runs_are_planned_in_rounds(tmp_path):
    """One column with gaps that are not worth reading: as many requests as rows."""
    path = tmp_path / "f.safetensors"
    rows, columns = 70_000, 16_500
    head = b'{"a":{"dtype":"U8","shape":[%d,%d],"data_offsets":[0,%d]}}' % (
        *(rows, columns),
        rows * columns,
    )
    with open(path, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + rows * columns)
        file.seek(8 + len(head) + (rows - 1) * columns + 7)
        file.write(b"x")
    loaded = tensorizer.load(path, "cpu", slices={"a": (1, 7, 8)})["a"]
    assert (loaded.shape, int(loaded.sum()), int(loaded[-1])) == ((rows, 1), 120, 120)


def test_a_pipe_that_promises_more_than_there_is_takes_no_memory():
    """One column of 2^61 bytes, of which none come."""
    code = """
import io, resource, sys, tensorizer
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
head = b'{"a":{"dtype":"U8","shape":[%d,%d],"data_offsets":[0,%d]}}' % (1 << 20, 1 << 41, 1 << 61)
class Pipe(io.BytesIO):
    def seekable(self):
        return False
pipe = Pipe(len(head).to_bytes(8, "little") + head)
try:
    tensorizer.load(pipe, "cpu", slices={"a": (1, 0, 1)})
except tensorizer.TruncatedError as error:
    print("truncated")
"""
    done = run_python(code)
    assert (done.returncode, done.stdout) == (0, "truncated\n"), done.stderr[-2000:]


class Counting(io.BytesIO):
    """Counts the bytes that are read."""

    count = 0

    def read(self, size=-1):
        data = super().read(size)
        self.count += len(data)
        return data


def test_only_the_bytes_of_a_slice_are_read(files):
    data = (files / "f.safetensors").read_bytes()

    def read(**slices):
        file = Counting(data)
        names = list(slices)
        loaded = tensorizer.load(file, "cpu", names=names, slices=slices)
        for name, tensor in loaded.items():
            assert tensor.numel()
            assert torch.equal(tensor, TENSORS[name][slices[name]])
        wanted = sum(tensor.nbytes for tensor in loaded.values())
        return file.count - 4096, wanted

    # Rows as they lie; columns with gaps that are too wide to be read over.
    count, wanted = read(rows=slice(10, 20))
    assert count <= wanted
    count, wanted = read(wide=(slice(None), slice(100, 9000)))
    assert count <= wanted
    # Short runs with what lies between them.
    count, wanted = read(thin=(slice(50, 60_000), 1))
    assert wanted * 3 <= count + 4096 <= wanted * 3 + 4096


def test_only_the_pieces_of_an_encrypted_tensor_are_read(files):
    file = Counting((files / "sealed.tensors").read_bytes())
    opened = TensorDeserializer(
        file, "cpu", lazy_load=True, encryption=DecryptionParams.from_key(KEY)
    )
    with contextlib.closing(opened):
        before = file.count
        part = opened.slice("rows")[2000:2010]
        assert torch.equal(part, TENSORS["rows"][2000:2010])
        # Its header, with tags, and one or two pieces; the key is tried on the smallest tensor.
        assert file.count - before <= 2 * (2 << 20) + (64 << 10)
        assert TENSORS["rows"].nbytes > 2 * (2 << 20) + (64 << 10)


def test_a_change_in_a_piece_of_a_slice_is_found(files, tmp_path):
    data = bytearray((files / "sealed.tensors").read_bytes())
    info = tensorizer.info(files / "sealed.tensors")
    assert info.encrypted
    with TensorDeserializer(
        files / "sealed.tensors", "cpu", lazy_load=True, encryption=DecryptionParams.from_key(KEY)
    ) as file:
        number = list(file.keys()).index("rows")
        at = file._file.reader.offsets()[number][1]
    data[at + 5_000_000] ^= 1
    path = tmp_path / "changed.tensors"
    path.write_bytes(data)
    encryption = DecryptionParams.from_key(KEY)
    rows = 5_000_000 // (501 * 4)
    with pytest.raises(tensorizer.CryptographyError, match="`rows`"):
        tensorizer.load(
            path, "cpu", slices={"rows": (0, rows, rows + 1)}, names=["rows"], encryption=encryption
        )
    # Other pieces are as they were.
    loaded = tensorizer.load(
        path, "cpu", slices={"rows": (0, 0, 10)}, names=["rows"], encryption=encryption
    )
    assert torch.equal(loaded["rows"], TENSORS["rows"][:10])


def test_slices_of_a_server_and_of_a_pipe(files, tmp_path_factory, monkeypatch):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = Nginx(tmp_path_factory.mktemp("nginx"))
    try:
        (server.root / "f.safetensors").write_bytes((files / "f.safetensors").read_bytes())
        slices = {"rows": (0, 5, 9), "thin": (1, 0, 2), "cube": (2, 7, 9)}
        loaded = tensorizer.load(f"{server.http}/f.safetensors", "cpu", slices=slices)
    finally:
        server.stop()
    expected = {
        **TENSORS,
        "rows": TENSORS["rows"][5:9],
        "thin": TENSORS["thin"][:, :2],
        "cube": TENSORS["cube"][..., 7:9],
    }
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())

    class Pipe(io.BytesIO):
        def seekable(self):
            return False

    pipe = Pipe((files / "f.safetensors").read_bytes())
    loaded = tensorizer.load(pipe, "cpu", names=["rows", "thin", "cube"], slices=slices)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())
    # Some of them in part, and others as a whole.
    pipe = Pipe((files / "plain.tensors").read_bytes())
    loaded = tensorizer.load(pipe, "cpu", names=list(TENSORS), slices=slices)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())


def test_different_slices_by_two_names_of_one_tensor_are_refused(tmp_path):
    tensorizer.save({"w": torch.arange(12.0).view(3, 4)}, tmp_path / "f")
    both = {"w": (slice(0, 1),), ("w",): (slice(0, 1),)}
    found = tensorizer.load(tmp_path / "f", names=list(both), slices=both)
    assert [tensor.tolist() for tensor in found.values()] == [[[0, 1, 2, 3]]] * 2
    both["w",] = (slice(1, 2),)
    with pytest.raises(ValueError, match="two slices of tensor 'w' are requested by two names"):
        tensorizer.load(tmp_path / "f", names=list(both), slices=both)


def test_none_is_no_slice(tmp_path):
    tensorizer.save({"a": torch.zeros(4, 3)}, tmp_path / "f.tensors")
    with pytest.raises(TypeError, match="the slice of 'a': expected integers"):
        tensorizer.load(tmp_path / "f.tensors", "cpu", slices={"a": None})
