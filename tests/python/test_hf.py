"""``hf://`` addresses: files of Hugging Face's hub, and of the cache of its own client."""

import hashlib
import json
import logging
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tensorizer
import torch
from conftest import ROOT, assert_same
from hub import Hub, send, sha256
from processes import COMMAND, run_python
from safetensors.torch import save
from tensorizer import (
    DamagedFileError,
    HashMismatchError,
    TensorDeserializer,
    TensorSerializer,
    load,
)
from tensorizer.file.open_file import OpenFile
from tensorizer.stream_io import open_stream
from tensorizer_cli.main import main
from test_cache import entries

ops = torch.ops.tensorizer
TOKEN = "hf_hu5hw0rd"
OURS = f"Bearer {TOKEN}"


def tensors(seed=0, size=300_000):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(size, generator=generator) for name in ("a", "b", "c")}


def shards(found, prefix=""):
    """Return the files of a checkpoint with a shard for each tensor."""
    names = {name: f"model-{name}.safetensors" for name in found}
    files = {prefix + file: save({name: found[name]}) for name, file in names.items()}
    index = json.dumps({"metadata": {}, "weight_map": names}).encode()
    return files | {prefix + "model.safetensors.index.json": index}


@pytest.fixture
def hub(no_settings_of_the_machine, monkeypatch, tmp_path):
    ours = ("HF_", "HUGGING", "TRANSFORMERS_OFFLINE", "XDG_CACHE_HOME")
    for name in [name for name in os.environ if name.startswith(ours)]:
        monkeypatch.delenv(name)
    with Hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        yield server


