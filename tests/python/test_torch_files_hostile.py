"""Checkpoints of torch.save that are damaged, made to harm, or of a kind that is not read."""

import collections
import io
import os
import pickle
import random
import struct
import zipfile

import pytest
import tensorizer
import torch
from conftest import GOLDEN, run_python
from tensorizer import FormatError

ops = torch.ops.tensorizer

#: What reading a file may raise, whatever is in it.
REFUSALS = (ValueError, OSError, NotImplementedError, MemoryError, pickle.UnpicklingError)


class Storage:
    """Stands for a storage in a pickle: its record, type and count are what they are said to be."""

    def __init__(self, key="0", count=6, kind=torch.FloatStorage, pid=None):
        self.pid = pid or ("storage", kind, key, "cpu", count)


class Call:
    """A function that a pickle has called."""

    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


def tensor(storage=None, offset=0, shape=(2, 3), stride=(3, 1)):
    storage = storage or Storage()
    rest = (False, collections.OrderedDict())
    return Call(torch._utils._rebuild_tensor_v2, storage, offset, shape, stride, *rest)


def pickled(tree):
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            return obj.pid if isinstance(obj, Storage) else None

    buffer = io.BytesIO()
    Pickler(buffer, 2).dump(tree)
    return buffer.getvalue()


DATA = torch.arange(6.0).numpy().tobytes()


def records(tree=None, **more):
    """Return the records of a checkpoint with one storage of six floats."""
    tree = {"a": tensor()} if tree is None else tree
    found = {"data.pkl": pickled(tree), "byteorder": b"little", "data/0": DATA, "version": b"3\n"}
    return found | {name.replace("__", "/"): data for name, data in more.items()}


class Zip:
    """An archive whose fields can be set to anything, record by record.

    ``local`` and ``central`` have for a name the fields that are to be others.
    """

    def __init__(self, content, *, folder="x/", local=None, central=None, end=None, end64=None):
        self.local, self.central = local or {}, central or {}
        out = bytearray()
        directory = bytearray()
        for name, data in content if isinstance(content, list) else content.items():
            at = len(out)
            out += self.header(folder + name, data, at)
            out += data
            if data:
                out += struct.pack("<IIII", 0x08074B50, 0, len(data), len(data))
            directory += self.entry(folder + name, data, at)
        count = len(content)
        self.start = len(out)
        out += directory
        end64 = {"length": 44, "disk": 0, "here": count, "count": count} | (end64 or {})
        end64 = {"size": len(directory), "start": self.start, "at": len(out), "disks": 1} | end64
        out += struct.pack(
            "<IQHHIIQQQQ", 0x06064B50, end64["length"], 45, 45, end64["disk"], 0, end64["here"],
            end64["count"], end64["size"], end64["start"],
        )  # fmt: skip
        out += struct.pack("<IIQI", 0x07064B50, 0, end64["at"], end64["disks"])
        end = {"disk": 0, "here": count, "count": count, "comment": b""} | (end or {})
        end = {"size": len(directory), "start": self.start, "junk": b""} | end
        out += struct.pack(
            "<IHHHHIIH", 0x06054B50, end["disk"], 0, end["here"], end["count"], end["size"],
            end["start"], len(end["comment"]),
        )  # fmt: skip
        self.bytes = bytes(out) + end["comment"] + end["junk"]

    def header(self, name, data, at):
        field = {"sign": 0x04034B50, "flags": 0x808, "method": 0, "size": 0, "packed": 0}
        field |= {"name": name.encode(), "extra": b"FB" + b"\0\0"} | self.local.get(name, {})
        padding = -(at + 30 + len(field["name"]) + len(field["extra"])) % 64
        field["extra"] += b"Z" * padding if len(field["extra"]) == 4 else b""
        return struct.pack(
            "<IHHHHHIIIHH", field["sign"], 0, field["flags"], field["method"], 0, 0, 0,
            field["packed"], field["size"], len(field["name"]), len(field["extra"]),
        ) + field["name"] + field["extra"]  # fmt: skip

    def entry(self, name, data, at):
        field = {"sign": 0x02014B50, "flags": 0x808, "method": 0, "size": len(data), "at": at}
        field |= {"packed": len(data), "disk": 0, "name": name.encode(), "extra": b""}
        field |= self.central.get(name, {})
        return struct.pack(
            "<IHHHHHHIIIHHHHHII", field["sign"], 0, 0, field["flags"], field["method"], 0, 0, 0,
            field["packed"], field["size"], len(field["name"]), len(field["extra"]), 0,
            field["disk"], 0, 0, field["at"],
        ) + field["name"] + field["extra"]  # fmt: skip


