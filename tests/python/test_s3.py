"""Objects of an S3 server."""

import json
import urllib.request

import pytest
import tensorizer
import torch
from conftest import assert_same
from scripted import Relay, Scripted
from servers import Moto
from tensorizer import TensorDeserializer
from tensorizer.stream_io import CURLStreamFile, open_stream

ops = torch.ops.tensorizer

TENSORS = {
    "big": torch.randn(1500, 1000),
    **{f"small.{i}": torch.full((i % 7, 3), float(i)) for i in range(60)},
}
#: Keys that need care in addresses.
KEYS = ["f.tensors", "folder/f.tensors", "with space+plus.tensors", "per%20cent", "ümlaut/&=;.t"]


def check(loaded):
    assert list(loaded) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert_same(loaded[name].detach(), tensor)


@pytest.fixture(scope="session")
def s3(tmp_path_factory):
    """The host and port of a server that keeps objects in memory, with some of ours."""
    server = Moto()
    client = server.client()
    client.create_bucket(Bucket="bucket", ACL="public-read")
    path = tmp_path_factory.mktemp("s3") / "f.tensors"
    tensorizer.save(TENSORS, path)
    for key in KEYS:
        client.upload_file(str(path), "bucket", key, ExtraArgs={"ACL": "public-read"})
    yield server.host
    server.stop()


@pytest.fixture(autouse=True)
def no_settings(no_settings_of_the_machine):
    pass


KEY = {"s3_access_key_id": "key", "s3_secret_access_key": "secret-hu5hw0rd"}


@pytest.mark.parametrize("key", KEYS)
def test_arguments(s3, key):
    stream = open_stream(f"s3://bucket/{key}", s3_endpoint=s3, force_http=True, **KEY)
    assert isinstance(stream, CURLStreamFile)
    assert stream.name == f"s3://bucket/{key}"
    check(dict(TensorDeserializer(stream, device="cpu", num_readers=3, verify_hash=True).items()))


def test_the_environment(s3, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-hu5hw0rd")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token-hu5hw0rd")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{s3}")
    check(tensorizer.load("s3://bucket/f.tensors", "cpu"))
    check(ops.load("s3://bucket/f.tensors"))
    out = torch.zeros(1500, 1000)
    ops.load("s3://bucket/f.tensors", ["big"], [out])
    assert_same(out, TENSORS["big"])


def test_a_profile(s3, monkeypatch, tmp_path):
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(
        "[other]\naws_access_key_id = key\naws_secret_access_key = secret-hu5hw0rd\n"
    )
    (tmp_path / ".aws/config").write_text(f"[profile other]\nendpoint_url = http://{s3}\n")
    monkeypatch.setenv("AWS_PROFILE", "other")
    check(tensorizer.load("s3://bucket/f.tensors", "cpu"))


def test_s3cfg(s3, tmp_path, monkeypatch):
    text = f"[default]\naccess_key = key\nsecret_key = secret\nhost_base = {s3}\n"
    (tmp_path / ".s3cfg").write_text(text + "use_https = False\n")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")  # comes after it
    check(tensorizer.load("s3://bucket/f.tensors", "cpu"))
    (tmp_path / "mine").write_text(text)
    (tmp_path / ".s3cfg").unlink()
    stream = open_stream("s3://bucket/f.tensors", s3_config_path=tmp_path / "mine", force_http=True)
    check(dict(TensorDeserializer(stream, device="cpu").items()))
    with pytest.raises(FileNotFoundError):
        open_stream("s3://bucket/f.tensors", s3_config_path=tmp_path / "nothing")


class Metadata(Scripted):
    """A server that gives a container its credentials."""

    def __init__(self):
        self.asked = []
        super().__init__()

    def answer(self, handler):
        self.asked.append(handler.path)
        names = ("AccessKeyId", "SecretAccessKey", "Token")
        body = dict.fromkeys(names, "of-the-machine") | {"Expiration": "2100-01-01T00:00:00Z"}
        data = json.dumps(body).encode()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)


