"""Objects that are written to an S3 server."""

import contextlib
import gc
import io
import json
import logging
import os
import signal
import subprocess
import threading
import time
import zipfile

import boto3
import pytest
import tensorizer
import torch
from botocore.exceptions import ClientError
from conftest import assert_same
from processes import run_python, start_python
from scripted import Relay
from servers import Moto
from tensorizer import TensorDeserializer, TensorSerializer
from tensorizer.stream_io import open_stream, s3_download, s3_upload
from test_addresses import Store

ops = torch.ops.tensorizer

SMALL = {"a": torch.arange(10), "b": torch.randn(3, 4).to(torch.bfloat16), "empty": torch.ones(0)}
#: Between the shortest batch of an upload, 512 KiB, and the longest tensor hashed at once, 1 MiB.
MEDIUM = {str(kib): torch.arange(kib * 128).double() for kib in range(500, 1030, 50)}
#: Several parts of 8 MiB; tensors of 16 MiB are written between others.
LARGE = {
    "first": torch.randn(900, 1000),
    "big": torch.randn(5, 1000, 1000),
    **{f"small.{i}": torch.full((i % 7, 3), float(i)) for i in range(60)},
    "turned": torch.randn(700, 900).T,
}
#: Stands for the environment in other processes.
CODE = """
import os, sys, tensorizer, torch
os.environ.update(AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret-hu5hw0rd",
                  AWS_EC2_METADATA_DISABLED="true", AWS_ENDPOINT_URL_S3="http://" + sys.argv[1])
"""


@pytest.fixture
def client(moto):
    return moto.client()


@pytest.fixture(autouse=True)
def settings(s3, monkeypatch):
    monkeypatch.setenv("TENSORIZER_STALL_SECONDS", "2")
    monkeypatch.setenv("TENSORIZER_TOTAL_SECONDS", "20")


@pytest.fixture
def key(request, client):
    """A key of the test's own; at the end no upload under way may be left."""
    key = f"{request.node.name}.tensors"
    yield key
    left = client.list_multipart_uploads(Bucket="bucket").get("Uploads", [])
    assert key not in [upload["Key"] for upload in left]


def read(client, key):
    return client.get_object(Bucket="bucket", Key=key)["Body"].read()


def exists(client, key):
    try:
        client.head_object(Bucket="bucket", Key=key)
    except ClientError:
        return False
    return True


def check(key, tensors):
    loaded = tensorizer.load(f"s3://bucket/{key}", "cpu", verify_hash=True)
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        assert_same(loaded[name], tensor)


@pytest.mark.parametrize("tensors", [SMALL, MEDIUM, LARGE], ids=["small", "medium", "large"])
@pytest.mark.parametrize("way", ["address", "stream", "save", "operator", "one"])
def test_every_way_of_writing(client, tmp_path, key, way, tensors):
    address = f"s3://bucket/{key}"
    if way == "address":
        with TensorSerializer(address) as serializer:
            serializer.write_state_dict(tensors)
    elif way == "stream":
        serializer = TensorSerializer(open_stream(address, "wb+"))
        serializer.write_state_dict(tensors)
        serializer.close()
        serializer.close()
    elif way == "save":
        tensorizer.save(tensors, address)
    elif way == "operator":
        ops.save(address, tensors)
    else:
        with TensorSerializer(address, limit_cpu_concurrency=1) as serializer:
            serializer.write_state_dict(tensors)
    # The same bytes as a local file's.
    if way in ("save", "operator"):
        tensorizer.save(tensors, tmp_path / "local.tensors")
    else:
        with TensorSerializer(tmp_path / "local.tensors") as serializer:
            serializer.write_state_dict(tensors)
    assert read(client, key) == (tmp_path / "local.tensors").read_bytes()
    check(key, tensors)


def test_modules_and_many_calls(key):
    module = torch.nn.Sequential(torch.nn.Linear(2000, 2000), torch.nn.LayerNorm(2000))
    with TensorSerializer(f"s3://bucket/{key}") as serializer:
        serializer.write_module(module)
        for number in range(20):
            serializer.write_tensor(0, f"t.{number}", 0, torch.full((100_000,), float(number)))
    with TensorDeserializer(f"s3://bucket/{key}", "cpu", verify_hash=True) as deserializer:
        for name, tensor in module.state_dict().items():
            assert_same(deserializer[name].detach(), tensor)
        assert deserializer["t.7"][0] == 7


def test_an_index_that_outgrows_its_space(client, key):
    tensors = {"big": torch.randn(2, 2_000_000)}
    with TensorSerializer(f"s3://bucket/{key}") as serializer:
        serializer.write_state_dict(tensors)
        for start in range(0, 6000, 2000):  # 256 KiB hold about 4,400 of them
            more = {f"t{number:05}": torch.tensor(number) for number in range(start, start + 2000)}
            serializer.write_state_dict(more)
            tensors |= more
    check(key, tensors)


