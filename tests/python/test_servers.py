"""Servers that are ordinary, and differ from what the standards say: one test for each kind."""

import email.utils
import functools
import itertools
import os
import re
import time

import pytest
import tensorizer
import torch
from conftest import assert_same
from hub import send
from internet import EXPRESS, Internet
from processes import run_python
from scripted import Relay, Scripted, reset
from servers import Nginx
from tensorizer import TensorDeserializer, TensorSerializer
from tensorizer.stream_io import open_stream

TENSORS = {f"layer.{i}": torch.randn(500_000) for i in range(4)}
KEYS = {"s3_access_key_id": "key", "s3_secret_access_key": "secret-hu5hw0rd"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("servers") / "f.tensors"
    tensorizer.save(TENSORS, path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def nginx(tmp_path_factory, data):
    server = Nginx(tmp_path_factory.mktemp("nginx"))
    (server.root / "f.tensors").write_bytes(data)
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def settings(no_settings_of_the_machine, monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("HF_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("TENSORIZER_STALL_SECONDS", "10")
    monkeypatch.setenv("TENSORIZER_TOTAL_SECONDS", "60")


def check(address, **options):
    """Load a file, and return why it was read in another way than wanted."""
    found = tensorizer.load(address, "cpu", **options)
    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert_same(found[name], tensor)
    return tensorizer.stats()["fallbacks"]


class Server(Scripted):
    """Serves a file: ``change`` gets status, fields and body of each answer, and returns others."""

    def __init__(self, data, change=lambda status, fields, body: (status, fields, body)):
        self.data, self.change = data, change
        super().__init__()
        self.host = f"127.0.0.1:{self.port}"
        self.url = f"http://{self.host}/f.tensors"

    def answer(self, handler):
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
        status, fields, body = 200, {"ETag": '"one"'}, self.data
        if asked is not None:
            start, end = int(asked[1]), min(int(asked[2]) + 1, len(self.data))
            status, body = 206, self.data[start:end]
            fields["Content-Range"] = f"bytes {start}-{end - 1}/{len(self.data)}"
        send(handler, *self.change(status, fields, body))


# Few connections


@pytest.mark.parametrize("limit", [1, 2])
def test_a_server_that_allows_few_connections_is_read_by_as_many(nginx, limit):
    (why,) = check(f"{nginx.http}/at-most-{limit}/f.tensors", num_readers=8)
    # More than the limit, if the answers of some had been sent, but not yet read to their ends:
    # nginx then serves others.
    assert re.search(rf"refused some of the connections, and [1-{limit + 2}] w", why), why


class OneConnection(Server):
    """Answers on one connection, and resets the others while that is open."""

    first, refused = None, 0

    def answer(self, handler):
        with self.lock:
            if self.first is None or self.first.fileno() < 0:
                self.first = handler.connection
            is_other = handler.connection is not self.first
            self.refused += is_other
        if is_other:
            reset(handler.connection)
            handler.close_connection = True
        else:
            super().answer(handler)


def test_a_server_that_serves_one_connection_and_resets_the_others_is_read(data):
    with OneConnection(data) as server:
        check(server.url, num_readers=4)


# Answers to ranges


BROKEN = {
    "no Content-Range": lambda status, fields, body: (206, {}, body),
    "400": lambda status, fields, body: (400, {}, b"no ranges"),
    "501": lambda status, fields, body: (501, {}, b"no ranges"),
    "a part as the whole": lambda status, fields, body: (200, fields, body[:1000]),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_server_with_broken_ranges_is_read_front_to_back(data, kind):
    def change(status, fields, body):
        return BROKEN[kind](status, fields, body) if status == 206 else (status, fields, body)

    with Server(data, change) as server:
        (why,) = check(server.url)
        assert "so the file is read front to back" in why
        with open_stream(server.url) as stream:
            assert stream.read() == data


def test_a_range_of_a_file_of_unknown_length_is_broken_too(data):
    def change(status, fields, body):
        if status == 206:
            fields["Content-Range"] = fields["Content-Range"].split("/")[0] + "/*"
        return status, fields, body

    with Server(data, change) as server:
        check(server.url)


@pytest.mark.parametrize("coding", ["aws-chunked", "", "Identity", "AWS-chunked,identity"])
def test_codings_that_change_nothing_are_none(data, coding):
    def change(status, fields, body):
        return status, fields | {"Content-Encoding": coding}, body

    with Server(data, change) as server:
        assert check(server.url) == []


def test_a_compressed_file_is_refused(data):
    def change(status, fields, body):
        return status, fields | {"Content-Encoding": "aws-chunked, gzip"}, body

    with Server(data, change) as server, pytest.raises(OSError, match="Content-Encoding .*gzip"):
        check(server.url)


@pytest.mark.parametrize("is_same", [True, False])
def test_replicas_of_a_file_have_one_tag_and_several_dates(data, is_same):
    number = itertools.count()

    def change(status, fields, body):
        this = next(number)
        tag = fields["ETag"] if is_same else f'"{this}"'
        return status, fields | {"ETag": tag, "Last-Modified": email.utils.formatdate(this)}, body

    with Server(data, change) as server:
        if is_same:
            assert check(server.url) == []
            return
        with pytest.raises(OSError, match="the file changed since it was opened: its ETag"):
            check(server.url)


@pytest.mark.parametrize("has_ranges", [True, False])
def test_headers_of_the_first_answer_stay_after_a_load(data, has_ranges):
    def change(status, fields, body):
        fields["X-Cache-Status"] = "HIT"
        return (status, fields, body) if has_ranges else (200, {"X-Cache-Status": "HIT"}, data)

    with Server(data, change) as server:
        for lazy in (False, True):
            for file in (server.url, open_stream(server.url)):
                with TensorDeserializer(file, "cpu", lazy_load=lazy) as deserializer:
                    assert deserializer.cache_status == "HIT"
        with open_stream(server.url) as stream:
            stream.read()
            assert stream.response_headers["x-cache-status"] == "HIT"


# Refusals


REASONS = {
    "gs": (403, "<Error><Code>UserProjectMissing</Code><Message>{}</Message></Error>"),
    "az": (409, "<Error><Code>BlobArchived</Code><Message>{}</Message></Error>"),
    "s3": (403, "<Error><Code>InvalidObjectState</Code><Message>{}</Message></Error>"),
    "http": (400, '{{"error": {{"code": "TooLarge", "message": "{}"}}}}'),
    "hf": (403, ""),
}


@pytest.mark.parametrize("scheme", REASONS)
def test_refusals_say_the_reason_of_the_server(monkeypatch, scheme):
    """The token that was sent is left out of it."""
    status, body = REASONS[scheme]
    said = "a reason" if scheme == "http" else "a reason (hu5hw0rd-of-mine)"

    def change(*_):
        fields = {"X-Error-Message": said, "X-Error-Code": "X"} if scheme == "hf" else {}
        return status, fields, body.format(said).encode()

    with Server(b"", change) as server:
        for name, value in {
            "GOOGLE_BASE_URL": f"http://{server.host}",
            "GOOGLE_BEARER_TOKEN": "hu5hw0rd-of-mine",
            "AZURE_STORAGE_ENDPOINT": f"http://{server.host}",
            "AZURE_STORAGE_ACCOUNT_NAME": "account",
            "AZURE_STORAGE_TOKEN": "hu5hw0rd-of-mine",
            "AWS_ENDPOINT_URL": f"http://{server.host}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret-hu5hw0rd",
            "AWS_SESSION_TOKEN": "hu5hw0rd-of-mine",
            "HF_ENDPOINT": f"http://{server.host}",
            "HF_TOKEN": "hu5hw0rd-of-mine",
        }.items():
            monkeypatch.setenv(name, value)
        address = server.url if scheme == "http" else f"{scheme}://org/repo/f.tensors"
        calls = [tensorizer.load]
        if scheme in ("gs", "az", "s3"):
            calls.append(functools.partial(tensorizer.save, TENSORS))
        for call in calls:
            with pytest.raises(OSError, match=rf"answered {status} .*a reason") as raised:
                call(address)
            code = re.search(r"Code>(\w+)<|(TooLarge)|^$", body)
            assert (code[1] or code[2] or "X") in str(raised.value)
            assert "hu5hw0rd" not in str(raised.value)


# S3


def write_and_read(address="s3://bucket/servers.tensors", **options):
    """Upload a file and load it, both by one stream."""
    with TensorSerializer(open_stream(address, "wb", **options)) as file:
        file.write_state_dict(TENSORS)
    with TensorDeserializer(open_stream(address, **options), "cpu") as file:
        for name, tensor in TENSORS.items():
            assert_same(file[name].detach(), tensor)


class Hosts(Relay):
    """Stands for a store that has the bucket in its host."""

    def translate(self, host, path):
        return self.to, f"/{host.partition('.')[0]}{path}"


@pytest.mark.parametrize("way", ["argument", "variable", "profile", "s3cfg"])
def test_buckets_are_in_the_host_if_a_setting_says_so(moto, monkeypatch, tmp_path, way):
    options = KEYS | {"s3_endpoint": "store.example", "force_http": True}
    if way == "argument":
        options["s3"] = {"addressing_style": "virtual"}
    elif way == "variable":
        monkeypatch.setenv("TENSORIZER_S3_ADDRESSING_STYLE", "virtual")
    elif way == "profile":
        (tmp_path / "aws").write_text("[default]\ns3 =\n    addressing_style = virtual\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws"))
    else:
        (tmp_path / ".s3cfg").write_text(
            "[default]\naccess_key = key\nsecret_key = secret-hu5hw0rd\nuse_https = False\n"
            "host_base = store.example\nhost_bucket = %(bucket)s.store.example\n"
        )
        options = {}
    with Hosts(moto.host) as relay:
        monkeypatch.setenv("http_proxy", f"http://{relay.host}")
        write_and_read(**options)
        assert {host for _, host, _ in relay.requests} == {"bucket.store.example"}


def test_uploads_ask_for_encryption_and_all_requests_for_the_payer(moto):
    with Relay(moto.host) as relay:
        write_and_read(
            **KEYS,
            s3_endpoint=relay.host,
            force_http=True,
            s3={
                "ServerSideEncryption": "aws:kms",
                "SSEKMSKeyId": "id-of-key",
                "RequestPayer": "requester",
            },
        )
        assert all(fields["x-amz-request-payer"] == "requester" for fields in relay.fields)
        begins = [
            fields
            for (method, _, path), fields in zip(relay.requests, relay.fields, strict=True)
            if (method == "PUT" and "partNumber" not in path) or path.endswith("?uploads")
        ]
        assert [fields["x-amz-server-side-encryption"] for fields in begins] == ["aws:kms"]
    found = moto.client().head_object(Bucket="bucket", Key="servers.tensors")
    assert (found["ServerSideEncryption"], found["SSEKMSKeyId"]) == ("aws:kms", "id-of-key")
    for wrong, said in [
        ({"SSE": "x"}, "expected settings among"),
        ({"RequestPayer": "me"}, "'me'"),
    ]:
        with pytest.raises(ValueError, match=said):
            open_stream("s3://bucket/f", s3=wrong)


def test_session_tokens_are_signed_and_no_address_has_a_secret(moto, tmp_path):
    """Also those of s3cmd's file."""
    token = "token-hu5hw0rd"
    with Relay(moto.host) as relay:
        (tmp_path / "s3cfg").write_text(
            f"[default]\naccess_key = key\nsecret_key = secret-hu5hw0rd\naccess_token = {token}\n"
            f"host_base = {relay.host}\nuse_https = False\n"
        )
        host = {"s3_endpoint": relay.host, "force_http": True}
        for options in (
            KEYS | host | {"s3_session_token": token},
            {"s3_config_path": tmp_path / "s3cfg"},
        ):
            before = len(relay.requests)
            write_and_read(**options)
            for fields in relay.fields[before:]:
                assert fields["x-amz-security-token"] == token
                assert ";x-amz-security-token" in fields["authorization"]
        assert not any("X-Amz" in path or "hu5hw0rd" in path for _, _, path in relay.requests)


def test_the_region_of_a_source_profile_is_signed_for(moto, tmp_path, monkeypatch):
    config = "[profile role]\nrole_arn = arn:aws:iam::1:role/r\nsource_profile = base\n"
    (tmp_path / "aws").write_text(config + "[profile base]\nregion = cn-north-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws"))
    monkeypatch.setenv("AWS_PROFILE", "role")
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.delenv("AWS_REGION", raising=False)
    with Relay(moto.host) as relay:
        write_and_read(**KEYS, s3_endpoint=relay.host, force_http=True)
        assert all("/cn-north-1/s3/" in fields["authorization"] for fields in relay.fields)


class Ahead(Relay):
    """Refuses requests of another day than its own, which is tomorrow."""

    now = time.time() + 24 * 3600

    def answer(self, handler):
        handler.date_time_string = lambda: email.utils.formatdate(self.now, usegmt=True)
        super().answer(handler)

    def is_refused(self, number):
        day = time.strftime("%Y%m%d", time.gmtime(self.now))
        return not self.fields[number]["x-amz-date"].startswith(day)


def test_requests_are_signed_by_the_clock_of_the_server(moto):
    said = b"<Error><Code>RequestTimeTooSkewed</Code></Error>"
    with Ahead(moto.host) as relay:
        relay.script = lambda method, path, number: (
            ("status", 403, {}, said) if relay.is_refused(number) else None
        )
        write_and_read(**KEYS, s3_endpoint=relay.host, force_http=True)
        refused = sum(relay.is_refused(number) for number in range(len(relay.requests)))
        assert 2 <= refused < len(relay.requests)


SESSION = b"""<?xml version="1.0"?>
<CreateSessionResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Credentials>
<SessionToken>session-hu5hw0rd</SessionToken><SecretAccessKey>other-hu5hw0rd</SecretAccessKey>
<AccessKeyId>key-of-session</AccessKeyId><Expiration>2099-01-01T00:00:00Z</Expiration>
</Credentials></CreateSessionResult>"""


class Express(Internet):
    """The server of a directory bucket, which gives sessions."""

    def told(self, method, path, number):
        return ("status", 200, {}, SESSION) if "session" in path else None

    def translate(self, host, path):
        return self.to, f"/bucket{path}"


def test_directory_buckets_are_read_and_written_in_sessions(moto, monkeypatch, tmp_path):
    bucket, _, _ = EXPRESS.partition(".")
    with Express(moto, tmp_path / "internet") as internet:
        for name, value in internet.variables.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("AWS_REGION", "us-west-2")
        write_and_read(f"s3://{bucket}/express.tensors", **KEYS, s3_region_name="us-west-2")
        assert internet.hosts == [EXPRESS]
        of_session = [
            fields.get("x-amz-s3session-token") == "session-hu5hw0rd" for fields in internet.fields
        ]
        asks = ["session" in path for _, _, path in internet.requests]
        assert of_session == [not asked for asked in asks]
        assert set(internet.signers) == {"key", "key-of-session"}


# A machine without threads


WITHOUT_THREADS = """
import os, resource, sys, threading, tensorizer
os.setgroups([]); os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
try:
    threading.Thread(target=print).start()
except RuntimeError:
    print(len(tensorizer.load(sys.argv[1], "cpu")))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a limit on processes of a user needs another user")
def test_names_are_looked_up_where_no_thread_can_be_started(data):
    """Tokio's own way to look them up panics there."""
    with Server(data) as server:
        address = server.url.replace("127.0.0.1", "localhost")
        done = run_python(WITHOUT_THREADS, address, env=os.environ)
    assert done.stdout == "4\n", done.stderr
