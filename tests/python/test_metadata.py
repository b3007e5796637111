"""Metadata in ``.tensors`` files: behind the index, where old releases do not look."""

import io
import struct
import zlib

import pytest
import tensorizer
import torch
from conftest import TENSORS, assert_same
from tensorizer import DecryptionParams, EncryptionParams, FormatError, TensorSerializer, TensorType
from tensorizer.file.file_writer import FileWriter
from tensorizer.file.open_file import OpenFile

METADATA = {"zeta": "ü\n\0", "": "", "alpha": "x" * 1000}
KEY = bytes(range(32))
PARAMS = DecryptionParams.from_key(KEY)
PROLOGUE = 73
MIN_INDEX = 256 << 10


class Kept(io.BytesIO):
    """Memory that can be read when its writer has closed it."""

    def close(self):
        pass


def stored(metadata):
    """Return the bytes that metadata are stored as."""
    texts = [text.encode() for pair in metadata.items() for text in pair]
    return ended(b"".join(struct.pack("<I", len(text)) + text for text in texts))


def ended(pairs):
    return pairs + b"TZMETA01" + struct.pack("<II", len(pairs), zlib.crc32(pairs))


def index_end(data):
    return PROLOGUE + int.from_bytes(data[65:73], "little")


def read(source):
    return dict(tensorizer.info(source).metadata)


def save_with_room(tensors, target, **options):
    """Save by a serializer, which leaves room in the index for more tensors."""
    with TensorSerializer(target, **options) as file:
        file.write_state_dict(tensors)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "f.tensors"


def test_metadata_follow_the_index(path):
    save_with_room(TENSORS, path)
    plain = path.read_bytes()
    for none in (None, {}):
        save_with_room(TENSORS, path, metadata=none)
        assert path.read_bytes() == plain
        assert read(path) == {}
    save_with_room(TENSORS, path, metadata=METADATA)
    data, end = path.read_bytes(), index_end(plain)
    expected = stored(METADATA)
    assert data == plain[: end - len(expected)] + expected + plain[end:]
    info = tensorizer.info(path)
    assert list(info.metadata.items()) == list(METADATA.items())
    assert list(info.tensors) == list(TENSORS)
    loaded = tensorizer.load(path, "cpu", verify_hash=True)
    for name, tensor in TENSORS.items():
        assert_same(loaded[name], tensor)


def test_every_way_of_writing(path):
    def later(target):
        tensorizer.save_async(TENSORS, target, metadata=METADATA).result(60)

    def now(target):
        tensorizer.save(TENSORS, target, metadata=METADATA)

    def with_room(target):
        save_with_room(TENSORS, target, metadata=METADATA)

    for writes in ((now, later), (with_room, with_room)):
        writes[0](path)
        expected = path.read_bytes()
        for write in writes:
            write(path)
            assert path.read_bytes() == expected
            file = Kept()
            write(file)
            assert file.getvalue() == expected
    file = Kept()
    file.write(bytes(100))
    with_room(file)
    file.seek(100)
    assert read(file) == METADATA


def test_a_file_object_shows_them_from_the_first_tensor_on():
    """They are there even if the index outgrows its reserved space, and gets tags."""
    file = Kept()
    writer = TensorSerializer(file, metadata=METADATA)
    lengths = set()
    for number in range(40):
        shape = (0, 2**32) if number == 20 else (number,)
        name = f"{number}".ljust(20_000, "x")
        tensor = torch.zeros(shape, dtype=torch.int8)
        writer.write_tensor(0, name, TensorType.BUFFER, tensor)
        data = file.getvalue()
        info = tensorizer.info(io.BytesIO(data))
        assert (len(info.tensors), info.metadata) == (number + 1, METADATA)
        lengths.add(index_end(data))
    writer.close()
    assert read(io.BytesIO(file.getvalue())) == METADATA
    assert len(lengths) > 1


