"""Credentials that expire, and those of machines in a cloud: found once, and renewed."""

import json
import os

import pytest
import tensorizer
import torch
from conftest import assert_same
from processes import run_python
from scripted import Relay, Scripted
from tensorizer import TensorDeserializer
from tensorizer.stream_io import open_stream

TENSORS = {"big": torch.randn(5, 1000, 1000), "small": torch.arange(10)}
EXPIRED = (
    b"<?xml version='1.0'?><Error><Code>ExpiredToken</Code>"
    b"<Message>The provided token has expired.</Message></Error>"
)
#: S3's answer to a presigned address that has expired.
TOO_LATE = (
    b"<?xml version='1.0'?><Error><Code>AccessDenied</Code>"
    b"<Message>Request has expired</Message></Error>"
)


class Metadata(Scripted):
    """Gives credentials to containers (``/credentials``) and to machines (all other paths).

    Each answer has another access key: ``key-1``, ``key-2`` and so on.
    """

    def __init__(self, expiration="2100-01-01T00:00:00Z"):
        self.expiration, self.given, self.asked = expiration, 0, []
        super().__init__()
        self.address = f"http://127.0.0.1:{self.port}"

    def answer(self, handler):
        with self.lock:
            self.asked.append(handler.path)
            body = self.body(handler.path)
        handler.send_response(200)
        handler.send_header("X-aws-ec2-metadata-token-ttl-seconds", "21600")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def body(self, path):
        if path.endswith("/token"):
            return b"token"
        if path.endswith("/region"):
            return b"mars-north-1"
        if path.endswith("/security-credentials/"):
            return b"role"
        self.given += 1
        said = {"Code": "Success", "Type": "AWS-HMAC", "LastUpdated": "2020-01-01T00:00:00Z",
                "AccessKeyId": f"key-{self.given}", "SecretAccessKey": "secret-hu5hw0rd",
                "Token": "token-hu5hw0rd", "Expiration": self.expiration}  # fmt: skip
        return json.dumps(said).encode()


