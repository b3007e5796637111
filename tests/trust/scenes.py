"""Saves and loads that campaigns disturb, small ones of each kind, and checks of what is left.

Each scene has a folder of its own. Before a save its file has the value 1, after it the value 2.
"""

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# torch's own threads do not survive a fork, and other threads would ask for them.
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import parts
import pytest
import tensorizer
import torch
import torch.distributed.checkpoint as dcp
from buckets import Azure, Google
from emulators import Azurite
from scripted import FaultServer
from servers import Moto
from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer
from tensorizer._C import forget_environment
from tensorizer.distributed import Reader, Writer
from tensorizer.stream_io import open_stream
from tensorizer.torch_compat import tensorizer_loading, tensorizer_saving

KEY = bytes(range(32))
OLD, NEW = 1.0, 2.0
#: Elements of the two tensors: one is among many small ones in a block, one has its own.
SIZES = {"small": 100, "large": 300_000}

torch.set_num_threads(1)
# torch says at its first use that it is not distributed, and Dynamo what it does not like.
warnings.filterwarnings("ignore", category=UserWarning)
warnings.filterwarnings("ignore", category=RuntimeWarning)


def tensors(value: float) -> dict[str, torch.Tensor]:
    """Return what a file with a value holds."""
    return {name: torch.full((size,), value) for name, size in SIZES.items()}


def value_of(found: object) -> float:
    """Return the value of what was loaded, of which nothing may be missing or wrong."""
    ends = [found[name].detach().aminmax() for name in SIZES]
    values = {value.item() for both in ends for value in both}
    sizes = {name: found[name].numel() for name in SIZES}
    if len(values) != 1 or sizes != SIZES or set(found.keys()) != set(SIZES):
        raise AssertionError(f"wrong data: {sizes} with the values {sorted(values)[:5]}")
    return values.pop()


@dataclass
class Save:
    """A way to save."""

    name: str
    #: Saves a value in the folder.
    save: Callable[[Path, float], None]
    #: Returns the value that is found there.
    load: Callable[[Path], float]
    #: True if a file with the value 1 is there before.
    over: bool = True
    #: Variables that the save sees.
    environment: tuple[tuple[str, str], ...] = ()
    #: Calls that fail always, by name and a text in their path, with the number of the error.
    refused: tuple[tuple[str, int], ...] = ()
    #: A word of the path that messages name.
    file: str = "f.tensors"

    def found(self, folder: Path) -> float | None:
        """Return the value, or None where there is no file."""
        try:
            return self.load(folder)
        except FileNotFoundError:
            return None
        except dcp.api.CheckpointException as error:
            if all(isinstance(e[0], FileNotFoundError) for e in error.failures.values()):
                return None
            raise


@dataclass
class Load:
    """A way to load; what it loads has the value 1."""

    name: str
    prepare: Callable[[Path], None]
    load: Callable[[Path], float]
    file: str = "f.tensors"


def by_path(folder: Path) -> float:
    return value_of(tensorizer.load(folder / "f.tensors", "cpu", verify_hash=True))


def save_path(folder: Path, value: float) -> None:
    tensorizer.save(tensors(value), folder / "f.tensors")


def save_encrypted(folder: Path, value: float) -> None:
    tensorizer.save(tensors(value), folder / "f.tensors", encryption=EncryptionParams(KEY))


def load_encrypted(folder: Path) -> float:
    params = DecryptionParams.from_key(KEY)
    path = folder / "f.tensors"
    return value_of(tensorizer.load(path, "cpu", verify_hash=True, encryption=params))


def save_safetensors(folder: Path, value: float) -> None:
    tensorizer.save(tensors(value), folder / "f.safetensors")


def load_safetensors(folder: Path) -> float:
    return value_of(tensorizer.load(folder / "f.safetensors", "cpu"))


def save_pair(folder: Path, value: float) -> None:
    with tensorizer_saving():
        torch.save(tensors(value), folder / "f.tensors")


