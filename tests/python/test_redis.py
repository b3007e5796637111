"""Values of a Redis server."""

import contextlib
import io
import os
import socket
import time

import pytest
import redis
import tensorizer
import torch
from conftest import OLD_PYTHON, assert_same
from processes import run_python
from scripted import Forwarder
from servers import Redis, free_port
from tensorizer import TensorDeserializer
from tensorizer.file import to_redis as _redis
from tensorizer.stream_io import CAInfo, RedisStreamFile, open_stream
from tensorizer_cli.main import main

ops = torch.ops.tensorizer

TENSORS = {
    "big": torch.randn(1500, 1000),
    **{f"small.{i}": torch.full((i % 7, 3), float(i)) for i in range(60)},
    "with space": torch.arange(7),
    'with "quotes"': torch.arange(8),
    "with:colons:5": torch.arange(9),
    "meta": torch.zeros(3, device="meta"),
}
NESTED = {"layers": [{"a b": torch.randn(5)}, {"c": torch.arange(3)}], "x": torch.randn(4)}


def check(loaded, tensors=TENSORS):
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        wanted = torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor
        assert_same(loaded[name].detach(), wanted)


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    server = Redis(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def client(server, monkeypatch):
    monkeypatch.setenv("TENSORIZER_STALL_SECONDS", "2")
    monkeypatch.setenv("TENSORIZER_TOTAL_SECONDS", "10")
    with redis.Redis(port=server.port) as client:
        client.flushall()
        yield client


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "f.tensors"
    tensorizer.save(TENSORS, path, allow_meta=True)
    return path


def store(path, client, prefix="m", **options):
    with TensorDeserializer(path, "cpu", lazy_load=True, **options) as deserializer:
        deserializer.to_redis(client, prefix)


def test_a_cluster_of_several_servers_is_refused(tmp_path, path):
    """Each has only some of the keys; one alone has all."""
    with contextlib.ExitStack() as stack:
        ports, clients = [free_port(), free_port()], []
        for number, port in enumerate(ports):
            folder = tmp_path / f"redis{number}"
            folder.mkdir()
            server = Redis(folder, cluster_enabled="yes", cluster_port=port)
            stack.callback(server.stop)
            clients.append(stack.enter_context(redis.Redis(port=server.port)))
        one, other = clients
        one.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        addresses = [
            f"redis://127.0.0.1:{client.connection_pool.connection_kwargs['port']}/m"
            for client in clients
        ]
        wait_until(lambda: one.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
        store(path, one)
        check(tensorizer.load(addresses[0], "cpu"))
        one.execute_command("CLUSTER DELSLOTSRANGE", 8192, 16383)
        other.execute_command("CLUSTER ADDSLOTSRANGE", 8192, 16383)
        port = other.connection_pool.connection_kwargs["port"]
        one.execute_command("CLUSTER MEET", "127.0.0.1", port, ports[1])
        wait_until(
            lambda: all(
                client.execute_command("CLUSTER INFO")["cluster_size"] == "2" for client in clients
            )
        )
        for address in addresses:
            with pytest.raises(NotImplementedError, match="2 servers of a Redis cluster"):
                tensorizer.load(address)
        whole = stack.enter_context(redis.RedisCluster("127.0.0.1", port))
        for client in (one, other, whole):
            with pytest.raises(NotImplementedError, match="a Redis cluster is not supported"):
                store(path, client, "other")


def wait_until(is_so):
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_every_way_of_loading(server, client, path):
    store(path, client)
    address = f"{server.address}/m"
    for readers in (None, 1, 3):
        check(dict(TensorDeserializer(address, "cpu", num_readers=readers).items()))
        check(tensorizer.load(address, "cpu", verify_hash=True, num_readers=readers))
    lazy = TensorDeserializer(address, "cpu", lazy_load=True)
    for name in ("meta", "small.3", "big"):
        check({name: lazy[name]}, {name: TENSORS[name]})
    lazy.close()
    chosen = {name for name in TENSORS if name.endswith("3")}
    found = TensorDeserializer(address, "cpu", filter_func=lambda name: name in chosen)
    assert set(found) == chosen
    check(ops.load(address))
    check(dict(TensorDeserializer(open_stream(address), "cpu").items()))


def test_the_keys(client, path):
    store(path, client)
    keys = {key.decode() for key in client.scan_iter()}
    assert "m:header:0" in keys
    data = path.read_bytes()
    for key in keys:
        value = client.get(key)
        offset = int(key.rsplit(":", 1)[1])
        assert value == data[offset : offset + len(value)]
    named = {key.rsplit(":", 1)[0] for key in keys}
    assert named == {"m:header", *(f"m:{name}" for name in TENSORS)}
    # Neither empty tensors nor meta tensors have data.
    empty = sum(tensor.numel() == 0 or tensor.is_meta for tensor in TENSORS.values())
    assert len(keys) == 1 + 2 * len(TENSORS) - empty


def test_structured_names(server, client, tmp_path):
    path = tmp_path / "nested.tensors"
    with tensorizer.TensorSerializer(path) as serializer:
        serializer.write_state_dict(NESTED)
    store(path, client, 'odd *[prefix] "x"')
    found = TensorDeserializer(f'{server.address}/odd *[prefix] "x"', "cpu").tree()
    assert_same(found["layers"][0]["a b"].detach(), NESTED["layers"][0]["a b"])
    assert_same(found["x"].detach(), NESTED["x"])


def test_a_prefix_is_no_pattern(server, client, path):
    store(path, client, "axb")
    with pytest.raises(FileNotFoundError, match=r"begins with `a\*b:`"):
        TensorDeserializer(f"{server.address}/a*b", "cpu")
    client.set("axb:note", "not ours")
    check(tensorizer.load(f"{server.address}/axb", "cpu"))


def test_files_whose_prefix_begins_with_that_of_another(server, client, tmp_path):
    """`SCAN` finds the keys of `m:v2` for `m` too."""
    for prefix, value in {"m": 1.0, "m:v2": 2.0, "m:v2:x": 3.0}.items():
        tensors = {name: torch.full((5,), value) for name in ("a", "b:c", "z")}
        tensorizer.save(tensors, tmp_path / "f")
        store(tmp_path / "f", client, prefix)
    for prefix, value in {"m": 1.0, "m:v2": 2.0, "m:v2:x": 3.0}.items():
        found = tensorizer.load(f"{server.address}/{prefix}", "cpu", verify_hash=True)
        assert list(found) == ["a", "b:c", "z"]
        assert {number for tensor in found.values() for number in tensor.tolist()} == {value}


def test_two_values_of_one_position_are_refused(server, client, path):
    store(path, client)
    key = next(client.scan_iter("m:big:*")).decode()
    client.set(key.replace("big", "another"), "x" * 10)
    with pytest.raises(OSError, match=r"m:another:\d+` and `m:big:\d+` hold bytes of the same"):
        tensorizer.load(f"{server.address}/m", "cpu")


def test_a_filtered_copy_is_a_file(server, client, path):
    store(path, client, filter_func=lambda name: name.startswith("small"))
    loaded = tensorizer.load(f"{server.address}/m", "cpu", verify_hash=True)
    check(loaded, {name: t for name, t in TENSORS.items() if name.startswith("small")})


def test_stored_tensors_are_overwritten_only_with_force(client, path):
    store(path, client)
    key = next(key for key in client.scan_iter("m:big:*"))
    for key in client.scan_iter("m:big:*"):
        client.set(key, "changed")
    store(path, client)
    assert {client.get(key) for key in client.scan_iter("m:big:*")} == {b"changed"}
    with TensorDeserializer(path, "cpu", lazy_load=True) as deserializer:
        deserializer.to_redis(client, "m", force=True)
    assert client.get(key) != b"changed"


def test_long_values_are_split(server, client, path, monkeypatch):
    monkeypatch.setattr(_redis, "_MAX_VALUE_BYTES", 1_000_000)
    monkeypatch.setattr(_redis, "_BATCH_BYTES", 1_500_000)
    store(path, client)
    assert len(list(client.scan_iter("m:big:*"))) == 1 + 6
    check(tensorizer.load(f"{server.address}/m", "cpu"))


def test_users_databases_and_tls(server, client, path):
    with redis.Redis(port=server.port, db=3) as other:
        store(path, other)
    with pytest.raises(FileNotFoundError, match="no key"):
        tensorizer.load(f"{server.address}/m", "cpu")
    check(tensorizer.load(f"{server.address}/m?db=3", "cpu"))
    check(
        tensorizer.load(
            f"redis://reader:p%40ss%2Fword-hu5hw0rd@127.0.0.1:{server.port}/m?db=3", "cpu"
        )
    )
    with pytest.raises(PermissionError, match="user and password") as refused:
        tensorizer.load(f"redis://reader:hidden-hu5hw0rd@127.0.0.1:{server.port}/m?db=3", "cpu")
    assert "hidden" not in str(refused.value)
    address = f"{server.tls_address}/m?db=3"
    for trust in (CAInfo(cacert=server.folder / "ca.pem"), CAInfo(allow_untrusted=True)):
        stream = open_stream(address, certificate_handling=trust)
        check(dict(TensorDeserializer(stream, "cpu").items()))
    with pytest.raises(PermissionError, match="not trusted"):
        tensorizer.load(address, "cpu")
    with redis.Redis(
        host="localhost", port=server.tls_port, ssl=True, ssl_ca_certs=server.folder / "ca.pem"
    ) as tls:
        store(path, tls, "over-tls")
    check(tensorizer.load(f"{server.address}/over-tls", "cpu"))


def test_streams(server, client, path):
    store(path, client)
    data = path.read_bytes()
    end = max(
        int(key.decode().rsplit(":", 1)[1]) + client.strlen(key) for key in client.scan_iter()
    )
    data = data[:end]  # the mark at the end of the file is not stored
    with open_stream(f"{server.address}/m") as stream:
        assert isinstance(stream, RedisStreamFile)
        assert isinstance(stream, io.BufferedIOBase)
        assert stream.read(5) == b"|TZR|"
        assert stream.seek(-10, os.SEEK_END) == end - 10
        assert stream.read() == data[-10:]
        assert stream.seek(1234) == 1234
        buffer = bytearray(99)
        assert stream.readinto(buffer) == 99
        assert buffer == data[1234:1333]
        assert stream.bytes_read == 5 + 10 + 99
    with RedisStreamFile(f"{server.address}/m", begin=7, end=20, buffer_size=4) as stream:
        assert stream.read() == data[7:20]


def test_bad_arguments(server, client, path):
    for mode in ("wb", "ab", "rb+"):
        with pytest.raises(ValueError, match="to_redis"):
            open_stream(f"{server.address}/m", mode)
    with pytest.raises(ValueError, match="expected redis://"):
        RedisStreamFile("http://host/m")
    with pytest.raises(ValueError, match="unknown option `dbs`"):
        open_stream(f"{server.address}/m?dbs=3")
    with TensorDeserializer(path, "cpu", lazy_load=True) as deserializer:
        with pytest.raises(TypeError, match="client"):
            deserializer.to_redis("localhost", "m")
        with pytest.raises(TypeError, match="prefix"):
            deserializer.to_redis(client, b"m")
    with pytest.raises(ValueError, match="closed"):
        TensorDeserializer(io.BytesIO(path.read_bytes()), "cpu").to_redis(client, "m")
    with pytest.raises(ValueError, match="to_redis"):
        tensorizer.save(TENSORS, f"{server.address}/m")


def test_a_copy_after_a_load_that_has_closed_the_file(server, client, path, nginx):
    (nginx.root / "f.tensors").write_bytes(path.read_bytes())
    chosen = {"big", "small.3", "meta"}
    for prefix, name in (("path", path), ("http", f"{nginx.http}/f.tensors")):
        loaded = TensorDeserializer(name, "cpu", filter_func=chosen.__contains__)
        loaded.to_redis(client, prefix)
        found = tensorizer.load(f"{server.address}/{prefix}", "cpu", verify_hash=True)
        check(found, {name: TENSORS[name] for name in TENSORS if name in chosen})


def test_a_file_that_was_replaced_is_not_copied(client, path):
    loaded = TensorDeserializer(path, "cpu")
    tensorizer.save(TENSORS | {"big": torch.ones(1)}, path, allow_meta=True)
    with pytest.raises(ValueError, match="has changed since it was loaded"):
        loaded.to_redis(client, "m")
    assert client.keys() == []
    path.unlink()
    with pytest.raises(FileNotFoundError):
        loaded.to_redis(client, "m")


def test_an_unreachable_server_raises_connection_error(client, monkeypatch):
    monkeypatch.setenv("TENSORIZER_TOTAL_SECONDS", "1")
    with pytest.raises(ConnectionError, match="m"):
        tensorizer.load(f"redis://127.0.0.1:{free_port()}/m", "cpu")


def test_a_failed_copy_is_no_file(server, client, path):
    with TensorDeserializer(path, "cpu", lazy_load=True) as deserializer:
        path.write_bytes(path.read_bytes()[:3_000_000])  # what was opened is the new file too
        with pytest.raises(tensorizer.serialization.TruncatedError):
            deserializer.to_redis(client, "m")
    with pytest.raises(OSError, match="no key"):
        tensorizer.load(f"{server.address}/m", "cpu")


@pytest.mark.parametrize("damage", ["deleted", "shorter", "list"])
def test_values_that_change(server, client, path, damage):
    store(path, client)
    lazy = TensorDeserializer(f"{server.address}/m", "cpu", lazy_load=True)
    key = max(client.scan_iter("m:big:*"), key=client.strlen)
    client.delete(key)
    if damage == "shorter":
        client.set(key, b"x" * 1000)
    if damage == "list":
        client.rpush(key, b"x")
    with pytest.raises(OSError, match="changed while it was read|WRONGTYPE"):
        lazy["big"]
    lazy.close()
    if damage == "deleted":
        with pytest.raises(OSError, match="no key of the database holds byte"):
            tensorizer.load(f"{server.address}/m", "cpu")


class Proxy(Forwarder):
    """Passes bytes on; every connection is reset after as many bytes as ``limits`` says."""

    def __init__(self, port, limits):
        self.port, self.limits, self.opened = port, list(limits), 0
        super().__init__()
        self.address = f"redis://{self.host}"

    def connect(self, inner):
        limit = self.limits[self.opened] if self.opened < len(self.limits) else None
        self.opened += 1
        return socket.create_connection(("127.0.0.1", self.port)), limit


def test_lost_connections_are_made_again(server, client, path):
    store(path, client)
    size = path.stat().st_size
    # During the scan, in the index, and in the tensors.
    with Proxy(server.port, [300, 100_000, 3_000_000, 2_000_000]) as proxy:
        check(tensorizer.load(f"{proxy.address}/m", "cpu", num_readers=1, verify_hash=True))
        assert proxy.opened == 5
        # A batch is asked for again, not the whole file.
        assert proxy.passed < 3 * size


def test_attempts_are_bounded(server, client, path, monkeypatch):
    monkeypatch.setenv("TENSORIZER_ATTEMPTS", "3")
    store(path, client)
    with (
        Proxy(server.port, [300] * 50) as proxy,
        pytest.raises(ConnectionError, match="after 3 tries"),
    ):
        tensorizer.load(f"{proxy.address}/m", "cpu")


def test_a_server_that_says_nothing(client, monkeypatch):
    monkeypatch.setenv("TENSORIZER_CONNECT_SECONDS", "0.2")
    monkeypatch.setenv("TENSORIZER_TOTAL_SECONDS", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        tensorizer.load(f"redis://127.0.0.1:{silent.getsockname()[1]}/m", "cpu")


#: The old package reads no names with spaces or quotes, nor tensors without data.
PLAIN = {
    name: tensor
    for name, tensor in TENSORS.items()
    if " " not in name and tensor.numel() > 0 and not tensor.is_meta
}


def test_the_old_package_reads_it(server, client, tmp_path, old, monkeypatch):
    monkeypatch.setattr(_redis, "_MAX_VALUE_BYTES", 1_000_000)
    path = tmp_path / "plain.tensors"
    tensorizer.save(PLAIN, path)
    store(path, client)
    read = old(
        """
d = tensorizer.TensorDeserializer(args[0], device="cpu", verify_hash=True, num_readers=1)
return {name: d[name].detach().numpy() for name in d.keys()}
""",
        f"{server.address}/m",
    )
    check({name: torch.from_numpy(array) for name, array in read.items()}, PLAIN)


def test_the_old_package_wrote_it(server, client, tmp_path, old):
    path = tmp_path / "plain.tensors"
    tensorizer.save(PLAIN, path)
    old(
        """
import redis
d = tensorizer.TensorDeserializer(args[0], device="cpu", lazy_load=True)
d.to_redis(redis.Redis(port=args[1]), "old")
""",
        str(path),
        server.port,
    )
    check(tensorizer.load(f"{server.address}/old", "cpu", verify_hash=True), PLAIN)


def test_the_tests_have_the_old_package():
    assert OLD_PYTHON.exists() or not os.environ.get("CI")


def test_secrets_are_not_shown(server, client):
    code = (
        "import tensorizer, sys\ntry: tensorizer.load(sys.argv[1], 'cpu')\n"
        "except OSError as e: print(repr(e))"
    )
    address = f"redis://default:hidden-hu5hw0rd@127.0.0.1:{free_port()}/m?db=1"
    done = run_python(code, address, env=os.environ | {"TENSORIZER_TOTAL_SECONDS": "1"})
    assert done.returncode == 0, done.stderr
    assert "127.0.0.1" in done.stdout
    assert "hidden" not in done.stdout + done.stderr


def test_the_file_that_was_loaded_is_stored(server, client, path):
    other = {
        name: tensor + 1 if tensor.dtype.is_floating_point else tensor
        for name, tensor in TENSORS.items()
    }
    eager = TensorDeserializer(path, "cpu")
    lazy = TensorDeserializer(path, "cpu", lazy_load=True)
    tensorizer.save(other, path, allow_meta=True)
    with pytest.raises(ValueError, match="has changed since it was loaded: pass lazy_load=True"):
        eager.to_redis(client, "m")
    assert not list(client.scan_iter())
    with lazy:
        lazy.to_redis(client, "m")
    check(tensorizer.load(f"{server.address}/m", "cpu"))
    # A server of Redis does not tell versions apart.
    with pytest.raises(ValueError, match="no strong ETag"):
        TensorDeserializer(f"{server.address}/m", "cpu").to_redis(client, "n")


def test_a_prefix_is_that_of_one_file(server, client, path, capsys):
    store(path, client, "a:")
    with pytest.raises(FileNotFoundError, match="no key of the database begins with `a:`"):
        tensorizer.load(f"{server.address}/a", "cpu")
    store(path, client, "a")
    for prefix in ("a", "a:"):
        check(tensorizer.load(f"{server.address}/{prefix}", "cpu"))
    for wrong in (f"{server.address}/a#b", f"{server.address}#/a"):
        with pytest.raises(ValueError, match="without `#`"):
            tensorizer.load(wrong, "cpu")
    assert main(["cp", str(path), f"{server.address}/a#b"]) == 2
    assert "without `#`" in capsys.readouterr().err
