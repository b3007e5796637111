"""Variables and AWS profile settings act as in the reference client: requests, boto3 or curl."""

import contextlib
import ipaddress
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import boto3
import botocore.exceptions
import botocore.loaders
import botocore.session
import pytest
import requests
import tensorizer
import torch
from botocore.config import Config
from conftest import assert_same
from scripted import Forwarder, Relay
from servers import make_certificates, need
from tensorizer.stream_io import open_stream

TENSORS = {"a": torch.arange(1000), "b": torch.ones(3)}
ADDRESS = "s3://bucket/guests.tensors"
KEYS = {"AWS_ACCESS_KEY_ID": "key-of-variables", "AWS_SECRET_ACCESS_KEY": "secret-hu5hw0rd"}
#: The models of boto3, which takes longer to read them than for a request.
MODELS = botocore.loaders.create_loader()
HTTPS_HINT = "certificate_handling=CAInfo(cacert=...) or REQUESTS_CA_BUNDLE"
S3_HINT = "certificate_handling=CAInfo(cacert=...) or AWS_CA_BUNDLE"


@pytest.fixture
def use(no_settings_of_the_machine, monkeypatch):
    """Set variables; those of the machine are removed."""
    monkeypatch.setenv("TENSORIZER_ATTEMPTS", "1")

    def use(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return use


@pytest.fixture(scope="module")
def web(nginx):
    """The server with a file, ``f.tensors``."""
    tensorizer.save(TENSORS, nginx.root / "f.tensors")
    return nginx


@pytest.fixture(scope="module")
def objects(moto, web):
    """The S3 server with the object at ADDRESS."""
    moto.client().upload_file(str(web.root / "f.tensors"), "bucket", "guests.tensors")
    return moto


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """Values of variables by kind; the right ones have the authority of the servers."""
    folder = tmp_path_factory.mktemp("bundles")
    make_certificates(folder)
    hashed = folder / "hashed"
    hashed.mkdir()
    shutil.copy(folder / "ca.pem", hashed)
    subprocess.run([need("openssl"), "rehash", hashed], check=True)
    return {"right": folder / "ca.pem", "wrong": requests.certs.where(), "folder": hashed,
            "missing": folder / "missing.pem", "empty": ""}  # fmt: skip


@pytest.fixture
def s3_over_tls(use, objects, bundles):
    """A TLS relay to the S3 server; the variables name it as the endpoint."""
    folder = bundles["right"].parent
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    with Relay(objects.host) as relay:
        # The handshake is a part of accept(), whose errors the server ignores: clients end some.
        relay.server.socket = context.wrap_socket(relay.server.socket, server_side=True)
        use(**KEYS, AWS_REGION="us-east-1", AWS_ENDPOINT_URL_S3=f"https://{relay.host}")
        yield relay


def configure(text):
    (Path.home() / ".aws").mkdir()
    (Path.home() / ".aws/config").write_text(text)


def load(address):
    loaded = tensorizer.load(address, "cpu")
    assert list(loaded) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert_same(loaded[name].detach(), tensor)


def refused(address, *parts):
    """Check the message of a load that fails, and that of a stream."""
    for call in (open_stream, lambda address: tensorizer.load(address, "cpu")):
        with pytest.raises((OSError, ValueError)) as raised:
            call(address)
        assert all(part in str(raised.value) for part in parts), raised.value


def requests_get(url):
    """Read a file by ``requests`` with the settings of the environment."""
    response = requests.get(url, timeout=60)
    assert response.content.startswith(b"|TZR|")


def boto3_get():
    """Read the object by boto3 with the settings of the environment."""
    options = Config(retries={"total_max_attempts": 1})
    settings = botocore.session.get_session()
    settings.register_component("data_loader", MODELS)
    session = boto3.session.Session(botocore_session=settings)
    client = session.client("s3", config=options, region_name="us-east-1")
    with contextlib.closing(client):
        answer = client.get_object(Bucket="bucket", Key="guests.tensors")
        assert answer["Body"].read().startswith(b"|TZR|")


def curl(url, works=True):
    """Check that curl can read a file, or cannot; False if it is not installed."""
    if shutil.which("curl") is None:
        return False
    done = subprocess.run(["curl", "-sS", "--max-time", "60", url], capture_output=True)
    assert (done.returncode == 0, done.stdout.startswith(b"|TZR|")) == (works, works), done.stderr
    return True


#: The kind of bundle of each variable; a part of the message, None if the server is trusted.
HTTPS = [
    ({"REQUESTS_CA_BUNDLE": "right"}, None),
    ({"REQUESTS_CA_BUNDLE": "folder"}, None),
    ({"CURL_CA_BUNDLE": "right"}, None),
    ({"REQUESTS_CA_BUNDLE": "right", "CURL_CA_BUNDLE": "wrong"}, None),
    ({"REQUESTS_CA_BUNDLE": "empty", "CURL_CA_BUNDLE": "right"}, None),
    ({"REQUESTS_CA_BUNDLE": "wrong", "CURL_CA_BUNDLE": "right"}, "REQUESTS_CA_BUNDLE"),
    ({"CURL_CA_BUNDLE": "wrong"}, "CURL_CA_BUNDLE"),
    ({}, HTTPS_HINT),
]


@pytest.mark.parametrize(("kinds", "named"), HTTPS, ids=str)
def test_https_trusts_the_bundles_of_requests(web, bundles, use, kinds, named):
    url = f"{web.https}/f.tensors"
    use(**{name: bundles[kind] for name, kind in kinds.items()})
    if named is None:
        requests_get(url)
        load(url)
        return
    with pytest.raises(requests.exceptions.SSLError):
        requests_get(url)
    reason = f"{bundles['wrong']} ({named}) does not have the certificate" if kinds else named
    refused(url, "certificate is not trusted", reason)


@pytest.mark.parametrize("variable", ["REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"])
def test_missing_bundle_is_an_error_of_https_alone(web, bundles, use, variable):
    use(**{variable: bundles["missing"]})
    requests_get(f"{web.http}/f.tensors")
    load(f"{web.http}/f.tensors")
    with pytest.raises(OSError, match="missing.pem"):
        requests_get(f"{web.https}/f.tensors")
    refused(f"{web.https}/f.tensors", "missing.pem", variable)


SYSTEM = [
    ({"SSL_CERT_FILE": "right"}, None),
    ({"SSL_CERT_DIR": "folder"}, None),
    ({"SSL_CERT_FILE": "wrong", "SSL_CERT_DIR": "folder"}, None),
    ({"CURL_CA_BUNDLE": "right", "SSL_CERT_FILE": "wrong"}, None),
    ({"CURL_CA_BUNDLE": "wrong", "SSL_CERT_FILE": "right"}, "CURL_CA_BUNDLE"),
    ({"SSL_CERT_FILE": "wrong"}, HTTPS_HINT),
]


@pytest.mark.parametrize(("kinds", "named"), SYSTEM, ids=str)
def test_https_trusts_the_system_certificates_of_curl(web, bundles, use, kinds, named):
    url = f"{web.https}/f.tensors"
    use(**{name: bundles[kind] for name, kind in kinds.items()})
    curl(url, works=named is None)
    if named is None:
        load(url)
    else:
        refused(url, "certificate is not trusted", named)


def test_missing_ssl_cert_file_is_named(web, bundles, use):
    use(SSL_CERT_FILE=bundles["missing"])
    curl(f"{web.https}/f.tensors", works=False)
    refused(f"{web.https}/f.tensors", "SSL_CERT_FILE")


V, P, R = "AWS_CA_BUNDLE", "ca_bundle", "REQUESTS_CA_BUNDLE"
AWS = [
    ({V: "right"}, None),
    ({P: "right"}, None),
    ({R: "right"}, None),
    ({V: "right", P: "wrong", R: "wrong"}, None),
    ({P: "right", R: "wrong"}, None),
    *(({V: kind, P: "right", R: "right"}, V) for kind in ("wrong", "missing")),
    *(({P: kind, R: "right"}, "`ca_bundle` of AWS's profile") for kind in ("wrong", "missing")),
    *(({R: kind}, R) for kind in ("wrong", "missing")),
    ({}, S3_HINT),
]


@pytest.mark.parametrize(("kinds", "named"), AWS, ids=str)
def test_s3_trusts_the_bundles_of_boto3(s3_over_tls, bundles, use, kinds, named):
    values = {name: bundles[kind] for name, kind in kinds.items()}
    if P in values:
        configure(f"[default]\nca_bundle = {values.pop(P)}\n")
    use(**values)
    if named is None:
        boto3_get()
        load(ADDRESS)
        assert set(s3_over_tls.signers) == {KEYS["AWS_ACCESS_KEY_ID"]}
        return
    with pytest.raises((botocore.exceptions.SSLError, OSError)):
        boto3_get()
    is_missing = "missing" in kinds.values()
    refused(ADDRESS, "missing.pem" if is_missing else "certificate is not trusted", named)
    assert s3_over_tls.requests == []


@pytest.mark.parametrize("variable", ["NO_PROXY", "no_proxy"])
def test_asterisk_excludes_numeric_hosts_from_proxies(web, use, variable):
    url = f"http://127.0.0.1:{web.port}/f.tensors"
    use(http_proxy="http://127.0.0.1:1", TENSORIZER_TOTAL_SECONDS="1")
    with pytest.raises(requests.exceptions.ProxyError):
        requests_get(url)
    refused(url)
    use(**{variable: "*", "TENSORIZER_TOTAL_SECONDS": "60"})
    requests_get(url)
    load(url)


def test_services_section_names_the_endpoint_of_s3(objects, use):
    with Relay(objects.host) as relay:
        configure(
            "[profile x]\nregion = us-east-1\nservices = local\n"
            f"[services local]\ns3 =\n  endpoint_url = http://{relay.host}\n"
        )
        use(**KEYS, AWS_PROFILE="x")
        boto3_get()
        assert len(relay.requests) == 1
        load(ADDRESS)
        assert len(relay.requests) > 1


@pytest.mark.parametrize("of_profile", [{}, {"AWS_PROFILE": ""}], ids=str)
def test_default_profile_variable_names_the_profile(objects, use, of_profile):
    with Relay(objects.host) as relay:
        keys = "aws_secret_access_key = secret-hu5hw0rd\nregion = us-east-1\n"
        configure(
            f"[default]\naws_access_key_id = of-default\n{keys}endpoint_url = http://127.0.0.1:1\n"
            f"[profile x]\naws_access_key_id = of-x\n{keys}endpoint_url = http://{relay.host}\n"
        )
        use(AWS_DEFAULT_PROFILE="x", **of_profile)
        boto3_get()
        load(ADDRESS)
        assert set(relay.signers) == {"of-x"}


class Socks(Forwarder):
    """A SOCKS5 proxy whose connections all go to one port. ``asked`` has the hosts and ports."""

    def __init__(self, port):
        self.port, self.asked = port, []
        super().__init__()

    def connect(self, inner):
        inner.settimeout(20)
        with inner.makefile("rb") as read:
            read.read(read.read(2)[1])  # methods of authentication
            inner.sendall(b"\5\0")  # none
            kind = read.read(4)[3]
            host = read.read({1: 4, 4: 16}.get(kind) or read.read(1)[0])
            host = host.decode() if kind == 3 else ipaddress.ip_address(host)
            self.asked.append((host, int.from_bytes(read.read(2), "big")))
        inner.sendall(b"\5\0\0\1" + bytes(6))
        return socket.create_connection(("127.0.0.1", self.port)), None


def test_socks5h_proxy_is_given_the_host_name(web, use):
    with Socks(web.port) as proxy:
        use(all_proxy=f"socks5h://{proxy.host}")
        if curl("http://files.example/f.tensors"):
            assert proxy.asked == [("files.example", 80)]
        proxy.asked.clear()
        load("http://files.example/f.tensors")
        assert set(proxy.asked) == {("files.example", 80)}


@pytest.mark.parametrize("variable", ["https_proxy", "HTTPS_PROXY", "all_proxy"])
def test_proxy_of_an_unknown_scheme_is_an_error(web, bundles, use, variable):
    url = f"{web.https}/f.tensors"
    use(CURL_CA_BUNDLE=bundles["right"], **{variable: "quic://host:1"})
    with pytest.raises((requests.exceptions.RequestException, ValueError)):
        requests_get(url)
    curl(url, works=False)
    refused(url, f"{variable} names a proxy with `quic://`")