def assert_all(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same(found[name].detach(), tensor)


def download(*files, repo="org/repo", revision="main", **settings):
    """Have Hugging Face's own client download files; return their paths."""
    code = """
import sys
from huggingface_hub import hf_hub_download
repo, revision, *files = sys.argv[1:]
for file in files:
    print(hf_hub_download(repo, file, revision=revision))
"""
    env = {**os.environ, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", **settings}
    done = run_python(code, repo, revision, *files, env=env)
    assert done.returncode == 0, done.stderr
    return [Path(line) for line in done.stdout.splitlines()]


def test_files_folders_and_revisions(hub, tmp_path):
    first, second, third = (tensors(seed, 1000) for seed in range(3))
    repo = hub.repo("org/my.repo")
    pinned = repo.commit({"model.safetensors": save(first), "sub/x.bin": b""})
    repo.commit(shards(second) | shards(third, "deep/down/"), "a/branch")
    repo.commit({"model.safetensors": save(third)}, "refs/pr/7")
    repo.commit({"with space/ü.safetensors": save(second)}, "v1.0")
    for address, expected in {
        "hf://org/my.repo": first,
        "HF://org/my.repo/": first,
        "hf://org/my.repo@main/model.safetensors": first,
        "hf://org/my.repo/model.safetensors": first,
        "hf://models/org/my.repo": first,
        f"hf://org/my.repo@{pinned}": first,
        "hf://org/my.repo@a%2Fbranch": second,
        "hf://org/my.repo@a%2Fbranch/model.safetensors.index.json": second,
        "hf://org/my.repo@a%2Fbranch/deep/down": third,
        "hf://org/my.repo@a%2Fbranch/deep/down/": third,
        "hf://org/my.repo@refs/pr/7": third,
        "hf://org/my.repo@v1.0/with space/ü.safetensors": second,
    }.items():
        assert_all(load(address, "cpu"), expected)
        assert_all(ops.load(address), expected)
    address = "hf://org/my.repo@a%2Fbranch"
    commit = repo.refs["a/branch"]
    about = tensorizer.info(address)
    assert about.uri == f"hf://org/my.repo@{commit}/model.safetensors.index.json"
    assert_all(dict(tensorizer.iterate(address)), second)
    with TensorDeserializer(address, "cpu", lazy_load=True) as file:
        assert_same(file.slice("b")[10:20], second["b"][10:20])
        assert_all(file, second)
    assert_all(load(address, "cpu", names=["b"]), {"b": second["b"]})
    with open_stream("hf://org/my.repo/model.safetensors") as stream:
        assert stream.read() == save(first)
        assert stream.name == f"hf://org/my.repo@{pinned}/model.safetensors"
    copy = tmp_path / "copy.tensors"
    assert main(["cp", "--quiet", address, str(copy)]) == 0
    assert main(["diff", "--quiet", address, str(copy)]) == 0
    assert main(["ls", "hf://org/my.repo"]) == 0
    assert_all(load(copy, "cpu"), second)


@pytest.mark.parametrize("verify", [False, True])
def test_a_load_stays_at_one_commit(hub, verify):
    """The branch moves when the index was read, and before the shards are."""
    old, new = tensors(1, 1000), tensors(2, 1000)
    repo = hub.repo("org/repo", shards(old))
    commit = repo.refs["main"]

    def moves(method, path):
        if method == "GET" and path.endswith("index.json"):
            repo.commit(shards(new))

    hub.watch = moves
    assert_all(load("hf://org/repo", "cpu", verify_hash=verify), old)
    asked = hub.asked()
    assert [path for _, path in asked if "/main/" in path] == [
        "/org/repo/resolve/main/model.safetensors"
    ]
    assert all(f"/resolve/{commit}/" in path for _, path in asked[1:])
    assert sum(path.endswith("-a.safetensors") for _, path in asked) == (2 if verify else 1)
    hub.watch = lambda *_: None
    assert_all(load("hf://org/repo", "cpu"), new)


def test_another_process_opens_the_same_commit(hub):
    """It gets the heads of the first process, and sends no request for them."""
    old = tensors(1, 1000)
    repo = hub.repo("org/repo", shards(old))
    with OpenFile("hf://org/repo", heads=[]) as first:
        heads = first.heads
    repo.commit(shards(tensors(2, 1000)))
    hub.asked()
    hub.files.requests.clear()
    with OpenFile("hf://org/repo", heads=heads) as file:
        assert hub.asked() == hub.files.requests == []
        loaded = [tensor for _, tensor, _ in file.load(range(3), torch.device("cpu"))]
        assert_all({file.reader.name(n): tensor for n, tensor in enumerate(loaded)}, old)
    download("model.safetensors.index.json", revision=next(iter(repo.commits)))
    hub.asked()
    with OpenFile("hf://org/repo", heads=heads) as file:
        assert hub.asked() == []


@pytest.mark.parametrize("where", ["HF_TOKEN", "HF_TOKEN_PATH", "HF_HOME"])
def test_the_token_is_for_the_hub_alone(hub, where, tmp_path, monkeypatch, caplog):
    repo = hub.repo("org/repo", shards(tensors()))
    repo.readers = {OURS}
    with pytest.raises(PermissionError, match=r"it is private: set HF_TOKEN to a token") as raised:
        load("hf://org/repo")
    if where == "HF_TOKEN":
        monkeypatch.setenv("HF_TOKEN", f" {TOKEN}\n")
    else:
        folder = tmp_path / ("hf" if where == "HF_HOME" else "tokens")
        folder.mkdir()
        (folder / "token").write_text(TOKEN + "\n")
        if where == "HF_TOKEN_PATH":
            monkeypatch.setenv("HF_TOKEN_PATH", str(folder / "token"))
    hub.asked()
    with caplog.at_level(logging.DEBUG):
        assert_all(load("hf://org/repo", "cpu", cache_dir=tmp_path / "cache"), tensors())
    fields = [fields for _, _, fields in hub.requests]
    assert len(fields) == 6
    assert {fields["authorization"] for fields in fields} == {OURS}
    assert len(hub.files.requests) >= 3
    for _, _, fields in hub.files.requests:
        assert TOKEN not in json.dumps(fields)
        assert "authorization" not in fields
    repo.readers = {"Bearer another-hu5hw0rd"}
    with pytest.raises(FileNotFoundError, match="has no access to it") as other:
        load("hf://org/repo")
    shown = f"{raised.value} {other.value} {caplog.text}"
    kept = b"".join(path.read_bytes() for path in (tmp_path / "cache").iterdir())
    for secret in (TOKEN, "Signature", "signed1"):
        assert secret not in shown
        assert secret.encode() not in kept
    repo.readers = {OURS}
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "TRUE")
    with pytest.raises(PermissionError, match="set HF_TOKEN"):
        load("hf://org/repo")


def test_a_malformed_hub_token_is_refused_and_not_shown(hub, monkeypatch):
    hub.repo("org/repo", shards(tensors()))
    monkeypatch.setenv("HF_TOKEN", "hu5hw0rd\nlines")
    with pytest.raises(OSError, match="invalid name or value") as raised:
        load("hf://org/repo")
    assert "lines" not in str(raised.value)


def test_addresses_that_expire(hub):
    """Each signed address is good for two requests, and a load makes more."""
    big = {"t": torch.rand(20 << 20)}
    hub.repo("org/repo", {"model.safetensors": save(big)})
    hub.files.good_for = 2
    assert_all(load("hf://org/repo", "cpu", num_readers=2), big)
    with TensorDeserializer("hf://org/repo", "cpu", lazy_load=True) as file:
        for start in range(8):
            part = file.slice("t")[start << 21 : (start << 21) + 10]
            assert_same(part, big["t"][start << 21 : (start << 21) + 10])
    refused = max(hub.files.uses.values())
    assert refused > 2


def test_refusals_of_the_hub_name_their_cause(hub, monkeypatch):
    repo = hub.repo("org/repo", {"README.md": b"text", "model.safetensors": save(tensors())})
    gated = hub.repo("org/gated", shards(tensors()))
    gated.gated, gated.readers = True, {OURS}
    for address, kind, said in [
        ("hf://org/none", PermissionError, "there is no repository `org/none`.*HF_TOKEN"),
        ("hf://org/gated", PermissionError, "`org/gated` is gated.*HF_TOKEN"),
        (f"hf://org/gated@{gated.refs['main']}", PermissionError, "`org/gated` is gated"),
        ("hf://org/repo@none", FileNotFoundError, "`org/repo` has no revision `none`"),
        (f"hf://org/repo@{'0' * 40}", FileNotFoundError, "no revision `0000"),
        ("hf://org/repo/none.bin", FileNotFoundError, "there is no file none.bin"),
        (
            "hf://org/repo/none",
            FileNotFoundError,
            "none, nor a folder with any of model.safetensors",
        ),
        ("hf://org/repo/README.md", tensorizer.FormatError, "README.md"),
    ]:
        with pytest.raises(kind, match=said) as raised:
            load(address)
        assert f"`{'/'.join(address.split('@')[0].split('/')[:4])}" in str(raised.value)
    monkeypatch.setenv("HF_TOKEN", "another-hu5hw0rd")
    with pytest.raises(PermissionError, match=r"request access .*; the token \(of HF_TOKEN"):
        load("hf://org/gated")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert_all(load("hf://org/gated", "cpu"), tensors())
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.files.port}")
    with pytest.raises(PermissionError, match="the hub refuses access to `org/repo`"):
        load("hf://org/repo")
    for wrong in ("hub", "ftp://host", "http://"):
        monkeypatch.setenv("HF_ENDPOINT", wrong)
        with pytest.raises(ValueError, match="HF_ENDPOINT must be"):
            load("hf://org/repo")
    assert len(repo.commits) == 1


