"""Every name of release 2.12.1 is here with parameters that its callers can use, or it is listed.

``old_names.json`` has them by module, as ``inspect`` found them there: parameters in their order,
with ``=`` if they have a default, behind ``keyword`` if they have no position and behind ``/`` if
they have no name; public members of classes; attributes that their objects have; values of enums.
"""

import contextlib
import importlib
import inspect
import json
import re
from pathlib import Path

import pytest
import redis
import tensorizer
import torch
from processes import run_python
from scripted import FaultServer
from servers import Redis
from tensorizer import serialization, stream_io

OLD = json.loads(Path(__file__).with_name("old_names.json").read_text())
DOCUMENT = Path(__file__).resolve().parents[2] / "docs/how-to/migrate.md"


def listed():
    """Return the names that the table of differences speaks of on the side of the old package."""
    table = DOCUMENT.read_text().partition("## All differences")[2].partition("\n## ")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| ")]
    code = " ".join(found for row in rows for found in re.findall(r"`([^`]*)`", row))
    return set(re.findall(r"\w+", code))


def find(module, name):
    """Return what a module has under a name, or None."""
    try:
        found = getattr(importlib.import_module(module), name, None)
        return importlib.import_module(f"{module}.{name}") if found is None else found
    except ModuleNotFoundError:
        return None