def test_an_exception_keeps_the_old_object(client, key):
    client.put_object(Bucket="bucket", Key=key, Body=b"old")
    with pytest.raises(RuntimeError, match="mine"), TensorSerializer(f"s3://bucket/{key}") as one:
        one.write_state_dict(LARGE)
        raise RuntimeError("mine")
    with pytest.raises(RuntimeError, match="mine"), open_stream(f"s3://bucket/{key}", "wb") as two:
        serializer = TensorSerializer(two)
        serializer.write_state_dict(LARGE)
        raise RuntimeError("mine")
    with pytest.raises(ValueError, match="closed"):
        serializer.write_state_dict(SMALL)
    serializer.close()
    with pytest.raises(RuntimeError, match="mine"), open_stream(f"s3://bucket/{key}", "wb") as two:
        two.write(bytes(70 << 20))
        raise RuntimeError("mine")
    with pytest.raises(TypeError), TensorSerializer(f"s3://bucket/{key}") as three:
        three.write_state_dict({"a": LARGE["big"], "b": "no tensor"})
    assert read(client, key) == b"old"


def test_a_stream_that_closes_before_its_serializer(key):
    with open_stream(f"s3://bucket/{key}", "wb") as stream:
        serializer = TensorSerializer(stream)
        serializer.write_state_dict(LARGE)
    check(key, LARGE)
    serializer.close()


def test_forgotten_objects(client, key, caplog):
    tensorizer.save(SMALL, f"s3://bucket/{key}")
    stream = open_stream(f"s3://bucket/{key}", "wb")
    stream.write(b"incomplete")
    with caplog.at_level(logging.ERROR):
        del stream
        gc.collect()
    assert "was not closed" in caplog.text
    check(key, SMALL)


def test_the_stream_is_a_python_file(client, key):
    address = f"s3://bucket/{key}"
    with open_stream(address, "wb") as stream:
        assert isinstance(stream, io.BufferedIOBase)
        assert stream.writable()
        assert not stream.readable()
        assert not stream.seekable()
        assert stream.name == address
        assert stream.write(b"ab") == 2
        assert stream.write(memoryview(torch.arange(3).numpy())) == 24
        assert stream.tell() == 26
        with pytest.raises(io.UnsupportedOperation):
            stream.read()
        with pytest.raises(io.UnsupportedOperation):
            stream.seek(0)
        assert not exists(client, key)
    stream.close()
    with pytest.raises(ValueError, match="closed"):
        stream.write(b"x")
    assert read(client, key) == b"ab" + torch.arange(3).numpy().tobytes()
    with open_stream(address, "ab") as stream:
        torch.save(SMALL, stream)
    with open_stream(address) as stream:
        assert_same(torch.load(io.BytesIO(stream.read()))["a"], SMALL["a"])
    with open_stream(address, "wb") as stream, zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("x.json", json.dumps([1, 2]))
    with open_stream(address) as stream, zipfile.ZipFile(stream) as archive:
        assert json.loads(archive.read("x.json")) == [1, 2]
    data = bytes(range(256)) * (300 << 10)  # 75 MiB, sent in two pieces and many parts
    with open_stream(address, "wb") as stream:
        for start in range(0, len(data), 5 << 20):
            stream.write(data[start : start + (5 << 20)])
    assert read(client, key) == data
    with open_stream(address, "wb"):
        pass
    assert read(client, key) == b""


def test_tensors_after_bytes_of_the_caller(client, key):
    with open_stream(f"s3://bucket/{key}", "wb") as stream:
        stream.write(b"mine: " * 100)
        serializer = TensorSerializer(stream)
        serializer.write_state_dict(LARGE)
        with pytest.raises(io.UnsupportedOperation, match="TensorSerializer"):
            stream.write(b"more")
        serializer.close()
    stream = open_stream(f"s3://bucket/{key}")
    assert stream.read(600) == b"mine: " * 100
    loaded = TensorDeserializer(stream, "cpu", verify_hash=True)
    for name, tensor in LARGE.items():
        assert_same(loaded[name].detach(), tensor)


def test_passing_failures(key, monkeypatch, moto):
    # A slow answer would be a failure, and its request would be sent once more.
    monkeypatch.setenv("TENSORIZER_STALL_SECONDS", "20")
    failed = set()

    def script(method, path, number):
        # Every request fails once, in one way or another.
        what = (method, path)
        if what in failed:
            return None
        failed.add(what)
        faults = [("status", 503, {"Retry-After": "0"}), ("reset",), ("status", 500)]
        return faults[len(failed) % 3]

    with Relay(moto.host, script) as relay:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{relay.host}")
        tensorizer.save(LARGE, f"s3://bucket/{key}")
        parts = [path for method, _, path in relay.requests if method == "PUT"]
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{moto.host}")
    # Begin, parts, complete.
    assert len(failed) >= 5
    assert len(parts) == 2 * len(set(parts))
    check(key, LARGE)