def test_renamed_repositories_and_busy_hubs_are_supported(hub, monkeypatch):
    """The hub redirects to the new name of a repository, and is asked again when it has no time."""
    hub.repo("new/name", shards(tensors(1, 1000)))
    hub.renamed["org/old"] = "new/name"
    hub.busy = 2
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint + "/")
    assert_all(load("hf://org/old", "cpu", verify_hash=True), tensors(1, 1000))
    assert hub.busy == 0
    download("model-a.safetensors", repo="new/name")
    hub.busy = 1
    assert_all(load("hf://new/name/model-a.safetensors", "cpu"), {"a": tensors(1, 1000)["a"]})
    assert hub.asked()[-1][0] == "HEAD"
    # A busy hub is retried before it counts as one that cannot be reached.
    hub.repos["new/name"].commit(shards(tensors(2, 1000)))
    hub.busy = 2
    assert_all(load("hf://new/name/model-a.safetensors", "cpu"), {"a": tensors(2, 1000)["a"]})


def test_a_server_that_redirects_everything(hub, monkeypatch):
    """The same host without TLS is such a server: a redirect does not tell if there is a file."""
    hub.repo("org/repo", shards(tensors(1, 1000)))
    with Hub() as other:
        other.elsewhere = hub.endpoint
        monkeypatch.setenv("HF_ENDPOINT", other.endpoint)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        with pytest.raises(OSError, match=f"redirects to {hub.endpoint}, .* set HF_ENDPOINT"):
            load("hf://org/repo")
    assert hub.asked() == []


