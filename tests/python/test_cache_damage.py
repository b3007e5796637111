"""Copies of the cache whose bytes are not those of the server's file any more."""
# ruff: noqa: F811  # parameters are fixtures

import pytest
import tensorizer
import torch
from tensorizer import TensorDeserializer, load
from test_cache import (  # noqa: F401  # fixtures
    FIRST,
    MB,
    assert_all,
    entries,
    folder,
    parts,
    served,
    set_variable,
    tensors,
)


@pytest.fixture
def source(nginx, served):
    """The server, a file of it, and its size."""
    return nginx, *served


def spoil(entry, at, data=b"\xa5" * 4):
    with entry.open("r+b") as file:
        file.seek(at)
        file.write(data)


#: Offset of a damaged byte, and True if only a comparison of hashes finds the damage.
DAMAGED = {
    "prologue": (2, False),
    "index": (300, False),
    "header": (MB // 4 + 50, False),
    "data": (5 * MB, True),
}


@pytest.mark.parametrize("where", DAMAGED)
@pytest.mark.parametrize("names", [None, [f"t{i}" for i in range(7)]], ids=["all", "some"])
def test_damaged_bytes_are_fetched_anew_once(source, folder, tensors, where, names):
    nginx, name, size = source
    uri = f"{nginx.http}/{name}"
    at, verify = DAMAGED[where]
    load(uri, names=names, cache_dir=folder)
    (entry,) = parts(folder) if names else entries(folder)
    spoil(entry, at)
    before = nginx.sent(name)
    assert_all(load(uri, cache_dir=folder, verify_hash=verify), tensors)
    assert nginx.sent(name) - before <= 2 * size + 2 * FIRST
    # The repaired copy is right, and not fetched again.
    before = nginx.sent(name)
    assert_all(load(uri, cache_dir=folder, verify_hash=True), tensors)
    assert nginx.sent(name) - before <= 2 * FIRST


def fill(uri, tensors):
    found = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    torch.ops.tensorizer.load(uri, list(found), list(found.values()), verify=True)
    return found


#: Loads that compare hashes, beside the one above.
WAYS = {
    "operator": lambda uri, tensors: torch.ops.tensorizer.load(uri, verify=True),
    "in place": fill,
    "iterator": lambda uri, tensors: dict(tensorizer.iterate(uri, verify_hash=True)),
    "deserializer": lambda uri, tensors: TensorDeserializer(uri, "cpu", verify_hash=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_load_fetches_damaged_bytes_anew(source, folder, tensors, monkeypatch, way):
    nginx, name, _ = source
    set_variable(monkeypatch, "TENSORIZER_CACHE", str(folder))
    uri = f"{nginx.http}/{name}"
    load(uri)
    (entry,) = entries(folder)
    spoil(entry, DAMAGED["data"][0])
    assert_all(WAYS[way](uri, tensors), tensors)


def test_a_wrong_key_is_no_damage(nginx, tensors, folder, tmp_path):
    name, key = "sealed.tensors", tensorizer.EncryptionParams.random()
    tensorizer.save(tensors, nginx.root / name, encryption=key)
    uri, right = f"{nginx.http}/{name}", tensorizer.DecryptionParams.from_key(key.key)
    wrong = tensorizer.DecryptionParams.from_key(bytes(32))
    load(uri, cache_dir=folder, encryption=right)
    (entry,) = entries(folder)
    before = nginx.sent(name)
    with pytest.raises(tensorizer.CryptographyError):
        load(uri, cache_dir=folder, encryption=wrong)
    assert entries(folder) == [entry]
    assert nginx.sent(name) - before < 8 * MB
    spoil(entry, DAMAGED["data"][0])
    assert_all(load(uri, cache_dir=folder, encryption=right), tensors)
    assert not entries(folder)


def test_damage_that_cannot_be_mended_names_the_entry(nginx, served, folder, tensors):
    name, _ = served
    uri = f"{nginx.http}/{name}"
    load(uri, cache_dir=folder)
    (entry,) = entries(folder)
    spoil(entry, DAMAGED["data"][0])
    damaged = entry.stat().st_ino
    file = TensorDeserializer(uri, "cpu", cache_dir=folder, lazy_load=True, verify_hash=True)
    (nginx.root / name).rename(nginx.root / f"{name}.gone")
    with pytest.raises(OSError, match="404") as failed:
        list(file.values())
    assert f"the cached copy `{entry}` was damaged and has been removed: " in str(failed.value)
    assert "crc32" in str(failed.value).lower()
    assert not entry.exists() or entry.stat().st_ino != damaged


def test_slices_of_a_copy_with_two_damaged_headers(nginx, folder, tmp_path):
    """One has another nonce, which only decryption finds; the other one ends the first attempt."""
    key, name = tensorizer.EncryptionParams.random(), "slices.tensors"
    made = {"first_tensor": torch.randn(1_500_000), "second_tensor": torch.randn(1_500_000)}
    tensorizer.save(made, nginx.root / name, encryption=key)
    whole = (nginx.root / name).read_bytes()
    options = {
        "encryption": tensorizer.DecryptionParams.from_key(key.key),
        "slices": {name: (slice(700_000, 1_400_000),) for name in made},
    }

    (tmp_path / "f").write_bytes(whole)

    def fails(at, kind):
        """Tell whether a load raises this error if one byte is changed."""
        spoil(tmp_path / "f", at, bytes([whole[at] ^ 1]))
        try:
            load(tmp_path / "f", **options)
        except Exception as error:
            return type(error) is kind
        finally:
            spoil(tmp_path / "f", at, whole[at : at + 1])

    first, second = (whole.rindex(name.encode()) + len(name) for name in made)
    # The last one is part of a piece's nonce or tag, so that the header itself is valid.
    places = reversed(range(first, first + 300))
    nonce = next(at for at in places if fails(at, tensorizer.CryptographyError))
    places = range(second, second + 300)
    field = next(at for at in places if fails(at, tensorizer.FormatError))
    uri = f"{nginx.http}/{name}"
    load(uri, cache_dir=folder, encryption=options["encryption"])
    (entry,) = entries(folder)
    content = entry.read_bytes()
    for at in (nonce, field):
        spoil(entry, content.index(whole[at - 20 : at + 20]) + 20, b"\xa5")
    for tensor, loaded in load(uri, cache_dir=folder, **options).items():
        assert torch.equal(loaded, made[tensor][700_000:1_400_000])
