"""The two halves of a saved object: of and for the old package, hostile, lost, half written."""

import gzip
import io
import os
import pickle
import re
import types
from pathlib import Path

import pytest
import tensorizer
import torch
from conftest import GOLDEN, MANIFEST, assert_same, files
from pairs import assert_state, load, save, state
from processes import run_python
from tensorizer import CryptographyError, DecryptionParams, EncryptionParams, TensorDeserializer
from tensorizer.serialization import FormatError
from tensorizer.torch_compat import PairMismatchError, tensorizer_saving
from tensorizer_cli.main import main

pytestmark = pytest.mark.device

CASES = {case["name"]: case for case in MANIFEST["torch_compat"]}
KEY = bytes(range(32))


@pytest.fixture
def golden(tmp_path):
    def unpack(name):
        case = CASES[name]
        path = tmp_path / case["pt"]
        path.write_bytes((GOLDEN / case["pt"]).read_bytes())
        if case["sidecar"]:
            side = gzip.decompress((GOLDEN / case["sidecar"]).read_bytes())
            Path(f"{path}.tensors").write_bytes(side)
        return path

    return unpack


# Files of the old package, and for it


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_pairs_of_the_old_package(golden, name, weights_only):
    case = CASES[name]
    block = {"device": "cpu"}
    if name == "tc_encrypted":
        block["encryption"] = DecryptionParams.from_key(KEY)
    if name == "tc_linear" and weights_only:  # a module, not its state dict
        with pytest.raises(pickle.UnpicklingError, match="Linear"):
            load(golden(name), block, weights_only=True)
        return
    loaded = load(golden(name), block, weights_only=weights_only)
    loaded = loaded.state_dict() if isinstance(loaded, torch.nn.Module) else loaded
    assert loaded.keys() == case["loaded"].keys()
    for key, expected in case["loaded"].items():
        found = loaded[key]
        if not isinstance(expected, dict):
            if isinstance(found, torch.storage.TypedStorage):
                assert str(found) == expected
            else:
                assert repr(found) == expected
            continue
        assert type(found).__name__ == expected["cls"]
        assert str(found.dtype) == expected["dtype"]
        assert list(found.shape) == expected["shape"]
        assert str(found.layout) == expected["layout"]
        assert found.device.type == expected["device"]
        assert found.requires_grad == expected["requires_grad"]
        if "stride" in expected and found.device.type != "meta":
            assert list(found.stride()) == expected["stride"]
            assert found.storage_offset() == expected["storage_offset"]
            assert found.untyped_storage().nbytes() == expected["storage_nbytes"]
        if expected.get("values") is not None:
            assert found.tolist() == expected["values"]


LOAD_WITH_OLD = """
from tensorizer.torch_compat import tensorizer_loading
kwargs = dict(args[1])
if "key" in kwargs:
    kwargs["encryption"] = tensorizer.DecryptionParams.from_key(kwargs.pop("key"))
with tensorizer_loading(device="cpu", **kwargs):
    loaded = torch.load(args[0])
buffer = __import__("io").BytesIO()
torch.save(loaded, buffer)
return buffer.getvalue()
"""
SAVE_WITH_OLD = """
from tensorizer.torch_compat import tensorizer_saving
obj = torch.load(__import__("io").BytesIO(args[0]), weights_only=False)
with tensorizer_saving():
    torch.save(obj, args[1], **args[2])
"""


@pytest.mark.parametrize("legacy", [False, True])
def test_the_old_package_loads_what_is_saved_here(old, tmp_path, legacy):
    expected = state()
    if legacy:
        del expected["meta"]
    path = tmp_path / "f.pt"
    with tensorizer_saving():
        torch.save(expected, path, _use_new_zipfile_serialization=not legacy)
    found = torch.load(io.BytesIO(old(LOAD_WITH_OLD, str(path), {})), weights_only=True)
    assert_state(found, expected)