@pytest.fixture(autouse=True)
def settings(s3, monkeypatch):
    """The environment of a container: no keys, but a server that gives them."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("TENSORIZER_TOTAL_SECONDS", "30")


@pytest.fixture
def saved(moto, request, tmp_path):
    path = tmp_path / "f.tensors"
    tensorizer.save(TENSORS, path)
    key = f"{request.node.name}.tensors"
    moto.client().upload_file(str(path), "bucket", key)
    return f"s3://bucket/{key}"


@pytest.fixture
def ask(monkeypatch):
    """Have a server asked for credentials, and the objects of another."""

    def ask(metadata, relay):
        address = f"{metadata.address}/credentials"
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", address)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{relay.host}")

    return ask


def check(loaded):
    assert list(loaded) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert_same(loaded[name].detach(), tensor)


@pytest.mark.parametrize(
    ("status", "body"), [(400, EXPIRED), (403, TOO_LATE)], ids=["token", "address"]
)
def test_requests_refused_as_expired_get_new_credentials(moto, saved, ask, status, body):
    def script(method, path, number):
        old = number >= 1 and relay.signers[number] == "key-1"
        return ("status", status, {"Content-Type": "application/xml"}, body) if old else None

    with Metadata() as metadata, Relay(moto.host, script) as relay:
        ask(metadata, relay)
        check(tensorizer.load(saved, "cpu"))
    assert metadata.given == 2
    assert relay.signers[0] == "key-1"
    assert relay.signers[-1] == "key-2"


def test_expired_credentials_are_renewed_only_once(moto, saved, ask):
    script = lambda *_: ("status", 400, {}, EXPIRED)  # noqa: E731
    with Metadata() as metadata, Relay(moto.host, script) as relay:
        ask(metadata, relay)
        with pytest.raises(OSError, match="400"):
            tensorizer.load(saved, "cpu")
    assert relay.signers == ["key-1", "key-2"]
    # Other refusals are errors, and the credentials are not renewed.
    with Metadata() as metadata, Relay(moto.host, lambda *_: ("status", 403)) as relay:
        ask(metadata, relay)
        with pytest.raises(PermissionError, match="403"):
            tensorizer.load(saved, "cpu")
    assert relay.signers == ["key-1"]


def test_expired_credentials_are_replaced_before_each_request(moto, saved, ask):
    # Credentials that have expired when they come: each request asks for new ones.
    with Metadata("2020-01-01T00:00:00Z") as metadata, Relay(moto.host) as relay:
        ask(metadata, relay)
        stream = open_stream(saved)
        with TensorDeserializer(stream, "cpu", num_readers=1) as deserializer:
            check(dict(deserializer.items()))
    assert len(relay.signers) > 1
    assert len(set(relay.signers)) == len(relay.signers)


@pytest.mark.parametrize("expiration", ["2100-01-01T00:00:00Z", "2020-01-01T00:00:00Z"])
def test_uploads_renew_what_expires(moto, request, ask, monkeypatch, expiration):
    monkeypatch.setenv("TENSORIZER_NUM_READERS", "2")
    key = f"{request.node.name}.tensors"

    class Strict(Relay):
        def __init__(self):
            def script(method, path, number):
                late = method == "PUT" and self.signers[number] == "key-1" and number > 2
                return (
                    ("status", 400, {"Content-Type": "application/xml"}, EXPIRED) if late else None
                )

            super().__init__(moto.host, script)

    with Metadata(expiration) as metadata, Strict() as relay:
        ask(metadata, relay)
        tensorizer.save({"a": torch.zeros(10 << 20)}, f"s3://bucket/{key}")
    if expiration.startswith("2020"):
        assert len(set(relay.signers)) == len(relay.signers)
    else:
        assert metadata.given == 2
        assert set(relay.signers) == {"key-1", "key-2"}
    size = moto.client().head_object(Bucket="bucket", Key=key)["ContentLength"]
    assert size > 40 << 20


def test_credentials_are_cached_per_process(moto, saved, ask):
    with Metadata() as metadata, Relay(moto.host) as relay:
        ask(metadata, relay)
        for _ in range(3):
            check(tensorizer.load(saved, "cpu"))
        assert metadata.asked == ["/credentials"]
        code = (
            "import os, sys, tensorizer\n"
            "tensorizer.load(sys.argv[1], 'cpu')\n"
            "if os.fork() == 0:\n"
            "    tensorizer.load(sys.argv[1], 'cpu')\n"
            "    os._exit(0)\n"
            "assert os.wait()[1] == 0\n"
            "tensorizer.load(sys.argv[1], 'cpu')\n"
        )
        done = run_python(code, saved, env=dict(os.environ))
        assert done.returncode == 0, done.stderr
        # The first process, and the one that was forked off it.
        assert len(metadata.asked) == 3


def test_the_metadata_server_is_asked_only_for_missing_credentials(moto, saved, monkeypatch):
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    host, options = moto.host, {"s3_endpoint": moto.host, "force_http": True}
    given = {"s3_access_key_id": "key", "s3_secret_access_key": "secret-hu5hw0rd"}
    with Metadata() as metadata, Relay(host) as relay:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.address)
        stream = open_stream(saved, **given, **options)
        check(dict(TensorDeserializer(stream, "cpu").items()))
        monkeypatch.setenv("AWS_REGION", "mars-south-1")
        open_stream(saved, **given, **options).close()
        assert metadata.asked == []
        monkeypatch.delenv("AWS_REGION")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{relay.host}")
        for _ in range(2):
            check(tensorizer.load(saved, "cpu"))
        # For its keys, and not for its region, which is not that of this server.
        assert not any(path.endswith("/region") for path in metadata.asked)
    assert metadata.given == 1
    assert set(relay.signers) == {"key-1"}


def test_a_machine_says_which_region_of_aws_is_asked(monkeypatch):
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    with Metadata() as metadata:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.address)
        with pytest.raises(OSError, match=r"host bucket\.s3\.mars-north-1\.amazonaws\.com"):
            tensorizer.load("s3://bucket/key")
        assert metadata.given == 1


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """Shared files of the test's own."""
    credentials, config = tmp_path / "credentials", tmp_path / "config"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    config.write_text("")
    return credentials, config