def test_a_lasting_failure_publishes_nothing(client, key, monkeypatch, moto):
    monkeypatch.setenv("TENSORIZER_ATTEMPTS", "2")
    client.put_object(Bucket="bucket", Key=key, Body=b"old")

    def script(method, path, number):
        return ("status", 502) if method == "PUT" and "partNumber=1002" in path else None

    with Relay(moto.host, script) as relay:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{relay.host}")
        with pytest.raises(OSError, match=f"s3://bucket/{key[:10]}.*502.*2 tries") as raised:
            tensorizer.save(LARGE, f"s3://bucket/{key}")
        assert "secret" not in str(raised.value)
        assert any(method == "DELETE" for method, _, _ in relay.requests)
    assert read(client, key) == b"old"


@pytest.mark.parametrize(
    ("status", "error"), [(403, PermissionError), (404, FileNotFoundError), (400, OSError)]
)
def test_refusals_are_not_tried_again(key, monkeypatch, moto, status, error):
    with Relay(moto.host, lambda *_: ("status", status)) as relay:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{relay.host}")
        with pytest.raises(error, match=str(status)):
            tensorizer.save(SMALL, f"s3://bucket/{key}")
        assert len(relay.requests) == 1


def test_servers_that_are_not_there(monkeypatch, moto):
    with pytest.raises(FileNotFoundError, match="NoSuchBucket"):
        tensorizer.save(SMALL, "s3://nothing/key")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    monkeypatch.setenv("TENSORIZER_ATTEMPTS", "2")
    with pytest.raises(ConnectionError):
        tensorizer.save(SMALL, "s3://bucket/key")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{moto.host}")
    monkeypatch.setenv("TENSORIZER_STALL_SECONDS", "0.3")
    with Relay(moto.host, lambda *_: ("stall",)) as relay:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{relay.host}")
        with pytest.raises(TimeoutError, match="neither sent nor accepted a byte"):
            tensorizer.save(SMALL, "s3://bucket/key")


@pytest.fixture
def checking():
    """A server that checks signatures, and a pair of keys."""
    server = Moto(unchecked=4)
    iam = server.client("iam")
    iam.create_user(UserName="writer")
    rule = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [rule]})
    iam.put_user_policy(UserName="writer", PolicyName="all", PolicyDocument=policy)
    made = iam.create_access_key(UserName="writer")["AccessKey"]
    server.client().create_bucket(Bucket="bucket")
    yield server.host, made["AccessKeyId"], made["SecretAccessKey"]
    server.stop()


def test_signatures(checking):
    host, access, secret = checking
    options = {"s3_endpoint": host, "force_http": True}

    def save(key, access, secret):
        stream = open_stream(f"s3://bucket/{key}", "wb", access, secret, **options)
        with TensorSerializer(stream) as serializer:
            serializer.write_state_dict(LARGE)

    for key in ("signed.tensors", "with space/ü+&=.tensors"):
        save(key, access, secret)
        reader = boto3.client("s3", endpoint_url=f"http://{host}", region_name="us-east-1",
                              aws_access_key_id=access, aws_secret_access_key=secret)  # fmt: skip
        assert len(read(reader, key)) > 4 << 22
    with pytest.raises(PermissionError, match=r"403.*check the credentials"):
        save("wrong", access, secret[:-1] + "?")


def test_buckets_as_hosts_through_a_proxy(monkeypatch, moto):
    options = {"s3_endpoint": "cwobject.com", "force_http": True}
    with Relay(moto.host, lambda *_: ("status", 200)) as relay:
        monkeypatch.setenv("http_proxy", f"http://{relay.host}")
        stream = open_stream("s3://bucket/k/l.tensors", "wb", "key", "secret-hu5hw0rd", **options)
        with TensorSerializer(stream) as serializer:
            serializer.write_state_dict(SMALL)
        method, host, path = relay.requests[0]
    assert (method, host) == ("PUT", "bucket.cwobject.com")
    assert path.startswith("/k/l.tensors")


def test_helpers(client, tmp_path, moto, key):
    path = tmp_path / "f.tensors"
    tensorizer.save(LARGE, path)
    endpoint = f"http://{moto.host}"
    s3_upload(path, f"s3://bucket/{key}", "key", "secret-hu5hw0rd", endpoint)
    assert read(client, key) == path.read_bytes()
    with s3_download(
        f"s3://bucket/{key}", "key", "secret-hu5hw0rd", endpoint, begin=1, end=5
    ) as stream:
        assert stream.read() == b"TZR|"
    with pytest.raises(FileNotFoundError):
        s3_upload(tmp_path / "nothing", f"s3://bucket/{key}", "key", "secret-hu5hw0rd", endpoint)


