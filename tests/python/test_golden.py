"""Every golden file through the Python classes."""

import hashlib

import pytest
import torch
from conftest import MANIFEST, bits, golden_files
from processes import run_python
from tensorizer import CryptographyError, TensorDeserializer, TensorSerializer, TensorType
from tensorizer.serialization import (
    FormatError,
    HashMismatchError,
    InvalidVersionError,
    TruncatedError,
)

pytestmark = pytest.mark.device

#: One of its names has a lone surrogate.
SURROGATE = "v1_nested_unicode.tensors.gz"
SOUND = [
    file
    for file in golden_files("valid") + golden_files("handmade")
    if "tensors" in file
    and file["file"] != SURROGATE
    and file["version"] != 3
    and not (file["version"] > 3 and file["flags"] & 1)
]
ENCRYPTED = [
    file
    for file in golden_files("valid") + golden_files("handmade")
    if file["version"] == 3 or (file["version"] > 3 and file["flags"] & 1)
]
WELL_FORMED_DEFECTS = ("defect_empty_bf16", "defect_meta_bf16")
ids = {"ids": lambda file: file["file"]}


PLAIN = {
    "u1": "uint8", "i1": "int8", "i2": "int16", "i4": "int32", "i8": "int64", "u2": "uint16",
    "u4": "uint32", "u8": "uint64", "f2": "float16", "f4": "float32", "f8": "float64",
    "c8": "complex64", "c16": "complex128", "b1": "bool",
}  # fmt: skip


def torch_dtype(stored):
    plain, _, opaque = stored.partition("\0")
    return opaque or f"torch.{PLAIN[plain[1:]]}"


def open_golden(path, **kwargs):
    stream = path.open("rb")
    if path.name.startswith("v1_at_offset_100"):
        stream.seek(100)
    return TensorDeserializer(stream, device="cpu", **kwargs)


def check(path, file, **kwargs):
    with open_golden(path, lazy_load=True, **kwargs) as deserializer:
        found = list(deserializer.read_tensors())
    assert len(found) == len(file["tensors"])
    for (module_index, kind, name, tensor), expected in zip(found, file["tensors"], strict=True):
        assert (list(name) if isinstance(name, tuple) else name) == expected["name"]
        assert kind == TensorType(int(expected["type"][0]))
        assert module_index == expected["module_idx"]
        assert list(tensor.shape) == expected["shape"]
        assert str(tensor.dtype) == torch_dtype(expected["dtype"])
        if expected["data_length"] or tensor.numel() == 0:
            assert hashlib.sha256(bits(tensor)).hexdigest() == expected["data_sha256"]
        else:
            assert not any(bits(tensor)), "a meta tensor comes back as zeros"


@pytest.mark.parametrize("file", SOUND, **ids)
def test_golden_files_load(file, unpack):
    check(unpack(file), file, verify_hash="no_hashes" not in file["file"])


def test_a_lone_surrogate_in_a_name_is_refused(unpack):
    (file,) = [file for file in golden_files("valid") if file["file"] == SURROGATE]
    with pytest.raises(FormatError, match="invalid structured.*lone surrogates are not supported"):
        open_golden(unpack(file))


def test_a_file_without_hashes_cannot_be_verified(unpack):
    (file,) = [file for file in SOUND if file["file"].startswith("hand_no_hashes")]
    with pytest.raises(HashMismatchError, match="holds no hash of it"):
        open_golden(unpack(file), verify_hash=True)


@pytest.mark.parametrize("name", WELL_FORMED_DEFECTS)
def test_well_formed_files_that_the_old_package_cannot_read(name, unpack):
    (file,) = [file for file in golden_files("defect") if file["file"].startswith(name + ".")]
    check(unpack(file), file, verify_hash=True)


@pytest.mark.parametrize("file", golden_files("defect"), **ids)
def test_broken_files_of_the_old_package(file, unpack):
    """Each is read as far as its bytes allow, or gives a typed error."""
    name, path = file["file"].split(".")[0], unpack(file)
    if name in WELL_FORMED_DEFECTS:
        return check(path, file)
    if name == "defect_meta_scalar":
        check(path, file | {"tensors": [t | {"data_length": 4} for t in file["tensors"]]})
        with pytest.raises(HashMismatchError, match="Tensor 'm' failed CRC32 verification"):
            open_golden(path, verify_hash=True)
        return None
    expected = {
        "defect_empty_name": (FormatError, "Invalid empty tensor path"),
        "defect_no_tensors": (FormatError, "Tensor index in the file is empty"),
        "defect_rs_name_invalid": (FormatError, "invalid structured tensor name"),
        "defect_rs_name_collides": (None, ""),
        "defect_meta_scalar_encrypted": (CryptographyError, "decryption was not requested"),
    }
    error, text = expected[name]
    if error is None:
        return check(path, file)
    with pytest.raises(error, match=text):
        open_golden(path)
    return None