def test_an_unknown_token_is_reported_as_wrong_or_expired(hub, monkeypatch):
    hub.repo("org/repo", shards(tensors(1, 1000)))
    hub.unknown = {OURS}
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(PermissionError, match="it is wrong, or has expired") as raised:
        load("hf://org/repo")
    assert TOKEN not in str(raised.value)
    assert "no repository" not in str(raised.value)


def test_names_that_the_hubs_own_client_knows_too(hub, monkeypatch, tmp_path):
    old = tensors(1, 1000)
    repo = hub.repo("org/repo", shards(old))
    repo.readers = {OURS}
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", TOKEN)
    assert_all(load("hf://org/repo", "cpu"), old)
    monkeypatch.setenv("BASE", str(tmp_path))
    monkeypatch.setenv("HUGGINGFACE_HUB_CACHE", "${BASE}/old")
    download(*repo.commits[repo.refs["main"]])
    assert (tmp_path / "old").is_dir()
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    hub.asked()
    assert_all(load("hf://org/repo", "cpu"), old)
    monkeypatch.setenv("HF_HUB_CACHE", "$BASE/old")
    assert_all(load("hf://org/repo", "cpu"), old)
    assert hub.asked() == []
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN")
    monkeypatch.setenv("HF_TOKEN_PATH", "$BASE/a token")
    (tmp_path / "a token").write_text(TOKEN)
    assert_all(load("hf://org/repo", "cpu"), old)
    assert len(hub.asked()) == 1


def test_the_example_of_the_document(hub):
    repo = hub.repo("org/repo", shards(tensors(1, 1000)))
    repo.commit({"model.safetensors": save(tensors(2, 1000))}, "v1.0")
    text = (ROOT / "docs/reference/addresses/hugging-face.md").read_text()
    (code,) = re.findall(r'```python title="from the hub"\n(.+?)```', text, re.DOTALL)
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert len(hub.files.requests) == 3 + 1


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    "address",
    ["hf://", "hf://repo", "hf://org/repo@", "hf://org/repo/../x", "hf://datasets/org/repo/f"],
)
def test_addresses_that_are_wrong(address):
    with pytest.raises(ValueError, match=r"expected hf://org/repo\[@revision\]\[/path\]"):
        load(address)


@pytest.mark.usefixtures("hub")
def test_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, address = tensors(), "hf://org/repo/f.tensors"
    for call in (
        lambda: tensorizer.save(found, address),
        lambda: TensorSerializer(address),
        lambda: open_stream(address, "wb"),
    ):
        with pytest.raises(ValueError, match=r"hf://.*huggingface_hub"):
            call()
    with pytest.raises(RuntimeError, match="`hf://` addresses cannot be written.*huggingface_hub"):
        ops.save(address, found)
    tensorizer.save(found, "f")
    assert main(["cp", "f", address]) == 2
    assert os.listdir() == ["f"]


def test_the_cache_of_the_hubs_own_client(hub, monkeypatch):
    """A commit is read there without a request, a branch with one."""
    old, new = tensors(1), tensors(2)
    repo = hub.repo("org/repo", shards(old) | {"one.safetensors": save(old)})
    commit = repo.refs["main"]
    paths = download(*repo.commits[commit])
    assert all(path.is_symlink() and commit in path.parts for path in paths)
    hub.asked()
    hub.files.requests.clear()
    for address in (f"hf://org/repo@{commit}", f"hf://org/repo@{commit}/one.safetensors"):
        for verify in (False, True):
            assert_all(load(address, "cpu", verify_hash=verify), old)
        assert_all(ops.load(address), old)
    with TensorDeserializer(f"hf://org/repo@{commit}", "cpu", mmap=True) as file:
        assert_all(file, old)
        assert "/blobs/" in Path("/proc/self/maps").read_text()
    assert hub.asked() == []
    assert_all(load("hf://org/repo", "cpu"), old)
    assert hub.asked() == [("HEAD", "/org/repo/resolve/main/model.safetensors")]
    assert hub.files.requests == []
    # Files that the client has not downloaded come from the hub.
    repo.commit(shards(new))
    assert_all(load("hf://org/repo", "cpu"), new)
    download("model.safetensors.index.json", "model-a.safetensors")
    hub.files.requests.clear()
    assert_all(load("hf://org/repo", "cpu"), new)
    assert len({path for _, path, _ in hub.files.requests}) == 2
    monkeypatch.setenv("HF_HUB_CACHE", "/nowhere")
    assert_all(load(f"hf://org/repo@{commit}", "cpu"), old)
    assert len(hub.asked()) > 1