@pytest.mark.host
def test_the_old_package_loads_encrypted_storages(old, tmp_path):
    path = tmp_path / "f.pt"
    save(state(), path, encryption=EncryptionParams(KEY, manifest=True))
    found = torch.load(io.BytesIO(old(LOAD_WITH_OLD, str(path), {"key": KEY})), weights_only=True)
    assert_state(found)
    with pytest.raises(CryptographyError):
        load(path)
    block = {"encryption": DecryptionParams.from_key(KEY, require_manifest=True)}
    assert_state(load(path, block))


@pytest.mark.parametrize("legacy", [False, True])
def test_checkpoints_of_the_old_package_load(old, tmp_path, legacy):
    expected = state()
    if legacy:
        del expected["meta"]
    buffer, path = io.BytesIO(), str(tmp_path / "f.pt")
    torch.save(expected, buffer)
    old(SAVE_WITH_OLD, buffer.getvalue(), path, {"_use_new_zipfile_serialization": not legacy})
    assert_state(load(path, {"device": "cpu"}), expected)


# weights_only


class Evil:
    ran = False

    def __reduce__(self):
        return setattr, (Evil, "ran", True)


def test_files_cannot_run_code(tmp_path):
    path = tmp_path / "evil.pt"
    save({"a": torch.ones(3), "evil": Evil()}, path)
    for kwargs in ({}, {"weights_only": True}):
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            load(path, **kwargs)
        assert not Evil.ran
    load(path, weights_only=False)
    assert Evil.ran
    Evil.ran = False
    with pytest.warns(UserWarning, match="suppress_weights_only"):
        load(path, {"suppress_weights_only": True}, weights_only=True)
    assert Evil.ran
    Evil.ran = False


def test_the_environment_decides_as_in_torch(tmp_path, monkeypatch):
    path = tmp_path / "evil.pt"
    save({"a": torch.ones(3), "evil": Evil()}, path)
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        load(path, weights_only=False)
    assert not Evil.ran
    monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    load(path)
    assert Evil.ran
    Evil.ran = False


