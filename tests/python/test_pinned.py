"""Files whose SHA-256 is stated: whatever their address and format, only these bytes are loaded."""

import contextlib
import hashlib
import os
import subprocess

import pytest
import tensorizer
import torch
from conftest import assert_same
from processes import run_python
from scripted import FaultServer, Scripted
from tensorizer import DamagedFileError, TensorDeserializer
from tensorizer_cli.main import main

MB = 1 << 20
TENSORS = {f"t{n}": torch.rand(MB // 4 + n) for n in range(12)}
OTHER = "0" * 64


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def assert_all(found, tensors=TENSORS):
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_same(found[name].detach(), tensor)


@pytest.fixture(params=["tensors", "safetensors", "pt"])
def file(request, tmp_path):
    path = tmp_path / f"f.{request.param}"
    torch.save(TENSORS, path) if request.param == "pt" else tensorizer.save(TENSORS, path)
    return path


LOADS = {
    "load": lambda file, **o: tensorizer.load(file, "cpu", **o),
    "one reader": lambda file, **o: tensorizer.load(file, "cpu", num_readers=1, **o),
    "many readers": lambda file, **o: tensorizer.load(file, "cpu", num_readers=8, **o),
    "mapped": lambda file, **o: tensorizer.load(file, "cpu", mmap=True, **o),
    "in place": lambda file, **o: tensorizer.load(
        file, out={name: torch.empty_like(one) for name, one in TENSORS.items()}, **o
    ),
    "eager": lambda file, **o: TensorDeserializer(file, "cpu", **o),
    "lazy": lambda file, **o: TensorDeserializer(file, "cpu", lazy_load=True, **o),
}


@pytest.mark.parametrize("way", LOADS)
def test_only_the_stated_bytes_are_loaded(file, way):
    found = LOADS[way](file, sha256=digest(file).upper())
    assert_all({name: found[name] for name in TENSORS})
    with pytest.raises(DamagedFileError, match=f"f.*: the caller expects {OTHER}, the bytes have"):
        found = LOADS[way](file, sha256=OTHER)
        found["t11"]


def test_a_part_is_compared_with_the_whole_file(file):
    expected = digest(file)
    assert_all(tensorizer.load(file, "cpu", names=["t7"], sha256=expected), {"t7": TENSORS["t7"]})
    part = tensorizer.load(file, "cpu", slices={"t3": (0, 5, 9)}, names=["t3"], sha256=expected)
    assert_same(part["t3"], TENSORS["t3"][5:9])
    data = bytearray(file.read_bytes())
    data[-40 if file.suffix == ".pt" else -1] ^= 1  # not of these tensors
    file.write_bytes(data)
    with pytest.raises(DamagedFileError):
        tensorizer.load(file, "cpu", names=["t7"], sha256=expected)


@pytest.mark.parametrize("kind", ["tensors", "safetensors"])
def test_a_file_of_a_server_is_sent_once(tmp_path, kind):
    path = tmp_path / f"f.{kind}"
    tensorizer.save(TENSORS, path)
    data = path.read_bytes()
    for ranges in (True, False):
        with FaultServer(data, ranges=ranges) as server:
            assert_all(tensorizer.load(server.url, "cpu", sha256=digest(path)))
            # The first bytes may be sent twice: to open the file and, without ranges, to read it.
            assert len(data) <= server.sent + MB and server.sent <= 2 * len(data)
            if ranges:
                assert server.sent <= len(data) + 2 * MB
            with pytest.raises(DamagedFileError):
                tensorizer.load(server.url, "cpu", sha256=OTHER)


def test_bytes_that_change_between_two_reads_are_not_handed_out(tmp_path):
    """A server that says that it has the same file."""
    path = tmp_path / "f.safetensors"
    tensorizer.save(TENSORS, path)
    with FaultServer(path.read_bytes()) as server:
        with TensorDeserializer(server.url, "cpu", lazy_load=True, sha256=digest(path)) as file:
            assert_same(file["t2"].detach(), TENSORS["t2"])
            server.data = bytes(server.data[:-5]) + b"other"
            with pytest.raises(DamagedFileError, match="changed since they were compared"):
                file["t9"]  # the last in the file


def test_each_file_of_a_checkpoint_has_its_own(tmp_path):
    tensorizer.save(TENSORS, tmp_path / "m.safetensors", max_shard_size="5MB")
    index = tmp_path / "m.safetensors.index.json"
    expected = {path.name: digest(path) for path in tmp_path.iterdir()}
    assert_all(tensorizer.load(index, "cpu", sha256=expected))
    assert_all(tensorizer.load(tmp_path, "cpu", sha256=expected))
    for name in expected:
        with pytest.raises(DamagedFileError, match=name):
            tensorizer.load(index, "cpu", sha256={**expected, name: OTHER})
        rest = {other: value for other, value in expected.items() if other != name}
        with pytest.raises(ValueError, match=f"sha256 has no hash of `{name}`"):
            tensorizer.load(index, "cpu", sha256=rest)


@pytest.mark.parametrize("value", ["abc", "g" * 64, {"f": 7}])
def test_what_is_no_hash_is_refused(file, value):
    with pytest.raises(ValueError, match="sha256 must have 64 hexadecimal digits"):
        tensorizer.load(file, "cpu", sha256=value)


def test_iterate_refuses_it(file):
    with pytest.raises(ValueError, match="known at its end only"):
        tensorizer.iterate(file, "cpu", sha256=digest(file))


@pytest.mark.parametrize("fragment", ["sha256=" + OTHER, "part"])
def test_a_fragment_of_an_address_is_refused(fragment):
    with pytest.raises(ValueError, match="without a fragment") as raised:
        tensorizer.load(f"http://127.0.0.1:1/f#{fragment}", "cpu")
    assert ("sha256=" in str(raised.value)) == fragment.startswith("sha256=")


def test_the_command_takes_the_output_of_sha256sum(tmp_path, capsys):
    def run(*arguments):
        status = main([*map(str, arguments)])
        return status, "".join(capsys.readouterr())

    (tmp_path / "m").mkdir()
    tensorizer.save(TENSORS, tmp_path / "m/m.safetensors", max_shard_size="5MB")
    names = sorted(os.listdir(tmp_path / "m"))
    listed = subprocess.run(["sha256sum", *names], cwd=tmp_path / "m", capture_output=True).stdout
    (tmp_path / "SHA256SUMS").write_bytes(listed)
    index = tmp_path / "m/m.safetensors.index.json"
    status, said = run("verify", "--sums", tmp_path / "SHA256SUMS", index)
    assert (status, said) == (0, "12 of 12 tensors are as they were written\n")
    status, said = run("cp", "-q", "--sums", tmp_path / "SHA256SUMS", index, tmp_path / "c.tensors")
    assert status == 0, said
    assert_all(tensorizer.load(tmp_path / "c.tensors", "cpu"))
    wrong = listed.decode().replace(digest(tmp_path / "m" / names[1]), OTHER)
    (tmp_path / "SHA256SUMS").write_text(wrong)
    status, said = run("verify", "--sums", tmp_path / "SHA256SUMS", index)
    assert status == 1 and names[1] in said
    one = tmp_path / "c.tensors"
    assert run("verify", "--sha256", digest(one), one)[0] == 0
    assert run("verify", "--sha256", OTHER, one)[0] == 1
    status, said = run("cp", "-q", "--sha256", OTHER, one, tmp_path / "d.tensors")
    assert status != 0 and "the caller expects" in said
    assert not (tmp_path / "d.tensors").exists()


LONG = """
import resource, sys, tensorizer
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    tensorizer.load(sys.argv[1], "cpu", sha256="0" * 64, names=["t0"], timeout=100)
except OSError as error:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, type(error).__name__)
"""


def test_a_length_that_a_server_states_takes_no_memory(tmp_path):
    """It states 2^50 bytes, and has no more than the file."""
    tensorizer.save(TENSORS, tmp_path / "f.tensors")
    data = (tmp_path / "f.tensors").read_bytes()

    class Endless(Scripted):
        def answer(self, handler):
            start, end = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
            body = data[start : end + 1]
            handler.send_response(206 if body else 416)
            if body:
                stated = f"bytes {start}-{start + len(body) - 1}/{2**50}"
                handler.send_header("Content-Range", stated)
                handler.send_header("ETag", '"one"')
            handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            with contextlib.suppress(OSError):
                handler.wfile.write(body)

    with Endless() as server:
        done = run_python(LONG, f"http://127.0.0.1:{server.port}/f.tensors")
    kib, error = done.stdout.split()
    assert int(kib) < 600_000 and error != "TimeoutError", done.stdout