def test_cached_files_load_while_offline(hub, monkeypatch):
    old = tensors(1)
    repo = hub.repo("org/repo", shards(old))
    repo.commit(shards(old), "a/tag")
    download(*repo.commits[repo.refs["main"]])
    download(*repo.commits[repo.refs["a/tag"]], revision="a/tag")
    repo.commit(shards(tensors(2)))
    hub.asked()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert_all(load("hf://org/repo", "cpu", verify_hash=True), old)
    assert_all(load("hf://org/repo@a%2Ftag", "cpu"), old)
    for address in (
        "hf://org/repo/none.bin",
        "hf://org/repo@other",
        f"hf://org/repo@{repo.refs['main']}",
        "hf://org/other",
    ):
        with pytest.raises(FileNotFoundError, match="HF_HUB_OFFLINE is set, and it is not in"):
            load(address)
    assert hub.asked() == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert_all(load("hf://org/repo", "cpu"), tensors(2))
    # The hub cannot be reached.
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert_all(load("hf://org/repo", "cpu"), old)
    with pytest.raises(ConnectionError, match="hf://org/other@main"):
        load("hf://org/other")
    # A refusal is an error: the cached files are for a hub that cannot be reached.
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    repo.readers = {OURS}
    with pytest.raises(PermissionError, match="set HF_TOKEN"):
        load("hf://org/repo")


@pytest.mark.parametrize("refuses", ["expired", "gated"])
def test_a_refused_token_leaves_the_copy_of_the_hubs_own_client(hub, monkeypatch, refuses):
    old, new = tensors(1, 1000), tensors(2, 1000)
    repo = hub.repo("org/repo", shards(old))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    download(*repo.commits[repo.refs["main"]])
    repo.commit(shards(new))
    if refuses == "expired":
        hub.unknown = {OURS}
    else:
        repo.gated, repo.readers = True, {"another"}
    said = "the copy in the cache of Hugging Face's client is used, .*the token"
    with pytest.warns(UserWarning, match=said):
        assert_all(load("hf://org/repo", "cpu"), old)
    (why,) = tensorizer.stats()["fallbacks"]
    assert re.match(said, why)
    assert TOKEN not in why
    with pytest.raises(PermissionError, match="the token"):
        load("hf://org/repo/none.bin")
    with pytest.raises(PermissionError, match="the token"):
        load(f"hf://org/repo@{repo.refs['main']}")


class Mirror(Hub):
    """A hub below a path, whose redirects name no host."""

    def answer(self, handler):
        if handler.path.startswith("/mirror/"):
            send(handler, 307, {"Location": handler.path.replace("mirror", "api/hub", 1)}, b"")
        else:
            handler.path = handler.path.removeprefix("/api/hub")
            super().answer(handler)


@pytest.mark.usefixtures("hub")
def test_a_mirror_below_a_path(monkeypatch):
    with Mirror() as mirror:
        mirror.repo("org/repo", shards(tensors(1, 1000)))
        monkeypatch.setenv("HF_ENDPOINT", f"{mirror.endpoint}/mirror")
        assert_all(load("hf://org/repo", "cpu", verify_hash=True), tensors(1, 1000))


