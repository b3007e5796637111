"""Copies in the cache while their servers are down, and those that need no server."""

import pytest
import tensorizer
import torch
from conftest import assert_same
from hub import Hub
from scripted import FaultServer
from servers import free_port
from tensorizer._native import forget_environment

TENSORS = {f"t{n}": torch.full((800_000,), float(n)) for n in range(6)}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("offline") / "f.safetensors"
    tensorizer.save(TENSORS, path)
    return path.read_bytes()


@pytest.fixture(autouse=True)
def settings(no_settings_of_the_machine, monkeypatch, tmp_path):
    for name, value in {"HF_HOME": tmp_path / "hf", "TENSORIZER_ATTEMPTS": 2}.items():
        monkeypatch.setenv(name, str(value))
    forget_environment()
    yield
    monkeypatch.undo()
    forget_environment()


def check(address, **options):
    found = tensorizer.load(address, "cpu", **options)
    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert_same(found[name], tensor)


@pytest.mark.parametrize("query", ["?versionId=abc", "?generation=17"])
def test_a_version_needs_no_request_once_it_is_complete(data, tmp_path, query):
    with FaultServer(data) as server:
        url = server.url + query
        tensorizer.load(url, "cpu", names=["t0", "t1", "t2", "t3"], cache_dir=tmp_path / "cache")
        check(url, cache_dir=tmp_path / "cache")  # the copy was a part
        asked = len(server.requests)
        check(url, cache_dir=tmp_path / "cache")
        assert len(server.requests) == asked
        assert tensorizer.stats()["fallbacks"] == [] and tensorizer.stats()["requests"] == 0
    check(url, cache_dir=tmp_path / "cache")


def test_a_commit_of_a_hub_needs_no_request(data, tmp_path, monkeypatch):
    with Hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        repo = hub.repo("org/repo", {"model.safetensors": data})
        address = f"hf://org/repo@{repo.refs['main']}"
        check(address, cache_dir=tmp_path / "cache")
        asked = len(hub.requests) + len(hub.files.requests)
        check(address, cache_dir=tmp_path / "cache")
        assert len(hub.requests) + len(hub.files.requests) == asked
    check(address, cache_dir=tmp_path / "cache")


UNCHECKED = "the copy in the cache of `.*` is used, which may not be current"


@pytest.mark.parametrize("how", ["variable", "argument"])
def test_the_copy_of_a_server_that_is_down(data, tmp_path, monkeypatch, how):
    cache = tmp_path / "cache"
    with FaultServer(data) as server:
        check(server.url, cache_dir=cache)
        check(server.url, cache_dir=cache, stale_if_error=True)
        assert tensorizer.stats()["fallbacks"] == [], "the server has confirmed it"
    free_port(server.port)  # so that no other program gets it
    with pytest.raises(ConnectionError):
        check(server.url, cache_dir=cache)
    options = {"stale_if_error": True}
    if how == "variable":
        monkeypatch.setenv("TENSORIZER_CACHE_OFFLINE", "1")
        options = {}
    with pytest.warns(UserWarning, match=UNCHECKED):
        check(server.url, cache_dir=cache, **options)
    (why,) = tensorizer.stats()["fallbacks"]
    assert ("TENSORIZER_CACHE_OFFLINE is set" if how == "variable" else "refused") in why
    other = server.url.replace("f.tensors", "other")
    errors = FileNotFoundError if how == "variable" else ConnectionError
    with pytest.raises(errors):
        tensorizer.load(other, "cpu", cache_dir=cache, **options)


def test_a_server_that_fails_and_one_that_has_removed_the_file(data, tmp_path):
    status = []
    with FaultServer(data, lambda *_: ("status", status[0]) if status else None) as server:
        cache = tmp_path / "cache"
        check(server.url, cache_dir=cache)
        status.append(500)
        with pytest.warns(UserWarning, match=f"{UNCHECKED}.*answered 500"):
            check(server.url, cache_dir=cache, stale_if_error=True)
        for status[0], error in ((404, FileNotFoundError), (403, PermissionError)):
            with pytest.raises(error):
                check(server.url, cache_dir=cache, stale_if_error=True)


def test_a_part_is_no_copy(data, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    with FaultServer(data) as server:
        tensorizer.load(server.url, "cpu", names=["t0", "t1", "t2", "t3"], cache_dir=cache)
    free_port(server.port)  # so that no other program gets it
    with pytest.raises(ConnectionError):
        check(server.url, cache_dir=cache, stale_if_error=True)
    monkeypatch.setenv("TENSORIZER_CACHE_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match="the cache has no complete copy"):
        check(server.url, cache_dir=cache)


@pytest.mark.parametrize("how", ["variable", "argument"])
def test_a_branch_of_a_hub_that_is_down(data, tmp_path, monkeypatch, how):
    cache = tmp_path / "cache"
    with Hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        hub.repo("org/repo", {"model.safetensors": data})
        check("hf://org/repo", cache_dir=cache)
    free_port(hub.port)  # so that no other program gets it
    with pytest.raises(OSError):
        check("hf://org/repo", cache_dir=cache)
    options = {"stale_if_error": True}
    if how == "variable":
        monkeypatch.setenv("TENSORIZER_CACHE_OFFLINE", "1")
        options = {}
    with pytest.warns(UserWarning, match=UNCHECKED):
        check("hf://org/repo", cache_dir=cache, **options)
    with pytest.raises(OSError):
        check("hf://org/other", cache_dir=cache, **options)
