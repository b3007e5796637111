"""The server that `s3://` means: an endpoint that is named, or that of the credentials."""

import contextlib
import json
import subprocess
import sys

import pytest
import secret_words
import tensorizer
import torch
from conftest import assert_same
from internet import EU, OTHER, READ, US, WRITE, Internet
from processes import COMMAND
from scripted import Relay, Scripted
from tensorizer import stream_io
from tensorizer.stream_io import CAInfo, open_stream, s3_download, s3_upload

ops = torch.ops.tensorizer

TENSORS = {"a": torch.arange(1000), "b": torch.ones(3)}
ADDRESS = "s3://bucket/endpoints.tensors"
KEYS = {"s3_access_key_id": "key-of-mine", "s3_secret_access_key": "secret-hu5hw0rd"}
NOBODY = {"s3_access_key_id": "", "s3_secret_access_key": ""}
#: The variables of a machine that AWS knows.
CHAIN = {
    "AWS_ACCESS_KEY_ID": "key-of-chain",
    "AWS_SECRET_ACCESS_KEY": "secret-hu5hw0rd",
    "AWS_SESSION_TOKEN": "token-hu5hw0rd",
    "AWS_REGION": "eu-west-1",
}


@pytest.fixture(scope="module")
def objects(moto, tmp_path_factory):
    """The server that has the object."""
    path = tmp_path_factory.mktemp("endpoints") / "f.tensors"
    tensorizer.save(TENSORS, path)
    moto.client().upload_file(str(path), "bucket", "endpoints.tensors",
                              ExtraArgs={"ACL": "public-read"})  # fmt: skip
    return moto