@pytest.mark.device
@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("", "model-b.safetensors"),
        ("/one.safetensors", "one.safetensors"),
        ("/f.pt", "f.pt"),
        ("/f.tensors", "f.tensors"),
    ],
)
def test_verified_by_what_the_hub_publishes(hub, tmp_path, path, wrong):
    found = tensors()
    with tensorizer.TensorSerializer(tmp_path / "f.tensors") as file:  # with room in the index
        file.write_state_dict(found)
    torch.save(found, tmp_path / "f.pt")
    files = shards(found) | {"one.safetensors": save(found)}
    files |= {name: (tmp_path / name).read_bytes() for name in ("f.tensors", "f.pt")}
    hub.repo("org/repo", files)
    address, expected = f"hf://org/repo{path}", sha256(files[wrong])
    for verify in (True, "crc32"):
        assert_all(load(address, "cpu", verify_hash=verify), found)
    other = bytearray(files[wrong])
    # In a file of our own format, a byte that no hash of a tensor covers.
    at = other.index(bytes(60), 500) + 30 if wrong == "f.tensors" else 1 << 20
    other[at] ^= 1
    hub.files.blobs[expected] = bytes(other)
    if wrong == "f.tensors":
        assert_all(load(address, "cpu", verify_hash="crc32"), found)
    else:
        assert load(address, "cpu").keys() == found.keys()
    said = f"{wrong}` failed SHA256 verification: the hub publishes {expected}, the bytes have "
    said += sha256(bytes(other))
    # Only shards that are needed are verified.
    out = {"b": torch.zeros(300_000)}
    calls = [
        lambda: load(address, "cpu", verify_hash=True),
        lambda: load(address, "cpu", names=["b"], verify_hash=True),
        lambda: load(address, "cpu", names=["b"], out=out, verify_hash=True),
        lambda: load(address, "cpu", slices={"b": (0, 0, 5)}, verify_hash=True),
        lambda: TensorDeserializer(address, "cpu", verify_hash=True),
        lambda: list(tensorizer.iterate(address, verify_hash=True)),
        lambda: load_module(address),
        lambda: load(address, "cpu", mmap=True, verify_hash=True),
    ]
    for call in calls:
        with pytest.raises(DamagedFileError) as raised:
            call()
        assert said in str(raised.value)
    assert not out["b"].any()
    if wrong == "model-b.safetensors":
        assert_all(load(address, "cpu", names=["a"], verify_hash=True), {"a": found["a"]})
    if wrong != "f.pt":
        with pytest.raises(RuntimeError, match="failed SHA256 verification"):
            ops.load(address, verify=True)


def module_like(found):
    module = torch.nn.Module()
    for name, tensor in found.items():
        module.register_parameter(name, torch.nn.Parameter(torch.zeros_like(tensor)))
    return module


def load_module(address):
    module = module_like(tensors())
    with TensorDeserializer(address, "cpu", lazy_load=True) as file:
        try:
            file.load_into_module(module, verify_hash=True)
        finally:
            assert not module.a.any()


def test_verified_after_the_file_was_closed(hub, tmp_path):
    """A file of no hub is verified by its own hashes; that of a hub can be read no more."""
    found = tensors(1, 1000)
    module = module_like(found)
    module.load_state_dict(found)
    with TensorSerializer(tmp_path / "f.tensors") as writer:
        writer.write_module(module)
    module = module_like(found)
    TensorDeserializer(tmp_path / "f.tensors", "cpu").load_into_module(module, verify_hash=True)
    assert_all(dict(module.named_parameters()), found)
    hub.repo("org/repo", {"model.safetensors": save(found)})
    with pytest.raises(tensorizer.ClosedError):
        TensorDeserializer("hf://org/repo", "cpu").load_into_module(module, verify_hash=True)
    file = TensorDeserializer("hf://org/repo", "cpu", verify_hash=True)
    file.load_into_module(module, verify_hash=True)
    # The bytes that were loaded before are not those that the hub's hash would be compared with.
    with TensorDeserializer("hf://org/repo", "cpu", lazy_load=True) as file:
        assert file["a"].numel()
        with pytest.raises(
            ValueError, match="'a' was loaded without verification, and has no hash"
        ):
            file.load_into_module(module, verify_hash=True)


def test_threads_verify_once(hub):
    found = tensors(size=3_000_000)
    hub.repo("org/repo", {"model.safetensors": save(found)})
    with OpenFile("hf://org/repo", verify_hash=True) as file, ThreadPoolExecutor(3) as threads:
        loads = [threads.submit(file.read, [n], torch.device("cpu")) for n in range(3)]
        for number, done in enumerate(loads):
            ((tensor,), _) = done.result()
            assert_same(tensor, found[file.reader.name(number)])
    assert sum(method == "HEAD" for method, _ in hub.asked()) == 2


