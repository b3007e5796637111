"""Shared fixtures: golden files, the old package, servers, and a check that nothing is left."""

import contextlib
import gzip
import importlib.util
import io
import json
import os
import pickle
import signal
import subprocess
import threading
import time
from pathlib import Path

import compilers  # noqa: F401  # settings of torch's
import faults
import pytest
import shared
import tensorizer
import torch
from ranks import start
from secret_search import (  # noqa: F401  # hooks of pytest
    pytest_configure,
    pytest_runtest_makereport,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_warning_recorded,
)
from servers import Moto, Nginx, Seaweed
from tensorizer import _C, FormatError

# Without a bound the cache leaves a twentieth of the disk free, which may be full.
os.environ["TENSORIZER_CACHE_GB"] = "10"
# Background jobs of a shell ignore SIGINT, and so would the processes that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/golden"
MANIFEST = json.loads((GOLDEN / "manifest.json").read_text())
#: First lines of code that mounts what only its own process and its children see.
OWN_MOUNTS = """import ctypes, subprocess, sys
def mount(*arguments):
    subprocess.run(["mount", *arguments], check=True)
NEW_MOUNTS = 0x20000
if ctypes.CDLL(None).unshare(NEW_MOUNTS):
    sys.exit("unshare: not permitted")
mount("--make-rprivate", "/")
"""
#: A Python that has tensorizer 2.12.1, see the Makefile.
OLD_PYTHON = Path(os.environ.get("TENSORIZER_OLD_PYTHON", ROOT / ".venv-old/bin/python"))
#: Its program: runs function bodies one after another, each in the environment of the tests.
OLD_PROGRAM = """import os, pickle, sys, textwrap, traceback
import tensorizer, torch
assert tensorizer.__version__ == "2.12.1"
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
while True:
    try:
        body, args, environment = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    os.environ.clear()
    os.environ.update(environment)
    scope = dict(globals(), args=args)
    try:
        exec("def body():\\n" + textwrap.indent(body.strip(), "    "), scope)
        found = scope["body"](), None
    except Exception:
        found = None, traceback.format_exc()
    pickle.dump(found, answers)
    answers.flush()
"""


