"""Loads from the clouds' servers and saves to them, over connections that break at random moments.

A load gives the right bytes, or an error of a connection or a time. After a save there is what was
there before, or the new object; the new one if the save has not failed.
"""

import contextlib
import random
import socket
import struct
import threading

import pytest
import tensorizer
import torch
from buckets import Azure, Google
from conftest import assert_same
from scripted import Forwarder, Relay
from tensorizer import TensorDeserializer
from tensorizer.stream_io import open_stream

ops = torch.ops.tensorizer

TENSORS = {
    "big": torch.arange(400_000).view(400, 1000),
    "half": torch.randn(30, 40).to(torch.bfloat16),
    "small": torch.arange(10),
}


@pytest.fixture(autouse=True)
def settings(no_settings_of_the_machine, monkeypatch):
    monkeypatch.setenv("TENSORIZER_ATTEMPTS", "3")


class S3:
    """A bucket of a server that speaks as S3 does."""

    scheme = "s3"

    def __init__(self, moto):
        self.moto, self.host = moto, moto.host

    def settings(self, host=None):
        return self.moto.settings(host)

    def stop(self):
        pass


@pytest.fixture(params=["gs", "az", pytest.param("s3", marks=pytest.mark.long)])
def cloud(request):
    """A bucket of each cloud."""
    if request.param == "az":
        server = Azure(request.getfixturevalue("azurite"))
    else:
        server = (Google if request.param == "gs" else S3)(request.getfixturevalue("moto"))
    yield server
    server.stop()


@pytest.fixture
def use(cloud, monkeypatch):
    """Have all requests go to a host, or to the server itself."""

    @contextlib.contextmanager
    def through(host=None):
        # Without faults nothing may fail, however slow the server is.
        monkeypatch.setenv("TENSORIZER_STALL_SECONDS", "1" if host else "30")
        monkeypatch.setenv("TENSORIZER_TOTAL_SECONDS", "5" if host else "60")
        with monkeypatch.context() as patch:
            for name, value in cloud.settings(host).items():
                patch.setenv(name, value)
            yield

    return through


class Breaking(Forwarder):
    """Passes connections on; a script says by their number where each breaks, or None.

    After so many bytes of its answers, or of its requests, a connection is ``"cut"``, ``"reset"``
    or goes on for ever without another byte (``"stall"``).
    """

    def __init__(self, host, script):
        self.to, self.script, self.count, self.breaks = host, script, 0, {}
        self.stopping = threading.Event()
        super().__init__()

    def connect(self, inner):
        host, port = self.to.split(":")
        outer = socket.create_connection((host, int(port)))
        found = self.script(self.count)
        self.count += 1
        if found is not None:
            side, fault, after = found
            self.breaks[outer if side == "answers" else inner] = fault, after
        return outer, None

    def move(self, source, target, _):
        fault, after = self.breaks.get(source, (None, None))
        moved = 0
        with contextlib.suppress(OSError):
            while moved != after and (data := source.recv(1 << 16)):
                data = data if after is None else data[: after - moved]
                target.sendall(data)
                moved += len(data)
        if fault == "stall" and moved == after:
            self.stopping.wait(30)
        if fault == "reset" and moved == after:
            option = struct.pack("ii", 1, 0)
            with contextlib.suppress(OSError):
                target.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            target.close()

    def __exit__(self, *exc):
        self.stopping.set()
        super().__exit__(*exc)


def some_breaks(chance, often):
    """Return a script of random breaks: at the head of an answer, in it, or late."""

    def script(_):
        if chance.random() > often:
            return None
        after = int(10 ** chance.uniform(0, 6.6))
        # Only a few stalls, which take a second each.
        fault = chance.choices(["cut", "reset", "stall"], [5, 5, 1])[0]
        return chance.choice(["answers", "requests"]), fault, after

    return script


#: Faults of a single request, which a server or a proxy may answer.
STATUSES = [429, 500, 502, 503, 504, 408]