@pytest.fixture
def refuse(tmp_path):
    """Check that a file is refused, with its name and a reason, wherever it comes from."""
    path = tmp_path / "hostile.pt"

    def check(data, match, error=FormatError):
        path.write_bytes(data)
        for call in (tensorizer.load, lambda p: tensorizer.TensorDeserializer(p, "cpu")):
            with pytest.raises(error, match=match) as raised:
                call(path)
            assert "hostile.pt" in str(raised.value)
            assert len(str(raised.value)) < 2000
        with pytest.raises(error, match=match):
            tensorizer.load(io.BytesIO(data))

    return check


def load(data):
    return tensorizer.load(io.BytesIO(data))


def test_the_archive_itself_is_right():
    data = Zip(records()).bytes
    assert torch.equal(load(data)["a"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(torch.load(io.BytesIO(data), weights_only=True)["a"], load(data)["a"])
    # As zipfile writes it: without descriptors, zip64 and alignment; with a comment.
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in records().items():
            archive.writestr(f"any/{name}", content)
        archive.mkdir("any/data")
        archive.comment = b"PK\x05\x06" + bytes(40)
    assert torch.equal(load(buffer.getvalue())["a"], load(data)["a"])
    # As the first release with zip files wrote it: without a byte order.
    content = records()
    del content["byteorder"]
    assert torch.equal(load(Zip(content, folder="archive/").bytes)["a"], load(data)["a"])


CENTRAL = [
    ({"method": 8}, r"`x/data/0`: it is compressed \(method 8\)"),
    ({"method": 93}, "compressed"),
    ({"flags": 0x809}, "is encrypted"),
    ({"flags": 0x848}, "is encrypted"),
    ({"flags": 0x2808}, "is encrypted"),
    ({"flags": 0x828}, "flags 0x0828, of which some are unknown"),
    ({"packed": 23}, "has 23 bytes as it lies there, and 24 without compression"),
    ({"size": 32, "packed": 32}, r"'0': expected 24 bytes for 6 elements .* found 32"),
    ({"size": 1 << 31, "packed": 1 << 31}, "reaches into the next"),
    ({"size": 0xFFFFFFFF, "packed": 0xFFFFFFFF}, "reaches into the next"),
    ({"at": 0}, "reaches into the next|is another before its data"),
    ({"at": 5}, "reaches into the next|signature"),
    ({"at": 0xFFFFFFF0}, "reaches into the next one, or into the directory"),
    ({"at": 0xFFFFFFFF}, "reaches into the next one, or into the directory"),
    ({"disk": 1}, "lies in another part"),
    ({"disk": 0xFFFF}, "lies in another part"),
    ({"sign": 1}, "holds something else"),
    ({"name": b"x/data/1"}, "its name is another before its data"),
    ({"name": b"x/data/\xff"}, "UTF-8"),
    ({"name": b"y/data/0"}, "another folder"),
    ({"name": b"x/data.pkl"}, "is there twice|its name is another"),
    ({"extra": struct.pack("<HH", 1, 4)}, "ends inside its field"),
    ({"size": 0xFFFFFFFF, "extra": struct.pack("<HHI", 1, 4, 0)}, "ends inside its size"),
    ({"at": 0xFFFFFFFF, "extra": struct.pack("<HHQ", 1, 8, 1 << 63)}, "reaches into the next"),
    (
        {
            "size": 0xFFFFFFFF,
            "packed": 0xFFFFFFFF,
            "extra": struct.pack("<HHQQ", 1, 16, (1 << 64) - 1, (1 << 64) - 1),
        },
        "reaches into the next",
    ),
]


@pytest.mark.parametrize(("fields", "match"), CENTRAL, ids=str)
def test_directories(refuse, fields, match):
    refuse(Zip(records(), central={"x/data/0": fields}).bytes, match)


LOCAL = [
    ({"method": 8}, "its method is another before its data"),
    ({"flags": 0x800}, "what its flags say"),
    ({"flags": 0x809}, "what its flags say"),
    ({"size": 25}, "its size"),
    ({"packed": 23}, "its size"),
    ({"name": b"x/data/9"}, "its name"),
    ({"name": b"x/data/00"}, "its name"),
    ({"name": b""}, "its name"),
    ({"sign": 1}, "its signature"),
    ({"extra": bytes(60000)}, None),
]


@pytest.mark.parametrize(("fields", "match"), LOCAL, ids=lambda value: str(value)[:40])
def test_local_headers(refuse, fields, match):
    data = Zip(records(), local={"x/data/0": fields}).bytes
    if match is None:
        assert torch.equal(load(data)["a"], torch.arange(6.0).reshape(2, 3))
    else:
        refuse(data, match)


def test_a_header_that_reaches_into_the_next_record(refuse):
    data = bytearray(Zip(records()).bytes)
    at = data.index(b"x/data/0") - 2
    # The length of its extra fields.
    struct.pack_into("<H", data, at, 0xFFFF)
    refuse(bytes(data), "`x/data/0` of 24 bytes reaches into the next one")


def counts(number):
    """Return ends of which the plain one leaves the count to the other."""
    unset = {"count": 0xFFFF, "here": 0xFFFF}
    return {"end": unset, "end64": {"count": number, "here": number}}


ENDS = [
    ({"end": {"disk": 1}}, "several parts"),
    ({"end": {"here": 3}}, "several parts"),
    ({"end": {"count": 3, "here": 3}}, "do not agree"),
    ({"end": {"size": 5}}, "do not agree"),
    ({"end": {"start": 0}}, "do not agree"),
    ({"end": {"junk": b"!"}}, "without the directory at its end"),
    ({"end": {"junk": bytes(100_000)}}, "without the directory at its end"),
    ({"end64": {"disk": 1}}, "several parts"),
    ({"end64": {"disks": 2}}, "several parts"),
    ({"end64": {"here": 3}}, "several parts"),
    ({"end64": {"at": 0}}, "expected the end of the zip archive at byte"),
    ({"end64": {"at": 1 << 63}}, "expected the end of the zip archive at byte"),
    ({"end64": {"length": 45}}, "is none, or of another length"),
    (counts(3), "expected 3 records"),
    (counts(5), "cannot name 5 records"),
    (counts(1 << 63), "cannot name"),
    ({"end": {"size": 0xFFFFFFFF}, "end64": {"size": 1 << 63}}, "expected it to end at byte"),
    ({"end": {"start": 0xFFFFFFFF}, "end64": {"start": 2**64 - 1}}, "expected it to end at byte"),
    ({"end": {"start": 0xFFFFFFFF}, "end64": {"start": 0}}, "expected it to end at byte"),
]


@pytest.mark.parametrize(("fields", "match"), ENDS, ids=str)
def test_ends(refuse, fields, match):
    refuse(Zip(records(), **fields).bytes, match)


def test_truncated():
    data = Zip(records()).bytes
    for length in range(4, len(data)):
        with pytest.raises(FormatError):
            load(data[:length])


def test_overlaps_and_repetitions(refuse):
    content = records()
    twice = [*content.items(), ("data/0", DATA)]
    refuse(Zip(twice).bytes, "record `x/data/0` is there twice")
    # Two names for the same bytes.
    first = Zip(records(data__1=DATA)).bytes.index(b"x/data/0") - 30
    refuse(
        Zip(records(data__1=DATA), central={"x/data/1": {"at": first}}).bytes,
        "reaches into the next",
    )
    archive = Zip(content)
    refuse(
        Zip(content, central={"x/version": {"at": archive.start - 4}}).bytes,
        "reaches into the next one, or into the directory",
    )


def test_other_archives(refuse, tmp_path):
    def packed(method=zipfile.ZIP_STORED, **content):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", method) as archive:
            for name, data in content.items():
                archive.writestr(name.replace("__", "/"), data)
        return buffer.getvalue()

    without = "a zip archive without the `data.pkl` that torch.save writes"
    refuse(packed(a=b"1"), without)
    refuse(packed(zipfile.ZIP_DEFLATED, a__b=b"1"), without)
    refuse(packed(data_pkl=b"1"), without)
    refuse(packed(), "looks like a zip archive that holds nothing")
    inner = Zip(records()).bytes
    refuse(packed(model__model_pt=inner), without)
    # A bomb of zeros is never unpacked.
    bomb = {"x/" + name: data for name, data in records(data__1=bytes(10_000_000)).items()}
    refuse(packed(zipfile.ZIP_DEFLATED, **bomb), "is compressed")
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "script.pt")
    refuse((tmp_path / "script.pt").read_bytes(), "a TorchScript archive.*torch.jit.load reads it")
    refuse(Zip(records(code__a=b"")).bytes, "a TorchScript archive")
    refuse(b"before" + inner, "Not a tensorizer file")
    refuse(b"PK\x03\x04" + b"before" + inner, "expected it to end at byte|expected the end")


def test_legacy_pickles(refuse, tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    data = (tmp_path / "x.pt").read_bytes()
    refuse(data, "_use_new_zipfile_serialization=False wrote: torch.load it once")
    refuse(pickle.dumps({"a": 1}), "a pickle")
    with pytest.raises((RuntimeError, ValueError), match="torch.load it once"):
        ops.load(str(tmp_path / "x.pt"))


def test_byte_orders_and_versions(refuse):
    refuse(Zip(records(byteorder=b"big")).bytes, "big-endian machine", NotImplementedError)
    refuse(Zip(records(byteorder=b"middle")).bytes, "says b'middle', which is unknown")
    refuse(Zip(records(byteorder=b"")).bytes, "unknown")
    refuse(Zip(records(version=b"11\n")).bytes, "says b'11.n', which is unknown")
    refuse(Zip(records(version=bytes(1000))).bytes, "has 1000 bytes")


STORAGES = [
    (Storage(key="7"), "storage '7' has no record"),
    (Storage(key="../0"), "has no record"),
    (Storage(key=""), "has no record"),
    (Storage(count=5), "expected 20 bytes for 5 elements of torch.float32, found 24"),
    (Storage(count=7), "expected 28 bytes for 7 elements"),
    (Storage(count=-1), "expected -4 bytes"),
    (Storage(count=1 << 62), "expected 18446744073709551616 bytes"),
    (Storage(count=1 << 200), "elements of torch.float32"),
    (Storage(count=6.0), "damaged id of a storage"),
    (Storage(count=True), "damaged id of a storage"),
    (Storage(kind=torch.DoubleStorage), "expected 48 bytes"),
    (Storage(kind=torch.Size), "damaged id of a storage"),
    (Storage(key=0), "damaged id of a storage"),
    (Storage(pid=("storage",)), "expected the id of a storage"),
    (Storage(pid=(*Storage().pid, 1)), "expected the id of a storage"),
    (Storage(pid=5), "expected the id of a storage"),
]


@pytest.mark.parametrize(("storage", "match"), STORAGES, ids=range(len(STORAGES)))
def test_storages(refuse, storage, match):
    refuse(Zip(records({"a": tensor(storage)})).bytes, match)


VIEWS = [
    {"offset": 1},
    {"offset": -1},
    {"offset": 1 << 62},
    {"offset": 1 << 63},
    {"shape": (7,), "stride": (1,)},
    {"shape": (2, 3), "stride": (4, 1)},
    {"shape": (-1,), "stride": (1,)},
    {"shape": (1 << 62,), "stride": (1,)},
    {"shape": (1 << 62, 1 << 62), "stride": (1, 1)},
    {"shape": (1 << 40, 1 << 40), "stride": (0, 0)},
    {"shape": (3,), "stride": (1 << 62,)},
    {"shape": (3,), "stride": (1 << 63,)},
    {"shape": (3,), "stride": (1, 1)},
    {"shape": (1,) * 100, "stride": (1,) * 100},
    {"shape": (1 << 62, 0), "stride": (1, 1)},
    {"shape": "abc", "stride": "abc"},
    {"shape": (2.5,), "stride": (1,)},
    {"shape": None},
]


@pytest.mark.parametrize("view", VIEWS, ids=range(len(VIEWS)))
def test_views(refuse, view):
    refuse(
        Zip(records({"a": tensor(**view)})).bytes,
        "does not lie in its storage|its pickle is damaged|is too large|dimensions",
    )


def test_a_view_that_repeats_takes_no_memory():
    loaded = load(Zip(records({"a": tensor(shape=(1 << 50,), stride=(0,))})).bytes)["a"]
    assert loaded.shape == (1 << 50,)
    assert loaded.untyped_storage().nbytes() == 24
    # What has no data is refused, whatever size it claims.
    meta = Call(
        torch._utils._rebuild_meta_tensor_no_storage, torch.float32, (1 << 58,), (1,), False
    )
    with pytest.raises(NotImplementedError, match="'a' was saved on the meta device"):
        load(Zip(records({"a": meta})).bytes)


class Attack:
    def __reduce__(self):
        return os.system, ("echo attacked",)


def test_only_what_the_restricted_unpickler_allows(refuse):
    for tree, match in (
        ({"a": Attack()}, "blocked|Unsupported global"),
        ({"a": Call(eval, "1")}, "Unsupported global"),
        ({"a": Call(torch.load, "x")}, "Unsupported global"),
        ({"a": random.Random()}, "Unsupported global"),
        ({"a": Storage(pid=("module", 1, 2, 3, 4))}, "Only persistent_load of storage"),
    ):
        refuse(Zip(records(tree)).bytes, match, pickle.UnpicklingError)
    content = records()
    for data in (b"", b"\x80\x02", content["data.pkl"][:-1], b"\xff" * 100, b"\x80\x02."):
        content["data.pkl"] = data
        refuse(Zip(content).bytes, "damaged|Unsupported op", (FormatError, pickle.UnpicklingError))
    # What callers allow is allowed.
    with torch.serialization.safe_globals([collections.Counter, fractions]):
        assert torch.equal(load(Zip(records({"b": Call(fractions), "a": tensor()})).bytes)["a"],
                           torch.arange(6.0).reshape(2, 3))  # fmt: skip


def fractions():
    return object()


def test_an_environment_variable_changes_nothing(tmp_path):
    (tmp_path / "x.pt").write_bytes(Zip(records({"a": Call(eval, "print('attacked')")})).bytes)
    code = "import sys, tensorizer\ntensorizer.load(sys.argv[1])"
    env = {**os.environ, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    done = run_python(code, tmp_path / "x.pt", env=env)
    assert "UnpicklingError" in done.stderr
    assert "attacked" not in done.stdout


def test_structures(refuse):
    loop = []
    loop.append({"a": loop})
    refuse(Zip(records(loop)).bytes, "contains itself")
    deep = tensor()
    for _ in range(300):
        deep = [deep]
    refuse(Zip(records(deep)).bytes, "nested more than 256 levels", NotImplementedError)
    # A short pickle that names one tensor 2 to the 60 times, and one that names nothing as often.
    many = tensor()
    for _ in range(60):
        many = [many, many]
    refuse(Zip(records(many)).bytes, "over and over")
    none = []
    for _ in range(60):
        none = [none, none]
    assert load(Zip(records({"a": tensor(), "none": none})).bytes).keys() == {"a"}
    wide = [tensor(), *[[]] * 2000]
    refuse(Zip(records([wide] * 4000)).bytes, "over and over")
    long = {"k" * 60000: [tensor()] * 1000}
    refuse(Zip(records(long)).bytes, "over and over")
    refuse(Zip(records({"k" * 70000: tensor()})).bytes, "name is too long")
    for tree, match in (
        ({1.5: tensor()}, "names have strings and indices, and not 1.5"),
        ({None: tensor()}, "not None"),
        ({True: tensor()}, "not True"),
        ({-1: tensor()}, "not -1"),
        ({1 << 64: tensor()}, "not 18446744073709551616"),
        ({b"k" * 5000: tensor()}, "not b'kkk"),
        ({(1, 2): tensor()}, r"not \(1, 2\)"),
        ({"a": tensor(), 1: tensor()}, "strings and integers as keys"),
        ({"b": {"a": tensor(), 1: [tensor()]}}, "strings and integers as keys"),
    ):
        refuse(Zip(records(tree)).bytes, match, NotImplementedError)
    # What is no tensor may be beside others, whatever its key.
    assert load(Zip(records({"a": tensor(), 1: 2, None: "x", (1, 2): [3]})).bytes).keys() == {"a"}


def saved(value):
    buffer = io.BytesIO()
    torch.save({"plain": torch.ones(2), "other": value}, buffer)
    return buffer.getvalue()


@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_not_plain(refuse):
    for value, match in (
        (torch.eye(3).to_sparse(), "tensor 'other' is sparse_coo"),
        (torch.eye(3).to_sparse_csr(), "tensor 'other' is sparse_csr"),
        (torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8), "a quantized tensor"),
        (torch.nested.nested_tensor([torch.randn(2)]), "a nested tensor"),
        (
            torch.nested.nested_tensor([torch.randn(2)], layout=torch.jagged),
            "tensor 'other' is of the class NestedTensor",
        ),
        ({torch.ones(1)}, "not None"),
    ):
        refuse(saved(value), match, NotImplementedError)
    assert torch._utils._sparse_tensors_to_validate == []

    class Special(torch.Tensor):
        pass

    Special.__module__, Special.__qualname__ = __name__, "Special"
    globals()["Special"] = Special
    with torch.serialization.safe_globals([Special]):
        special = torch.ones(3).as_subclass(Special)
        refuse(saved(special), "of the class Special", NotImplementedError)


def test_half_of_a_pair(tmp_path):
    with tensorizer.torch_compat.tensorizer_saving(str(tmp_path / "x.tensors")):
        torch.save({"a": torch.ones(3)}, tmp_path / "x.pt")
    # The other is of the old package.
    for path in (tmp_path / "x.pt", GOLDEN / "tc_linear.pt"):
        with pytest.raises(FormatError, match=r".pt is one half of .* tensorizer_loading"):
            tensorizer.load(path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(4))
def test_mutations(seed):
    """Whatever is changed, a file is refused in a known way, or gives bytes of its own."""
    chance = random.Random(seed)
    small = io.BytesIO()
    weight = torch.randn(5, 4)
    torch.save({"w": weight, "t": weight.t(), "n": {"x": [torch.arange(9)]}, "e": 5}, small)
    originals = [Zip(records()).bytes, small.getvalue()]
    outcomes = collections.Counter()
    for _ in range(1000):
        data = bytearray(chance.choice(originals))
        for _ in range(chance.choice((1, 1, 1, 2, 5))):
            at, kind = chance.randrange(len(data)), chance.randrange(5)
            if kind == 0:
                data[at] ^= 1 << chance.randrange(8)
            elif kind == 1:
                data[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
            elif kind == 2:
                data[at : at + 4] = chance.choice((b"\xff" * 4, bytes(4), b"\0\0\0\x80"))
            elif kind == 3:
                del data[at : at + chance.randrange(1, 20)]
            else:
                start = chance.randrange(len(data))
                data[at:at] = data[start : start + chance.randrange(1, 40)]
        try:
            loaded = load(bytes(data))
        except REFUSALS as error:
            outcomes[type(error).__name__] += 1
            continue
        outcomes["loaded"] += 1
        for value in loaded.values():
            if value.numel() < 1000 and value.numel():
                # All of its bytes are those of the file.
                raw = bytes(value.untyped_storage())
                assert raw in data
    assert outcomes["loaded"] > 50
    assert outcomes["FormatError"] > 300
