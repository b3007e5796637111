"""Checkpoints as torch before 1.6 wrote them, and archives that other programs have changed."""

import hashlib
import io
import json
import pickle
import re
import struct
import tarfile
import zipfile

import pytest
import tensorizer
import torch
from archives import DATA, REFUSALS, Storage, pickled, tensor
from tensorizer import FormatError, TruncatedError
from tensorizer_cli.main import main
from torch_files import check, dtypes, leaves, make

MAGIC, VERSION = 0x1950A86A20F9469CFC6C, 1001
MACHINE = {"protocol_version": VERSION, "little_endian": True, "type_sizes": {"long": 4}}


def save(tree, file):
    torch.save(tree, file, _use_new_zipfile_serialization=False)


def legacy(tree=None, *, version=VERSION, machine=MACHINE, keys=("0",), count=6, data=DATA):
    """Return a file of one storage of six floats, whose parts can be anything."""
    tree = {"a": tensor(old_storage())} if tree is None else tree
    parts = [pickled(one) for one in (MAGIC, version, machine, tree, list(keys))]
    return b"".join(parts) + struct.pack("<q", count) + data


def old_storage(view=None, kind=torch.FloatStorage, count=6):
    return Storage(pid=("storage", kind, "0", "cpu", count, view))


def load(data):
    return tensorizer.load(io.BytesIO(data))


@pytest.fixture
def file(tmp_path):
    save(make(), tmp_path / "old.pth")
    return tmp_path / "old.pth"


@pytest.mark.parametrize("options", [{}, {"mmap": True}, {"num_readers": 3}])
def test_they_load_as_torch_loads_them(file, options):
    expected = torch.load(file, weights_only=True)
    check(tensorizer.load(file, **options), expected)
    with tensorizer.TensorDeserializer(file, "cpu", lazy_load=True) as lazy:
        assert torch.equal(lazy["tied"], expected["weight"])
    iterated = dict(tensorizer.iterate(file))
    assert all(torch.equal(iterated[name], one) for name, one in tensorizer.load(file).items())


def test_every_dtype(tmp_path):
    tensors = {name: one for name, one in dtypes() if name != "bcomplex32"}
    save(tensors, tmp_path / "x.pt")
    # torch itself does not load those that have no class of storages.
    check(tensorizer.load(tmp_path / "x.pt"), tensors)


def test_on_servers_in_shards_and_by_the_command(tmp_path, nginx, capsys):
    torch.manual_seed(1)
    tensors = {f"layer.{number}": torch.randn(50, number + 1) for number in range(40)}
    folder = nginx.root / "old"
    folder.mkdir(exist_ok=True)
    save(dict(list(tensors.items())[:20]), folder / "1.bin")
    torch.save(dict(list(tensors.items())[20:]), folder / "2.bin")
    index = {"weight_map": {name: f"{1 + (n >= 20)}.bin" for n, name in enumerate(tensors)}}
    # Some editors begin a text with a byte order mark.
    text = "\ufeff" + json.dumps(index)
    (folder / "pytorch_model.bin.index.json").write_text(text, encoding="utf-8")
    for uri in (folder, f"{nginx.http}/old/"):
        loaded = tensorizer.load(uri)
        assert loaded.keys() == tensors.keys()
        assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert main(["ls", f"{nginx.http}/old/1.bin"]) == 0
    assert "20 tensors, 42.0 KB, torch" in capsys.readouterr().out
    assert main(["cp", "--verify", str(folder / "1.bin"), str(tmp_path / "x.safetensors")]) == 0
    copied = tensorizer.load(tmp_path / "x.safetensors")
    assert all(torch.equal(copied[name], tensors[name]) for name in copied)
    assert len(copied) == 20


def test_several_in_one_stream(tmp_path):
    trees = [{"a": torch.arange(3)}, {"b": torch.randn(300)}]
    with open(tmp_path / "both", "wb+") as stream:
        stream.write(b"before")
        for tree in trees:
            save(tree, stream)
        tensorizer.save(trees[0], stream)
        stream.write(b"after")
        stream.seek(6)
        for expected in (*trees, trees[0]):
            check(tensorizer.load(stream), expected)
        assert stream.read() == b"after"