@pytest.mark.parametrize("value", ["TRUE", "Yes"])
def test_capitals_in_the_environment_never_let_code_run(tmp_path, monkeypatch, value):
    # Releases of torch differ in whether they count.
    path = tmp_path / "evil.pt"
    save({"a": torch.ones(3), "evil": Evil()}, path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", value)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        load(path)
    monkeypatch.delenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", value)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        load(path, weights_only=False)
    assert not Evil.ran


def test_safe_globals_count(tmp_path):
    save(torch.nn.Linear(2, 3), tmp_path / "module.pt")
    with pytest.raises(pickle.UnpicklingError, match="Linear"):
        load(tmp_path / "module.pt")
    with torch.serialization.safe_globals([torch.nn.Linear, set]):
        found = load(tmp_path / "module.pt")
    assert found(torch.ones(2)).shape == (3,)
    assert isinstance(load(tmp_path / "module.pt", weights_only=False), torch.nn.Linear)


def test_data_that_look_like_an_id(tmp_path):
    values = ["TensorizerPickler", ("TensorizerPickler", 0, "storage", 0, None), torch.ones(2)]
    save(values, tmp_path / "f.pt")
    for weights_only in (True, False):
        found = load(tmp_path / "f.pt", weights_only=weights_only)
        assert found[:2] == values[:2]
        assert pickle.loads(pickle.dumps(found[1])) == values[1]
        assert_same(found[2], values[2])


def pickle_module(name):
    module = types.ModuleType(name)
    module.__dict__.update(vars(pickle))
    module.__name__ = name
    return module


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize(
    ("pid", "what"),
    [
        (("TensorizerPickler", 1, "storage", 0, None), "newer release"),
        (("TensorizerPickler", 0, "module", 0, None), "module"),
        (("TensorizerPickler", 0, "storage", "0", None), "damaged"),
        (("TensorizerPickler", 0, "storage", 0, "f4"), "damaged"),
        (("TensorizerPickler", 0, "storage"), None),
    ],
)
def test_ids_that_are_not_ours(tmp_path, pid, what, weights_only):
    module = pickle_module("other")

    class Odd(pickle.Pickler):
        def __init_subclass__(cls):
            cls.persistent_id = lambda self, obj: (
                pid if isinstance(obj, torch.storage.TypedStorage) else None
            )

    module.Pickler = Odd
    torch.save({"a": torch.ones(2)}, tmp_path / "f.pt", pickle_module=module)
    with pytest.raises(pickle.UnpicklingError, match=what):
        load(tmp_path / "f.pt", weights_only=weights_only)


def test_other_pickle_modules_are_refused(tmp_path, pair):
    other = pickle_module("cloudpickle")
    with tensorizer_saving(), pytest.raises(ValueError, match=r"cloudpickle.*outside"):
        torch.save(state(), tmp_path / "f.pt", pickle_module=other)
    assert not (tmp_path / "f.pt").exists()
    with pytest.raises(ValueError, match=r"cloudpickle.*outside"):
        load(pair, pickle_module=other, weights_only=False)
    assert_state(load(pair, pickle_module=pickle, weights_only=False))


# Two halves


def test_half_a_pair(pair):
    side = Path(f"{pair}.tensors")
    side.rename(f"{side}.gone")
    with pytest.raises(FileNotFoundError, match=r"state\.pt.*which is missing.*state\.pt\.tensors"):
        load(pair)


def test_the_half_of_another(pair, tmp_path):
    other = state()
    other["base"] += 1
    save(other, tmp_path / "other.pt")
    os.replace(tmp_path / "other.pt.tensors", f"{pair}.tensors")
    with pytest.raises(PairMismatchError, match=r"state\.pt\.tensors.*state\.pt'.*expected.*found"):
        load(pair)


def test_the_half_of_an_older_release(pair, golden, tmp_path):
    older = golden("tc_storages")
    os.replace(f"{older}.tensors", f"{pair}.tensors")
    with pytest.raises(PairMismatchError, match="older release"):
        load(pair)
    save(state(), tmp_path / "new.pt")
    os.replace(tmp_path / "new.pt.tensors", f"{older}.tensors")
    with pytest.raises(PairMismatchError, match="older release"):
        load(older)


def test_a_file_that_holds_no_storages(golden, tmp_path):
    older = golden("tc_storages")
    tensorizer.save({"weight": torch.ones(3)}, f"{older}.tensors")
    with pytest.raises(FormatError, match="expected a list of"):
        load(older)
    tensorizer.save([torch.ones(3), torch.ones(3)], f"{older}.tensors")
    with pytest.raises(FormatError, match="expected bytes of a storage.*float32"):
        load(older)
    tensorizer.save([torch.ones(3, dtype=torch.uint8)], f"{older}.tensors")
    with pytest.raises(FormatError, match="asks for storage 1, found 1"):
        load(older)


def test_copies_stay_halves(pair):
    side = Path(f"{pair}.tensors")
    with TensorDeserializer(side, lazy_load=True) as file:
        before = file._file.reader.pair_id
    for command in (
        ["cp", side, f"{side}.copy"],
        ["encrypt", f"{side}.copy", f"{side}.encrypted", "--key-file", pair.parent / "key"],
    ):
        (pair.parent / "key").write_bytes(KEY)
        assert main([str(argument) for argument in command]) == 0
    os.replace(f"{side}.encrypted", side)
    with TensorDeserializer(
        side, lazy_load=True, encryption=DecryptionParams.from_key(KEY)
    ) as file:
        assert file._file.reader.pair_id == before
    assert_state(load(pair, {"encryption": DecryptionParams.from_key(KEY)}))


@pytest.mark.parametrize("weights_only", [True, False])
def test_links_and_copies_of_the_pickle_load(pair, weights_only):
    folder = pair.parent
    (folder / "last.pt").symlink_to(pair.name)
    (folder / "best.pt").write_bytes(pair.read_bytes())
    # Another pair's storages under the name of the copy's.
    save({"other": torch.ones(2)}, folder / "other.pt")
    (folder / "best.pt.tensors").write_bytes((folder / "other.pt.tensors").read_bytes())
    (folder / "below").mkdir()
    (folder / "below/link.pt").symlink_to(f"../{pair.name}")
    for name in ("last.pt", "best.pt", "below/link.pt"):
        assert_state(load(folder / name, weights_only=weights_only))


def test_links_whose_storages_have_links_of_their_own(golden):
    """As caches keep files: under other names, in one folder. These have no identity."""
    pair = golden("tc_storages")
    blobs = pair.parent / "blobs"
    blobs.mkdir()
    expected = load(pair, {"device": "cpu"}, weights_only=False)
    for name, blob in ((pair, "1"), (Path(f"{pair}.tensors"), "2")):
        name.rename(blobs / blob)
        name.symlink_to(f"blobs/{blob}")
    assert str(load(pair, {"device": "cpu"}, weights_only=False)) == str(expected)


def test_a_save_through_a_link_writes_the_pair_that_it_names(pair):
    link = pair.parent / "last.pt"
    link.symlink_to(pair.name)
    save({"new": torch.arange(3)}, link)
    assert link.is_symlink()
    assert not (pair.parent / "last.pt.tensors").exists()
    for name in (link, pair):
        assert load(name)["new"].tolist() == [0, 1, 2]


def test_outside_of_a_block_messages_name_it(pair):
    with pytest.raises(pickle.UnpicklingError, match=r"tensorizer.torch_compat.tensorizer_loading"):
        torch.load(pair, weights_only=True)
    with pytest.raises(FormatError, match=rf"as a rule {re.escape(str(pair))}.tensors"):
        tensorizer.load(pair)


RECORDS = {
    '{"version":2,"pair":null,"locations":[]}': (pickle.UnpicklingError, "newer release"),
    '{"version":1,"pair":7,"locations":[]}': (pickle.UnpicklingError, "damaged record"),
    '{"version":1,"pair":"\\u001bc0ffee","locations":[]}': (
        pickle.UnpicklingError,
        r"expected an identity of 32 digits, found '\\x1bc0ffee'",
    ),
    # The message shows only a short part of it.
    '{"version":1,"pair":"%s","locations":[]}' % ("x" * 100_000): (
        pickle.UnpicklingError,
        r"expected an identity of 32 digits, found 'x{5,20}\.{3}x{5,20}'(?!x)",
    ),
    '{"version":1,"pair":null,"locations":[["cpu",-1]]}': (pickle.UnpicklingError, "damaged"),
    '{"version":1,"pair":null,"locations":[["cpu"]]}': (pickle.UnpicklingError, "damaged"),
    '{"version":1,"locations":[]}': (pickle.UnpicklingError, "damaged record"),
    "[" * 100_000: (pickle.UnpicklingError, "damaged record"),
    # More storages than any memory holds, in a few bytes.
    '{"version":1,"pair":null,"locations":[["cpu",9000000000000000000]]}': (
        FormatError,
        "has 9000000000000000000 storages, found",
    ),
}


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("content", RECORDS, ids=range(len(RECORDS)))
def test_damaged_records(tmp_path, monkeypatch, content, weights_only):
    def encode(record):
        text = f'{{"tensorizer":{content}}}'.encode()
        return pickle.BINUNICODE + len(text).to_bytes(4, "little") + text + pickle.POP

    monkeypatch.setattr("tensorizer.checkpoints.pickling.PairRecord.encode", encode)
    save(state(), tmp_path / "f.pt")
    error, what = RECORDS[content]
    with pytest.raises(error, match=what):
        load(tmp_path / "f.pt", weights_only=weights_only)


class Fails:
    def __reduce__(self):
        raise ArithmeticError("cannot be pickled")


def test_a_failed_save_changes_nothing(pair, monkeypatch):
    before = files(pair.parent)
    with pytest.raises(ArithmeticError):
        save({"a": torch.ones(3), "b": Fails()}, pair)
    assert files(pair.parent) == before
    with pytest.raises(NotImplementedError):
        save({"a": torch.ones(3)}, pair, file_obj=lambda f: f"{f}.tensors", save_func=refuse)
    assert files(pair.parent) == before
    with pytest.raises(ArithmeticError):
        save({"a": torch.ones(3), "b": Fails()}, pair.parent / "new.pt")
    assert files(pair.parent) == before


def refuse(*_):
    raise NotImplementedError


@pytest.mark.host
@pytest.mark.parametrize("limit", [100, 300_000])
def test_a_full_disk_changes_nothing(tmp_path, limit):
    # The first limit stops the storages' file, the second the pickle after it.
    path = tmp_path / "f.pt"
    save(state(), path)
    before = files(tmp_path)
    done = run_python(
        "import resource, signal, sys, torch\n"
        "from tensorizer.torch_compat import tensorizer_saving\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "limit = int(sys.argv[2])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))\n"
        "try:\n"
        "    with tensorizer_saving():\n"
        "        torch.save({'a': torch.ones(3), 'b': 'x' * 400_000}, sys.argv[1])\n"
        "except OSError as error:\n"
        "    print(error.errno, error.filename)\n",
        path,
        limit,
    )
    assert done.stdout.startswith("27 "), done
    assert files(tmp_path) == before


