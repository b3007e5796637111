"""One suite for all sources: what it asks holds for each of them."""

import contextlib
import io
import os

import pytest
import redis
import tensorizer
import torch
from conftest import assert_same
from emulators import Google
from hub import Hub
from packing import feeding
from scripted import FaultServer
from servers import Nginx, Redis
from tensorizer import TensorDeserializer
from tensorizer.serialization import FormatError, HashMismatchError
from tensorizer.stream_io import open_stream

TENSORS = {
    "first": torch.randn(900, 1000),
    **{f"small.{i}": torch.full((i % 7, 3), float(i)) for i in range(300)},
    "big": torch.randn(2, 1000, 1000),
    "half": torch.randn(40, 1000).to(torch.bfloat16),
    "scalar": torch.tensor(5),
    "meta": torch.zeros(3, 2, device="meta"),
    "last": torch.arange(1000),
}
WANTED = {name: torch.zeros(3, 2) if t.is_meta else t for name, t in TENSORS.items()}


class Sources:
    """Puts bytes where each kind of source finds them."""

    def __init__(self, factory, moto):
        self.nginx = Nginx(factory.mktemp("nginx"))
        self.redis = Redis(factory.mktemp("redis"))
        self.s3 = moto.client()
        self.clouds = {}
        self.count = 0

    def start_cloud(self, kind, request):
        """Start the server of a cloud for its first test."""
        if kind == "gs" and kind not in self.clouds:
            self.clouds[kind] = Google()
        if kind == "az":
            self.clouds[kind] = request.getfixturevalue("azurite")

    def stop(self):
        self.clouds.pop("az", None)
        for server in (self.nginx, self.redis, *self.clouds.values()):
            server.stop()

    @contextlib.contextmanager
    def open(self, kind, data, folder):
        """Yield a path, address or file object."""
        self.count += 1
        name = f"{self.count}.tensors"
        path = folder / name
        path.write_bytes(data)
        if kind == "path":
            yield str(path)
        elif kind == "descriptor":
            with path.open("rb") as file:
                yield file.fileno()
        elif kind == "file":
            yield path.open("rb")
        elif kind == "memory":
            yield io.BytesIO(data)
        elif kind == "pipe":
            with feeding(data) as reading, os.fdopen(reading, "rb", closefd=False) as file:
                yield file
        elif kind in ("http", "https", "no ranges"):
            (self.nginx.root / name).write_bytes(data)
            if kind == "https":
                os.environ["SSL_CERT_FILE"] = str(self.nginx.folder / "ca.pem")
            base = {"http": "", "https": "", "no ranges": "/whole"}[kind]
            yield f"{self.nginx.https if kind == 'https' else self.nginx.http}{base}/{name}"
        elif kind in ("unknown", "chunked"):
            with FaultServer(data, lambda *_: (kind,), ranges=False) as server:
                yield server.url
        elif kind == "s3":
            self.s3.put_object(Bucket="bucket", Key=name, Body=data)
            yield f"s3://bucket/{name}"
        elif kind in ("gs", "az"):
            server = self.clouds[kind]
            server.put(name, data)
            with pytest.MonkeyPatch.context() as patch:
                for variable, value in server.settings().items():
                    patch.setenv(variable, value)
                yield f"{kind}://bucket/{name}"
        elif kind == "redis":
            with redis.Redis(port=self.redis.port) as client:
                client.flushall()
                # In pieces that have nothing to do with the file's own.
                for start in range(0, len(data), 777_777):
                    client.set(f"p:x:{start}", data[start : start + 777_777])
            yield f"{self.redis.address}/p"
        elif kind == "hf":
            with Hub() as hub:
                hub.repo("org/repo", {name: data})
                os.environ["HF_ENDPOINT"] = hub.endpoint
                yield f"hf://org/repo/{name}"


KINDS = ["path", "descriptor", "file", "memory", "pipe", "http", "https", "no ranges", "unknown",
         "chunked", "s3", "gs", "az", "redis", "hf"]  # fmt: skip
#: Read front to back, once.
ONE_PASS = ("pipe", "no ranges", "unknown", "chunked")


@pytest.fixture(scope="module")
def sources(tmp_path_factory, moto):
    sources = Sources(tmp_path_factory, moto)
    yield sources
    sources.stop()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "f.tensors"
    tensorizer.save(TENSORS, path, allow_meta=True)
    return path.read_bytes()


@pytest.fixture(autouse=True)
def settings(s3, monkeypatch):
    monkeypatch.setenv("TENSORIZER_ATTEMPTS", "2")
    monkeypatch.setenv("TENSORIZER_STALL_SECONDS", "5")
    monkeypatch.setenv("SSL_CERT_FILE", "")
    monkeypatch.delenv("SSL_CERT_FILE")
    monkeypatch.setenv("HF_ENDPOINT", "")