def test_damaged_ones_are_refused():
    whole = legacy()
    assert torch.equal(load(whole)["a"], torch.arange(6.0).view(2, 3))
    assert torch.equal(torch.load(io.BytesIO(whole), weights_only=True)["a"], load(whole)["a"])
    for length in range(20, len(whole)):
        with pytest.raises(TruncatedError):
            load(whole[:length])
    view = legacy({"a": tensor(old_storage(("1", 0, 6)))})
    for data, text in (
        (legacy(count=7), "expected a storage of 6 elements, found 7"),
        (legacy(count=-1), "expected a storage of 6 elements"),
        (legacy(keys=("0", "1")), r"expected the keys of 1 storages, found \['0', '1'\]"),
        (legacy(version=1002), "expected version 1001"),
        (legacy(keys=(0,)), r"expected the keys of 1 storages, found \[0\]"),
        (legacy(keys=()), r"expected the keys of 1 storages, found \[\]"),
        (view, "storage '0' is a part of another one"),
        (legacy({"a": tensor(Storage())}), "expected the id of a storage"),
        (legacy({"a": tensor(old_storage(), shape=(3, 3))}), "does not lie in its storage"),
        (whole.replace(b"\x80\x02}", b"\x80\x02\xff", 1), "found byte 0xff"),
    ):
        with pytest.raises(FormatError, match=text):
            load(data)
    with pytest.raises(NotImplementedError, match="big-endian machine"):
        load(legacy(machine=MACHINE | {"little_endian": False}))
    with pytest.raises(pickle.UnpicklingError, match="blocked"):
        load(legacy({"a": Attack()}))
    for at in range(len(whole)):
        changed = whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :]
        try:
            for one in load(changed).values():
                assert one.numel() <= 6
        except REFUSALS:
            pass


class Attack:
    def __reduce__(self):
        import os

        return os.system, ("true",)


def test_pipes_and_tar_archives_have_a_sentence(file, tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(file, "storages")
    with pytest.raises(FormatError, match="a tar archive: unpack it first"):
        tensorizer.load(tmp_path / "x.tar")
    with pytest.raises(NotImplementedError, match="whose tensors may be in any order"):
        tensorizer.load(Unseekable(file.read_bytes()))


class Unseekable(io.BytesIO):
    def seekable(self):
        return False


# Archives


def changed(path, method=zipfile.ZIP_STORED, more=()):
    """Pack an archive of torch anew, with more records."""
    with zipfile.ZipFile(path) as archive:
        content = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in (*content, *more):
            archive.writestr(name, data)


@pytest.mark.parametrize("where", ["disk", "server", "memory"])
def test_deflated_records_load(tmp_path, nginx, where):
    path = nginx.root / "deflated.pt"
    torch.save(make(), path)
    expected = torch.load(path, weights_only=True)
    changed(path, zipfile.ZIP_DEFLATED)
    uri = {
        "disk": path,
        "server": f"{nginx.http}/deflated.pt",
        "memory": io.BytesIO(path.read_bytes()),
    }
    loaded = tensorizer.load(uri[where])
    assert loaded.keys() == {p[0] if len(p) == 1 else p for p, _ in leaves(expected)}
    for keys, one in leaves(expected):
        assert torch.equal(loaded[keys[0] if len(keys) == 1 else keys], one), keys
    if where == "disk":
        assert any("deflated" in why for why in tensorizer.stats()["fallbacks"])
        copied = tmp_path / "copy.tensors"
        assert main(["cp", "--verify", str(path), str(copied)]) == 0
        assert torch.equal(tensorizer.load(copied)["weight"], expected["weight"])
        with pytest.raises(ValueError, match="can only be read by one thread"):
            tensorizer.load(path, num_readers=4)
        right = hashlib.sha256(path.read_bytes()).hexdigest()
        assert len(tensorizer.load(path, sha256=right)) == len(loaded)
        with pytest.raises(tensorizer.DamagedFileError):
            tensorizer.load(path, sha256="0" * 64)


def test_only_records_that_are_needed_matter(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(5)}, path)
    changed(path, more=[("README.txt", b"x"), ("other/data.pkl", b"x"), ("x/info.json", b"{}")])
    with zipfile.ZipFile(path, "a", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("x/bzip2", bytes(10_000))
    assert tensorizer.load(path)["a"].tolist() == [0, 1, 2, 3, 4]
    changed(path, zipfile.ZIP_BZIP2)
    with pytest.raises(FormatError, match=r"`x/data.pkl`: it is compressed \(method 12\)"):
        tensorizer.load(path)


def test_damaged_deflated_records_are_refused(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(50_000)}, path)
    changed(path, zipfile.ZIP_DEFLATED)
    data, info = path.read_bytes(), zipfile.ZipFile(path).getinfo("x/data/0")
    begin = info.header_offset + 30 + len(info.filename)
    broken = data[: begin + 99] + bytes(200) + data[begin + 299 :]
    with pytest.raises(FormatError, match=re.escape("a deflated record is damaged")):
        load(broken)
    entry = data.index(b"x/data/0", data.index(b"PK\x01\x02")) - 22
    for stated in (399_999, 400_001, 1 << 31):
        wrong = data[:entry] + struct.pack("<I", stated) + data[entry + 4 :]
        with pytest.raises(FormatError):
            load(wrong)