def load_pair(folder: Path) -> float:
    with tensorizer_loading(device="cpu"):
        return value_of(torch.load(folder / "f.tensors", weights_only=True))


def save_stream(folder: Path, value: float) -> None:
    with open_stream(folder / "f.tensors", "wb+") as stream, TensorSerializer(stream) as file:
        file.write_state_dict(tensors(value))


def save_checkpoint(folder: Path, value: float) -> None:
    dcp.save(tensors(value), storage_writer=Writer(folder / "f.tensors"), no_dist=True)


def load_checkpoint(folder: Path) -> float:
    found = tensors(0.0)
    dcp.load(found, storage_reader=Reader(folder / "f.tensors"), no_dist=True)
    return value_of(found)


def save_whole(folder: Path, value: float) -> None:
    torch.save(tensors(value), folder / "f.tensors")


def save_new_folders(folder: Path, value: float) -> None:
    tensorizer.save(tensors(value), folder / "new/deep/f.tensors")


def load_new_folders(folder: Path) -> float:
    return by_path(folder / "new/deep")


#: Files without names are refused, so that a hidden name and a rename are used.
NAMED = (("O_TMPFILE", 95),)

SAVES = [
    Save("new file", save_path, by_path, over=False),
    Save("over a file", save_path, by_path),
    Save("over a file, without O_TMPFILE", save_path, by_path, refused=NAMED),
    Save("new folders", save_new_folders, load_new_folders, over=False),
    Save("encrypted", save_encrypted, load_encrypted),
    Save("safetensors", save_safetensors, load_safetensors, file="f.safetensors"),
    Save("stream", save_stream, by_path),
    Save("pair", save_pair, load_pair),
    Save("pair, without O_TMPFILE", save_pair, load_pair, refused=NAMED),
    Save("checkpoint", save_checkpoint, load_checkpoint, over=False),
]


def unverified(folder: Path) -> float:
    return value_of(tensorizer.load(folder / "f.tensors", "cpu"))


def lazily(folder: Path) -> float:
    with TensorDeserializer(folder / "f.tensors", "cpu", lazy_load=True) as file:
        return value_of({name: file[name].clone() for name in file})


def mapped(folder: Path) -> float:
    return value_of(tensorizer.load(folder / "f.tensors", "cpu", mmap=True))


def by_operator(folder: Path) -> float:
    return value_of(torch.ops.tensorizer.load(str(folder / "f.tensors")))


def by_readers(folder: Path) -> float:
    return value_of(tensorizer.load(folder / "f.tensors", "cpu", verify_hash=True, num_readers=3))


def sliced(folder: Path) -> float:
    found = tensorizer.load(folder / "f.tensors", "cpu", slices={"large": (0, 1000, 2000)})
    if found["large"].numel() != 1000:
        raise AssertionError("wrong length of a slice")
    return value_of({"small": found["small"], "large": found["large"][:1].expand(SIZES["large"])})


def module_of(value: float) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, tensor in tensors(value).items():
        module.register_parameter(name, torch.nn.Parameter(tensor))
    return module


def save_module(folder: Path, value: float) -> None:
    with TensorSerializer(folder / "f.tensors") as file:
        file.write_module(module_of(value))


def into_module(folder: Path) -> float:
    module = module_of(0.0)
    with TensorDeserializer(folder / "f.tensors", "cpu") as file:
        file.load_into_module(module)
    return value_of(module.state_dict())


def by_stream(folder: Path) -> float:
    with open_stream(folder / "f.tensors") as stream, TensorDeserializer(stream, "cpu") as file:
        return value_of({name: file[name].clone() for name in file})


def once(save: Callable[[Path, float], None]) -> Callable[[Path], None]:
    return lambda folder: save(folder, OLD)


