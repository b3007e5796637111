"""Objects of Google Cloud Storage and blobs of Azure that are written."""

import base64
import os
import threading

import pytest
import tensorizer
import torch
from conftest import assert_same
from emulators import GoogleXml, Tokens, crc32c
from processes import COMMAND, run_python
from scripted import Relay, silent
from tensorizer import TensorSerializer
from tensorizer.stream_io import open_stream

ops = torch.ops.tensorizer

SMALL = {"a": torch.arange(10), "b": torch.randn(3, 4).to(torch.bfloat16), "empty": torch.ones(0)}
#: Several parts of 8 MiB.
LARGE = {"first": torch.randn(900, 1000), "big": torch.randn(5, 1000, 1000), "end": torch.ones(3)}


@pytest.fixture(autouse=True)
def settings(no_settings_of_the_machine, monkeypatch):
    monkeypatch.setenv("TENSORIZER_ATTEMPTS", "3")
    monkeypatch.setenv("TENSORIZER_STALL_SECONDS", "10")
    monkeypatch.setenv("TENSORIZER_TOTAL_SECONDS", "60")


@pytest.fixture
def key(request, bucket):
    """A name of the test's own; at the end no upload under way may be left."""
    key = request.node.name.translate(str.maketrans("[]/ ", "----"))
    yield key
    assert bucket.left(key) == []


@pytest.fixture
def address(bucket, key):
    return f"{bucket.scheme}://bucket/{key}"


def check(address, tensors):
    loaded = tensorizer.load(address, "cpu", verify_hash=True)
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        assert_same(loaded[name], tensor)


def gone(bucket, key):
    try:
        bucket.read(key)
    except Exception as error:
        assert "404" in str(error) or "NoSuchKey" in str(error)
        return True
    return False


@pytest.fixture
def through(bucket, monkeypatch):
    """Save through a relay with a script, which is given the stage of a request and its number."""

    def save(tensors, address, script):
        def by_stage(method, path, number):
            return script(bucket.stage(method, path), number)

        with Relay(bucket.host, by_stage) as relay, monkeypatch.context() as patch:
            for name, value in bucket.settings(relay.host).items():
                patch.setenv(name, value)
            tensorizer.save(tensors, address)

    return save


