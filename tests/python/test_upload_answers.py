"""Uploads to an S3 server whose answers are incomplete, get lost, or tell of another object."""

import pytest
import tensorizer
import torch
from scripted import Relay
from tensorizer.stream_io import open_stream

#: Several parts of 8 MiB.
LARGE = {"a": torch.arange(2_500_000), "b": torch.ones(3)}


@pytest.fixture(autouse=True)
def settings(s3, monkeypatch):
    monkeypatch.setenv("TENSORIZER_STALL_SECONDS", "5")
    monkeypatch.setenv("TENSORIZER_ATTEMPTS", "2")


def check(key):
    loaded = tensorizer.load(f"s3://bucket/{key}", verify_hash=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in LARGE.items())


def saved_through(relay, key, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", f"http://{relay.host}")
        tensorizer.save(LARGE, f"s3://bucket/{key}")


@pytest.mark.parametrize("times", [1, 2])
def test_a_part_without_a_tag(moto, monkeypatch, times):
    parts = []

    def script(method, path, number):
        if method == "PUT" and "partNumber=1001&" in path + "&":
            parts.append(number)
            return ("without", "ETag") if len(parts) <= times else None
        return None

    with Relay(moto.host, script) as relay:
        if times == 1:
            saved_through(relay, "untagged", monkeypatch)
        else:
            with pytest.raises(OSError, match="response to UploadPart has no ETag"):
                saved_through(relay, "tagless", monkeypatch)
    if times == 1:
        check("untagged")


def is_end(method, path):
    return method == "POST" and "uploadId" in path


def test_an_answer_that_was_lost_is_looked_into(moto, monkeypatch):
    ends = []

    def script(method, path, number):
        if is_end(method, path):
            ends.append(number)
            # The server has done it, and knows the upload no more.
            return ("lost",) if len(ends) == 1 else ("status", 404)
        return None

    with Relay(moto.host, script) as relay:
        saved_through(relay, "lost", monkeypatch)
        assert any(method == "HEAD" for method, _, _ in relay.requests)
    assert len(ends) == 2
    check("lost")


def test_an_existing_object_of_same_size_is_not_taken_for_the_upload(moto, monkeypatch):
    # An object of the same size and the same parts.
    tensorizer.save(LARGE, "s3://bucket/same")

    def script(method, path, number):
        return ("status", 404) if is_end(method, path) else None

    with Relay(moto.host, script) as relay, pytest.raises(FileNotFoundError, match="404"):
        saved_through(relay, "same", monkeypatch)
    check("same")


@pytest.mark.parametrize(
    "endpoint", ["https://me:secret-hu5hw0rd@ho st", "ftp://me:secret-hu5hw0rd@host"]
)
def test_secrets_of_endpoints_are_not_shown(endpoint):
    for mode in ("rb", "wb"):
        with pytest.raises(ValueError, match="S3 endpoint") as refused:
            open_stream("s3://bucket/key", mode, "a", "b", endpoint)
        assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "address", ["s3://bucket?token=secret-hu5hw0rd", "s3://?token=secret-hu5hw0rd"]
)
def test_secrets_of_addresses_are_not_shown(address):
    with pytest.raises(ValueError, match="expected s3://bucket/key") as refused:
        open_stream(address)
    assert "secret" not in str(refused.value)
