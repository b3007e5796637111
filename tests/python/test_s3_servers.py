"""The same objects by a server that checks the signatures of reads, by path and by host."""

import pytest
import tensorizer
import torch
from conftest import assert_same
from scripted import Relay
from tensorizer import TensorDeserializer, TensorSerializer
from tensorizer.stream_io import open_stream

ops = torch.ops.tensorizer

TENSORS = {
    "big": torch.randn(5, 1000, 1000),
    **{f"small.{i}": torch.full((i % 7, 3), float(i)) for i in range(60)},
}
SMALL = {"a": torch.arange(10)}
#: Keys that need care in addresses and signatures.
KEYS = [
    "f.tensors", "folder/f.tensors", "with space+plus.tensors", "per%20cent%", "ümlaut/&=;.t",
    "a~b!c*d'(e)@f,g:h$.tensors", "日本/語.tensors",
]  # fmt: skip
KEY = {"s3_access_key_id": "key", "s3_secret_access_key": "secret-hu5hw0rd"}


@pytest.fixture(autouse=True)
def settings(no_settings_of_the_machine, monkeypatch, weed):
    for name, value in weed.settings().items():
        monkeypatch.setenv(name, value)


def check(loaded, expected=SMALL):
    assert list(loaded) == list(expected)
    for name, tensor in expected.items():
        assert_same(loaded[name].detach(), tensor)


@pytest.mark.parametrize("key", KEYS)
def test_written_and_read(weed, key):
    address = f"s3://bucket/{key}"
    tensorizer.save(SMALL, address)
    found = weed.client().list_objects_v2(Bucket="bucket", Prefix=key[:4])["Contents"]
    assert key in [one["Key"] for one in found]
    check(tensorizer.load(address, verify_hash=True))
    check(ops.load(address))


@pytest.mark.parametrize("key", KEYS[2:5])
def test_wrong_keys_read_and_write_nothing(weed, key):
    tensorizer.save(SMALL, f"s3://bucket/{key}")
    options = {"s3_endpoint": weed.host, "force_http": True}
    for access, secret in (("key", "secret-hu5hw0rd-"), ("ke", "secret-hu5hw0rd"), ("", "")):
        keys = {"s3_access_key_id": access, "s3_secret_access_key": secret}
        with pytest.raises(PermissionError, match=r"403.*check the credentials"):
            open_stream(f"s3://bucket/{key}", **keys, **options)
        with (
            pytest.raises(PermissionError, match="403"),
            TensorSerializer(open_stream(f"s3://bucket/{key}", "wb", **keys, **options)) as file,
        ):
            file.write_state_dict({"other": torch.ones(3)})
    check(tensorizer.load(f"s3://bucket/{key}"))


def test_parts_and_ranges(weed):
    tensorizer.save(TENSORS, "s3://bucket/parts.tensors")
    with Relay(weed.host) as relay:
        stream = open_stream(
            "s3://bucket/parts.tensors", s3_endpoint=relay.host, force_http=True, **KEY
        )
        check(dict(TensorDeserializer(stream, "cpu", num_readers=3, verify_hash=True)), TENSORS)
        assert len(relay.requests) > 3
        with open_stream("s3://bucket/parts.tensors", begin=1, end=5) as few:
            assert few.read() == b"TZR|"
    with pytest.raises(FileNotFoundError, match="404"):
        tensorizer.load("s3://bucket/nothing.tensors")


def test_an_abandoned_upload_keeps_the_old_object(weed):
    tensorizer.save(SMALL, "s3://bucket/up.tensors")
    with (
        pytest.raises(RuntimeError, match="mine"),
        TensorSerializer("s3://bucket/up.tensors") as file,
    ):
        file.write_state_dict(TENSORS)
        raise RuntimeError("mine")
    check(tensorizer.load("s3://bucket/up.tensors"))
    assert not weed.client().list_multipart_uploads(Bucket="bucket").get("Uploads")


@pytest.mark.parametrize("key", KEYS[2:5])
def test_buckets_as_hosts(weed, monkeypatch, key):
    """The name of the bucket is signed as part of the host."""
    options = {"s3_endpoint": "cwobject.com", "force_http": True}
    with Relay(weed.host) as relay:
        monkeypatch.setenv("http_proxy", f"http://{relay.host}")
        address = f"s3://bucket/hosts/{key}"
        with TensorSerializer(open_stream(address, "wb", **options, **KEY)) as file:
            file.write_state_dict(TENSORS)
        with TensorDeserializer(open_stream(address, **options, **KEY), "cpu") as file:
            check(dict(file), TENSORS)
        with pytest.raises(PermissionError, match="403"):
            open_stream(address, **options, **KEY | {"s3_secret_access_key": "secre-hu5hw0rd"})
        assert {host for _, host, _ in relay.requests} == {"bucket.cwobject.com"}
        assert not any(path.startswith("/bucket/") for _, _, path in relay.requests)
    monkeypatch.delenv("http_proxy")
    check(tensorizer.load(address), TENSORS)


def is_signed(fields, path):
    signed = fields.get("authorization", "") + path
    return any(name in signed for name in (";x-amz-request-payer", "%3Bx-amz-request-payer"))


@pytest.mark.parametrize("word", ["requester", "true"])
def test_the_requester_pays(weed, monkeypatch, word):
    """Each request says so, and its signature covers that."""
    with Relay(weed.host) as relay:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{relay.host}")
        tensorizer.save(SMALL, "s3://bucket/pays.tensors")
        check(tensorizer.load("s3://bucket/pays.tensors"))
        assert not any("x-amz-request-payer" in fields for fields in relay.fields)
        before = len(relay.requests)
        monkeypatch.setenv("AWS_REQUEST_PAYER", word)
        tensorizer.save(SMALL, "s3://bucket/pays.tensors")
        tensorizer.save(TENSORS, "s3://bucket/pays.more.tensors")
        check(tensorizer.load("s3://bucket/pays.tensors"))
        check(ops.load("s3://bucket/pays.more.tensors"), TENSORS)
        with pytest.raises(RuntimeError), TensorSerializer("s3://bucket/pays.tensors") as file:
            file.write_state_dict(TENSORS)
            raise RuntimeError
        found = list(zip(relay.requests, relay.fields, strict=True))[before:]
    assert {method for (method, *_), _ in found} == {"GET", "PUT", "POST", "DELETE"}
    for (method, _, path), fields in found:
        assert fields["x-amz-request-payer"] == "requester", (method, path)
        assert is_signed(fields, path), (method, path)


def test_an_unknown_value_of_aws_request_payer_is_refused(monkeypatch):
    monkeypatch.setenv("AWS_REQUEST_PAYER", "BucketOwner")
    for call in (lambda: tensorizer.load("s3://bucket/f"), lambda: open_stream("s3://b/f", "wb")):
        with pytest.raises(ValueError, match="AWS_REQUEST_PAYER must be `requester`, or empty"):
            call()