@pytest.mark.parametrize("file", ENCRYPTED, **ids)
def test_encrypted_files_are_refused_at_open(file, unpack):
    for lazy in (True, False):
        with pytest.raises(CryptographyError, match="decryption was not requested"):
            open_golden(unpack(file), lazy_load=lazy)


TYPED = (FormatError, InvalidVersionError, HashMismatchError, CryptographyError)


@pytest.mark.parametrize("verify", [True, False])
def test_damaged_files(verify, unpack):
    """An error of ours that names the file, or the right data; hashes decide what is right."""
    sound = {file["file"]: file for file in MANIFEST["files"]}
    outcomes = {}
    for file in golden_files("corrupt"):
        path = unpack(file)
        try:
            with open_golden(path, lazy_load=True, verify_hash=verify) as deserializer:
                found = list(deserializer.read_tensors())
        except TYPED as error:
            if not isinstance(error, HashMismatchError):
                assert path.name in str(error)
            assert isinstance(error, (ValueError, HashMismatchError, CryptographyError))
            outcomes[file["file"]] = type(error)
            continue
        expected = {
            str(tuple(t["name"]) if isinstance(t["name"], list) else t["name"]): t
            for t in sound[file["base"]]["tensors"]
        }
        for _, _, name, tensor in found:
            stored = expected[str(name)]
            assert list(tensor.shape) == stored["shape"]
            assert str(tensor.dtype) == stored["torch_dtype"]
            if verify and stored["data_length"]:
                assert hashlib.sha256(bits(tensor)).hexdigest() == stored["data_sha256"]
        outcomes[file["file"]] = None
    assert len(outcomes) == 182
    # Truncation is an error in its own right, whether hashes are verified or not.
    cut = {name for name in outcomes if "trunc_data" in name or "trunc_theader" in name}
    cut = {name for name in cut if "v3" not in name}
    assert cut
    assert {outcomes[name] for name in cut} == {TruncatedError}
    if verify:
        flipped = {outcomes[name] for name in outcomes if "v3" not in name and "data_flip" in name}
        assert flipped == {HashMismatchError}
        # The old package reads these too; nothing that it refuses is accepted.
        ok = {name for name, error in outcomes.items() if error is None}
        for file in golden_files("corrupt"):
            # Two of them are sound files, which the old package was asked to decrypt.
            if file["file"] in ok and "decrypt_plain" not in file["file"]:
                assert file["original_2.12.1"]["verify"] == "ok", file["file"]


LIMITED = """
import pathlib, resource, sys
import torch, tensorizer
folder, limit = pathlib.Path(sys.argv[1]), int(sys.argv[2])
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + limit, size + limit))
for path in sorted(folder.glob("bad_*")):
    for verify in (True, False):
        try:
            tensorizer.load(path, verify_hash=verify)
        except MemoryError as error:
            sys.exit(f"{path.name}: {error}")
        except Exception:
            pass
"""


@pytest.mark.host
def test_damaged_files_take_little_memory(tmp_path, unpack):
    """With a limit of 128 MiB on new memory, threads' stacks included, nothing runs out of it."""
    for file in golden_files("corrupt"):
        unpack(file)
    done = run_python(LIMITED, tmp_path, 128 << 20, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]


REPRODUCIBLE = [f for f in SOUND if f["category"] == "valid" and "offset_100" not in f["file"]]


@pytest.mark.parametrize("file", REPRODUCIBLE, **ids)
def test_saving_the_same_again_gives_the_same_bytes(file, unpack, tmp_path):
    """With ``alignment=1``, through the calls that the old package has."""
    path, again = unpack(file), tmp_path / "again.tensors"
    with open_golden(path, lazy_load=True) as deserializer:
        entries = list(deserializer.read_tensors())
    lengths = [tensor["data_length"] for tensor in file["tensors"]]
    serializer = TensorSerializer(again, alignment=1)
    if any(isinstance(name, tuple) for _, _, name, _ in entries):
        serializer.write_state_dict(rebuild(entries))
    else:
        for (index, kind, name, tensor), length in zip(entries, lengths, strict=True):
            meta = length == 0 and tensor.numel()
            stored = torch.empty_like(tensor, device="meta") if meta else tensor
            serializer.write_tensor(index, name, kind, stored)
    serializer.close()
    assert again.read_bytes() == path.read_bytes()


def rebuild(entries):
    """Nested lists and dicts of tensors from their paths."""
    root = {}
    for _, _, name, tensor in entries:
        path = name if isinstance(name, tuple) else (name,)
        node = root
        for step in path[:-1]:
            node = node.setdefault(step, {})
        node[path[-1]] = tensor
    return plain(root)


def plain(node):
    if not isinstance(node, dict):
        return node
    if all(isinstance(key, int) for key in node):
        return [plain(node[index]) for index in sorted(node)]
    return {key: plain(child) for key, child in node.items()}