def test_credentials_of_a_machine_in_a_cloud(s3, monkeypatch):
    """The SDK's chain asks for them over our client."""
    with Metadata() as metadata, Relay(s3) as relay:
        address = f"http://127.0.0.1:{metadata.port}/credentials"
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", address)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{relay.host}")
        check(tensorizer.load("s3://bucket/f.tensors", "cpu"))
        assert metadata.asked == ["/credentials"]
        assert set(relay.signers) == {"of-the-machine"}


def test_requests_without_credentials_are_unsigned(s3):
    stream = open_stream(
        "s3://bucket/f.tensors", s3_access_key_id="", s3_secret_access_key="", s3_endpoint=s3,
        force_http=True,
    )  # fmt: skip
    check(dict(TensorDeserializer(stream, device="cpu").items()))
    # No credentials are found: the request is not signed.
    stream = open_stream("s3://bucket/f.tensors", s3_endpoint=s3, force_http=True)
    assert stream.read(5) == b"|TZR|"


def test_ranges_of_an_object(s3):
    options = {"s3_endpoint": s3, "force_http": True, **KEY}
    with open_stream("s3://bucket/f.tensors", begin=1, end=5, **options) as stream:
        assert stream.read() == b"TZR|"


def test_errors(s3):
    options = {"s3_endpoint": s3, "force_http": True, **KEY}
    with pytest.raises(FileNotFoundError, match="s3://bucket/nothing.*404"):
        open_stream("s3://bucket/nothing", **options)
    with pytest.raises(FileNotFoundError, match="404"):
        open_stream("s3://nothing/nothing", **options)
    for address in ("s3://", "s3://bucket", "s3://bucket/", "s3:///key"):
        with pytest.raises(ValueError, match="expected s3://bucket/key"):
            open_stream(address, **options)
    with pytest.raises(ValueError, match="Non-HTTPS endpoint URLs are not allowed"):
        open_stream("s3://bucket/key", s3_endpoint=f"http://{s3}", **KEY)
    with pytest.raises(ValueError, match="half a pair of keys was given: s3_secret_access_key="):
        open_stream("s3://bucket/key", s3_access_key_id="key", s3_endpoint=s3)
    with pytest.raises(ValueError, match="'s3' is not supported, only 'v4' is"):
        open_stream("s3://bucket/key", s3_signature_version="s3", **options)
    with pytest.raises(ValueError, match="'rb' and 'wb', not 'rb\\+'"):
        open_stream("s3://bucket/key", "rb+", **options)
    with pytest.raises(ConnectionError) as refused:
        open_stream("s3://bucket/key", s3_endpoint="127.0.0.1:1", force_http=True, **KEY)
    assert "secret" not in str(refused.value)
    assert "Signature" not in str(refused.value)


def test_the_old_package_uploads_and_we_read(s3, old):
    old(
        """
with tensorizer.stream_io.open_stream(
        "s3://bucket/old.tensors", "wb", "key", "secret-hu5hw0rd", args[0],
        force_http=True) as stream:
    serializer = tensorizer.TensorSerializer(stream)
    serializer.write_state_dict({"a": torch.arange(100)})
    serializer.close()
""",
        s3,
    )
    stream = open_stream("s3://bucket/old.tensors", s3_endpoint=s3, force_http=True, **KEY)
    assert_same(TensorDeserializer(stream, "cpu")["a"].detach(), torch.arange(100))


def test_presigned_addresses_are_plain_https(s3):
    import boto3

    client = boto3.client("s3", endpoint_url=f"http://{s3}", region_name="us-east-1",
                          aws_access_key_id="key",
                          aws_secret_access_key="secret-hu5hw0rd")  # fmt: skip
    url = client.generate_presigned_url(
        "get_object", Params={"Bucket": "bucket", "Key": "f.tensors"}
    )
    with urllib.request.urlopen(url) as reply:
        assert reply.status == 200
    check(tensorizer.load(url, "cpu"))