def whole_numbers(*shape):
    """Return numbers whose sums are exact, and so the same in whatever order a compiler adds."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-500, 500, shape, generator=generator).float()


#: The tensors that the tests of operators save.
TENSORS = {
    "weight": whole_numbers(40, 30),
    "bias": torch.arange(5),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "empty": torch.empty(0, 2),
}


def golden_files(category):
    return [file for file in MANIFEST["files"] if file["category"] == category]


def golden_bytes(file):
    return gzip.decompress((GOLDEN / file["file"]).read_bytes())


@pytest.fixture
def unpack(tmp_path):
    """Write a golden file and return its path."""

    def write(file):
        path = tmp_path / file["file"].removesuffix(".gz")
        path.write_bytes(golden_bytes(file))
        return path

    return write


@pytest.fixture
def saved(tmp_path):
    """Save `TENSORS` and return the path."""
    path = str(tmp_path / "f.tensors")
    torch.ops.tensorizer.save(path, TENSORS)
    return path


@pytest.fixture
def without_graphs_of_others():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def need_protobuf():
    """Skip where protobuf, which only ``tensorizer.protobuf`` needs, is not installed."""

    def need():
        if importlib.util.find_spec("google") and importlib.util.find_spec("google.protobuf"):
            return
        if os.environ.get("CI"):
            pytest.fail("protobuf is required in CI")
        pytest.skip("protobuf is not installed: pip install protobuf")

    return need


@pytest.fixture(scope="session")
def old():
    """Run a function body with the old package; arguments and result are pickled."""
    if not OLD_PYTHON.exists():
        if os.environ.get("CI"):
            pytest.fail(f"{OLD_PYTHON} is required in CI")
        pytest.skip("tensorizer 2.12.1 is not installed: run make test")
    # A path to a tree of this package is not for it.
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([OLD_PYTHON, "-c", OLD_PROGRAM], env=environment, **pipes) as process:

        def run(body, *args):
            try:
                pickle.dump((body, args, dict(os.environ)), process.stdin)
                process.stdin.flush()
                result, error = pickle.load(process.stdout)
            except BaseException:
                process.kill()  # Its answer would be taken for that to the next call.
                raise
            assert error is None, error
            return result

        yield run
        process.kill()


@pytest.fixture
def monkeypatch(monkeypatch):
    """Have variables that are read once read again where a test changes them."""

    def again(change):
        def changed(*args, **kwargs):
            change(*args, **kwargs)
            _C.forget_environment()

        return changed

    monkeypatch.setenv = again(monkeypatch.setenv)
    monkeypatch.delenv = again(monkeypatch.delenv)
    yield monkeypatch
    monkeypatch.undo()
    _C.forget_environment()


@pytest.fixture(scope="session")
def with_faults():
    """Return an environment of forked interpreters in which calls fail as ``faults.c`` says."""
    if faults.library() is None:
        if os.environ.get("CI"):
            pytest.fail("a C compiler is required in CI")
        pytest.skip("there is no C compiler")

    def environment(**chosen):
        return os.environ | {f"FAULT_{name}": str(value) for name, value in chosen.items()}

    return environment


def count_threads():
    # Importing Dynamo starts one of tqdm's.
    return sum(type(thread).__name__ != "TMonitor" for thread in threading.enumerate())


@pytest.fixture
def pair(tmp_path):
    """Save an object with the storages in a file of their own; return the path."""
    from pairs import save, state

    path = tmp_path / "state.pt"
    save(state(), path)
    return path


@pytest.fixture
def refuse(tmp_path):
    """Check that a checkpoint of torch.save is refused, with its name and a reason."""
    path = tmp_path / "hostile.pt"

    def check(data, match, error=FormatError):
        path.write_bytes(data)
        for call in (tensorizer.load, lambda p: tensorizer.TensorDeserializer(p, "cpu")):
            with pytest.raises(error, match=match) as raised:
                call(path)
            assert "hostile.pt" in str(raised.value)
            assert len(str(raised.value)) < 2000
        with pytest.raises(error, match=match):
            tensorizer.load(io.BytesIO(data))

    return check


@pytest.fixture(scope="session")
def ranks():
    """Starts ranks of torch.distributed, which do without the settings of the machine."""
    return start


@pytest.fixture(scope="session", autouse=True)
def folder_of_the_run(request, tmp_path_factory):
    """Set the folder that the workers of this run share."""
    own = tmp_path_factory.getbasetemp()
    shared.folder = own.parent if hasattr(request.config, "workerinput") else own


@pytest.fixture(params=["ranks", pytest.param("torchrun", marks=pytest.mark.long)])
def run_script(request, ranks):
    """Run a script in its folder in two processes of a group."""

    def run(script):
        if request.param == "torchrun":
            start.torchrun(2, script)
        else:
            ranks.run("dcp_meshes.execute", 2, script.read_text(), script.parent)

    return run


@pytest.fixture(scope="module")
def nginx(tmp_path_factory):
    """A server with a folder of its own, ``root``."""
    server = Nginx(tmp_path_factory.mktemp("nginx"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def moto():
    """An S3 server with a bucket called bucket."""
    server = Moto()
    server.client().create_bucket(Bucket="bucket")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def weed(tmp_path_factory):
    """A second S3 server with a bucket called bucket."""
    server = Seaweed(tmp_path_factory.mktemp("weed"))
    yield server
    server.stop()


@pytest.fixture
def s3(no_settings_of_the_machine, monkeypatch, moto):
    """The same as the server of this environment."""
    for name, value in moto.settings().items():
        monkeypatch.setenv(name, value)
    return moto


#: Prefixes of the environment variables of the clouds.
CLOUDS = ("AWS_", "AZURE_", "CLOUDSDK_", "GCE_", "GOOGLE_", "IDENTITY_", "STORAGE_EMULATOR_")


@pytest.fixture
def no_settings_of_the_machine(monkeypatch, tmp_path):
    """Hide the credentials, proxies and certificates of the machine that runs the tests."""
    for name in [name for name in os.environ if name.startswith(CLOUDS)]:
        monkeypatch.delenv(name)
    proxies = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
    bundles = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR")
    for name in (*proxies, "NO_PROXY", "no_proxy", *bundles):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture(scope="session")
def azurite():
    """A server of Azure with a container called bucket."""
    from emulators import Azurite

    with Azurite.of_run() as server:
        server.make_containers()
        yield server


@pytest.fixture(params=["gs", "az"])
def bucket(request, no_settings_of_the_machine, monkeypatch):
    """A bucket of Google's, and a container of Azure's, of servers of this environment."""
    from buckets import Azure, Google

    if request.param == "gs":
        server = Google(request.getfixturevalue("moto"))
    else:
        server = Azure(request.getfixturevalue("azurite"))
    for name, value in server.settings().items():
        monkeypatch.setenv(name, value)
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Fail a test that leaves threads."""
    threads = count_threads()
    native = len(os.listdir("/proc/self/task"))
    yield
    # torch starts threads of its own; ours are gone when a call returns. Python and the kernel may
    # list one for a moment after it has ended.
    until = time.monotonic() + 1
    while count_threads() > threads or "tensorizer" in names_of_threads():
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    assert count_threads() <= threads, threading.enumerate()
    assert "tensorizer" not in (names := names_of_threads()), (native, names)


def names_of_threads():
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            names.append(Path(f"/proc/self/task/{task}/comm").read_text().strip())
    return names


def files(folder):
    """Return the contents of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def bits(tensor):
    """Return the bytes of a tensor."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if tensor.numel() == 0:
        return b""
    if tensor.dtype == torch.bool:
        return bytes(tensor.view(torch.uint8).flatten().tolist())
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    flat = tensor.reshape(-1).view(widths[tensor.element_size()])
    return flat.numpy().tobytes()


def assert_same(left, right):
    """Dtype, shape and every bit agree."""
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    assert bits(left) == bits(right)