def test_tokens_that_are_replaced_again_and_again(moto, saved, shared, monkeypatch):
    """They do not say when they expire: the server does, each time."""
    good = []

    def replace():
        good.append(f"key-{len(good)}")
        shared[0].write_text(
            f"[default]\naws_access_key_id={good[-1]}\naws_secret_access_key=s\n"
            "aws_session_token=token-hu5hw0rd\n"
        )

    def script(method, path, number):
        fits = relay.signers[number] == good[-1]
        return None if fits else ("status", 400, {"Content-Type": "application/xml"}, EXPIRED)

    replace()
    with Relay(moto.host, script) as relay:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{relay.host}")
        stream = open_stream(saved)
        for _ in range(4):
            stream.seek(0)
            assert stream.read(5) == b"|TZR|"
            # Beyond what the stream has read ahead.
            stream.seek(10 << 20)
            replace()
            assert len(stream.read(100)) == 100
        stream.close()


def test_credentials_of_another_profile_are_never_kept(moto, saved, shared, tmp_path, monkeypatch):
    text = ""
    for name in "ab":
        said = {"Version": 1, "AccessKeyId": f"key-{name}", "SecretAccessKey": "s-hu5hw0rd"}
        (tmp_path / name).write_text(json.dumps(said | {"SessionToken": "t-hu5hw0rd"}))
        text += f"[profile {name}]\ncredential_process = /bin/cat {tmp_path / name}\n"
    shared[1].write_text(text)
    refuses = []

    def script(method, path, number):
        if refuses and relay.signers[number] == "key-a":
            return "status", 400, {"Content-Type": "application/xml"}, refuses.pop()
        return None

    with Relay(moto.host, script) as relay:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{relay.host}")
        monkeypatch.setenv("AWS_PROFILE", "a")
        with TensorDeserializer(open_stream(saved), "cpu", num_readers=1, lazy_load=True) as file:
            monkeypatch.setenv("AWS_PROFILE", "b")
            refuses.append(EXPIRED)
            with pytest.raises(
                OSError, match="the environment variables that configure them have changed"
            ):
                file["big"]
        monkeypatch.setenv("AWS_PROFILE", "a")
        before = len(relay.signers)
        assert_same(tensorizer.load(saved, "cpu")["small"], TENSORS["small"])
        assert set(relay.signers[before:]) == {"key-a"}


class Proxy(Scripted):
    """A proxy that reaches nothing."""

    def __init__(self):
        self.asked = []
        super().__init__()

    def answer(self, handler):
        self.asked.append((handler.path, str(handler.headers)))
        handler.send_error(502)


@pytest.mark.parametrize(
    "variables",
    [
        {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://169.254.170.23/v1/credentials"},
        {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://[fd00:ec2::23]/v1/credentials"},
        {"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/v2/credentials"},
        {"AWS_EC2_METADATA_DISABLED": "false"},
    ],
    ids=["pod", "pod by IPv6", "task", "machine"],
)
def test_services_of_the_machine_are_not_asked_through_a_proxy(
    variables, tmp_path, monkeypatch, moto
):
    """The proxy cannot reach them, and would see the token."""
    (tmp_path / "token").write_text("token-hu5hw0rd")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("TENSORIZER_ATTEMPTS", "1")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with Proxy() as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        with pytest.raises(OSError):
            open_stream("s3://bucket/nothing")
        assert not [path for path, _ in proxy.asked if "169.254" in path or "fd00" in path]
        assert "hu5hw0rd" not in str(proxy.asked)


def test_a_service_on_loopback_is_not_asked_through_a_proxy(moto, saved, monkeypatch):
    with Proxy() as proxy, Metadata() as metadata:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{metadata.address}/credentials")
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        # The object is asked for through the proxy.
        with pytest.raises(OSError, match="502"):
            open_stream(saved)
        assert metadata.asked == ["/credentials"]
        assert {path.split("?")[0] for path, _ in proxy.asked} == {
            f"http://{moto.host}/{saved[5:]}"
        }
