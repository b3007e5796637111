"""A string is a path or an address of a known scheme; addresses of other schemes are refused."""

import os
import urllib.parse
from pathlib import Path

import pytest
import tensorizer
import torch
import torch.distributed.checkpoint as dcp
from processes import COMMAND, run_python
from scripted import Scripted
from tensorizer import TensorDeserializer, TensorSerializer
from tensorizer.distributed import Writer
from tensorizer.safetensors import save_file
from tensorizer.stream_io import open_stream
from tensorizer.torch_compat import tensorizer_saving
from tensorizer.torch_hooks.lightning import TensorizerCheckpointIO

ops = torch.ops.tensorizer

UNKNOWN = ["gcs://bucket/f", "word://f", "file://host/f"]


@pytest.mark.parametrize("address", UNKNOWN)
def test_addresses_that_are_not_known(address, tmp_path, monkeypatch):
    """They are not taken for paths of folders."""
    monkeypatch.chdir(tmp_path)
    tensors = {"a": torch.ones(1)}
    for call in (
        lambda: tensorizer.save(tensors, address),
        lambda: tensorizer.load(address),
        lambda: open_stream(address, "wb"),
        lambda: open_stream(address),
        lambda: TensorDeserializer(address),
        lambda: TensorSerializer(address),
    ):
        with pytest.raises(ValueError, match="file://") as raised:
            call()
        assert address in str(raised.value)
    for operator in (lambda: ops.save(address, tensors), lambda: ops.load(address)):
        with pytest.raises(RuntimeError, match="file://"):
            operator()
    tensorizer.save(tensors, "f")
    done = run_python(COMMAND, "cp", "f", address)
    assert done.returncode != 0
    assert "file://" in done.stderr
    assert os.listdir(tmp_path) == ["f"]


def test_file_addresses(tmp_path):
    path = tmp_path / "with space/f"
    address = path.as_uri()
    assert "%20" in address
    tensorizer.save({"a": torch.arange(3)}, address)
    assert tensorizer.load(path)["a"].tolist() == [0, 1, 2]
    assert tensorizer.load(address)["a"].tolist() == [0, 1, 2]
    assert ops.load(address)["a"].tolist() == [0, 1, 2]
    ops.save(address, {"a": torch.arange(4)})
    assert TensorDeserializer(address, "cpu")["a"].tolist() == [0, 1, 2, 3]
    with TensorSerializer(address) as serializer:
        serializer.write_state_dict({"a": torch.arange(5)})
    with open_stream(address) as stream:
        assert len(TensorDeserializer(stream, "cpu")["a"]) == 5
    assert os.listdir(path.parent) == ["f"]


MISSPELLED = {
    "s3:/bucket/f": "s3://bucket/f",
    "gs:/bucket/f": "gs://bucket/f",
    "abfss:/c@account.dfs.core.windows.net/f": "abfss://c@account",
    "hf:/org/repo/f": "hf://org/repo/f",
    "redis:/host/f": "redis://host/f",
    "file:/nowhere/f": "file:///nowhere/f",
    "~/f": "`~` is not expanded",
}


@pytest.mark.parametrize("path", MISSPELLED)
def test_misspelled_addresses_are_not_written(path, tmp_path, monkeypatch):
    """The hint is that of a load; no folder of such a name is made."""
    monkeypatch.chdir(tmp_path)
    tensors, hint = {"a": torch.ones(1)}, MISSPELLED[path]
    tensorizer.save(tensors, "f")

    def saved_in_block():
        with tensorizer_saving():
            torch.save(tensors, path)

    for call in (
        lambda: tensorizer.save(tensors, path),
        lambda: tensorizer.save(tensors, Path(path)),
        lambda: tensorizer.save(tensors, os.fsencode(path)),
        lambda: tensorizer.save(tensors, f"{path}.safetensors"),
        lambda: tensorizer.save(tensors, f"{path}.safetensors", max_shard_size=1),
        lambda: tensorizer.save_async(tensors, path).result(),
        lambda: TensorSerializer(path),
        lambda: open_stream(path, "wb"),
        lambda: open_stream(Path(path), "ab"),
        lambda: save_file(tensors, f"{path}.safetensors"),
        lambda: dcp.save(tensors, storage_writer=Writer(path), no_dist=True),
        lambda: TensorizerCheckpointIO().save_checkpoint(tensors, path),
        lambda: tensorizer.load("http://127.0.0.1:1/f", "cpu", cache_dir=path),
        saved_in_block,
    ):
        with pytest.raises((ValueError, dcp.CheckpointException)) as raised:
            call()
        assert hint in str(raised.value)
    with pytest.raises(RuntimeError) as raised:
        ops.save(path, tensors)
    assert hint in str(raised.value)
    for command in (("cp", "f", path), ("keygen", path)):
        done = run_python(COMMAND, *command)
        assert done.returncode != 0 and hint in done.stderr
    with pytest.raises(FileNotFoundError) as raised:
        tensorizer.load(path, "cpu")
    assert hint in str(raised.value)
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.parametrize("address", ["s3://bucket/f.pt", "file:///nowhere/f.pt", "s3:/bucket/f.pt"])
def test_torch_save_to_an_address_sends_nothing(address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Store() as store:
        store.use(monkeypatch)
        with tensorizer_saving(), pytest.raises(ValueError, match="address"):
            torch.save({"a": torch.ones(10)}, address)
        assert store.paths == []
        # Both halves go there through an open file.
        with tensorizer_saving(), open_stream("s3://bucket/f.pt", "wb") as file:
            torch.save({"a": torch.ones(10)}, file)
        assert sorted(store.objects) == ["/bucket/f.pt", "/bucket/f.pt.tensors"]
    assert os.listdir(tmp_path) == []


KEYS = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "secret-hu5hw0rd"}