def unfit(function, old, bound):
    """Say which of the old parameters a function does not take as they may be given."""
    given = list(inspect.signature(function).parameters.values())[bound:]
    by_name = {p.name: p for p in given}
    anything = {p.kind for p in given}
    places = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    wrong = []
    for at, text in enumerate(old):
        name = re.sub(r"^(keyword |/)|=$", "", text)
        if text.startswith("**"):
            fits = inspect.Parameter.VAR_KEYWORD in anything
        elif text.startswith("*"):
            fits = inspect.Parameter.VAR_POSITIONAL in anything
        elif text.startswith("/"):
            fits = at < len(places)
        else:
            here = by_name.get(name)
            fits = here is not None and here.kind is not here.POSITIONAL_ONLY
            fits = fits and (text.startswith("keyword ") or places[at : at + 1] == [here])
        if fits and text.endswith("="):
            here = places[at] if text.startswith("/") else by_name[name]
            fits = here.default is not here.empty
        if not fits:
            wrong.append(text)
    names = {re.sub(r"^(keyword |/|\**)|=$", "", text) for text in old}
    optional = {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    wrong += [
        f"{p.name}, which is new and has no default"
        for p in given
        if p.name not in names and p.default is p.empty and p.kind not in optional
    ]
    return wrong


def compared(where, found, old):
    """Yield what is missing or does not fit."""
    if isinstance(old, list):
        old = {"parameters": old}
    if isinstance(old, dict) and old.get("parameters") is not None:
        for wrong in unfit(found, old["parameters"], 0):
            yield f"{where}({wrong})"
    for name, value in (old or {}).get("values", {}).items():
        if getattr(found, name, None) != value:
            yield f"{where}.{name}"
    for field in (old or {}).get("fields", []):
        if field not in found.DESCRIPTOR.fields_by_name:
            yield f"{where}.{field}"
    for name, member in (old or {}).get("members", {}).items():
        here = inspect.getattr_static(found, name, None)
        if here is None:
            if name not in getattr(found, "__annotations__", {}):
                yield f"{where}.{name}"
        elif isinstance(member, list):
            bound = 0 if isinstance(here, staticmethod) else 1
            function = getattr(here, "__func__", here)
            for wrong in unfit(function, member, bound):
                yield f"{where}.{name}({wrong})"
        elif member is not None:
            yield from compared(f"{where}.{name}", getattr(found, name), member)


@pytest.mark.parametrize("module", OLD)
def test_names_and_parameters(module, need_protobuf):
    if module.rpartition(".")[2] in ("tensorizer", "protobuf", "tensors_pb2"):
        need_protobuf()
    differences = listed()
    for name, old in OLD[module].items():
        found = find(module, name)
        if found is None:
            assert name in differences, f"{module}.{name} is neither here nor listed"
        else:
            assert list(compared(f"{module}.{name}", found, old)) == []


def test_attributes_of_objects(tmp_path):
    path = tmp_path / "f.tensors"
    key = tensorizer.EncryptionParams.random().key
    with contextlib.ExitStack() as open_:
        writer = open_.enter_context(tensorizer.TensorSerializer(path))
        writer.write_state_dict({"a": torch.ones(2)})
        writer.close()
        reader = open_.enter_context(tensorizer.TensorDeserializer(path, "cpu", lazy_load=True))
        http = open_.enter_context(FaultServer(b"abc"))
        server = Redis(tmp_path)
        open_.callback(server.stop)
        reader.to_redis(redis_client=redis.Redis(port=server.port), key_prefix="m")
        objects = {
            "TensorSerializer": writer,
            "TensorDeserializer": reader,
            "DecryptionParams": tensorizer.DecryptionParams.from_key(key),
            "CURLStreamFile": open_.enter_context(stream_io.CURLStreamFile(http.url)),
            "RedisStreamFile": open_.enter_context(
                stream_io.RedisStreamFile(f"{server.address}/m")
            ),
        }
        old = OLD["tensorizer.serialization"] | OLD["tensorizer.stream_io"]
        assert {name for name in old if "attributes" in old[name]} == set(objects)
        for name, found in objects.items():
            assert [a for a in old[name]["attributes"] if not hasattr(found, a)] == []

        curl, stored = objects["CURLStreamFile"], objects["RedisStreamFile"]
        assert curl.read(size=2) == b"ab"
        assert curl.seek(position=1, whence=0) == 1 and curl.read() == b"bc"
        assert len(curl.http_response_latencies) == 1 + curl.read_operations > 1
        assert stored.read(size=5) == b"|TZR|"
        assert stored.setup_latency > 0 and len(stored.response_latencies) == 1
        filled = bytearray(3)
        assert curl.seek(position=0) == 0 and curl.readinto(ba=filled) == 3 and filled == b"abc"


def test_the_check_finds_changed_signatures_and_missing_members():
    def here(a, b, /, c, *, d=1, e, **rest):
        pass

    assert unfit(here, ["/a", "/b", "c", "keyword d=", "keyword e", "**kwargs"], 0) == []
    assert unfit(here, ["a", "/b=", "c", "keyword d", "keyword e="], 0) == [
        "a", "/b=", "keyword e=",
    ]  # fmt: skip
    assert unfit(lambda c, a: 0, ["a"], 0) == ["a", "c, which is new and has no default"]
    assert list(compared("x", tensorizer.TensorType, {"values": {"PARAM": 1}})) == ["x.PARAM"]
    assert list(compared("x", str, {"members": {"nothing": None}})) == ["x.nothing"]


def test_headers_of_files(tmp_path):
    tensorizer.save({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "f", alignment=1)
    header, flags = serialization._FileHeader, serialization._FileFeatureFlags
    with open(tmp_path / "f", "rb") as file:
        assert file.read(5) == serialization.TENSORIZER_MAGIC
        start = file.read(60)
        file.seek(5)
        found = header.from_io(file, accepted_versions=range(1, 6))
        assert file.tell() == 65
        assert (found.tensor_size, found.tensor_count) == (20, 2)
        assert found.to_bytes() == start
        assert found == header(found.version_number, found.feature_flags, 20, 2)
        assert flags.encrypted not in found.feature_flags
        file.seek(5)
        with pytest.raises(header.InvalidVersionError, match="Unsupported version") as raised:
            header.from_io(file, (99,))
        assert raised.value.version == found.version_number
    damaged = {start[:59]: "too small", start[:4] + b"\xff" + start[5:]: "feature flags: 0xfc"}
    for text, said in damaged.items():
        (tmp_path / "g").write_bytes(text)
        with open(tmp_path / "g", "rb") as file, pytest.raises(ValueError, match=said):
            header.from_io(file, range(1, 6))


def test_performance_statistics_need_their_variable(tmp_path, monkeypatch):
    assert serialization._enable_perf_stats is False
    with pytest.raises(RuntimeError, match="Performance stats are not enabled"):
        serialization._get_perf_stats()
    code = """
import importlib, sys, tensorizer, torch
for name in ("tensorizer.file.legacy", "tensorizer.serialization"):
    sys.modules.pop(name, None)
serialization = importlib.import_module("tensorizer.serialization")
tensorizer.save({"a": torch.ones(1000)}, sys.argv[1])
tensorizer.load(sys.argv[1], "cpu")
found = serialization._get_perf_stats()
assert found.pop("file_readinto_secs") > 0
assert serialization._enable_perf_stats is True
print(found)
"""
    monkeypatch.setenv("TENSORIZER_ENABLE_PERF_STATS", "1")
    done = run_python(code, tmp_path / "f")
    zeros = {"tensor_to_device_secs": 0, "tensor_to_device_bytes": 0}
    assert done.stdout == f"{zeros | {'file_readinto_bytes': 4000}}\n", done.stderr


def test_errors_and_entries():
    error = serialization._FileHeader.InvalidVersionError("one", "two", version=7)
    assert (error.args, error.version, isinstance(error, ValueError)) == (("one", "two"), 7, True)
    hashes = [serialization.TensorHash(type=serialization.HashType.CRC32, hash=b"abcd")]
    assert hashes < [serialization.TensorHash(serialization.HashType.SHA256, b"")]
    dtype = "|V2" + serialization.OPAQUE_DTYPE_SEP + "torch.bfloat16"
    kind = serialization.TensorType.PARAM
    entry = serialization.TensorEntry(4, "x", kind, dtype, (2, 3), 9, 99, 0, hashes, None)
    assert (entry.deserialized_length, entry.is_long_tensor) == (12, False)
    entry = serialization.TensorEntry(5, "x", kind, dtype, (2, 3), 9, 99, 10, hashes, None)
    assert (entry.deserialized_length, entry.is_long_tensor) == (10, True)


def test_arrays_of_tensors(tmp_path):
    array_of = serialization._NumpyTensor
    for tensor, stored in [
        (torch.randn(2, 3), "<f4"),
        (torch.ones(3, dtype=torch.bfloat16), "<V2"),
        (torch.ones(()).to(torch.float8_e4m3fn), "<V1"),
    ]:
        found = array_of.from_tensor(tensor)
        assert (found.numpy_dtype, found.torch_dtype) == (stored, str(tensor.dtype))
        assert found.is_opaque is (tensor.dtype != torch.float32)
        assert found.to_tensor().data_ptr() == tensor.data_ptr()
        assert found.to_tensor().dtype == tensor.dtype
        again = array_of.from_array(found.data)
        assert again.data is found.data and not again.is_opaque
        data = bytearray(b"..") + bytearray(found.data.tobytes())
        shape = list(tensor.shape)
        read = array_of.from_buffer(stored, str(tensor.dtype), shape, data, 2).to_tensor()
        assert torch.equal(read.float(), tensor.float()) and read.dtype == tensor.dtype
    for dtype in (None, "torch.nonsense"):
        with pytest.raises(ValueError, match="dtype"):
            array_of(found.data, "<V1", dtype).to_tensor()
    # Arrays of read_numpy_arrays become tensors again.
    path = tmp_path / "f"
    tensorizer.save({"h": torch.full((3,), 2.5, dtype=torch.bfloat16)}, path)
    with tensorizer.TensorDeserializer(path, "cpu", lazy_load=True) as file:
        ((_, _, _, array, opaque, dtype),) = file.read_numpy_arrays(allow_raw_data=True)
    assert opaque and torch.equal(
        array_of(array, "<V2", dtype).to_tensor(), torch.full((3,), 2.5, dtype=torch.bfloat16)
    )


def test_flags_for_curl(tmp_path):
    assert stream_io.CAInfo(cacert=__file__).curl_flags == ("--cacert", __file__)
    assert stream_io.CAInfo(capath=tmp_path).curl_flags == ("--capath", str(tmp_path))
    assert stream_io.CAInfo(allow_untrusted=True).curl_flags == ("--insecure",)
    assert stream_io.logger.name == "tensorizer.stream_io"


def test_credentials_for_scripts(tmp_path, monkeypatch):
    infer = stream_io._infer_credentials
    monkeypatch.setenv("HOME", str(tmp_path))
    assert infer("a", "b", tmp_path / "nothing") == (None, None, "a", "b", None)
    assert infer("", "") == (None, None, "", "", None)
    with pytest.raises(ValueError, match=r"none were given, and there is no .*\.s3cfg"):
        infer(None, None)
    with pytest.raises(FileNotFoundError, match="nothing"):
        infer(None, None, tmp_path / "nothing")
    path = tmp_path / ".s3cfg"
    path.write_text(
        "[default]\naccess_key = A\nsecret_key = S%S\nhost_base = h.example\nuse_https = False\n"
    )
    found = infer(None, None)
    assert found == (str(path), "h.example", "A", "S%S", False)
    assert found.s3_endpoint == "h.example"
    assert infer(None, "b", s3_config_path=str(path)).s3_access_key == "A"
    path.write_text("[default]\naccess_key = A\n")
    with pytest.raises(ValueError, match="secret_key is neither given nor in"):
        infer(None, None)
    path.write_text("[other]\naccess_key = A\n")
    with pytest.raises(ValueError, match="access_key is neither"):
        infer(None, None, path)
    path.write_text("no sections\n")
    with pytest.raises(ValueError, match="not a configuration file"):
        infer(None, None)
