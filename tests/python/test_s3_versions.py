"""Versions of objects, and other queries in addresses."""

import pickle

import pytest
import tensorizer
import torch
from native import open_reader
from scripted import Relay
from tensorizer import TensorDeserializer, TensorSerializer
from tensorizer.stream_io import open_stream
from tensorizer.tensors.handles import take

ops = torch.ops.tensorizer

KEYS = ["f.tensors", "with space+plus/per%20cent/ü&=;.tensors"]


@pytest.fixture(params=["moto", "weed"])
def server(request, no_settings_of_the_machine, monkeypatch):
    """Two servers, one of which checks the signatures of reads."""
    server = request.getfixturevalue(request.param)
    for name, value in server.settings().items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def versioned(server):
    """A bucket that keeps versions."""
    client = server.client()
    client.create_bucket(Bucket="versioned")
    state = {"Status": "Enabled"}
    client.put_bucket_versioning(Bucket="versioned", VersioningConfiguration=state)
    yield client
    for kind in ("Versions", "DeleteMarkers"):
        for one in client.list_object_versions(Bucket="versioned").get(kind, []):
            client.delete_object(Bucket="versioned", Key=one["Key"], VersionId=one["VersionId"])
    client.delete_bucket(Bucket="versioned")


def write(client, key, *numbers):
    """Save objects over one another; return their versions."""
    versions = []
    for number in numbers:
        tensorizer.save({"a": torch.full((1000,), float(number))}, f"s3://versioned/{key}")
        versions.append(client.head_object(Bucket="versioned", Key=key)["VersionId"])
    assert len(set(versions)) == len(numbers)
    return versions


@pytest.mark.parametrize("key", KEYS)
def test_each_version_is_read(versioned, key):
    address = f"s3://versioned/{key}"
    versions = write(versioned, key, 1, 2)
    assert tensorizer.load(address)["a"][0] == 2
    for number, version in enumerate(versions, 1):
        one = f"{address}?versionId={version}"
        assert tensorizer.load(one, verify_hash=True)["a"][0] == number
        assert ops.load(one)["a"][0] == number
        with TensorDeserializer(one, "cpu", lazy_load=True) as file:
            assert file["a"][0] == number
        stream = open_stream(one)
        assert stream.name == one
        assert TensorDeserializer(stream, "cpu")["a"][0] == number
    versioned.delete_object(Bucket="versioned", Key=key)
    with pytest.raises(FileNotFoundError, match="404"):
        tensorizer.load(address)
    assert tensorizer.load(f"{address}?versionId={versions[0]}")["a"][0] == 1


def test_a_version_that_there_is_not(versioned):
    write(versioned, "f.tensors", 1)
    address = "s3://versioned/f.tensors?versionId=0123456789abcdef0123456789abcdef"
    with pytest.raises(OSError, match=r"f\.tensors\?versionId=0123.*40[04]"):
        tensorizer.load(address)


def test_the_cache_tells_versions_apart(versioned, tmp_path):
    address, cache = "s3://versioned/f.tensors", tmp_path / "cache"
    one, two = write(versioned, "f.tensors", 1, 2)
    for _ in range(2):
        for place, number in ((f"{address}?versionId={one}", 1), (address, 2),
                              (f"{address}?versionId={two}", 2)):  # fmt: skip
            assert tensorizer.load(place, cache_dir=cache)["a"][0] == number
    assert len(list(cache.glob("*"))) >= 3


def test_heads_tell_versions_apart(versioned):
    """Heads of one version are not used to open another version."""
    address = "s3://versioned/f.tensors"
    one, two = (f"{address}?versionId={found}" for found in write(versioned, "f.tensors", 1, 2))
    heads = [open_reader(place).heads() for place in (address, one, two)]
    assert [head[0][0] for head in heads] == [address, one, two]
    known = pickle.loads(pickle.dumps([head for of_one in heads for head in of_one]))
    for place, number in ((address, 2), (one, 1), (two, 2)):
        reader = open_reader(place, known)
        assert reader.heads() == []
        handle, _ = reader.load([0], devices=[-1])
        assert take(handle)[0][0] == number


def test_shards_of_a_version_are_not_guessed(versioned):
    """An index names its shards, and not their versions: those of today may be others."""
    key = "model.safetensors"
    tensorizer.save(
        {"a": torch.ones(1000), "b": torch.ones(1000)}, f"s3://versioned/{key}", max_shard_size=5000
    )
    index = "model.safetensors.index.json"
    assert len(tensorizer.load(f"s3://versioned/{index}")) == 2
    version = versioned.head_object(Bucket="versioned", Key=index)["VersionId"]
    with pytest.raises(NotImplementedError, match="does not say which versions of the shards"):
        tensorizer.load(f"s3://versioned/{index}?versionId={version}")
    # One of its shards can be named.
    shard = next(
        found
        for found in versioned.list_object_versions(Bucket="versioned")["Versions"]
        if found["Key"] != index
    )
    address = f"s3://versioned/{shard['Key']}?versionId={shard['VersionId']}"
    assert set(tensorizer.load(address)) < {"a", "b"}


def test_versions_of_public_objects_are_read(s3, moto):
    client = moto.client()
    client.create_bucket(Bucket="public", ACL="public-read")
    state = {"Status": "Enabled"}
    client.put_bucket_versioning(Bucket="public", VersioningConfiguration=state)
    keys = ["", ""]
    for number in (1, 2):
        tensorizer.save({"a": torch.full((10,), float(number))}, "s3://public/f.tensors")
    found = client.list_object_versions(Bucket="public")["Versions"]
    old = next(version["VersionId"] for version in found if not version["IsLatest"])
    with Relay(moto.host) as relay:
        stream = open_stream(
            f"s3://public/f.tensors?versionId={old}", "rb", *keys, relay.host, force_http=True
        )
        assert TensorDeserializer(stream, "cpu")["a"][0] == 1
        assert relay.signers == [None] * len(relay.signers)


def test_other_query_parameters_of_s3_are_refused(s3, tmp_path):
    tensorizer.save({"a": torch.ones(1)}, "s3://bucket/plain.tensors")
    for more in (
        "?x=secret-hu5hw0rd",
        "#secret-hu5hw0rd",
        "?versionId=",
        "?versionId=1&x=secret-hu5hw0rd",
        "?versionid=1",
    ):
        address = f"s3://bucket/plain.tensors{more}"
        for call in (tensorizer.load, open_stream, TensorDeserializer):
            with pytest.raises(ValueError, match=r"only \?versionId=\.\.\. may follow") as raised:
                call(address)
            assert "secret" not in str(raised.value)
        with pytest.raises(ValueError, match=r"only \?versionId=\.\.\. may follow"):
            tensorizer.save({"a": torch.ones(1)}, address)


def test_versions_are_not_written(s3, moto):
    address = "s3://bucket/version.tensors?versionId=null"
    with Relay(moto.host) as relay, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", f"http://{relay.host}")
        for call in (
            lambda: tensorizer.save({"a": torch.ones(1)}, address),
            lambda: TensorSerializer(address),
            lambda: open_stream(address, "wb"),
        ):
            with pytest.raises(ValueError, match="a version of an object cannot be written"):
                call()
        with pytest.raises(RuntimeError, match="a version of an object cannot be written"):
            ops.save(address, {"a": torch.ones(1)})
        assert relay.requests == []