LOADS = [
    Load("eager", once(save_path), by_path),
    Load("lazy", once(save_path), lazily),
    Load("mapped", once(save_path), mapped),
    Load("operator", once(save_path), by_operator),
    Load("three readers", once(save_path), by_readers),
    Load("slice", once(save_path), sliced),
    Load("module", once(save_module), into_module),
    Load("stream", once(save_path), by_stream),
    Load("encrypted", once(save_encrypted), load_encrypted),
    Load("safetensors", once(save_safetensors), load_safetensors, file="f.safetensors"),
    Load("torch.save", once(save_whole), unverified),
    Load("pair", once(save_pair), load_pair),
    Load("checkpoint", once(save_checkpoint), load_checkpoint),
]


def upload(name: str, uri: str) -> Save:
    """Return saves to a cloud, of several parts."""
    # More than a part of an upload.
    more = torch.zeros(3 << 20)

    def save(_: Path, value: float) -> None:
        tensorizer.save(tensors(value) | {"more": more + value}, uri)

    def load(_: Path) -> float:
        # A load makes few attempts here, and test servers close idle connections.
        for pause in (0.1, 0.5, 2, 5, 10):
            try:
                found = tensorizer.load(uri, "cpu", verify_hash=True)
                break
            except (ConnectionError, TimeoutError):
                time.sleep(pause)
        else:
            found = tensorizer.load(uri, "cpu", verify_hash=True)
        (value,) = {end.item() for end in found.pop("more").aminmax()}
        return value if value == value_of(found) else -1

    return Save(f"upload to {name}", save, load)


@contextlib.contextmanager
def environment(variables: tuple[tuple[str, str], ...]) -> Iterator[None]:
    """Set variables for a while."""
    before = {name: os.environ.get(name) for name, _ in variables}
    os.environ.update(variables)
    forget_environment()
    yield
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
    forget_environment()


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Make a folder that is removed in the end."""
    folder = Path(tempfile.mkdtemp(prefix="trust-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def visible(folder: Path) -> list[str]:
    """Return what is there, hidden things too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@contextlib.contextmanager
def serving(start: Callable[[], object], address: Callable[[object], str]) -> Iterator[str]:
    """Run a server in a process of its own; yield its address."""
    reading, writing = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        parts.end_with(parent, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.close(reading)
        server = start()
        # Clients that go away are expected.
        if isinstance(server, FaultServer):
            server.server.handle_error = lambda *_: None
        os.write(writing, address(server).encode() + b"\n")
        signal.pause()
        os._exit(0)
    os.close(writing)
    with open(reading) as file:
        found = file.readline().strip()
    try:
        yield found
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextlib.contextmanager
def http_server(folder: Path) -> Iterator[str]:
    """Serve a file with the value 1; yield its address."""
    save_path(folder, OLD)
    data = (folder / "f.tensors").read_bytes()
    with serving(lambda: FaultServer(data), lambda server: server.url) as url:
        yield url


def uploads(stack: contextlib.ExitStack, folder: Path) -> list[Save]:
    """Run servers of the clouds, of which variables tell; return saves to those that there are."""
    found = []
    with contextlib.suppress(pytest.skip.Exception):
        moto = Moto()
        stack.callback(moto.stop)
        moto.client().create_bucket(Bucket="bucket")
        stack.enter_context(environment(tuple(moto.settings().items())))
        found.append(upload("S3", "s3://bucket/f.tensors"))
        google = serving(lambda: Google(moto), lambda server: server.host)
        settings = Google.settings_of(stack.enter_context(google))
        stack.enter_context(environment(tuple(settings.items())))
        found.append(upload("Google", "gs://bucket/g.f.tensors"))
    with contextlib.suppress(pytest.skip.Exception):
        (folder / "azurite").mkdir()
        azurite = Azurite(folder / "azurite")
        stack.callback(azurite.process.kill)
        azurite.make_containers()
        stack.enter_context(environment(tuple(Azure(azurite).settings().items())))
        found.append(upload("Azure", "az://bucket/f.tensors"))
    return found