@pytest.mark.parametrize("existed", [True, False])
def test_publishing_that_fails_half_way(tmp_path, monkeypatch, existed):
    from tensorizer.checkpoints import pairs

    path = tmp_path / "f.pt"
    if existed:
        save(state(), path)
    before = files(tmp_path)

    class Broken(pairs.AtomicWriter):
        def close(self):
            if not self.closed and Path(f"{path}.tensors").exists():
                self.abandon()
                raise OSError("lost the disk")

    monkeypatch.setattr(pairs, "AtomicWriter", Broken)
    with pytest.raises(OSError, match="lost the disk"):
        save({"a": torch.ones(3)}, path)
    assert files(tmp_path) == before


def test_a_file_object_that_fails(tmp_path):
    class Full(io.FileIO):
        def write(self, data):
            super().write(data[:10])
            raise OSError(28, "No space left on device")

    path = tmp_path / "f.pt"
    with Full(path, "w") as file, pytest.raises(OSError, match="No space"):
        save(state(), file)
    assert files(tmp_path) == {"f.pt": b""}


def test_save_func_and_load_func(tmp_path):
    seen = {}

    def write(file, tensors, options):
        seen.update(file=file, tensors=tensors, options=options)
        torch.save([tensor.clone() for tensor in tensors], file)

    def read(file, options):
        seen.update(options=options)
        return torch.load(file)

    expected = state()
    save(expected, tmp_path / "f.pt", save_func=write, encryption="mine")
    assert seen["file"] == str(tmp_path / "f.pt.tensors")
    assert seen["options"] == {"encryption": "mine"}
    assert seen["tensors"][0].data_ptr() == expected["base"].data_ptr()
    assert_state(load(tmp_path / "f.pt", {"load_func": read, "dtype": "mine"}))
    assert seen["options"] == {"dtype": "mine"}
    on_meta = load(tmp_path / "f.pt", {"load_func": read}, map_location="meta")
    assert on_meta["base"].device.type == "meta"


@pytest.mark.parametrize("fails", [False, True])
def test_storages_over_the_network(tmp_path, s3, fails):
    client = s3.client()
    side = "s3://bucket/state.side"
    save(state(), tmp_path / "f.pt", file_obj=side)
    before = client.get_object(Bucket="bucket", Key="state.side")["Body"].read()
    assert [path.name for path in tmp_path.glob("f.pt*")] == ["f.pt"]
    if fails:
        with pytest.raises(ArithmeticError):
            save({"a": torch.ones(3), "b": Fails()}, tmp_path / "f.pt", file_obj=side)
        after = client.get_object(Bucket="bucket", Key="state.side")["Body"].read()
        assert before == after
    assert_state(load(tmp_path / "f.pt", {"file_obj": side}))
    with pytest.raises(FileNotFoundError, match=r"f\.pt.*which is missing.*s3://bucket/gone"):
        load(tmp_path / "f.pt", {"file_obj": "s3://bucket/gone"})