def some_faults(chance, often):
    """Return a script of random faults of requests, for a relay."""

    def script(method, path, number):
        if chance.random() > often:
            return None
        kind = chance.choices(["status", "reset", "lost", "stall"], [6, 4, 4, 1])[0]
        return (
            (kind, chance.choice(STATUSES), {"Retry-After": "0"}) if kind == "status" else (kind,)
        )

    return script


def by_stream(address):
    with open_stream(address) as stream, TensorDeserializer(stream, "cpu") as file:
        return dict(file)


def lazily(address):
    with TensorDeserializer(address, "cpu", lazy_load=True) as file:
        return {name: file[name] for name in file}


def by_operator(address):
    try:
        return ops.load(address)
    except RuntimeError as error:
        # All errors of operators are of this class; those of a server name the object.
        assert address in str(error)
        raise OSError(str(error)) from error


LOADS = [
    lambda address: tensorizer.load(address, "cpu", verify_hash=True),
    lambda address: tensorizer.load(address, "cpu", num_readers=3),
    lambda address: dict(tensorizer.iterate(address, "cpu", buffer_bytes=1 << 20)),
    by_stream,
    lazily,
    by_operator,
]


def value_of(found):
    """Return the number that tensors were saved with; nothing of them may be wrong."""
    value = found["small"][0].item()
    for name, tensor in TENSORS.items():
        assert_same(found[name].detach(), tensor + value)
    return value


def saved(value, address, way):
    tensors = {name: tensor + value for name, tensor in TENSORS.items()}
    if way == 0:
        tensorizer.save(tensors, address)
    elif way == 1:
        tensorizer.save_async(tensors, address).result()
    else:
        with open_stream(address, "wb+") as stream:
            with tensorizer.TensorSerializer(stream) as file:
                file.write_state_dict(tensors)


@pytest.fixture(params=["connections", "requests"])
def broken(request, cloud):
    """Break connections of the cloud's server, or answers to requests; yields a host."""

    @contextlib.contextmanager
    def start(chance, often):
        if request.param == "connections":
            with Breaking(cloud.host, some_breaks(chance, often)) as forwarder:
                yield forwarder.host
        else:
            with Relay(cloud.host, some_faults(chance, often)) as relay:
                yield relay.host

    return start


#: Seeds of the random numbers, and the number of loads in each way, or of saves.
SEEDS = [(5, 1), *(pytest.param((seed, 3), marks=pytest.mark.long) for seed in (6, 7))]


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"seed {seed[0]}")
def test_loads_over_connections_that_break(cloud, use, broken, request, seed):
    name = f"loads-{request.node.callspec.params['broken']}-{seed[0]}"
    address, chance, ended = f"{cloud.scheme}://bucket/{name}", random.Random(seed[0]), []
    with use():
        tensorizer.save(TENSORS, address)
    for often in [0.3, 0.6, 0.2][: seed[1]]:
        with broken(chance, often) as host, use(host):
            for load in LOADS:
                try:
                    ended.append(value_of(load(address)))
                except OSError as error:
                    assert address in str(error)
                    ended.append(error)
    assert ended.count(0) > 1, ended
    with use():
        assert value_of(tensorizer.load(address, "cpu", verify_hash=True)) == 0


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"seed {seed[0]}")
def test_saves_over_connections_that_break(cloud, use, broken, request, seed):
    name = f"saves-{request.node.callspec.params['broken']}-{seed[0]}"
    address, chance = f"{cloud.scheme}://bucket/{name}", random.Random(seed[0])
    before = done = 0
    with use():
        saved(0, address, 0)
    for value in range(1, 6 * seed[1]):
        with broken(chance, 0.2 if value % 2 else 0.7) as host, use(host):
            try:
                saved(value, address, value % 3)
                allowed, done = {value}, done + 1
            except OSError as error:
                assert address in str(error)
                allowed = {before, value}
        with use():
            before = value_of(tensorizer.load(address, "cpu", verify_hash=True))
        assert before in allowed
    assert done > 0