@pytest.mark.parametrize(("count", "alignment"), [(3200, 1), (3200, 64), (5000, 64)])
def test_metadata_may_fill_the_reserved_index(path, alignment, count):
    """They may begin where the last entry ends, but leave room for more entries if few."""
    tensors = {f"layer.{number}": torch.full((2,), number) for number in range(count)}
    entries = sum(2 + len(name) + 1 + 1 + 3 + 1 + 4 + 24 for name in tensors)
    reserved = MIN_INDEX if entries <= MIN_INDEX else -(-entries // 4096) * 4096
    # Around two lengths of four bytes, a name of one, and 16 bytes at the end.
    room = reserved - entries - 25
    for length in (room - 1, room, room + 1, 1_000_000):
        metadata = {"x": "y" * length}
        tensorizer.save(tensors, path, alignment=alignment, metadata=metadata)
        data = path.read_bytes()
        assert index_end(data) == PROLOGUE + entries + len(stored(metadata))
        assert read(path) == metadata
        save_with_room(tensors, path, alignment=alignment, metadata=metadata)
        data = path.read_bytes()
        expected = reserved + 4096 if length == room + 1 else reserved
        assert length > room + 1 or index_end(data) == PROLOGUE + expected
        if length == room:
            assert data[PROLOGUE + entries :].startswith(stored(metadata))
        assert read(path) == metadata
        loaded = tensorizer.load(path, "cpu", verify_hash=True)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_an_identity_and_a_manifest_are_beside_them(path):
    params = EncryptionParams(KEY, manifest=True)
    for encryption in (None, params):
        for identity in (None, bytes(range(16))):
            options = {"encryption": encryption, "clear_metadata": True}
            with FileWriter(path, metadata=METADATA, **options) as writer:
                if identity:
                    writer.set_pair_id(identity)
                writer.write_leaves(list(TENSORS), list(TENSORS.values()))
            sealed = DecryptionParams.from_key(KEY, require_manifest=True) if encryption else None
            with OpenFile(path, encryption=sealed) as file:
                assert dict(file.reader.metadata) == METADATA
                assert file.reader.pair_id == identity


@pytest.mark.parametrize(
    ("metadata", "error", "text"),
    [
        ({"a": 1}, TypeError, "metadata must be a dict of strings, found 1 at 'a'"),
        ({1: "a"}, TypeError, "a dict of strings, found 'a' at 1"),
        ([("a", "b")], TypeError, "a dict of strings, found list"),
        ({"a": "\ud800"}, ValueError, "metadata must be valid Unicode"),
        ({"a": "x" * 100_000_000}, ValueError, "at most 100000000 bytes, found 100000009"),
    ],
)
def test_invalid_metadata_leave_the_old_file(path, metadata, error, text):
    path.write_bytes(b"old")
    for save in (tensorizer.save, tensorizer.save_async):
        with pytest.raises(error, match=text):
            save(TENSORS, path, metadata=metadata)
    with pytest.raises(error, match=text):
        TensorSerializer(path, metadata=metadata)
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


def test_an_encrypted_file_has_them_in_the_clear_only_if_that_is_said(path):
    encryption = EncryptionParams(KEY)
    for save in (tensorizer.save, tensorizer.save_async, TensorSerializer):
        arguments = [path] if save is TensorSerializer else [TENSORS, path]
        with pytest.raises(ValueError, match=r"are not encrypted.*clear_metadata"):
            save(*arguments, encryption=encryption, metadata=METADATA)
    assert not list(path.parent.iterdir())
    tensorizer.save(TENSORS, path, encryption=encryption, metadata={})
    assert read(path) == {}
    tensorizer.save(TENSORS, path, encryption=encryption, metadata=METADATA, clear_metadata=True)
    assert read(path) == METADATA
    assert_same(tensorizer.load(path, "cpu", encryption=PARAMS)["weight"], TENSORS["weight"])


def test_a_manifest_seals_them_and_nothing_else_does(path):
    changed = {**METADATA, "alpha": "y" * 1000}
    for manifest in (False, True):
        encryption = EncryptionParams(KEY, manifest=manifest)
        options = {"encryption": encryption, "clear_metadata": True}
        tensorizer.save(TENSORS, path, metadata=METADATA, **options)
        assert read(path) == METADATA
        data = path.read_bytes()
        for forged in (
            data.replace(stored(METADATA), stored(changed)),
            data.replace(stored(METADATA), bytes(len(stored(METADATA)))),
        ):
            assert forged != data
            path.write_bytes(forged)
            # Without a key the seal is not compared.
            assert read(path) in (changed, {})
            if not manifest:
                tensorizer.load(path, "cpu", encryption=PARAMS)
                continue
            with pytest.raises(tensorizer.CryptographyError, match="manifest"):
                tensorizer.info(path, encryption=PARAMS)
            with pytest.raises(tensorizer.CryptographyError, match="manifest"):
                tensorizer.load(path, "cpu", encryption=PARAMS)


def test_damage_is_told_with_its_place_and_tensors_are_loaded(path):
    save_with_room(TENSORS, path, metadata={"name": "value"})
    data = path.read_bytes()
    end = index_end(data)
    (start, magic) = (end - len(stored({"name": "value"})), end - 16)
    for at, where, text in (
        (start + 5, start, "damaged: expected CRC-32"),
        (end - 1, start, "damaged: expected CRC-32"),
        (end - 6, magic + 8, "expected metadata of at most"),
    ):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        with pytest.warns(UserWarning, match=f"without its metadata: .*{text}.*at byte {where}\\)"):
            assert read(path) == {}
        with OpenFile(path) as file, pytest.raises(FormatError, match=f"at byte {where}\\)"):
            file.reader.metadata
        loaded = tensorizer.load(path, "cpu", verify_hash=True)
        assert_same(loaded["weight"], TENSORS["weight"])
    for texts, text in (
        ((b"a", b"b", b"a", b"c"), "`a` comes twice"),
        ((b"a", b"\xff"), "a value in the metadata is not UTF-8"),
        ((b"a",), "the metadata ends inside its value"),
    ):
        bad = ended(b"".join(struct.pack("<I", len(text)) + text for text in texts))
        path.write_bytes(data[: end - len(bad)] + bad + data[end:])
        with pytest.warns(UserWarning, match=text):
            assert list(tensorizer.info(path).tensors) == list(TENSORS)
    # Without its first letter it is unused space, as any bytes there are.
    path.write_bytes(data[:magic] + b"t" + data[magic + 1 :])
    assert read(path) == {}
    tensorizer.load(path, "cpu", verify_hash=True)


READ_WITH_OLD = """
options = {}
if args[1]:
    options["encryption"] = tensorizer.DecryptionParams.from_key(args[1])
d = tensorizer.TensorDeserializer(args[0], device="cpu", verify_hash=True, **options)
return {name: t.detach().float().tolist() for name, t in d.items()}
"""


def test_the_old_package_does_not_see_them(old, path):
    expected = {name: tensor.float().tolist() for name, tensor in TENSORS.items()}
    for encryption in (None, EncryptionParams(KEY), EncryptionParams(KEY, manifest=True)):
        for alignment in (1, 64):
            options = {"encryption": encryption, "alignment": alignment}
            tensorizer.save(TENSORS, path, metadata=METADATA, clear_metadata=True, **options)
            assert old(READ_WITH_OLD, str(path), encryption and KEY) == expected
    tensorizer.save(TENSORS, path, metadata={"long": "x" * 1_000_000})
    assert old(READ_WITH_OLD, str(path), None) == expected


def test_files_of_the_old_package_have_none(old, path):
    old(
        """
s = tensorizer.TensorSerializer(args[0])
s.write_state_dict({"a": torch.arange(5)})
s.close()
""",
        str(path),
    )
    assert read(path) == {}
    assert tensorizer.load(path, "cpu")["a"].tolist() == [0, 1, 2, 3, 4]