@pytest.mark.parametrize("tensors", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("way", ["address", "stream", "save", "background", "operator"])
def test_every_way_of_writing(bucket, key, address, tmp_path, way, tensors):  # noqa: PLR0917
    if way == "address":
        with TensorSerializer(address) as serializer:
            serializer.write_state_dict(tensors)
    elif way == "stream":
        with open_stream(address, "wb") as stream:
            serializer = TensorSerializer(stream)
            serializer.write_state_dict(tensors)
    elif way == "save":
        tensorizer.save(tensors, address)
    elif way == "background":
        tensorizer.save_async(tensors, address).result()
    else:
        ops.save(address, tensors)
    # The same bytes as a local file's.
    if way in ("address", "stream"):
        with TensorSerializer(tmp_path / "local") as serializer:
            serializer.write_state_dict(tensors)
    else:
        tensorizer.save(tensors, tmp_path / "local")
    assert bucket.read(key) == (tmp_path / "local").read_bytes()
    check(address, tensors)


def test_written_streams_appear_when_they_are_closed(bucket, key, address):
    data = os.urandom(1 << 20) * 20
    with open_stream(address, "wb") as stream:
        for start in range(0, len(data), 3 << 20):
            stream.write(data[start : start + (3 << 20)])
        assert gone(bucket, key)
    assert bucket.read(key) == data
    with open_stream(address) as stream:
        assert stream.read() == data
    for mode in ("rb+", "xb"):
        with pytest.raises(ValueError, match="can be opened with 'rb' and 'wb'"):
            open_stream(address, mode)


def test_folders_and_the_command(bucket, key, address, tmp_path):
    folder = f"{address}-folder"
    tensorizer.save(LARGE, f"{folder}/model.safetensors", max_shard_size=21_000_000)
    found = tensorizer.load(f"{folder}/")
    assert sorted(found) == sorted(LARGE)
    assert_same(found["big"], LARGE["big"])
    tensorizer.save(LARGE, tmp_path / "f.tensors")
    (tmp_path / "key").write_bytes(bytes(range(32)))

    def run(*arguments):
        done = run_python(COMMAND, *arguments)
        assert done.returncode == 0, done.stderr

    run("cp", tmp_path / "f.tensors", address)
    run("cp", "--verify", address, f"{address} copy")
    assert bucket.read(key) == (tmp_path / "f.tensors").read_bytes()
    check(f"{address} copy", LARGE)


def test_checkpoints_of_torch(bucket, address):
    import torch.distributed.checkpoint as dcp
    from tensorizer.distributed import Reader, Writer

    dcp.save({"w": LARGE["first"]}, storage_writer=Writer(f"{address}-dcp"), no_dist=True)
    state = {"w": torch.zeros_like(LARGE["first"])}
    dcp.load(state, storage_reader=Reader(f"{address}-dcp"), no_dist=True)
    assert_same(state["w"], LARGE["first"])


def test_an_exception_keeps_the_old_object(bucket, key, address):
    bucket.put(key, b"old")
    with pytest.raises(RuntimeError, match="mine"), TensorSerializer(address) as one:
        one.write_state_dict(LARGE)
        assert bucket.read(key) == b"old"
        raise RuntimeError("mine")
    with pytest.raises(RuntimeError, match="mine"), open_stream(address, "wb") as two:
        two.write(bytes(70 << 20))
        raise RuntimeError("mine")
    assert bucket.read(key) == b"old"


def test_transient_upload_failures_are_retried(address, through):
    """Every request fails at first, in one way or another."""
    seen = set()
    faults = [("status", 503, {"Retry-After": "0"}), ("reset",), ("status", 429), ("status", 500)]

    def script(stage, number):
        if stage in seen:
            return None
        seen.add(stage)
        return faults[len(seen) % len(faults)]

    through(LARGE, address, script)
    assert seen >= {"part", "complete"}
    check(address, LARGE)


@pytest.mark.parametrize("stage", ["begin", "part", "complete", "put"])
def test_permanent_failures_publish_nothing(bucket, key, address, through, stage):
    if stage == "begin" and bucket.scheme == "az":
        stage = "part"  # blocks are not begun
    bucket.put(key, b"old")
    with pytest.raises(OSError, match=f"://bucket/{key[:10]}.*502.*3 tries") as raised:
        through(SMALL if stage == "put" else LARGE, address,
                lambda now, _: ("status", 502) if now == stage else None)  # fmt: skip
    assert "secret" not in str(raised.value)
    assert bucket.read(key) == b"old"


def test_an_answer_that_was_lost_is_looked_into(address, through):
    """The server has done it, and knows the parts no more."""
    ends = []

    def script(stage, number):
        if stage == "complete":
            ends.append(number)
            return ("lost",) if len(ends) == 1 else None
        return None

    through(LARGE, address, script)
    assert len(ends) == 2
    check(address, LARGE)


def test_a_large_upload_succeeds_although_all_completion_replies_are_lost(address, through):
    through(LARGE, address, lambda stage, _: ("lost",) if stage == "complete" else None)
    check(address, LARGE)


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_a_small_upload_succeeds_although_all_replies_are_lost(address, through):
    """Not on Azure: Azurite refuses checksums, which a client never learns if answers are lost."""
    through(SMALL, address, lambda stage, _: ("lost",) if stage == "put" else None)
    check(address, SMALL)


def test_of_two_writers_of_one_object_the_later_one_stays(address):
    other = {name: tensor + 1 for name, tensor in LARGE.items()}
    with TensorSerializer(address) as one:
        one.write_state_dict(LARGE)
        tensorizer.save(other, address)
        check(address, other)
        # It began earlier, and drops its object.
        one.close()
    check(address, other)


def test_concurrent_saves_leave_one_whole_object(address):
    each = [{"t": torch.full((2_500_000,), float(number))} for number in range(3)]
    errors = []

    def save(tensors):
        try:
            tensorizer.save(tensors, address)
        except OSError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=save, args=(tensors,)) for tensors in each]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("another program has written" in error for error in errors)
    assert len(errors) < 3
    found = tensorizer.load(address, verify_hash=True)["t"]
    assert found.unique().numel() == 1


def test_an_existing_object_of_same_size_is_not_taken_for_the_upload(bucket, key, address, through):
    """The other object has the same size and the same parts."""
    tensorizer.save(LARGE, address)
    refusals = {"gs": (404, {}, b"<Error><Code>NoSuchUpload</Code></Error>"),
                "az": (400, {"x-ms-error-code": "InvalidBlockList"})}  # fmt: skip
    refusal = ("status", *refusals[bucket.scheme])
    with pytest.raises(OSError, match="NoSuchUpload|another program"):
        through(LARGE, address, lambda stage, _: refusal if stage == "complete" else None)
    check(address, LARGE)


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_spoiled_bytes_are_sent_again(address, through):
    """Azurite refuses fields with sums."""
    flipped = []

    def script(stage, number):
        if stage != "put" or flipped:
            return None
        flipped.append(number)
        return ("flipped",)

    through(SMALL, address, script)
    assert flipped
    check(address, SMALL)