class Store(Scripted):
    """Objects of S3, Google or Azure, by the path of their URL."""

    def __init__(self):
        self.objects, self.parts, self.paths = {}, {}, []
        super().__init__(timeout=1)

    def settings(self, path=""):
        """Return the variables that make it the server of a process, but for the keys of S3."""
        url = f"http://127.0.0.1:{self.port}{path}"
        return {
            "AWS_ENDPOINT_URL": url,
            "AWS_EC2_METADATA_DISABLED": "true",
            "GOOGLE_BASE_URL": url,
            "GOOGLE_BEARER_TOKEN": "secret-hu5hw0rd",
            "AZURE_STORAGE_ENDPOINT": url,
            "AZURE_STORAGE_ACCOUNT_NAME": "account",
            "AZURE_STORAGE_TOKEN": "secret-hu5hw0rd",
        }

    def use(self, monkeypatch, path="", signed=True):
        for name, value in (self.settings(path) | (KEYS if signed else {})).items():
            monkeypatch.setenv(name, value)
        for name in () if signed else KEYS:
            monkeypatch.delenv(name, raising=False)

    def answer(self, handler):
        path, _, query = handler.path.partition("?")
        path, fields = urllib.parse.unquote(path), urllib.parse.parse_qs(query, True)
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        self.paths.append(path)
        status, answer = 200, b""
        if handler.command == "POST" and "uploads" in fields:
            self.parts = {}
            answer = b"<InitiateMultipartUploadResult><UploadId>u</UploadId>"
            answer += b"</InitiateMultipartUploadResult>"
        elif handler.command == "POST":
            self.objects[path] = b"".join(self.parts[n] for n in sorted(self.parts))
            answer = b"<CompleteMultipartUploadResult></CompleteMultipartUploadResult>"
        elif handler.command == "PUT" and "partNumber" in fields:
            self.parts[int(fields["partNumber"][0])] = body
        elif handler.command == "PUT":
            self.objects[path] = body
        elif path in self.objects:
            answer = self.objects[path]
        else:
            status, answer = 404, b"<Error><Code>NoSuchKey</Code></Error>"
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(answer)))
        handler.send_header("ETag", '"e"')
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(answer)


@pytest.mark.parametrize("endpoint", ["", "/storage/v1/s3", "/storage/v1/s3/"])
@pytest.mark.parametrize("key", ["f", "/f", "//x//f", "x/", "x//f", "%2e%2e/f", "...//f"])
def test_keys_of_s3_are_sent_unchanged(monkeypatch, no_settings_of_the_machine, endpoint, key):
    tensors, big = {"a": torch.arange(4)}, {"a": torch.arange(3 << 20)}
    address = f"s3://bucket/{key}.tensors"
    with Store() as store:
        store.use(monkeypatch, endpoint)
        tensorizer.save(tensors, address)
        assert tensorizer.load(address, "cpu")["a"].tolist() == [0, 1, 2, 3]
        ops.save(address, tensors)
        ops.load(address)
        tensorizer.save(big, address)
        assert len(store.parts) > 1
        store.use(monkeypatch, endpoint, signed=False)
        assert torch.equal(tensorizer.load(address, "cpu")["a"], big["a"])
        assert set(store.paths) == {f"{endpoint.rstrip('/')}/bucket/{key}.tensors"}


@pytest.mark.parametrize("key", ["a/../b", "../other/key", "a/./b", "..", ".", "//../b"])
def test_keys_that_a_url_cannot_hold_are_refused(monkeypatch, key):
    with Store() as store:
        store.use(monkeypatch)
        for address in (f"s3://bucket/{key}", f"gs://bucket/{key}", f"az://bucket/{key}"):
            for call in (
                lambda address=address: tensorizer.load(address, "cpu"),
                lambda address=address: tensorizer.save({"a": torch.ones(2)}, address),
                lambda address=address: list(tensorizer.iterate(address)),
                lambda address=address: open_stream(address),
            ):
                with pytest.raises(ValueError, match=r"component `\.` or `\.\.`"):
                    call()
        with pytest.raises(RuntimeError, match=r"component `\.` or `\.\.`"):
            ops.save(f"s3://bucket/{key}", {"a": torch.ones(2)})
        assert store.paths == []


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_double_slashes_are_of_the_name_at_other_clouds(monkeypatch, tmp_path, scheme):
    with Store() as store:
        store.use(monkeypatch)
        tensorizer.save({"a": torch.arange(4)}, tmp_path / "f")
        data = (tmp_path / "f").read_bytes()
        names = {f"/bucket/{name}.tensors": data for name in ("/f", "x//f")}
        store.objects.update(names)
        for name in ("/f", "x//f"):
            assert len(tensorizer.load(f"{scheme}://bucket/{name}.tensors", "cpu")) == 1
        assert set(store.paths) == set(names)


def test_a_folder_of_an_object_with_two_slashes_is_not_another_one(monkeypatch):
    """The files of a model, and of a checkpoint, are looked for in the folder that is named."""
    with Store() as store:
        store.use(monkeypatch)
        with pytest.raises(FileNotFoundError):
            tensorizer.load("s3://bucket/x//", "cpu")
        dcp.save({"a": torch.ones(2)}, storage_writer=Writer("s3://bucket/x//"), no_dist=True)
        assert all(path.startswith("/bucket/x//") for path in store.paths)