def check(loaded, names=WANTED):
    assert list(loaded) == list(names)
    for name in names:
        assert_same(loaded[name].detach(), WANTED[name])


@pytest.mark.parametrize("kind", KINDS)
class TestEverySource:
    @pytest.fixture(autouse=True)
    def of_kind(self, kind, sources, data, tmp_path, request):
        sources.start_cloud(kind, request)
        self.kind, self.data = kind, data
        self.open = lambda data=data: sources.open(kind, data, tmp_path)

    def test_all_tensors_are_loaded(self):
        with self.open() as source, TensorDeserializer(source, "cpu") as loaded:
            check(dict(loaded.items()))

    def test_verified(self):
        with self.open() as source:
            check(tensorizer.load(source, "cpu", verify_hash=True))

    @pytest.mark.parametrize("readers", [1, 7])
    def test_readers(self, readers):
        with self.open() as source:
            if readers > 1 and self.kind in (*ONE_PASS, "memory"):
                with pytest.raises(ValueError, match="can only be read by one"):
                    TensorDeserializer(source, "cpu", num_readers=readers)
            else:
                check(dict(TensorDeserializer(source, "cpu", num_readers=readers).items()))

    def test_filtered_tensors_are_loaded(self):
        chosen = [name for name in TENSORS if name.endswith(("7", "t"))]
        with self.open() as source:
            loaded = TensorDeserializer(source, "cpu", filter_func=lambda name: name in chosen)
            check(dict(loaded.items()), chosen)

    def test_lazily_and_backwards(self):
        # Each is a request of its own: a tenth of the small ones will do.
        some = [name for name in TENSORS if not name.startswith("small") or name.endswith("0")]
        with self.open() as source, TensorDeserializer(source, "cpu", lazy_load=True) as loaded:
            for name in reversed(some):
                assert_same(loaded[name].detach(), WANTED[name])

    def test_into_a_module(self, tmp_path):
        module = torch.nn.Sequential(torch.nn.Linear(700, 500), torch.nn.BatchNorm1d(500))
        expected = {
            name: torch.randn(t.shape).to(t.dtype) for name, t in module.state_dict().items()
        }
        module.load_state_dict(expected)
        with tensorizer.TensorSerializer(tmp_path / "m.tensors") as serializer:
            serializer.write_module(module)
        module = torch.nn.Sequential(torch.nn.Linear(700, 500), torch.nn.BatchNorm1d(500))
        with self.open((tmp_path / "m.tensors").read_bytes()) as source:
            assert TensorDeserializer(source, "cpu").load_into_module(module) == len(expected)
        for name, tensor in module.state_dict().items():
            assert_same(tensor, expected[name])

    @pytest.mark.parametrize("length", [3, 100, 200_000, 4_000_000])
    def test_truncated(self, length):
        errors = (FormatError, OSError)
        with self.open(self.data[:length]) as source, pytest.raises(errors) as raised:
            tensorizer.load(source, "cpu")
        assert str(raised.value)
        if length > 100:
            assert isinstance(raised.value, OSError)  # a TruncatedError, or what is missing

    def test_an_empty_source_is_refused(self, monkeypatch):
        if self.kind == "gs":
            # Its server closes the connection after it has answered that there is no such range.
            monkeypatch.delenv("TENSORIZER_ATTEMPTS")
        if self.kind == "redis":
            with self.open(b"") as source, pytest.raises(FileNotFoundError):
                tensorizer.load(source, "cpu")
            return
        with (
            self.open(b"") as source,
            pytest.raises(FormatError, match="no format that tensorizer reads"),
        ):
            tensorizer.load(source, "cpu")

    def test_a_wrong_byte(self):
        at = self.data.index(WANTED["big"].numpy().tobytes()[:64]) + 5_000_000
        wrong = self.data[:at] + bytes([self.data[at] ^ 1]) + self.data[at + 1 :]
        with self.open(wrong) as source, pytest.raises(HashMismatchError, match="'big'"):
            tensorizer.load(source, "cpu", verify_hash=True)


def test_a_file_within_a_file(sources, data, tmp_path):
    """Positions of a stream that was read before count from its own beginning."""
    buffer = io.BytesIO()
    buffer.write(b"x" * 100)
    serializer = tensorizer.TensorSerializer(buffer)
    buffer.close = lambda: None
    serializer.write_state_dict({"a": torch.arange(5)})
    serializer.close()
    for kind in ("http", "s3", "redis", "no ranges", "hf"):
        with sources.open(kind, buffer.getvalue(), tmp_path) as address:
            stream = open_stream(address)
            assert stream.read(100) == b"x" * 100
            assert_same(TensorDeserializer(stream, "cpu")["a"].detach(), torch.arange(5))
