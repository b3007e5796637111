"""Checksums of uploads: the server finds a byte that changes on its way."""

import base64

import pytest
import tensorizer
import torch
from botocore.exceptions import ClientError
from scripted import Relay

#: Several parts of 8 MiB.
LARGE = {"a": torch.arange(3_200_000), "b": torch.ones(3)}
SMALL = {"a": torch.arange(10)}
UNKNOWN = b"<Error><Code>InvalidArgument</Code><Message>Checksum algorithm</Message></Error>"


@pytest.fixture(params=["moto", "weed"])
def server(request, no_settings_of_the_machine, monkeypatch):
    """Two servers, one of which compares sums."""
    server = request.getfixturevalue(request.param)
    for name, value in server.settings().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TENSORIZER_ATTEMPTS", "2")
    monkeypatch.setenv("TENSORIZER_NUM_READERS", "2")
    return server


def save(relay, tensors, key, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", f"http://{relay.host}")
        tensorizer.save(tensors, f"s3://bucket/{key}")


def check(key, tensors):
    loaded = tensorizer.load(f"s3://bucket/{key}", verify_hash=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def crc64(data):
    """CRC-64/NVME, as the standard defines it."""
    crc = (1 << 64) - 1
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x9A6C9329AC4BC9B5 if crc & 1 else 0)
    return base64.b64encode((crc ^ (1 << 64) - 1).to_bytes(8, "big")).decode()


def test_every_request_with_bytes_has_a_sum(server, monkeypatch):
    with Relay(server.host) as relay:
        save(relay, LARGE, "large.tensors", monkeypatch)
        save(relay, SMALL, "small.tensors", monkeypatch)
        requests = list(zip(relay.requests, relay.fields, strict=True))
    check("large.tensors", LARGE)
    check("small.tensors", SMALL)
    puts = [fields for (method, *_), fields in requests if method == "PUT"]
    assert len(puts) >= 5
    for fields in puts:
        assert len(base64.b64decode(fields["x-amz-checksum-crc64nvme"])) == 8
        # The bytes are those of the object, and not in pieces with a sum behind them.
        assert "aws-chunked" not in fields.get("content-encoding", "")
        assert "x-amz-trailer" not in fields
    (begin,) = [fields for (_, _, path), fields in requests if "uploads" in path]
    assert begin["x-amz-checksum-algorithm"] == "CRC64NVME"
    assert begin["x-amz-checksum-type"] == "FULL_OBJECT"
    body = server.client().get_object(Bucket="bucket", Key="small.tensors")["Body"].read()
    assert puts[-1]["x-amz-checksum-crc64nvme"] == crc64(body)


def test_the_server_has_the_sum_of_the_object(weed, no_settings_of_the_machine, monkeypatch):
    for name, value in weed.settings().items():
        monkeypatch.setenv(name, value)
    tensorizer.save({"a": torch.zeros(100_000)}, "s3://bucket/one.tensors")
    found = weed.client().head_object(Bucket="bucket", Key="one.tensors", ChecksumMode="ENABLED")
    body = weed.client().get_object(Bucket="bucket", Key="one.tensors")["Body"].read()
    assert found["ChecksumCRC64NVME"] == crc64(body)


@pytest.mark.parametrize("tensors", [SMALL, LARGE], ids=["whole", "parts"])
@pytest.mark.parametrize("always", [False, True], ids=["once", "always"])
def test_a_bit_that_flips_on_its_way(  # noqa: PLR0917
    weed, no_settings_of_the_machine, monkeypatch, request, tensors, always
):
    for name, value in weed.settings().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TENSORIZER_ATTEMPTS", "2")
    client, key, flipped = weed.client(), f"{request.node.name}.tensors", []

    def script(method, path, number):
        if method == "PUT" and ("partNumber" not in path or "partNumber=1002&" in path + "&"):
            flipped.append(number)
            return ("flipped",) if always or len(flipped) == 1 else None
        return None

    with Relay(weed.host, script) as relay:
        if always:
            with pytest.raises(OSError, match=r"BadDigest.*2 tries"):
                save(relay, tensors, key, monkeypatch)
        else:
            save(relay, tensors, key, monkeypatch)
    assert len(flipped) == 2
    if not always:
        check(key, tensors)
        return
    with pytest.raises(ClientError, match="404"):
        client.head_object(Bucket="bucket", Key=key)
    left = client.list_multipart_uploads(Bucket="bucket").get("Uploads", [])
    assert key not in [upload["Key"] for upload in left]


@pytest.mark.parametrize("status", [400, 501])
def test_servers_that_know_no_sums(server, monkeypatch, status):
    class Old(Relay):
        def script_of(self, method, path, number):
            knows = any("checksum" in name for name in self.fields[number])
            return ("status", status, {}, UNKNOWN) if knows else None

        def __init__(self):
            super().__init__(server.host, self.script_of)

    with Old() as relay:
        save(relay, LARGE, "old.tensors", monkeypatch)
        assert sum("uploads" in path for _, _, path in relay.requests) == 2
        # Parts are not sent twice.
        assert not any("x-amz-checksum-crc64nvme" in fields for fields in relay.fields)
        before = len(relay.requests)
        save(relay, SMALL, "old.small.tensors", monkeypatch)
        assert len(relay.requests) == before + 3
    check("old.tensors", LARGE)
    check("old.small.tensors", SMALL)


def test_servers_that_say_nothing_of_sums(server, monkeypatch):
    """The end of the upload has no checksum of the object, which they may define otherwise."""

    def script(method, path, number):
        return ("without", "x-amz-checksum-algorithm") if "uploads" in path else None

    with Relay(server.host, script) as relay:
        save(relay, LARGE, "silent.tensors", monkeypatch)
        ends = [
            fields
            for (method, _, path), fields in zip(relay.requests, relay.fields, strict=True)
            if method == "POST" and "uploadId" in path
        ]
    assert len(ends) == 1
    assert "x-amz-checksum-crc64nvme" not in ends[0]
    check("silent.tensors", LARGE)


def test_servers_that_refuse_sums_of_parts(server, monkeypatch):
    """Their answer to the begin of the upload did not mention checksums."""
    refused = []

    class Silent(Relay):
        def script_of(self, method, path, number):
            if "uploads" in path:
                return ("without", "x-amz-checksum-algorithm")
            if method == "PUT" and "x-amz-checksum-crc64nvme" in self.fields[number]:
                refused.append(path)
                return ("status", 400, {}, UNKNOWN)
            return None

        def __init__(self):
            super().__init__(server.host, self.script_of)

    with Silent() as relay:
        save(relay, LARGE, "parts.tensors", monkeypatch)
    # Each part is sent twice with its checksum, and then without.
    assert refused and all(refused.count(path) == 2 for path in refused)
    check("parts.tensors", LARGE)


def test_a_refusal_of_bytes_that_were_spoiled(server, monkeypatch):
    """Some servers call a wrong checksum invalid: the part is sent again with its checksum."""
    refused = []

    class Strict(Relay):
        def script_of(self, method, path, number):
            if method == "PUT" and not refused:
                refused.append(number)
                return ("status", 400, {}, UNKNOWN)
            return None

        def __init__(self):
            super().__init__(server.host, self.script_of)

    with Strict() as relay:
        save(relay, SMALL, "spoiled.tensors", monkeypatch)
        puts = [
            fields
            for (method, _, _), fields in zip(relay.requests, relay.fields, strict=True)
            if method == "PUT"
        ]
    assert ["x-amz-checksum-crc64nvme" in fields for fields in puts] == [True, True]
    check("spoiled.tensors", SMALL)


def test_checksums_can_be_disabled(server, monkeypatch):
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    with Relay(server.host) as relay:
        save(relay, LARGE, "without.tensors", monkeypatch)
        save(relay, SMALL, "small.tensors", monkeypatch)
        assert not any("checksum" in name for fields in relay.fields for name in fields)
    check("without.tensors", LARGE)
