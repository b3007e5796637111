"""Checkpoints of torch.save whose archives are damaged, or made to harm."""

import collections
import io
import pickle
import random
import struct
import zipfile

import pytest
import torch
from archives import DATA, REFUSALS, Zip, load, records
from tensorizer import FormatError

ops = torch.ops.tensorizer
#: Seeds of the mutations.
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))]


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
    ({"method": 8}, "`x/data/0`: its method in its local header differs"),
    ({"method": 93}, "compressed"),
    ({"flags": 0x809}, "is encrypted"),
    ({"flags": 0x848}, "is encrypted"),
    ({"flags": 0x2808}, "is encrypted"),
    ({"flags": 0x828}, "flags 0x0828, of which some are unknown"),
    ({"packed": 23}, "has 23 bytes in the archive, and 24 without compression"),
    ({"size": 32, "packed": 32}, r"'0': expected 24 bytes for 6 elements .* found 32"),
    ({"size": 1 << 31, "packed": 1 << 31}, "overlaps the next"),
    ({"size": 0xFFFFFFFF, "packed": 0xFFFFFFFF}, "overlaps the next"),
    ({"at": 0}, "overlaps the next|differs from the directory"),
    ({"at": 5}, "overlaps the next|signature"),
    ({"at": 0xFFFFFFF0}, "overlaps the next record, or the directory"),
    ({"at": 0xFFFFFFFF}, "overlaps the next record, or the directory"),
    ({"disk": 1}, "is in another part"),
    ({"disk": 0xFFFF}, "is in another part"),
    ({"sign": 1}, "has an entry with a wrong signature"),
    ({"name": b"x/data/1"}, "its name in its local header differs"),
    ({"name": b"x/data/\xff"}, "UTF-8"),
    ({"name": b"y/data/0"}, "storage '0' has no record"),
    ({"name": b"x/data.pkl"}, "has two records|its name in its local header"),
    ({"extra": struct.pack("<HH", 1, 4)}, "ends inside its field"),
    ({"size": 0xFFFFFFFF, "extra": struct.pack("<HHI", 1, 4, 0)}, "ends inside its size"),
    ({"at": 0xFFFFFFFF, "extra": struct.pack("<HHQ", 1, 8, 1 << 63)}, "overlaps the next"),
    (
        {
            "size": 0xFFFFFFFF,
            "packed": 0xFFFFFFFF,
            "extra": struct.pack("<HHQQ", 1, 16, (1 << 64) - 1, (1 << 64) - 1),
        },
        "overlaps the next",
    ),
]


@pytest.mark.parametrize(("fields", "match"), CENTRAL, ids=str)
def test_directories(refuse, fields, match):
    refuse(Zip(records(), central={"x/data/0": fields}).bytes, match)


LOCAL = [
    ({"method": 8}, "its method in its local header differs"),
    ({"flags": 0x800}, "its flags in its local header differ"),
    ({"flags": 0x809}, "its flags in its local header differ"),
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
    refuse(bytes(data), "`x/data/0` of 24 bytes overlaps the next record")


def counts(number):
    """Return ends of which the plain one leaves the count to the other."""
    unset = {"count": 0xFFFF, "here": 0xFFFF}
    return {"end": unset, "end64": {"count": number, "here": number}}


ENDS = [
    ({"end": {"disk": 1}}, "several parts"),
    ({"end": {"here": 3}}, "several parts"),
    ({"end": {"count": 3, "here": 3}}, "contradict each other"),
    ({"end": {"size": 5}}, "contradict each other"),
    ({"end": {"start": 0}}, "contradict each other"),
    ({"end": {"junk": b"!"}}, "without a central directory at its end"),
    ({"end": {"junk": bytes(100_000)}}, "without a central directory at its end"),
    ({"end64": {"disk": 1}}, "several parts"),
    ({"end64": {"disks": 2}}, "several parts"),
    ({"end64": {"here": 3}}, "several parts"),
    ({"end64": {"at": 0}}, "expected the zip64 end record of the zip archive at byte"),
    ({"end64": {"at": 1 << 63}}, "expected the zip64 end record of the zip archive at byte"),
    ({"end64": {"length": 45}}, "has a wrong signature or length"),
    (counts(3), "expected 3 records"),
    (counts(5), "cannot name 5 records"),
    (counts(1 << 63), "cannot name"),
    ({"end": {"size": 0xFFFFFFFF}, "end64": {"size": 1 << 63}}, "expected it to end at byte"),
    ({"end": {"start": 0xFFFFFFFF}, "end64": {"start": 2**64 - 1}}, "expected it to end at byte"),
    ({"end": {"start": 0xFFFFFFFF}, "end64": {"start": 0}}, "expected it to end at byte"),
]


@pytest.mark.parametrize(("fields", "match"), ENDS, ids=str)
def test_damaged_ends_of_archives_are_refused(refuse, fields, match):
    refuse(Zip(records(), **fields).bytes, match)


def test_truncated():
    data = Zip(records()).bytes
    for length in range(4, len(data)):
        with pytest.raises(FormatError):
            load(data[:length])


def test_overlaps_and_repetitions(refuse):
    content = records()
    twice = [*content.items(), ("data/0", DATA)]
    refuse(Zip(twice).bytes, "two records `x/data/0`")
    # Two names for the same bytes.
    first = Zip(records(data__1=DATA)).bytes.index(b"x/data/0") - 30
    refuse(
        Zip(records(data__1=DATA), central={"x/data/1": {"at": first}}).bytes,
        "overlaps the next",
    )
    archive = Zip(content)
    refuse(
        Zip(content, central={"x/version": {"at": archive.start - 4}}).bytes,
        "overlaps the next record, or the directory",
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
    refuse(packed(**{"arr_0.npy": b"1"}), "an .npz archive of numpy")
    refuse(packed(), "this is a zip archive that holds nothing")
    inner = Zip(records()).bytes
    refuse(packed(model__model_pt=inner), without)
    # A storage that the pickle does not name is never inflated.
    bomb = {"x/" + name: data for name, data in records(data__1=bytes(10_000_000)).items()}
    assert list(load(packed(zipfile.ZIP_DEFLATED, **bomb))) == ["a"]
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "script.pt")
    refuse((tmp_path / "script.pt").read_bytes(), "a TorchScript archive.*torch.jit.load")
    refuse(Zip(records(code__a=b"")).bytes, "a TorchScript archive")
    refuse(b"before" + inner, "no format that tensorizer reads")
    refuse(b"PK\x03\x04" + b"before" + inner, "expected it to end at byte|expected the zip64 end")


def test_legacy_pickles(refuse, tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    refuse(pickle.dumps({"a": 1}), "a pickle that torch.save did not write")
    with pytest.raises((RuntimeError, ValueError), match="convert it with `tensorizer cp`"):
        ops.load(str(tmp_path / "x.pt"))


def test_byte_orders_and_versions(refuse):
    refuse(Zip(records(byteorder=b"big")).bytes, "big-endian machine", NotImplementedError)
    refuse(Zip(records(byteorder=b"middle")).bytes, "says b'middle', which is unknown")
    refuse(Zip(records(byteorder=b"")).bytes, "unknown")
    refuse(Zip(records(version=b"11\n")).bytes, "says b'11.n', which is unknown")
    refuse(Zip(records(version=bytes(1000))).bytes, "has 1000 bytes")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", SEEDS)
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