@pytest.fixture
def use(no_settings_of_the_machine, monkeypatch):
    """Set variables; those of the clouds are removed before."""
    for name in ("TENSORIZER_S3_ENDPOINT", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TENSORIZER_ATTEMPTS", "1")

    def use(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return use


@pytest.fixture
def internet(use, objects, tmp_path):
    """Every host that is asked by HTTPS, with the object."""
    with Internet(objects, tmp_path / "internet") as internet:
        use(**internet.variables)
        yield internet


def check(loaded):
    assert list(loaded) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert_same(loaded[name].detach(), tensor)


def read(**options):
    with open_stream(ADDRESS, **options) as stream:
        assert stream.read(5) == b"|TZR|"


def write(**options):
    with open_stream(f"{ADDRESS}.copy", "wb", **options) as stream:
        stream.write(b"bytes")


def download(internet, **options):
    trust = CAInfo(cacert=str(internet.authority))
    with s3_download(ADDRESS, None, None, certificate_handling=trust, **options) as stream:
        assert stream.read(5) == b"|TZR|"


def s3cfg(tmp_path, keys=True, host=None):
    text = "[default]\naccess_key = key-of-file\nsecret_key = secret\n" if keys else "[default]\n"
    (tmp_path / ".s3cfg").write_text(text + (f"host_base = {host}\n" if host else ""))


# No endpoint is named: the origin of the credentials decides.


def test_credentials_of_the_chain_go_to_aws(internet, use, tmp_path):
    """No old default is asked, in any way to read or write, and gets the session token."""
    use(**CHAIN)
    check(tensorizer.load(ADDRESS, "cpu"))
    check(ops.load(ADDRESS))
    read()
    download(internet)
    tensorizer.save(TENSORS, f"{ADDRESS}.copy")
    ops.save(f"{ADDRESS}.copy", TENSORS)
    write()
    (tmp_path / "f").write_bytes(b"bytes")
    s3_upload(tmp_path / "f", f"{ADDRESS}.copy", None, None)
    assert set(internet.connected) == set(internet.hosts) == {EU}
    assert set(internet.signers) == {"key-of-chain"}
    for (_, _, path), fields in zip(internet.requests, internet.fields, strict=True):
        assert "eu-west-1" in fields.get("authorization", path)


def test_the_command_goes_to_aws(internet, use):
    use(**CHAIN)
    command = [sys.executable, "-c", COMMAND, "ls", ADDRESS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(internet.connected) == {EU}


@pytest.mark.parametrize("origin", ["arguments", "file"])
def test_stated_keys_go_to_the_old_default(internet, tmp_path, origin):
    options = KEYS if origin == "arguments" else {}
    if origin == "file":
        s3cfg(tmp_path)
    read(**options)
    assert set(internet.connected) == set(internet.hosts) == {READ}
    write(**options)
    assert internet.hosts == [READ, WRITE]
    assert set(internet.signers) == {"key-of-mine" if options else "key-of-file"}


SIGNS = {
    **{name: "x" for name in CHAIN if name != "AWS_SESSION_TOKEN"},
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_PROFILE": "other",
    "AWS_ROLE_ARN": "arn",
    "AWS_WEB_IDENTITY_TOKEN_FILE": secret_words.word("/token"),
    "AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1:1/",
    "profile": "region",
}


@pytest.mark.parametrize("origin", ["arguments", "file"])
@pytest.mark.parametrize("sign", SIGNS)
def test_stated_keys_of_an_unknown_server_are_not_sent(internet, use, tmp_path, origin, sign):
    """They may be those of AWS, or of another server."""
    if sign == "profile":
        (tmp_path / ".aws").mkdir()
        (tmp_path / ".aws/config").write_text("[default]\nregion = eu-west-1\n")
    else:
        use(**{sign: SIGNS[sign]})
    if origin == "file":
        s3cfg(tmp_path)
    options = KEYS if origin == "arguments" else {}
    name = "`region` of AWS's profile" if sign == "profile" else sign
    for call in (read, write):
        with pytest.raises(ValueError, match=f"{name} is set.*s3_endpoint=.*s3_region_name="):
            call(**options)
    assert internet.connected == []
    read(**options, s3_region_name="us-east-1")
    assert internet.hosts == [US]
    write(**options, s3_endpoint=OTHER)
    assert internet.hosts == [US, OTHER]


@pytest.mark.parametrize("options", [NOBODY, {}], ids=["two empty keys", "nothing found"])
def test_without_credentials_aws_is_asked_without_a_signature(internet, use, options):
    internet.wanted = lambda method, host, number: ("status", 403) if number else None
    read(**options)
    with pytest.raises(PermissionError) as raised:
        read(**options)
    assert set(internet.connected) == {US} and set(internet.signers) == {None}
    # Two empty keys ask for no signature: that is no mistake.
    for way in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "s3_access_key_id=", "AWS_ENDPOINT_URL_S3"):
        assert (way in str(raised.value)) == (not options)


@pytest.mark.parametrize("options", [NOBODY, {}], ids=["two empty keys", "nothing found"])
def test_the_public_bucket_is_read_from_the_old_host(internet, use, options):
    with pytest.raises(FileNotFoundError):
        open_stream("s3://tensorized/endpoints.tensors", **options)
    assert set(internet.connected) == {READ} and set(internet.signers) == {None}
    use(**CHAIN)
    with pytest.raises(OSError):
        open_stream("s3://tensorized/endpoints.tensors")
    assert internet.connected[-1] == "tensorized.s3.eu-west-1.amazonaws.com"


@pytest.mark.parametrize(
    "case",
    [
        (
            {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCES_KEY": "s-hu5hw0rd"},
            {},
            "AWS_SECRET_ACCESS_KEY",
        ),
        ({"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": ""}, {}, "AWS_SECRET_ACCESS_KEY"),
        ({"AWS_SECRET_ACCESS_KEY": "secret-hu5hw0rd"}, {}, "AWS_ACCESS_KEY_ID"),
        ({}, {"s3_access_key_id": "k"}, "s3_secret_access_key="),
        (CHAIN, {"s3_secret_access_key": "secret-hu5hw0rd"}, "s3_access_key_id="),
        (CHAIN, {"s3_access_key_id": "k", "s3_secret_access_key": ""}, "s3_secret_access_key="),
        ({}, "access_key = k\n", "secret_key of .s3cfg"),
        ({}, "secret_key = secret-hu5hw0rd\n", "access_key of .s3cfg"),
    ],
)
def test_half_a_pair_is_refused_by_the_missing_name(internet, use, tmp_path, case):
    variables, options, missing = case
    use(**variables)
    if isinstance(options, str):
        (tmp_path / ".s3cfg").write_text(f"[default]\n{options}")
        options = {}
    for call in (read, write):
        for more in ({}, {"s3_endpoint": OTHER}, {"s3_region_name": "us-east-1"}):
            with pytest.raises(ValueError) as raised:
                call(**options, **more)
            assert f"{missing} " in str(raised.value) or f"{missing})" in str(raised.value)
            assert "missing" in str(raised.value)
    assert internet.connected == []


def test_half_a_pair_in_a_profile_is_refused(internet, tmp_path):
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text("[default]\naws_access_key_id = k\n")
    for call in (read, write):
        with pytest.raises(ValueError, match="aws_secret_access_key is missing"):
            call()
    assert internet.connected == []


def test_the_query_of_an_endpoint_is_refused_and_not_shown(internet, use):
    for call in (read, write):
        with pytest.raises(ValueError, match=f"{OTHER}`: .*without `\\?`") as raised:
            call(s3_endpoint=f"{OTHER}?token=secret-hu5hw0rd")
        assert "hu5hw0rd" not in str(raised.value)
    assert internet.connected == []


@pytest.mark.parametrize("options", [NOBODY, {}], ids=["two empty keys", "nothing found"])
def test_nothing_is_written_anonymously_unless_a_server_is_named(internet, options):
    with pytest.raises(
        PermissionError, match=f"no credentials were found, .* sent to {US} anonymously: give"
    ):
        write(**options)
    assert internet.connected == []
    internet.wanted = lambda *_: ("status", 200)
    write(s3_endpoint=OTHER, **options)
    assert internet.hosts == [OTHER]


def test_a_profile_is_of_the_chain(internet, use, tmp_path):
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(
        "[other]\naws_access_key_id = of-profile\naws_secret_access_key = s\n"
    )
    (tmp_path / ".aws/config").write_text("[profile other]\nregion = us-east-1\n")
    use(AWS_PROFILE="other")
    read()
    assert set(internet.connected) == {US}
    assert set(internet.signers) == {"of-profile"}


RULES = [
    ({}, "bucket.s3.us-east-1.amazonaws.com"),
    ({"AWS_REGION": "cn-north-1"}, "bucket.s3.cn-north-1.amazonaws.com.cn"),
    ({"AWS_REGION": "us-gov-west-1"}, "bucket.s3.us-gov-west-1.amazonaws.com"),
    ({"AWS_USE_FIPS_ENDPOINT": "true"}, "bucket.s3-fips.us-east-1.amazonaws.com"),
    ({"AWS_USE_DUALSTACK_ENDPOINT": "true"}, "bucket.s3.dualstack.us-east-1.amazonaws.com"),
]


@pytest.mark.parametrize(("variables", "host"), RULES, ids=[host for _, host in RULES])
def test_hosts_by_the_rules_of_the_sdk(internet, use, variables, host):
    """The proxy has no certificates for most of them, and errors name them."""
    use(**{**CHAIN, "AWS_REGION": "us-east-1", **variables})
    for call in (read, write):
        with contextlib.nullcontext() if host == US else pytest.raises(OSError, match=host):
            call()
    assert set(internet.connected) == {host}


def test_a_partition_without_fips(internet, use):
    use(**{**CHAIN, "AWS_REGION": "cn-north-1", "AWS_USE_FIPS_ENDPOINT": "true"})
    with pytest.raises(ValueError, match="cn-north-1.*FIPS"):
        read()
    assert internet.connected == []


def test_aws_is_reached_over_https_only(internet, use):
    use(**CHAIN)
    with pytest.raises(ValueError, match="https:// only"):
        read(force_http=True)
    assert internet.connected == []


class Elsewhere(Internet):
    """AWS, where the bucket is in another region than most suppose."""

    answer_by = staticmethod(lambda host: None)

    def told(self, method, path, number):
        return self.answer_by(self.requests[number][1])


@pytest.fixture
def elsewhere(use, objects, tmp_path):
    with Elsewhere(objects, tmp_path / "internet") as internet:
        use(**internet.variables, **CHAIN, AWS_DEFAULT_REGION="us-east-1")
        use(AWS_REGION="us-east-1")
        yield internet


def says(region, status=301, **fields):
    said = b"<Error><Code>PermanentRedirect</Code><Message>Use another.</Message></Error>"
    return "status", status, {"x-amz-bucket-region": region, **fields}, said


@pytest.mark.parametrize("status", [301, 307, 400])
def test_the_region_of_a_bucket_is_followed(elsewhere, status):
    location = {"Location": f"https://{OTHER}/nowhere"} if status == 307 else {}
    elsewhere.answer_by = lambda host: says("eu-west-1", status, **location) if host == US else None
    check(tensorizer.load(ADDRESS, "cpu", num_readers=3))
    assert [host for _, host, _ in elsewhere.requests].count(US) == 1
    assert elsewhere.hosts == [US, EU]
    asked = zip(elsewhere.requests, elsewhere.fields, strict=True)
    signed = [fields["authorization"] for (_, host, _), fields in asked if host == EU]
    assert signed
    assert all("/eu-west-1/s3/" in text for text in signed)
    elsewhere.requests.clear()
    elsewhere.fields.clear()
    big = {"big": torch.ones(5 << 20)}
    tensorizer.save(big, f"{ADDRESS}.copy")
    assert [host for _, host, _ in elsewhere.requests].count(US) == 1
    assert elsewhere.hosts == [US, EU]
    assert_same(tensorizer.load(f"{ADDRESS}.copy", "cpu")["big"], big["big"])


def test_the_region_is_followed_once(elsewhere):
    """Two regions that redirect to each other are an error, which names the region."""
    elsewhere.answer_by = lambda host: says("eu-west-1" if host == US else "us-east-1")
    for call in (read, write):
        elsewhere.requests.clear()
        with pytest.raises(OSError, match=f"301 .*in the region `us-east-1`.*host {EU}"):
            call()
        assert [host for _, host, _ in elsewhere.requests] == [US, EU]


@pytest.mark.parametrize("region", ["evil.example/x", f"@{OTHER}#", ""])
def test_a_redirect_to_an_invalid_region_is_not_followed(elsewhere, region):
    elsewhere.answer_by = lambda host: says(region)
    with pytest.raises(OSError, match="301"):
        read()
    assert set(elsewhere.connected) == {US}


def test_an_endpoint_that_is_named_is_not_left_for_a_region(elsewhere, use):
    elsewhere.answer_by = lambda host: says("eu-west-1")
    for call in (read, write):
        with pytest.raises(OSError, match=f"301 .*in the region `eu-west-1`.*host {OTHER}"):
            call(s3_endpoint=OTHER)
    assert set(elsewhere.connected) == {OTHER}


# An endpoint that is named comes first.


@pytest.fixture
def named(use, objects):
    """The server that is named, with the object."""
    with Relay(objects.host) as relay:
        yield relay


WAYS = ["argument", "file", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "services", "profile",
        "assigned", "TENSORIZER_S3_ENDPOINT"]  # fmt: skip


def name_endpoints(ways, right, use, monkeypatch, tmp_path):
    """Name endpoints in these ways: the first is right, all others are of no server."""
    options = {}
    config = "[profile other]\nregion = us-east-1\n"
    for at, way in enumerate(ways):
        host = "127.0.0.1:1" if at else right
        if way == "argument":
            options = {"s3_endpoint": host, "force_http": True}
        elif way == "file":
            s3cfg(tmp_path, keys=False, host=host)
            with (tmp_path / ".s3cfg").open("a") as file:
                file.write("use_https = False\n")
        elif way == "services":
            config += "services = mine\n"
            config += f"[services mine]\ns3 =\n  endpoint_url = http://{host}\n"
        elif way == "profile":
            # The keys of a profile come before other sections.
            head = "[profile other]\n"
            config = config.replace(head, f"{head}endpoint_url = http://{host}\n")
        elif way == "assigned":
            monkeypatch.setattr(stream_io, "default_s3_read_endpoint", f"http://{host}")
            monkeypatch.setattr(stream_io, "default_s3_write_endpoint", f"http://{host}")
        else:
            use(**{way: f"http://{host}"})
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/config").write_text(config)
    use(AWS_PROFILE="other", **CHAIN)
    return options


@pytest.mark.parametrize("at", range(len(WAYS)), ids=WAYS)
def test_an_endpoint_that_is_named_wins(named, use, monkeypatch, tmp_path, at):
    options = name_endpoints(WAYS[at:], named.host, use, monkeypatch, tmp_path)
    read(**options)
    write(**options)
    assert set(named.signers) == {"key-of-chain"}
    if "argument" not in WAYS[at : at + 1]:
        tensorizer.save(TENSORS, f"{ADDRESS}.copy")
        check(tensorizer.load(ADDRESS, "cpu"))
    if WAYS[at] not in ("argument", "assigned"):
        check(ops.load(ADDRESS))


def test_settings_of_aws_that_are_empty_or_ignored_name_nothing(named, use, monkeypatch, tmp_path):
    name_endpoints(["services"], named.host, use, monkeypatch, tmp_path)
    use(AWS_ENDPOINT_URL="", AWS_ENDPOINT_URL_S3="")
    read()
    use(AWS_ENDPOINT_URL="http://127.0.0.1:1", AWS_IGNORE_CONFIGURED_ENDPOINT_URLS="true",
        TENSORIZER_S3_ENDPOINT=f"http://{named.host}")  # fmt: skip
    read()
    assert len(named.requests) == 2


def test_a_default_that_is_assigned_is_read_at_the_call(internet, use, monkeypatch):
    use(**CHAIN)
    monkeypatch.setattr(stream_io, "default_s3_read_endpoint", OTHER)
    read()
    check(tensorizer.load(ADDRESS, "cpu"))
    download(internet)
    assert internet.hosts == [OTHER]
    # The endpoint for writing is another one.
    write()
    assert internet.hosts == [OTHER, EU]
    monkeypatch.setattr(stream_io, "default_s3_write_endpoint", OTHER)
    write()
    monkeypatch.undo()
    assert internet.hosts == [OTHER, EU]


def test_the_old_default_that_is_named_gets_credentials_of_the_chain(internet, use, monkeypatch):
    use(**CHAIN)
    read(s3_endpoint=READ)
    download(internet, s3_endpoint=READ)
    assert internet.hosts == [READ]
    assert set(internet.signers) == {"key-of-chain"}
    # An assignment of an equal text names it too; to restore the object of before does not.
    before = stream_io.default_s3_write_endpoint
    stream_io.default_s3_write_endpoint = "".join(list(WRITE))
    try:
        write()
    finally:
        stream_io.default_s3_write_endpoint = before
    assert internet.hosts == [READ, WRITE]
    write()
    assert internet.hosts == [READ, WRITE, EU]


def test_operators_and_the_command_know_the_variable(internet, use):
    use(**CHAIN, TENSORIZER_S3_ENDPOINT=OTHER)
    check(ops.load(ADDRESS))
    ops.save(f"{ADDRESS}.copy", TENSORS)
    command = [sys.executable, "-c", COMMAND, "ls", ADDRESS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(internet.connected) == {OTHER}
    use(TENSORIZER_S3_ENDPOINT="")
    check(ops.load(ADDRESS))
    assert internet.hosts == [OTHER, EU]


# Errors.


class Refusing(Scripted):
    """An S3 server that refuses everything in the same way."""

    def __init__(self, status, code):
        self.status = status
        self.said = f"<Error><Code>{code}</Code><Message>No.</Message></Error>".encode()
        super().__init__(timeout=1)
        self.host = f"127.0.0.1:{self.port}"

    def answer(self, handler):
        handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        handler.send_response(self.status)
        handler.send_header("Content-Length", str(len(self.said)))
        handler.end_headers()
        handler.wfile.write(self.said)


def error_of(call, **options):
    with pytest.raises((OSError, ValueError)) as raised:
        call(force_http=True, **options)
    return raised.value


def test_missing_buckets_and_missing_keys_are_told_apart(objects, use):
    use(**CHAIN)
    options = {"s3_endpoint": objects.host, "force_http": True}
    with pytest.raises(FileNotFoundError, match=f"{objects.host} has no bucket `nothing`.*404"):
        open_stream("s3://nothing/key", **options)
    with pytest.raises(FileNotFoundError, match=f"{objects.host} has no bucket `nothing`.*404"):
        with open_stream("s3://nothing/key", "wb", **options) as stream:
            stream.write(b"bytes")
    with pytest.raises(
        FileNotFoundError, match=f"s3://bucket/no.*{objects.host} has no such object.*`bucket`.*404"
    ):
        open_stream("s3://bucket/nothing", **options)


@pytest.mark.parametrize("call", [read, write])
def test_no_credentials_are_said(use, call):
    with Refusing(403, "AccessDenied") as server:
        error = error_of(call, s3_endpoint=server.host)
        assert isinstance(error, PermissionError)
        assert "no credentials were found, so the server was asked anonymously" in str(error)
        assert f"host {server.host}" in str(error)
        use(**CHAIN)
        error = error_of(call, s3_endpoint=server.host)
        assert isinstance(error, PermissionError)
        assert "no credentials" not in str(error)
        assert f"host {server.host}" in str(error)


@pytest.mark.parametrize("files", [False, True])
@pytest.mark.parametrize("keys", [False, True])
def test_a_profile_that_is_not_there(internet, use, tmp_path, files, keys):
    """An error where AWS's chain is consulted, whatever else it would find."""
    if files:
        (tmp_path / ".aws").mkdir()
        (tmp_path / ".aws/config").write_text("[profile mine]\nregion = us-east-1\n")
    use(**(CHAIN if keys else {}), AWS_PROFILE="nothing")
    for call in (read, write, lambda: ops.load(ADDRESS)):
        with pytest.raises((PermissionError, RuntimeError), match="profile `nothing`.*neither"):
            call()
    assert internet.connected == []
    read(**KEYS, s3_endpoint=OTHER)
    read(**NOBODY, s3_endpoint=OTHER)
    assert internet.hosts == [OTHER]


@pytest.mark.parametrize("call", [read, write])
@pytest.mark.parametrize("status", [301, 400, 404, 405, 500, 502])
def test_every_refusal_names_the_host(use, call, status):
    use(**CHAIN)
    with Refusing(status, "Reason") as server:
        error = error_of(call, s3_endpoint=server.host)
    assert str(status) in str(error)
    assert "Reason" in str(error) or status >= 500
    assert server.host in str(error)


@pytest.mark.parametrize("call", [read, write])
@pytest.mark.parametrize("host", ["127.0.0.1:1", "no-such-host.invalid"])
def test_servers_that_are_not_there_are_named(use, call, host):
    use(**CHAIN)
    assert host in str(error_of(call, s3_endpoint=host))


@pytest.mark.parametrize("after", ["reset", "stall", ("status", 500)])
def test_a_server_that_fails_later_is_named(objects, use, after):
    """The error names it also after the first request, when the source is open."""
    use(**CHAIN)
    big = {"big": torch.zeros(5 << 20)}
    options = {"s3_endpoint": objects.host, "force_http": True}
    with tensorizer.TensorSerializer(open_stream(f"{ADDRESS}.big", "wb", **options)) as file:
        file.write_state_dict(big)
    use(TENSORIZER_STALL_SECONDS=1)
    fault = after if isinstance(after, tuple) else (after,)
    with Relay(objects.host, lambda method, path, number: fault if number else None) as relay:
        stream = open_stream(f"{ADDRESS}.big", s3_endpoint=relay.host, force_http=True)
        with pytest.raises(OSError, match=relay.host):
            dict(tensorizer.TensorDeserializer(stream, "cpu", num_readers=1).items())


def test_messages_show_no_secrets(internet, use):
    use(**CHAIN)
    internet.wanted = lambda *_: ("status", 403, {}, json.dumps("token-hu5hw0rd").encode())
    with pytest.raises(PermissionError, match=EU) as raised:
        read()
    assert "hu5hw0rd" not in str(raised.value)