def test_a_group_verifies_before_it_exchanges(hub, ranks, tmp_path):
    """Each rank compares the whole file, once."""
    data = save(tensors())
    hub.repo("org/repo", {"model.safetensors": data})
    env = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path)}
    assert ranks.run("groups.verified", 2, "hf://org/repo", env=env) == [None, None]
    assert sum(method == "HEAD" for method, _ in hub.asked()) == 1 + 2
    hub.files.blobs[sha256(data)] = data[:-1] + bytes([data[-1] ^ 1])
    for kind, said in ranks.run("groups.verified", 2, "hf://org/repo", env=env):
        assert kind == "DamagedFileError"
        assert sha256(data) in said


def test_files_of_the_hubs_own_client_are_local(hub):
    """Ranks of one machine are given the names of the files, and each rank reads them itself."""
    repo = hub.repo("org/repo", shards(tensors(1, 1000)))
    with OpenFile("hf://org/repo", heads=[]) as file:
        assert not file.is_local
        assert all(first for *_, first in file.heads)
    download(*repo.commits[repo.refs["main"]])
    with OpenFile("hf://org/repo", heads=[]) as file:
        assert file.is_local
        assert len(file.heads) == 4
        assert not any(first for *_, first in file.heads)


@pytest.mark.parametrize("command", [["cp"], ["cp", "--verify"]])
def test_copies_are_verified(hub, tmp_path, command, capsys):
    """With --verify also the source, where its hub publishes a hash."""
    data, small = save(tensors()), save(tensors(1))
    repo = hub.repo("org/repo", {"model.safetensors": data, "small.safetensors": small})
    repo.small.add("small.safetensors")
    target = tmp_path / "f.tensors"
    for name in ("model", "small"):
        assert main([*command, f"hf://org/repo/{name}.safetensors", str(target)]) == 0
        target.unlink()
    hub.files.blobs[sha256(data)] = data[:-1] + bytes([data[-1] ^ 1])
    verified = "--verify" in command
    assert main([*command, "hf://org/repo", str(target)]) == (2 if verified else 0)
    assert target.exists() != verified
    assert ("failed SHA256 verification" in capsys.readouterr().err) == verified


def test_the_command_verifies(hub, capsys):
    found = tensors()
    data = save(found)
    hub.repo("org/repo", {"model.safetensors": data})
    assert main(["verify", "hf://org/repo"]) == 0
    assert "3 of 3 tensors" in capsys.readouterr().out
    hub.files.blobs[sha256(data)] = data[:-1] + bytes([data[-1] ^ 1])
    assert main(["verify", "hf://org/repo"]) == 1
    said = capsys.readouterr()
    assert "failed SHA256 verification" in said.out + said.err
    assert "0 of 3 tensors" in said.out
    assert main(["verify", "--json", "hf://org/repo"]) == 1
    (damaged,) = json.loads(capsys.readouterr().out)["damaged"]
    assert damaged["name"] is None


def test_verified_once(hub):
    found = tensors()
    data = save(found)
    hub.repo("org/repo", {"model.safetensors": data})
    with TensorDeserializer("hf://org/repo", "cpu", verify_hash=True, lazy_load=True) as file:
        for name in found:
            assert_same(file[name], found[name])
    heads = [path for method, path in hub.asked() if method == "HEAD"]
    assert len(heads) == 2


def test_a_damaged_copy_of_the_hubs_own_client(hub, monkeypatch):
    found = tensors()
    repo = hub.repo("org/repo", shards(found))
    commit = repo.refs["main"]
    paths = {path.name: path for path in download(*repo.commits[commit])}
    blob = paths["model-c.safetensors"].resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    address = f"hf://org/repo@{commit}"
    said = rf"{address}/model-c.safetensors` failed SHA256.*{sha256(save({'c': found['c']}))}"
    with pytest.raises(DamagedFileError, match=said) as raised:
        load(address, "cpu", verify_hash=True)
    assert f"from the local copy `{blob}`: remove that file" in str(raised.value)
    blob.unlink()
    assert_all(load(address, "cpu", verify_hash=True), found)
    # A file that is no link is asked for by its hash.
    path = paths["model-a.safetensors"]
    kept = path.read_bytes()
    path.unlink()
    path.write_bytes(kept)
    hub.asked()
    assert_all(load(f"{address}/model-a.safetensors", "cpu", verify_hash=True), {"a": found["a"]})
    assert hub.asked() == [("HEAD", f"/org/repo/resolve/{commit}/model-a.safetensors")]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HashMismatchError, match="with HF_HUB_OFFLINE its hub is not asked"):
        load(f"{address}/model-a.safetensors", "cpu", verify_hash=True)
    assert hub.asked() == []