@pytest.mark.parametrize(("mib", "least", "writers"), [(None, 16, 16), (24, 2, 3)])
def test_connections_and_memory(monkeypatch, mib, least, writers):
    """So many parts are sent at once, and no more than there is memory for.

    The part with the header of a tensor waits for its hash, so that one less may be sent. Some
    saves send fewer at once: a part also waits if its last chunk ends in a part without memory.
    """
    if mib is not None:
        monkeypatch.setenv("TENSORIZER_UPLOAD_MB", str(mib))
    lock, under_way, most = threading.Lock(), [], []
    # Of three parts each, and one is for what is beside them.
    count = 6 if mib is None else 3
    tensors = {f"{i}": torch.full((2 << 20, 3), float(i)) for i in range(count)}

    class Counting(Store):
        def answer(self, handler):
            if handler.command == "PUT":
                with lock:
                    under_way.append(handler.path)
                    most.append(len(under_way))
                    first = len(most) <= least
                if first:
                    with contextlib.suppress(threading.BrokenBarrierError):
                        meeting.wait(5)
            respond, path = handler.send_response, handler.path

            def done(*status):
                with lock, contextlib.suppress(ValueError):
                    under_way.remove(path)
                respond(*status)

            handler.send_response = done
            super().answer(handler)

    monkeypatch.setenv("TENSORIZER_STALL_SECONDS", "60")
    with Counting() as store:
        store.use(monkeypatch)
        monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
        for _ in range(10):
            meeting = threading.Barrier(least)
            under_way.clear()
            most.clear()
            tensorizer.save(tensors, "s3://bucket/counted")
            check("counted", tensors)
            assert len(most) == 3 * count + 1
            assert max(most) <= writers
            if max(most) >= least:
                break
    assert max(most) >= least


def test_no_temporary_file(moto, key):
    code = CODE + (
        "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "tensorizer.save({'a': torch.zeros(3_000_000)}, sys.argv[2])\n"
    )
    done = run_python(code, moto.host, f"s3://bucket/{key}")
    assert done.returncode == 0, done.stderr
    check(key, {"a": torch.zeros(3_000_000)})


def test_a_killed_writer_keeps_the_old_object(client, moto):
    client.put_object(Bucket="bucket", Key="killed", Body=b"old")
    code = CODE + (
        "s = tensorizer.TensorSerializer(sys.argv[2])\n"
        "s.write_state_dict({'a': torch.zeros(10_000_000)})\nprint('written', flush=True)\n"
        "import time; time.sleep(60)\n"
    )
    process = start_python(code, moto.host, "s3://bucket/killed", stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"written\n"
    process.close()
    assert read(client, "killed") == b"old"


def test_ctrl_c(moto):
    code = CODE + (
        "print('go', flush=True)\n"
        "try: tensorizer.save({'a': torch.zeros(10_000_000)}, 's3://bucket/interrupted')\n"
        "except KeyboardInterrupt: print('interrupted')\n"
    )
    with Relay(moto.host, lambda *_: ("stall",)) as relay:
        env = {"TENSORIZER_ATTEMPTS": "2", "TENSORIZER_STALL_SECONDS": "20", "HOME": "/"}
        env = os.environ | env
        process = start_python(code, relay.host, stdout=subprocess.PIPE, env=env)
        assert process.stdout.readline() == b"go\n"
        while not relay.requests:
            time.sleep(0.05)
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == b"interrupted\n"
        assert time.monotonic() - begun < 10
        process.close()


def test_the_old_package_reads_it(old, moto, key):
    tensorizer.save({name: LARGE[name] for name in ("first", "small.5")}, f"s3://bucket/{key}")
    array = old(
        """
stream = tensorizer.stream_io.open_stream(
    args[0], "rb", "key", "secret-hu5hw0rd", args[1], force_http=True)
return tensorizer.TensorDeserializer(stream, device="cpu", verify_hash=True)["first"].tolist()
""",
        f"s3://bucket/{key}",
        moto.host,
    )
    assert_same(torch.tensor(array), LARGE["first"])


@pytest.mark.filterwarnings("error")
def test_a_stream_that_was_closed_before_its_serializer(client, key):
    with open_stream(f"s3://bucket/{key}", "wb+") as stream:
        serializer = TensorSerializer(stream)
        serializer.write_state_dict(SMALL)
    assert list(tensorizer.load(f"s3://bucket/{key}")) == list(SMALL)
    serializer.close()
    with pytest.raises(ValueError, match="closed"):
        serializer.write_state_dict({"more": torch.ones(2)})
    del serializer, stream
    gc.collect()
    assert list(tensorizer.load(f"s3://bucket/{key}")) == list(SMALL)