def test_uploads_send_the_documented_checksums(bucket, address, monkeypatch):
    """Checksums are those that Google documents, and those of Azure's own module for Python."""
    with Relay(bucket.host) as relay, monkeypatch.context() as patch:
        for name, value in bucket.settings(relay.host).items():
            patch.setenv(name, value)
        with open_stream(address, "wb") as stream:
            stream.write(b"123456789")
        tensorizer.save(LARGE, f"{address}-large")
        found = list(zip(relay.requests, relay.fields, strict=True))
    parts = [fields for (method, _, path), fields in found if bucket.stage(method, path) == "part"]
    assert len(parts) > 2
    if bucket.scheme == "gs":
        assert found[0][1]["x-goog-hash"] == "crc32c=4waSgw==" == f"crc32c={crc32c(b'123456789')}"
        assert all("x-goog-hash" in fields for fields in parts)
        assert bucket.door.summed
    else:
        assert found[0][1]["x-ms-content-crc64"] == "iJh5CoYUi64="
        # The emulator refuses the field, and is not told it again.
        assert "x-ms-content-crc64" not in found[1][1]
        assert sum("x-ms-content-crc64" in fields for fields in parts) < len(parts)
    check(f"{address}-large", LARGE)


def test_refused_credentials(bucket, key, address, monkeypatch):
    bucket.put(key, b"old")
    if bucket.scheme == "gs":
        bucket.door.good = lambda token, number: False
    else:
        monkeypatch.setenv(
            "AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(b"secret-hu5hw0rd").decode()
        )
    for tensors in (SMALL, LARGE):
        with pytest.raises(PermissionError, match=bucket.refusal) as raised:
            tensorizer.save(tensors, address)
        assert "secret" not in str(raised.value)
    assert bucket.read(key) == b"old"


def test_tokens_that_expire_in_the_middle(moto, monkeypatch):
    """After a few requests only the next token is good."""

    def good(token, number):
        return token == ("hu5hw0rd-1" if number <= 4 else "hu5hw0rd-2")

    with GoogleXml(moto, good) as door, Tokens() as tokens:
        monkeypatch.setenv("GOOGLE_BASE_URL", f"http://{door.host}")
        monkeypatch.setenv("GCE_METADATA_HOST", tokens.host)
        monkeypatch.setenv("GOOGLE_CLOUD_QUOTA_PROJECT", "project")
        tensorizer.save(LARGE, "gs://bucket/renewed")
        check("gs://bucket/renewed", LARGE)
        assert tokens.given == 2
        assert door.projects == {"project"}
        assert {"Bearer hu5hw0rd-1", "Bearer hu5hw0rd-2"} == set(door.shown)


def test_a_shared_access_signature(azurite, monkeypatch):
    given = azurite.settings()
    del given["AZURE_STORAGE_ACCOUNT_KEY"]
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", azurite.shared_access(rights="rcw"))
    tensorizer.save(LARGE, "az://bucket/signed")
    check("az://bucket/signed", LARGE)
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", azurite.shared_access(rights="r"))
    with pytest.raises(PermissionError, match="403") as raised:
        tensorizer.save(SMALL, "az://bucket/signed")
    assert "sig=" not in str(raised.value)


def test_blocks_of_another_program(azurite, monkeypatch):
    """Azure takes block ids of one length only, as long as there are uncommitted blocks."""
    for name, value in azurite.settings().items():
        monkeypatch.setenv(name, value)
    azurite.ask("PUT", "bucket/begun", b"x", query="blockid=AAAA&comp=block")
    with pytest.raises(OSError, match="InvalidBlobOrBlock: another program has begun"):
        tensorizer.save(LARGE, "az://bucket/begun")
    tensorizer.save(SMALL, "az://bucket/begun")
    check("az://bucket/begun", SMALL)


def test_servers_that_are_not_there(bucket, address, monkeypatch):
    with pytest.raises(FileNotFoundError, match="404 Not Found: (NoSuchBucket|ContainerNotFound)"):
        tensorizer.save(SMALL, f"{bucket.scheme}://nothing/name")
    for name, value in bucket.settings("127.0.0.1:1").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConnectionError):
        tensorizer.save(SMALL, address)
    monkeypatch.setenv("TENSORIZER_STALL_SECONDS", "0.3")
    monkeypatch.setenv("TENSORIZER_ATTEMPTS", "1")
    with silent() as host:
        for name, value in bucket.settings(host).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(TimeoutError, match="accepted a byte for 0.3 s|timed out"):
            tensorizer.save(SMALL, address)