def test_files_without_a_sha256(hub):
    """Files in git itself have no SHA-256: git has another hash of them."""
    data = save(tensors())
    repo = hub.repo("org/repo", {"model.safetensors": data})
    repo.small.add("model.safetensors")
    said = "safetensors files hold no hashes, and its hub publishes no SHA-256 of it"
    for _ in range(2):
        assert_all(load("hf://org/repo", "cpu"), tensors())
        with pytest.raises(HashMismatchError, match=said):
            load("hf://org/repo", "cpu", verify_hash=True)
        (path,) = download("model.safetensors")
    blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
    assert path.resolve().name == blob
    # The error names the one shard.
    hub.repo("org/many", shards(tensors(1, 1000))).small.add("model-b.safetensors")
    with pytest.raises(HashMismatchError, match=r"/model-b.safetensors` cannot be verified"):
        load("hf://org/many", "cpu", verify_hash=True)


def test_a_cache_of_our_own(hub, tmp_path):
    found, folder = tensors(), tmp_path / "cache"
    data = save(found)
    repo = hub.repo("org/repo", {"model.safetensors": data})
    assert_all(load("hf://org/repo", "cpu", cache_dir=folder, verify_hash=True), found)
    sent = len(hub.files.requests)
    assert_all(load("hf://org/repo", "cpu", cache_dir=folder, verify_hash=True), found)
    assert len(hub.files.requests) == sent, "the commit names the version"
    with TensorDeserializer("hf://org/repo", "cpu", cache_dir=folder, mmap=True) as file:
        assert_all(file, found)
        assert str(folder) in Path("/proc/self/maps").read_text()
    (entry,) = entries(folder)
    name = f"{hub.endpoint}/org/repo/resolve/{repo.refs['main']}/model.safetensors"
    assert name.encode() in entry.read_bytes()
    with entry.open("r+b") as kept:
        kept.seek(len(data) - 1)
        kept.write(bytes([data[-1] ^ 1]))
    with pytest.raises(DamagedFileError) as raised:
        load("hf://org/repo", "cpu", cache_dir=folder, verify_hash=True)
    assert f"from the local copy `{entry}`: remove that file" in str(raised.value)
    entry.unlink()
    assert_all(load("hf://org/repo", "cpu", cache_dir=folder, verify_hash=True), found)


def test_local_addresses(tmp_path):
    path = tmp_path / "a b.tensors"
    tensorizer.save(tensors(), path)
    address = path.as_uri().replace("file://", "FILE://LocalHost")
    assert_all(load(address, "cpu"), tensors())
    done = run_python(COMMAND, "diff", path, address)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("mmap", [False, True])
def test_only_verified_bytes_are_handed_out(hub, local, mmap):
    """The bytes change after they were verified; the server keeps the ETag and the length."""
    found = tensors()
    data = save(found)
    repo = hub.repo("org/repo", {"model.safetensors": data})
    other = data[:-1] + bytes([data[-1] ^ 1])
    if local:
        (path,) = download(*repo.commits[repo.refs["main"]])
    options = {"verify_hash": True, "lazy_load": True, "mmap": mmap}
    with TensorDeserializer("hf://org/repo", "cpu", **options) as file:
        first, *_, last = file.keys()
        assert_same(file[first], found[first])
        if local:
            with open(path.resolve(), "r+b") as blob:
                blob.write(other)
        else:
            hub.files.blobs[sha256(data)] = other
        assert_same(file[first], found[first])
        said = f"the hub publishes {sha256(data)}, the bytes have changed since they were compared"
        with pytest.raises(DamagedFileError, match=said):
            _ = file[last]
